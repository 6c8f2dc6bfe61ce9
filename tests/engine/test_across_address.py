"""What a method addresses to single clients, by `tests.support.Neighbours`: counted, packed, kept, refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.callbacks import Checkpoint
from lit_fed.codecs import CastCodec
from lit_fed.command.commands.cost import foresee, report
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import IFCA, FedAvg, FedFomo
from lit_fed.participation import Asynchronous, FullParticipation, Speeds, Stragglers
from lit_fed.privacy import ClientLevel, SampleLevel, SecureSum
from lit_fed.protocols import ClientTest
from tests.support import LeastSquares, Neighbours, Points, Threes, Wanderer, assert_same, fit, rows, trainer, weights

SIZES = (2, 3)


def last(made: Any) -> list[list[float]]:
    stack: Tensor = made.run.federation.server["last"]["network.weight"]
    return stack[:, 0].tolist()


@pytest.mark.parametrize(("codec", "size"), [(None, 4), (CastCodec("float16"), 2)])
def test_two_rounds_by_hand(tmp_path: Path, codec: Any, size: int) -> None:
    # Round 0 from (0, 0), and the neighbour's model is (0, 0): client 0 goes to ½(2, 0), client 1 to ½(0, 4); mean
    # (½, 1). Round 1: client 0 along (1½, 0) − (½ − 0, 1 − 2) = (1, 1) by ½; client 1 along (0, 3) − (½ − 1, 1 − 0).
    made = fit(tmp_path, algorithm=Neighbours(), downlink_codec=codec, protocols=[ClientTest()])
    assert last(made) == [[1.0, 1.5], [0.75, 2.0]]
    assert weights(made)["network.weight"].tolist() == [[0.875, 1.75]]
    # Two numbers by the broadcast and two by address, for two clients; up two numbers of four bytes.
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (2 * 4 * size, 16)
    # The drift is from what was broadcast: (½, ½) and (¼, 1).
    assert made.metrics["drift/update_norm_mean"] == pytest.approx((0.5**0.5 + 1.0625**0.5) / 2)


class Staircase(FedAvg):
    """Client i gets i numbers."""

    def address(
        self, server: Any, client_id: int, round_idx: int, kind: str, stage: Any = "train"
    ) -> dict[str, Tensor]:
        return {"stairs": torch.zeros(client_id)}


def test_bytes_are_each_clients_own_also_of_those_that_drop_out(tmp_path: Path) -> None:
    made = fit(
        tmp_path, None, Points(4), Staircase(), max_rounds=3, participation=FullParticipation(dropout_before=0.5)
    )
    found = {(int(row["client_id"]), float(row["value"])) for row in rows(made.log_dir / "clients.csv")
             if row["metric"] == "downlink_bytes"}  # fmt: skip
    assert found == {(0, 8.0), (1, 12.0), (2, 16.0), (3, 20.0)}
    assert made.metrics["comm/downlink_bytes"] == 8 + 12 + 16 + 20


@pytest.mark.parametrize("executor", [{"executor": "sequential"}, {"executor": "vectorized", "group_size": 3}])
def test_it_is_made_once_a_client_and_round(tmp_path: Path, executor: dict[str, Any]) -> None:
    class Counted(Neighbours):
        """Counts what it makes."""

        def __init__(self) -> None:
            super().__init__()
            self.made = Counter[tuple[int, int]]()

        def address(self, server: Any, client_id: int, round_idx: int, kind: str, stage: Any = "train") -> Any:
            self.made[round_idx, client_id] += 1
            return super().address(server, client_id, round_idx, kind, stage)

    method, settings = Counted(), {**executor, "evaluate_every": 0, "max_rounds": 4}
    settings |= {"downlink_codec": CastCodec("bfloat16"), "uplink_codec": CastCodec("bfloat16")}
    fit(tmp_path, Wanderer(), Points(8, sizes=SIZES), method, **settings)
    # Round 3: before the first, what the run needs is checked; in rounds 1, 2, 4, … a group's client is compared alone.
    assert [method.made[3, client_id] for client_id in range(8)] == [1] * 8


def test_cost_counts_it(tmp_path: Path) -> None:
    cost = foresee(trainer(tmp_path), LeastSquares(), Points(), Neighbours())
    (first, second) = (kinds["model"] for kinds in cost.rounds)
    assert (first.down, second.downlink) == (16, 32)
    assert "memory of the server: 24 bytes, on every process" in report(cost)  # the model, and that of two clients
    assert "memory of the server" not in report(foresee(trainer(tmp_path), LeastSquares(), Points(), FedAvg()))


def test_cost_counts_what_is_addressed_later(tmp_path: Path) -> None:
    def foreseen(method: Any, rounds: int) -> list[int]:
        made = trainer(tmp_path / "cost", max_rounds=rounds)
        return [kinds["model"].downlink for kinds in foresee(made, Odd(), Points(4, sizes=SIZES), method).rounds]

    def told(method: Any, rounds: int) -> list[float]:
        made = fit(tmp_path / f"{method}", Odd(), Points(4, sizes=SIZES), method, max_rounds=rounds)
        return [float(row["comm/downlink_bytes"]) for row in rows(made.log_dir / "metrics.csv")]

    # IFCA: all three models of three numbers in rounds 0 and 2, in the others one and an index of eight bytes.
    assert foreseen(IFCA(3, probe_every=2), 4) == [4 * 36, 4 * 20] * 2 == told(IFCA(3, probe_every=2), 4)
    # FedFomo: nothing in round 0, then two models of three numbers and two clients of eight bytes.
    two = 4 * 2 * (12 + 8)
    assert foreseen(FedFomo(2, calibration_fraction=0.5), 3) == [0, two, two]
    assert told(FedFomo(2, calibration_fraction=0.5), 3) == [0, two, two]


class Odd(LeastSquares):
    """Three weights, which begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Linear(2, 1)


def test_nobody_is_addressed_by_default(tmp_path: Path) -> None:
    federation = fit(tmp_path).run.federation
    assert federation.broadcast(0).addressed is None
    broadcast = federation.broadcast(0)
    assert broadcast.received(1, "model") is broadcast.payloads["model"]


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    class Twice(FedAvg):
        def address(self, server: Any, client_id: int, round_idx: int, kind: str, stage: Any = "train") -> Any:
            return {"network.weight": torch.zeros(1, 2)}

    with pytest.raises(ConfigError, match=r"algorithm Twice broadcasts and addresses 'network\.weight'; give one"):
        fit(tmp_path, algorithm=Twice())


def test_what_a_codec_spoils_is_named(tmp_path: Path) -> None:
    class Large(FedAvg):
        def address(self, server: Any, client_id: int, round_idx: int, kind: str, stage: Any = "train") -> Any:
            return {"large": torch.full((1,), 1e5)}

    with pytest.raises(Exception, match="large of the server's payload in round 0 is no longer finite"):
        fit(tmp_path, algorithm=Large(), downlink_codec=CastCodec("float16"))


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy": ClientLevel(1.0, 1.0, delta=0.01)},
        {"privacy": SampleLevel(1.0, 1.0, delta=0.01)},
        {"secure_sum": SecureSum(3, 0.5, nodes=3)},
    ],
)
def test_a_server_that_sees_sums_addresses_nobody(tmp_path: Path, settings: dict[str, Any]) -> None:
    (name,) = settings
    why = rf"algorithm Staircase makes each client a message from others' updates, which trainer\.{name} neither"
    with pytest.raises(ConfigError, match=why):
        fit(tmp_path, None, Threes(4), Staircase(weighting="uniform"), buffers="local", **settings)


def in_flight(folder: Path, rounds: int = 7, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    participation = Asynchronous(concurrency=5, buffer=2, speeds=Speeds(sigma=1.0))
    settings: dict[str, Any] = {"participation": participation, "callbacks": [Checkpoint()], **kwargs}
    return fit(folder, Wanderer(), Points(8, sizes=SIZES), Neighbours(), max_rounds=rounds, **settings)


def test_clients_in_flight_keep_what_was_addressed_to_them(tmp_path: Path) -> None:
    whole = in_flight(tmp_path / "whole", downlink_codec=CastCodec("float16"))
    for stop in (1, 2, 5):
        in_flight(tmp_path / f"{stop}", stop, downlink_codec=CastCodec("float16"))
        resumed = in_flight(tmp_path / f"{stop}", ckpt_path="last", downlink_codec=CastCodec("float16"))
        assert_same(weights(whole), weights(resumed))
        for name, stack in whole.run.federation.server["last"].items():
            assert torch.equal(stack, resumed.run.federation.server["last"][name]), name
        table = [rows(made.log_dir / "clients.csv") for made in (whole, resumed)]
        bytes_down = [[row for row in one if row["metric"] == "downlink_bytes"] for one in table]
        assert bytes_down[0] == bytes_down[1]


def test_a_checkpoint_without_it_is_refused(tmp_path: Path) -> None:
    made = in_flight(tmp_path, 3)
    file = made.log_dir / "checkpoints" / "last.ckpt"
    content = torch.load(file, weights_only=True)
    for version in content["versions"].values():
        del version["addressed"]
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"lacks what round \d addressed to clients at work"):
        in_flight(tmp_path, ckpt_path=str(file))


@pytest.mark.parametrize("module", [LeastSquares, Wanderer])
def test_groups_are_one_client_after_the_other(tmp_path: Path, module: Any) -> None:
    found = []
    for executor in ("sequential", "vectorized"):
        torch.manual_seed(0)
        data = Points(6, sizes=SIZES)
        kwargs: dict[str, Any] = {"executor": executor, "max_rounds": 4, "protocols": [ClientTest()]}
        made = fit(tmp_path / executor, module(), data, Neighbours(), **kwargs)
        found.append((made.run.federation.server["last"], made.metrics["clients/loss_mean"]))
    for name, stack in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], stack, rtol=1e-3, atol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)  # as the weights, to rounding


def test_late_updates_come_all_the_same(tmp_path: Path) -> None:
    # One sample takes .01 s, and three take .03 s: clients 1 and 3 are late by one round.
    stragglers = Stragglers(0.02, speed_sigma=0.0, late="next_round")
    participation = FullParticipation(stragglers=stragglers)
    made = fit(tmp_path, None, Points(4), Neighbours(), participation=participation)
    # Round 0: clients 0 and 2 arrive with (1, 0), clients 1 and 3 with (0, 2) a round later. Round 1 from (1, 0): the
    # neighbours 1 and 3 have sent nothing yet, so that client 0 goes along (1, 0) − (1, 0) = 0.
    assert last(made) == [[1.0, 0.0], [0.0, 2.0]] * 2
    assert made.metrics["comm/downlink_bytes"] == 4 * 16
