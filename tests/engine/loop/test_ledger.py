"""What a round reports, against arithmetic and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lightning import Fabric

from lit_fed import Classifier
from lit_fed.data import Digits
from lit_fed.engine.evaluation.protocols import ClientRow, spread
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.engine.loop import ledger as ledger_module
from lit_fed.engine.loop.ledger import DriftMeter, RoundLedger
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.engine.wire.totals import Total
from lit_fed.engine.wire.updates import Updates
from lit_fed.engine.wire.workers import ClientParallelStrategy, Workers
from lit_fed.errors import ClientFailure
from tests.support import fit

ALONE = Workers(Fabric(accelerator="cpu", devices=1))


def in_two_processes(work: Callable[[Workers], Any]) -> Any:
    """Run a function in two forked processes that talk over gloo; returns what the first one returns."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ClientParallelStrategy(start_method="fork"))
    return fabric.launch(lambda launched: work(Workers(launched)))


def drift(moves: list[list[float]], origin: list[float] | None = None) -> dict[str, float]:
    meter = DriftMeter()
    base = torch.tensor(origin or [0.0] * len(moves[0]))
    for move in moves:
        meter.add(Updates.of([ClientUpdate(0, {"w": base + torch.tensor(move)})]), {"w": base})
    return meter.result([meter.moves()], ALONE)


# ---------------------------------------------------------------------- drift


def test_drift_by_hand() -> None:
    # (3, 4) has norm 5, (0, 2) norm 2, (-1, 0) norm 1: mean 8/3. Cosines: (3·0 + 4·2)/(5·2) = 0.8, −3/5, 0: 1/15.
    found = drift([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]], origin=[10.0, -7.0])
    assert found == pytest.approx({"drift/update_norm_mean": 8 / 3, "drift/cosine_mean": 1 / 15}, abs=1e-6)


numbers = st.floats(-100, 100, width=32)


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=12))
def test_drift_is_the_mean_over_all_pairs(moves: list[list[float]]) -> None:
    # The meter works in the model's float32: a movement below 1e-3 would drown in no origin, but its square may.
    vectors = [np.array(move) for move in moves]
    moving = [vector for vector in vectors if np.linalg.norm(vector) > 1e-3]
    vectors = [vector if np.linalg.norm(vector) > 1e-3 else 0 * vector for vector in vectors]
    found = drift([vector.tolist() for vector in vectors])
    assert found["drift/update_norm_mean"] == pytest.approx(np.mean([np.linalg.norm(v) for v in vectors]), rel=1e-5)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(moving, 2)]
    if cosines:
        assert found["drift/cosine_mean"] == pytest.approx(np.mean(cosines), abs=1e-5)
    else:
        assert "drift/cosine_mean" not in found


@pytest.mark.parametrize("block", [50, 100])  # one movement at a time, and two
def test_large_models_are_measured_as_they_come(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    rng = np.random.default_rng(0)
    moves = rng.standard_normal((7, 50)).astype(np.float32).tolist()
    at_once = drift(moves)
    monkeypatch.setattr(ledger_module, "_BLOCK_VALUES", block)
    assert drift(moves) == pytest.approx(at_once, abs=1e-6)


def test_movements_are_kept_in_memory_of_one_model() -> None:
    meter = DriftMeter()
    size = ledger_module._BLOCK_VALUES
    for _ in range(5):
        meter.add(Updates.of([ClientUpdate(0, {"w": torch.ones(size)})]), {"w": torch.zeros(size)})
        assert not meter._waiting


def test_of_a_large_model_every_eighth_value_stands_for_those_between() -> None:
    meter, half = DriftMeter(), ledger_module.MOST_VALUES
    sent = {"w": torch.zeros(half), "x": torch.ones(2, half // 2), "steps": torch.tensor(3)}
    for w, x in ((3.0, 5.0), (0.0, 2.0)):
        meter.add(
            Updates.of([ClientUpdate(0, {"w": sent["w"] + w, "x": sent["x"] + x, "steps": torch.tensor(3)})]), sent
        )
        assert sum(tensor.numel() for tensor in [meter._origin, meter._units] if tensor is not None) == 2 * half // 4
    # 2^22 values that move by 3 and as many by 5: √(2^22·(9 + 25)); by 0 and 2: √(2^22·4). Cosine: 5·2/(√34·2).
    at_once = {"drift/update_norm_mean": 2048 * (34**0.5 + 2) / 2, "drift/cosine_mean": 5 / 34**0.5}
    assert meter.result([meter.moves()], ALONE) == pytest.approx(at_once, rel=1e-5)


def test_drift_takes_what_both_hold_and_no_integers() -> None:
    meter = DriftMeter()
    sent = {"w": torch.tensor([1.0]), "steps": torch.tensor(3), "down": torch.ones(9)}
    meter.add(
        Updates.of([ClientUpdate(0, {"w": torch.tensor([4.0]), "steps": torch.tensor(9), "up": torch.ones(5)})]), sent
    )
    assert meter.result([meter.moves()], ALONE) == {"drift/update_norm_mean": 3.0}


def test_buffers_stand_beside_the_drift_of_the_parameters() -> None:
    # w moves by 3; mean and var by (0.3, 0.4) and (0, 1.2): √(0.25 + 1.44) = 1.3. A second client moves nothing.
    sent = {"w": torch.tensor([1.0]), "mean": torch.zeros(2), "var": torch.ones(2), "seen": torch.tensor(0)}
    moved = {"w": torch.tensor([4.0]), "mean": torch.tensor([0.3, 0.4]), "var": torch.tensor([1.0, 2.2])}
    meter = DriftMeter(["mean", "var", "seen"])
    meter.add(Updates.of([ClientUpdate(0, moved | {"seen": torch.tensor(5)})]), sent)
    meter.add(Updates.of([ClientUpdate(1, dict(sent))]), sent)
    found = meter.result([meter.moves()], ALONE)
    assert found == pytest.approx({"drift/update_norm_mean": 1.5, "drift/buffer_norm_mean": 0.65})


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_batch_norm_that_learns_nothing_does_not_drift(tmp_path: Path, executor: Any) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8))
    network.add_module("head", torch.nn.Linear(8, 10))
    task = Classifier(network, partial(torch.optim.SGD, lr=0.0))
    data = Digits(num_clients=4, max_train_samples=80, drop_last=True)
    made = fit(tmp_path, task, data, max_rounds=1, executor=executor)
    assert made.metrics["drift/update_norm_mean"] == 0
    assert "drift/cosine_mean" not in made.metrics
    assert made.metrics["drift/buffer_norm_mean"] > 0.1


def test_no_drift_without_common_tensors() -> None:
    meter = DriftMeter()
    meter.add(Updates.of([ClientUpdate(0, {"predictions": torch.ones(3)})]), {"w": torch.ones(3)})
    assert meter.result([meter.moves()], ALONE) == {}


# ---------------------------------------------------------------------- over clients


values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=1, max_size=30))
@example([998747.0, 1.1, -998735.0])
def test_spread_is_numpys(column: list[float]) -> None:
    rows = [ClientRow(client_id, "test", "acc", value) for client_id, value in enumerate(column)]
    expected = {
        "p/acc_mean": np.mean(column),
        "p/acc_std": np.std(column),
        "p/acc_p10": np.percentile(column, 10),
        "p/acc_min": np.min(column),
    }
    rounding = 1e-12 * max(map(abs, column))  # NumPy's sums round at their largest number, which may cancel
    assert spread("p", rows) == pytest.approx(expected, rel=1e-12, abs=rounding)
    assert spread("p", rows[::-1]) == spread("p", rows)  # to the last bit: the order of clients must not matter


def test_spread_by_hand_with_several_metrics() -> None:
    # 1, 2, 6: mean 3, variance (4 + 1 + 9)/3, 10th percentile 1 + 0.2·(2 − 1).
    rows = [ClientRow(k, "test", name, v) for name in ("a", "b") for k, v in ((2, 6.0), (0, 1.0), (1, 2.0))]
    found = spread("x", rows)
    for name in ("a", "b"):
        expected = {"mean": 3.0, "std": math.sqrt(14 / 3), "p10": 1.2, "min": 1.0}
        assert {key: found[f"x/{name}_{key}"] for key in expected} == pytest.approx(expected)
    assert spread("x", []) == {}


def test_a_value_that_could_not_be_measured_is_missing_and_counted() -> None:
    """(1 + 3) / 2 = 2 of three clients; where nobody could measure, the mean is not a number."""
    rows = [ClientRow(at, "test", "acc", value) for at, value in enumerate((1.0, math.nan, 3.0))]
    assert spread("x", rows) == {
        "x/acc_missing": 1.0,
        "x/acc_mean": 2.0,
        "x/acc_std": 1.0,
        "x/acc_p10": 1.2,
        "x/acc_min": 1.0,
    }
    nobody = spread("x", rows[1:2])
    assert math.isnan(nobody["x/acc_mean"])
    assert nobody["x/acc_missing"] == 1
    # Of five clients that were asked, two told their loss, and the sums of a node have one more of 0.5 + 1.5 = 2.
    part = {"acc": Total((2.0,), 1)}
    assert spread("x", rows, [part], asked=5) == {"x/acc_missing": 2.0, "x/acc_mean": 2.0}


def test_the_worst_is_the_worst_by_the_metrics_direction_and_the_weighted_mean_knows_the_samples() -> None:
    """Clients of 1, 2 and 5 samples with 1, 2 and 6: (1 + 4 + 30)/8; the 90th percentile is 2 + 0.8·(6 − 2)."""
    rows = [ClientRow(k, "test", name, v) for name in ("acc", "loss") for k, v in enumerate((1.0, 2.0, 6.0))]
    directions = MetricNames({"acc": "max", "loss": "min"})
    found = spread("x", rows, (), 3, [1, 2, 5].__getitem__, directions.direction)
    for name, worst, tenth in (("acc", 1.0, 1.2), ("loss", 6.0, 5.2)):
        expected = {"weighted": 4.375, "min": 1.0, "p10": 1.2, "worst": worst, "worst10": tenth}
        assert {key: found[f"x/{name}_{key}"] for key in expected} == pytest.approx(expected)
    assert [directions.direction(f"x/loss_{key}") for key in ("worst", "worst10", "weighted")] == ["min"] * 3


# ---------------------------------------------------------------------- the ledger


def fill(ledger: RoundLedger, client_ids: list[int]) -> RoundLedger:
    """Client k moves by k + 1 and logs train/loss = k, and train/extra = 10·k where k is odd."""
    sent = {"w": torch.zeros(2)}
    for client_id in client_ids:
        metrics = {"train/loss": float(client_id), "time_s": 99.0}
        metrics |= {"train/extra": 10.0 * client_id} if client_id % 2 else {}
        update = ClientUpdate(client_id, {"w": torch.tensor([client_id + 1.0, 0.0])}, 1, metrics)
        ledger.sent(client_id, 100)
        ledger.trained(Updates.of([update]), sent)
        update.uplink_bytes = 8 + client_id
        ledger.arrived(Updates.of([update]))
    return ledger


def check_metrics(metrics: dict[str, float]) -> None:
    # Clients 0 to 3 with 1, 2, 3, 4 samples: loss (0·1 + 1·2 + 2·3 + 3·4)/10 = 2; extra (10·2 + 30·4)/6, among
    # those who log it. 4 downloads of 100 bytes; 8 + 9 + 10 + 11 bytes up. Norms 1, 2, 3, 4; all in one direction.
    assert metrics == pytest.approx(
        {
            "train/loss": 2.0,
            "train/extra": 140 / 6,
            "comm/uplink_bytes": 38,
            "comm/downlink_bytes": 400,
            "comm/total_bytes": 438,
            "drift/update_norm_mean": 2.5,
            "drift/cosine_mean": 1.0,
            "participation/count": 4,
        }
    )


def test_metrics_by_hand() -> None:
    ledger = fill(RoundLedger(), [3, 0, 2, 1])
    ledger.merge(ALONE)
    check_metrics(ledger.metrics(lambda ids: [one + 1 for one in ids], ALONE))


def test_an_empty_round() -> None:
    ledger = RoundLedger()
    ledger.merge(ALONE)
    counts = {"comm/uplink_bytes": 0, "comm/downlink_bytes": 0, "comm/total_bytes": 0, "participation/count": 0}
    assert ledger.metrics(lambda ids: [1] * len(ids), ALONE) == counts


def test_between_different_networks_there_is_no_drift() -> None:
    ledger = fill(RoundLedger(drift=None), [0, 1])
    ledger.merge(ALONE)
    metrics = ledger.metrics(lambda ids: [1] * len(ids), ALONE)
    # Clients 0 and 1 with a sample each: loss (0 + 1)/2; 8 + 9 bytes up.
    assert (metrics["train/loss"], metrics["comm/uplink_bytes"], metrics["comm/downlink_bytes"]) == (0.5, 17, 200)
    assert not [name for name in metrics if name.startswith("drift/")]


def test_two_processes_report_what_one_does() -> None:
    alone = fill(RoundLedger(), [3, 0, 2, 1])
    alone.merge(ALONE)

    def work(workers: Workers) -> list[Any]:
        ledger = fill(RoundLedger(), [[3, 0, 2, 1], []][workers.rank])
        ledger.local_s = 1.0 + workers.rank
        ledger.merge(workers)
        one_sided = ledger.metrics(lambda ids: [one + 1 for one in ids], workers)
        ledger = fill(RoundLedger(), [[3, 1], [2, 0]][workers.rank])
        ledger.merge(workers)
        both = ledger.metrics(lambda ids: [one + 1 for one in ids], workers)
        return workers.gather((one_sided, both, ledger.rows, ledger.delivered))

    for one_sided, both, rows, delivered in in_two_processes(work):
        check_metrics(one_sided)
        check_metrics(both)
        assert rows == alone.rows
        assert delivered == alone.delivered == [0, 1, 2, 3]


def test_the_order_of_rows_knows_no_processes() -> None:
    """A client's download, work, and two uploads, each taken down by whichever process it fell to."""

    def download(ledger: RoundLedger) -> None:
        ledger.sent(5, 100)

    def training(ledger: RoundLedger) -> None:
        ledger.trained(Updates.of([ClientUpdate(5, {}, 1, {"train/loss": 0.5, "time_s": 1.0})]), {})

    def late(ledger: RoundLedger) -> None:
        ledger.arrived(Updates.of([ClientUpdate(5, {}, uplink_bytes=30)]))

    def own(ledger: RoundLedger) -> None:
        ledger.arrived(Updates.of([ClientUpdate(5, {}, uplink_bytes=20)]))

    steps = [download, training, late, own]
    shares = [([0, 1, 2, 3], []), ([1, 3], [0, 2]), ([2], [0, 1, 3]), ([3, 1], [2, 0])]

    def work(workers: Workers) -> list[list[ClientRow]]:
        found = []
        for share in shares:
            ledger = RoundLedger()
            for step in share[workers.rank]:
                steps[step](ledger)
            ledger.merge(workers)
            found.append(ledger.rows)
        return found

    values = [("downlink_bytes", 100), ("train/loss", 0.5), ("time_s", 1.0), ("uplink_bytes", 20), ("uplink_bytes", 30)]
    expected = [ClientRow(5, "train", metric, value) for metric, value in values]
    assert in_two_processes(work) == [expected] * len(shares)


def test_every_process_learns_of_every_failure() -> None:
    def work(workers: Workers) -> list[Any]:
        ledger = RoundLedger()
        if workers.rank == 1:
            ledger.failed(ClientFailure(7, 3, "ZeroDivisionError: x", "the traceback"))
        ledger.merge(workers)
        return workers.gather([(f.client_id, f.round_idx, f.cause, f.details, str(f)) for f in ledger.failures])

    expected = [(7, 3, "ZeroDivisionError: x", "the traceback", "client 7 failed in round 3: ZeroDivisionError: x")]
    assert in_two_processes(work) == [expected, expected]


@pytest.mark.parametrize(("most", "said"), [(100.0, False), (101.0, True), (1e17, True)])
def test_an_update_far_beyond_the_cohort_is_named(most: float, said: bool) -> None:
    """Norms 1, 1 and another: over a hundred times the median it is said, whichever process trained it."""
    ledger = RoundLedger()
    for client_id, move in enumerate((1.0, most, 1.0)):
        update = ClientUpdate(client_id, {"w": torch.tensor([move])}, 1, {})
        ledger.trained(Updates.of([update]), {"w": torch.zeros(1)})
    ledger.merge(ALONE)
    line = ledger.outlier()
    assert (line is not None) == said
    assert line is None or line.startswith(f"the update of client 1 has norm {most:.3g}, and the cohort's median is 1")
