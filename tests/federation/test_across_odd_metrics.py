"""One client's metric, and one node's sum, decide no mean over a federation, whatever the task declares of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lit_fed.callbacks import Checkpoint, EarlyStopping
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.server.means import implausible
from lit_fed.participation import Asynchronous
from lit_fed.protocols import ClientTest
from tests.federation.support import Make, deploy, simulate, small
from tests.support import LeastSquares, Points, rows

ONE_EACH = [[0], [1], [2], [3], [4]]


class Ranged(LeastSquares):
    """Its loss is at least 0, and the module says so."""

    ranges: ClassVar[dict[str, tuple[float, float]]] = {"loss": (0.0, math.inf)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss


def make(rounds: int = 3, **kwargs: Any) -> Make:
    settings: dict[str, Any] = {"protocols": [ClientTest()], "callbacks": [Checkpoint("clients/loss_mean")]}
    return small(Ranged, lambda: Points(num_clients=5), max_rounds=rounds, **settings | kwargs)


def lying(place: int, change: Callable[[Message, Message], dict[str, Any]]) -> Callable[[list[Node]], dict[int, Any]]:
    """Nodes, of which one's answers have other fields."""

    def handlers(nodes: list[Node]) -> dict[int, Any]:
        def handle(blob: bytes) -> bytes:
            said = decode(nodes[place].handle(blob))
            return encode(replace(said, fields={**said.fields, **change(decode(blob), said)}))

        return {at + 1: handle if at == place else node.handle for at, node in enumerate(nodes)}

    return handlers


def telling(word: str, value: float, since: int = 1) -> Callable[[list[Node]], dict[int, Any]]:
    """The last of five nodes tells a loss of its own from a round on."""

    def change(asked: Message, said: Message) -> dict[str, Any]:
        if asked.word != word or asked.fields["round"] < since:
            return {}
        odd = {name: value for name in said.fields["metrics"] if name.endswith("loss")}
        return {"metrics": {**said.fields["metrics"], **odd}}

    return lying(4, change)


@pytest.mark.parametrize("value", [1e6, 3e38, math.inf, math.nan])
def test_a_loss_beyond_the_median_keeps_no_best_round(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others' losses fall in each round; their mean is that of the simulation without client 4."""
    stopping = {"callbacks": [Checkpoint("clients/loss_mean"), EarlyStopping("clients/loss_mean", patience=1)]}
    made = deploy(make(**stopping), tmp_path / "other", ONE_EACH, handlers=telling("ask", value))
    (best,) = (one for one in made.run.callbacks if isinstance(one, Checkpoint))
    assert best.best_round == 2
    simulated = simulate(make(), tmp_path / "one")
    own = [float(row["value"]) for row in rows(simulated.log_dir / "clients.csv") if row["metric"] == "loss"][-5:-1]
    assert made.metrics["clients/loss_mean"] == pytest.approx(sum(own) / 4, rel=1e-12)
    assert made.metrics["clients/loss_missing"] == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "beyond the median" in line]
    if not math.isnan(value):  # which a client sends that could not measure it
        (line,) = lines
        assert f"round 1: clients/loss of client 4 is {value:.3g}, 100 times beyond the median" in line


@pytest.mark.parametrize("value", [-1e30, 3e38, 1e6])
def test_a_loss_of_training_beyond_the_median_is_left_out(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """In round 0 weights are 0: losses are ½ 2² = 2 of one sample and ½ 4² = 8 of three, and client 4 has one."""
    made = deploy(make(1), tmp_path, ONE_EACH, handlers=telling("train", value, since=0))
    assert made.metrics["train/loss"] == pytest.approx((1 * 2 + 3 * 8 + 1 * 2 + 3 * 8) / 8, rel=1e-6)
    assert capsys.readouterr().out.count(f"round 0: train/loss of client 4 is {value:.3g}, 100 times beyond") == 1
    assert float(rows(made.log_dir / "metrics.csv")[0]["train/loss"]) == made.metrics["train/loss"]


@pytest.mark.parametrize("word", ["train", "ask"])
def test_a_nodes_sum_beyond_the_median_is_left_out(tmp_path: Path, word: str) -> None:
    """Three nodes report sums; the last one's is odd, and the mean is the others'."""

    def change(asked: Message, said: Message) -> dict[str, Any]:
        sums = said.fields.get("sums")
        if asked.word != word or not sums:
            return {}
        return {"sums": {name: [[1e9 * weight], weight] for name, (_, weight) in sums.items()}}

    own = {"report": "aggregate", "report_least": 1}
    made = deploy(make(1), tmp_path, [[0, 1], [2, 3], [4]], own=own, handlers=lying(2, change))
    name = "train/loss" if word == "train" else "clients/loss_mean"
    before = {"train/loss": (1 * 2 + 3 * 8 + 1 * 2 + 3 * 8) / 8}
    if word == "train":
        assert made.metrics[name] == pytest.approx(before[name], rel=1e-6)
    else:
        assert 0 < made.metrics[name] < 8


def test_a_loss_of_training_beyond_the_median_is_left_out_of_an_asynchronous_step(tmp_path: Path) -> None:
    asynchronous = make(2, participation=Asynchronous(concurrency=5, buffer=5))
    made = deploy(asynchronous, tmp_path, ONE_EACH, handlers=telling("train", -1e30, since=0))
    assert 0 < made.metrics["train/loss"] <= 8


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ([1.0, 1.0, 100.0], []),  # a hundred times the median of 1
        ([1.0, 1.0, 101.0], [2]),
        ([0.01, 0.01, 99.0], []),  # the median counts as 1 at least
        ([-5.0, 3.0, -501.0, 4.0, 5.0], [2]),  # the median magnitude is 5
        ([1.0, 1e30], []),  # of two values nobody knows which is odd
        ([1.0, math.inf], [1]),
        ([1.0, math.nan, 1e30], []),
        ([1.0, math.nan, 2.0, 3.0, -1e30], [4]),  # the median of 1, 2, 3 and 1e30 is 2.5
        ([3e38, 3e38, 3.5e38], [2]),  # beyond float32
        ([math.inf] * 3, [0, 1, 2]),
    ],
)
def test_the_rule_by_hand(values: list[float], odd: list[int]) -> None:
    assert implausible({(place,): value for place, value in enumerate(values)}) == [(place,) for place in odd]
