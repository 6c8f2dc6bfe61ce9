"""HetLoRA against arithmetic, with ranks that differ by kind."""

from pathlib import Path

import pytest
import torch

from lit_fed.algorithm import Model
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, HetLoRA
from lit_fed.networks import LoRALinear
from tests.methods.low_rank.support import Beside, OnTwo, assert_groups_are_sequential, drawn, layer, stepped
from tests.methods.support import Rota
from tests.support import assert_same, fit, weights


def test_a_round_by_hand(tmp_path: Path) -> None:
    # B = 1 and 2 with A = (1, 1): the norms √2 and 2√2 weigh 1/3 and 2/3: B = 1/3 + 4/3.
    made = fit(tmp_path, Beside(), algorithm=HetLoRA(), max_rounds=1)
    assert layer(made)["lora_B"] == [pytest.approx(5 / 3)]
    assert layer(made)["lora_A"] == [1.0, 1.0]


def test_ranks_are_padded_and_truncated_by_hand() -> None:
    # Of the layer 5 → 4: rank 1 with A all 1 and B all 1: ‖BA‖ = √20; rank 3 with A all 1, B all ⅔: BA is 3·⅔ = 2
    #   everywhere, the norm 2√20; weights 1/3 and 2/3. A: first row 1, other rows 0·1/3 + 1·2/3; B: first column
    #   1/3 + 2/3·2/3 = 7/9, other columns 4/9.
    tasks = {"small": OnTwo(rank=1), "large": OnTwo(rank=3)}
    updates = []
    for kind, task in tasks.items():
        tensors = drawn(task, 0) | {"network.second.lora_A": torch.ones(1 if kind == "small" else 3, 5)}
        tensors["network.second.lora_B"] = torch.ones(4, 1) if kind == "small" else torch.full((4, 3), 2 / 3)
        updates.append((kind, tensors, 7.0))
    server, _ = stepped(HetLoRA(), tasks, updates)
    a = torch.tensor([1.0, 2 / 3, 2 / 3])[:, None].expand(3, 5)
    b = torch.tensor([7 / 9, 4 / 9, 4 / 9]).expand(4, 3)
    for kind, rank in (("small", 1), ("large", 3)):
        torch.testing.assert_close(server["models"][kind]["network.second.lora_A"], a[:rank])
        torch.testing.assert_close(server["models"][kind]["network.second.lora_B"], b[:, :rank])


def test_a_cohort_of_small_ranks_leaves_the_further_rows(tmp_path: Path) -> None:
    tasks = {"small": OnTwo(rank=1), "large": OnTwo(rank=3)}
    begun = tasks["large"].get_parameter("network.first.lora_A").detach().clone()
    update = drawn(tasks["small"], 0)
    server, _ = stepped(HetLoRA(), tasks, [("small", update, 1.0)])
    held = server["models"]["large"]["network.first.lora_A"]
    torch.testing.assert_close(held[:1], update["network.first.lora_A"])
    assert torch.equal(held[1:], begun[1:])


def test_all_kinds_begin_with_the_first_rows_of_the_largest() -> None:
    tasks = {"small": OnTwo(rank=1), "large": OnTwo(rank=3)}
    server = HetLoRA().setup({k: Model(t) for k, t in tasks.items()}, type("P", (), {"num_clients": 2})())  # type: ignore[arg-type]  # no more is read
    small, large = (server["models"][kind] for kind in tasks)
    assert torch.equal(small["network.first.lora_A"], large["network.first.lora_A"][:1])
    assert torch.equal(small["network.first.weight"], large["network.first.weight"])


def test_with_one_client_a_round_it_is_fedavg(tmp_path: Path) -> None:
    one, other = (
        fit(tmp_path / type(method).__name__, Beside(), algorithm=method, max_rounds=4, participation=Rota())
        for method in (HetLoRA(), FedAvg())
    )
    assert_same(weights(one), weights(other))


def test_products_of_zero_weigh_the_same() -> None:
    task = OnTwo()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in drawn(task, 0).items()}
    ones = zeros | {"network.first.lora_A": torch.ones(2, 7)}
    server, _ = stepped(HetLoRA(), {"model": task}, [("model", zeros, 1.0), ("model", ones, 9.0)])
    assert server["models"]["model"]["network.first.lora_A"].unique().tolist() == [0.5]


def test_scales_that_differ_are_refused() -> None:
    tasks = {"one": OnTwo(), "other": OnTwo()}
    layer = tasks["other"].network.first
    assert isinstance(layer, LoRALinear)
    layer.scale = 4.0
    with pytest.raises(ConfigError, match=r"alpha/rank of 1\.5 and 4, and algorithm HetLoRA averages them"):
        stepped(HetLoRA(), tasks, [])


def test_groups_are_sequential(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "HetLoRA")
