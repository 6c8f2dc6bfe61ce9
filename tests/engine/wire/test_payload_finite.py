"""What is not finite is kept nowhere: neither of the server nor of a client."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Client, Update
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.method.algorithm import Cohort, Server
from lit_fed.engine.wire.payload import not_finite
from lit_fed.errors import CheckpointError, ClientFailure, NonFiniteServer
from lit_fed.methods import FedAvg, FedAvgM, LocalOnly
from tests.support import LeastSquares, Points, Threes, trainer


class Spoils(FedAvg):
    """FedAvg whose server keeps a number beside the model, and in round 1 spoils one of both."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def setup(self, models: Any, population: Any) -> Server:
        return {**super().setup(models, population), "scale": 1.0, "seen": torch.zeros(2, dtype=torch.int64)}

    def step(self, server: Server, aggregate: Any, cohort: Cohort) -> dict[str, float]:
        metrics = super().step(server, aggregate, cohort)
        if cohort.round_idx == 1 and self.what == "scale":
            server["scale"] = math.inf
        elif cohort.round_idx == 1:
            server["model"][self.what].fill_(math.nan)
        return metrics


@pytest.mark.parametrize(("what", "named"), [("scale", "scale"), ("network.weight", "model.network.weight")])
def test_a_step_that_leaves_the_server_infinite_is_named_and_the_last_checkpoint_stays(
    tmp_path: Path, what: str, named: str
) -> None:
    ours = trainer(tmp_path, max_rounds=4)
    with pytest.raises(NonFiniteServer, match=f"Spoils's step in round 1 left NaN or infinity in {named}.*smaller"):
        ours.fit(LeastSquares(), Points(), Spoils(what))
    for name in ("last.ckpt", "best.ckpt"):
        content = read_checkpoint(ours.log_dir / "checkpoints" / name)
        assert content["round_idx"] == 1
        assert not not_finite(content["server"])
    assert (ours.log_dir / "metrics.csv").read_text().count("\n") == 2  # its header, and round 0

    with pytest.raises(CheckpointError, match="this trainer holds NaN or infinity"):
        ours.save_checkpoint(tmp_path / "mine.ckpt")
    assert not (tmp_path / "mine.ckpt").exists()


def test_a_step_that_is_too_long_ends_the_run_and_blames_no_client(tmp_path: Path) -> None:
    # Round 0: the mean is (¼·1, ¾·2), the movement times 3e38 is (7.5e37, 4.5e38): infinite in float32, which ends at
    # 3.4e38.
    with pytest.raises(NonFiniteServer, match="FedAvgM's step in round 0"):
        trainer(tmp_path, max_rounds=3).fit(LeastSquares(), Points(), FedAvgM(server_lr=3e38))


class Best(FedAvg):
    """FedAvg whose server keeps the best so far of what never comes, and whose clients do."""

    def setup(self, models: Any, population: Any) -> Server:
        return {**super().setup(models, population), "best": torch.tensor(math.inf), "worst": -math.inf}

    def initial_state(self, client: Client) -> dict[str, Tensor]:
        return {"best": torch.tensor(math.inf), "sum": torch.zeros(())}

    def finish(self, client: Client) -> Update:
        return replace(super().finish(client), state=dict(client.state))


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_what_a_method_begins_as_infinite_may_stay_so(tmp_path: Path, executor: str) -> None:
    ours = trainer(tmp_path, max_rounds=2, executor=executor)
    ours.fit(LeastSquares(), Points(), Best())
    ours.max_rounds = 3
    ours.fit(LeastSquares(), Points(), Best(), ckpt_path="last")
    assert ours.run.next_round == 3
    assert ours.run.federation.server["best"] == math.inf


class Hoards(Best):
    """Keeps a sum that has become infinite."""

    def finish(self, client: Client) -> Update:
        return replace(super().finish(client), state={**client.state, "sum": client.state["sum"] + math.inf})


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_client_that_would_keep_infinity_fails_in_its_round(tmp_path: Path, executor: str) -> None:
    ours = trainer(tmp_path, executor=executor)
    with pytest.raises(ClientFailure, match="client 0 failed in round 0: its kept sum is not finite"):
        ours.fit(LeastSquares(), Threes(), Hoards())
    assert not list(tmp_path.rglob("*.states"))


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_client_whose_own_model_ends_infinite_fails(tmp_path: Path, executor: str) -> None:
    # One step of rate 3e38 from w = 0 is 3e38·2, beyond the 3.4e38 of float32; the loss before it is ½·2².
    ours = trainer(tmp_path, executor=executor, local_steps=1)
    with pytest.raises(ClientFailure, match=r"client [01] failed in round 0: its kept network.weight"):
        ours.fit(LeastSquares(lr=3e38), Points(), LocalOnly())


@pytest.mark.parametrize("executor", ["sequential", "vectorized", "auto"])
def test_whoever_trains_at_too_large_a_rate_is_named_however_clients_are_trained(tmp_path: Path, executor: str) -> None:
    with pytest.raises(ClientFailure, match=r"client [01] failed in round 0: train/loss is not finite; try a smaller"):
        trainer(tmp_path, executor=executor, local_epochs=4).fit(LeastSquares(lr=1e30), Points(), FedAvg())


def test_a_broadcast_that_its_codec_cannot_hold_is_named(tmp_path: Path) -> None:
    from lit_fed.codecs import CastCodec

    class Large(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            torch.nn.init.constant_(self.network.weight, 1e5)  # type: ignore[arg-type]  # float16 ends at 65504

    with pytest.raises(NonFiniteServer, match=r"network.weight of the server's payload in round 0.*downlink_codec"):
        trainer(tmp_path, downlink_codec=CastCodec("float16")).fit(Large(), Points(), FedAvg())


@pytest.mark.parametrize(
    ("entry", "odd"),
    [
        (1.5, []),
        (math.nan, ["x"]),
        (10**400, []),
        ("inf", []),
        (True, []),
        (torch.tensor([1, 2]), []),
        (torch.tensor([1.0, math.inf], dtype=torch.float64), ["x"]),
        (torch.full((4,), 1e38), []),  # whose sum is beyond float32
        (torch.full((4,), 3e38), []),
        (torch.tensor([complex(1, math.nan)]), ["x"]),
        ({"y": [torch.zeros(1), (math.inf,)]}, ["x.y.1.0"]),
    ],
)
def test_entries_of_a_state_by_name(entry: Any, odd: list[str]) -> None:
    assert not_finite({"x": entry, "z": torch.zeros(3)}) == odd
    assert not_finite({"x": entry}, but=odd) == []
