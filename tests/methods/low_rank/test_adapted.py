"""The base of methods over adapters: refusals, bytes, FedAvg over adapters, and the base that clients begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.methods import (
    FedBABU,
    FedExLoRA,
    FedIT,
    FedPer,
    FedRep,
    FedSALoRA,
    FFALoRA,
    FLoRA,
    HetLoRA,
    LGFedAvg,
    Scaffold,
)
from lit_fed.methods.low_rank.adapted import OnAdapters
from lit_fed.participation import Asynchronous
from tests.methods.low_rank.support import Beside, OnTwo, assert_groups_are_sequential
from tests.methods.support import run_quickstart
from tests.support import ROOT, fit, rows, weights

EVERY = [FFALoRA, FLoRA, FedExLoRA, FedIT, FedSALoRA, HetLoRA]


@pytest.mark.parametrize("method", EVERY)
def test_a_model_without_adapters_is_refused(method: type[OnAdapters], tmp_path: Path) -> None:
    said = rf"algorithm {method.__name__} needs adapters in model LeastSquares; set model\.adapter\.rank, such as to 4"
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, algorithm=method())


@pytest.mark.parametrize("method", [FLoRA, FedExLoRA, FedIT, HetLoRA])
def test_updates_from_several_models_are_refused(method: type[OnAdapters], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{method.__name__} needs updates that start from one model"):
        fit(tmp_path, Beside(), algorithm=method(), participation=Asynchronous(concurrency=2, buffer=1))


def test_fedavg_over_adapters_in_groups(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "FedAvg")


# The mlp of the digits: 64 → 64 → 10. A and B of the hidden layer, and the head with its bias.
A_FACTORS, B_FACTORS, HEAD = 4 * 64, 4 * 64, 64 * 10 + 10
SENT = {
    "FedAvg": A_FACTORS + B_FACTORS + HEAD,
    "FFALoRA": B_FACTORS + HEAD,
    "FLoRA": A_FACTORS + B_FACTORS + HEAD,
    "FedExLoRA": A_FACTORS + B_FACTORS + HEAD,
    "FedIT": A_FACTORS + B_FACTORS + HEAD,
    "FedSALoRA": A_FACTORS + HEAD,
    "HetLoRA": A_FACTORS + B_FACTORS + HEAD,
}


@pytest.mark.parametrize("method", SENT)
def test_four_bytes_for_each_number_that_trains_and_is_shared_go_up(method: str, tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "--algorithm", method, "--model.adapter.rank", "4", rounds=1)
    assert [float(row["comm/uplink_bytes"]) for row in rows(run / "metrics.csv")] == [4 * 4 * SENT[method]]


@pytest.mark.parametrize("method", ["FLoRA", "FedExLoRA"])
def test_the_factors_are_counted_and_forecast(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cohort of 4 with rank 4: in round 1 the base takes 16 columns of FLoRA, 20 of FedEx-LoRA, then twice that."""
    run = run_quickstart(tmp_path, "--algorithm", method, "--model.adapter.rank", "4", rounds=3)
    width, shared = {"FLoRA": 16, "FedExLoRA": 20}[method], A_FACTORS + B_FACTORS + HEAD
    expected = [shared + min(r * width * (64 + 64), 64 * 64) for r in range(3)]
    assert [float(row["comm/downlink_bytes"]) for row in rows(run / "metrics.csv")] == [16 * size for size in expected]
    from tests.methods.run_methods import CONFIGS, SMALL

    words = [w for key, value in SMALL.items() if "protocols" not in key for w in (f"--{key}", value)]
    capsys.readouterr()
    words += ["--algorithm", method, "--model.adapter.rank", "4", "--trainer.max_rounds", "3"]
    main(["cost", "-c", str(CONFIGS / "quickstart.yaml"), *words])
    told = capsys.readouterr().out
    assert [f"{4 * size:,}" in told for size in expected] == [True] * 3


@pytest.mark.parametrize("method", [FLoRA, FedExLoRA])
@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 60, 50)], ids=["as_matrices", "as_factors"])
def test_a_client_begins_with_the_base_that_is_tested(method: type[OnAdapters], sizes: Any, tmp_path: Path) -> None:
    made = fit(tmp_path, OnTwo(sizes=sizes), algorithm=method(), max_rounds=2)
    federation = made.run.federation
    broadcast = federation.broadcast(1)
    assert ("left.network.second.weight" in broadcast.payloads["model"]) == (sizes[1] == 60)
    for client_id in (0, 1, 0):  # the task holds the first client's base when the second one begins
        with federation.session.at_work():
            begun = federation.session.enter(client_id, broadcast, "train").model.copy()
        for name, tensor in weights(made).items():
            assert torch.equal(begun[name], tensor), name


@pytest.mark.parametrize("name", ["fedex_lora", "fedit", "fedsa_lora", "ffa_lora", "flora", "hetlora"])
def test_its_file_runs_on_a_transformer(name: str, tmp_path: Path) -> None:
    files = [f"configs/{path}.yaml" for path in ("quickstart", "network/vit_pocket", f"method/{name}")]
    assert list(yaml.safe_load((ROOT / files[-1]).read_text())) == ["algorithm"]
    words = [word for file in files for word in ("-c", str(ROOT / file))]
    small = {
        "data.num_clients": 8, "data.max_train_samples": 160, "trainer.participation.count": 2, "trainer.max_rounds": 2,
        "trainer.local_epochs": 1, "trainer.logger": "false", "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": str(tmp_path), "model.adapter.rank": 2,
    }  # fmt: skip
    main(["fit", *words, *[word for key, value in small.items() for word in (f"--{key}", str(value))]])
    assert len(rows(tmp_path / "lightning_logs/version_0/metrics.csv")) == 2


def test_a_checkpoint_holds_the_base_once(tmp_path: Path) -> None:
    made = fit(tmp_path, OnTwo(sizes=(2, 300, 400)), max_rounds=1)
    base, size = 4 * (2 * 300 + 300 * 400), (made.log_dir / "checkpoints" / "last.ckpt").stat().st_size
    assert base < size < 1.2 * base


class FrozenHead(OnTwo):
    """Only its adapters train."""

    def __init__(self) -> None:
        super().__init__(sizes=(2, 5, 4))
        self.network.head.requires_grad_(False)

    @property
    def head(self) -> Any:
        return self.network.head


@pytest.mark.parametrize(
    "method", [FedBABU(), FedPer(), FedRep(), LGFedAvg(), Scaffold(freeze_head=True)], ids=lambda m: type(m).__name__
)
def test_a_method_of_the_head_refuses_one_that_does_not_train(method: Any, tmp_path: Path) -> None:
    said = r"the head of model FrozenHead does not train, and .*: 'network\.head\.weight' is frozen; name the module"
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, FrozenHead(), algorithm=method)


@pytest.mark.parametrize("method", [FedPer(personal=["*lora_B", "*.head"]), LGFedAvg(shared=["network.head"])])
def test_a_pattern_that_matches_frozen_parameters_alone_is_refused(method: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"head', and no parameter that trains is called or begins so; "):
        fit(tmp_path, FrozenHead(), algorithm=method)
