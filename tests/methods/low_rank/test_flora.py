"""FLoRA against arithmetic and algebra, with matrices that are not square, and ranks that differ by kind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.algorithm import Model
from lit_fed.errors import ConfigError
from lit_fed.methods import FLoRA
from lit_fed.networks import adapters_of
from tests.methods.low_rank.support import (
    Beside,
    OnTwo,
    assert_groups_are_sequential,
    drawn,
    layer,
    products,
    stepped,
)
from tests.support import Points, fit, weights

WEIGHTS = (1.0, 3.0, 4.0)


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: B = 1 and 2, A = (1, 1): the base becomes (1 + 3·2)/4·(1, 1) = (1.75, 1.75), B zero, A = (a, b) anew.
    # Round 1: residuals 1.75 − 2 and 1.75 − 4: B = ½·0.25·a and ½·2.25·b: the base gains (B₀ + 3·B₁)/4·(a, b).
    made = fit(tmp_path / "one", Beside(), algorithm=FLoRA(), max_rounds=1)
    found = layer(made)
    assert found["weight"] == [1.75, 1.75]
    assert found["lora_B"] == [0.0]
    a, b = found["lora_A"]
    assert 0 < abs(a) <= 0.5**0.5  # uniform in ±1/√2
    second = layer(fit(tmp_path / "two", Beside(), algorithm=FLoRA(), max_rounds=2))
    mean = (0.125 * a + 3 * 1.125 * b) / 4
    assert second["weight"] == pytest.approx([1.75 + mean * a, 1.75 + mean * b], rel=1e-6)
    assert second["lora_A"] != found["lora_A"]


@pytest.mark.parametrize("sizes", [(7, 5, 4), (60, 50, 40)], ids=["as_matrices", "as_factors"])
def test_the_base_becomes_the_mean_of_weights_whatever_the_ranks(sizes: Any) -> None:
    """W₀ + B̃Ã = Σ p_i(W₀ + s_iB_iA_i), with clients of rank 1 and 3; the head is averaged over both kinds."""
    torch.manual_seed(0)
    tasks = {"small": OnTwo(rank=1, sizes=sizes), "large": OnTwo(rank=3, sizes=sizes)}
    kinds, method = ("small", "large", "small"), FLoRA()
    updates = [(kind, drawn(tasks[kind], seed), WEIGHTS[seed]) for seed, kind in enumerate(kinds)]
    server, _ = stepped(method, tasks, updates)
    for kind, task in tasks.items():
        tested = {**server["models"][kind], **method.tested(server, 1, kind)}
        for one in adapters_of(task):
            base = tasks["small"].get_parameter(one.base).double()  # the first kind's is everyone's
            mean = sum(w / 8 * products(tasks[k], update)[one.base] for k, update, w in updates)
            torch.testing.assert_close(tested[one.base].double(), base + mean, rtol=0, atol=1e-4)
            assert not tested[one.lora_b].any()
            assert tested[one.lora_a].shape[0] == {"small": 1, "large": 3}[kind]
        head = sum(w / 8 * update["network.head.weight"].double() for _, update, w in updates)
        torch.testing.assert_close(tested["network.head.weight"].double(), head, rtol=0, atol=1e-6)


def test_one_client_keeps_what_it_has_learnt(tmp_path: Path) -> None:
    """Of one client, the base becomes W₀ + sBA of a local fine-tuning."""
    made = fit(tmp_path, Beside(), Points(num_clients=1), FLoRA(), max_rounds=1)
    assert layer(made)["weight"] == [1.0, 1.0]  # B = ½·2
    assert made.metrics["global/loss"] == pytest.approx(0.5 * (1 - 2) ** 2)


def test_kinds_that_differ_in_more_than_the_rank_are_refused() -> None:
    models = {"one": Model(OnTwo()), "other": Model(OnTwo(sizes=(7, 6, 4)))}
    with pytest.raises(ConfigError, match=r"trainer\.kinds\.other differs from one in more than the rank"):
        FLoRA().setup(models, None)  # type: ignore[arg-type]  # not read before


def test_ranks_by_kind_from_the_command_line(tmp_path: Path) -> None:
    from tests.methods.support import run_quickstart
    from tests.support import rows

    kinds = "{small: {adapter: {rank: 2}}, large: {adapter: {rank: 6}}}"
    for name in ("FLoRA", "HetLoRA"):
        run = run_quickstart(tmp_path / name, "--algorithm", name, "--trainer.kinds", kinds, rounds=2)
        last = rows(run / "metrics.csv")[-1]
        assert float(last["clients/loss_mean"]) < 2.5


def test_groups_are_sequential(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "FLoRA")


def test_the_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    one, other = (weights(fit(tmp_path / str(seed), Beside(), algorithm=FLoRA(), seed=seed)) for seed in (0, 1))
    assert not torch.equal(one["network.lora_A"], other["network.lora_A"])
