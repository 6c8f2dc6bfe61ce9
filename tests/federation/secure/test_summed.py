"""`trainer.secure_sum` in a simulation: the plain sum's bits, means of metrics, and what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Fabric

from lit_fed.algorithm import ClientUpdate
from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.codecs import CastCodec
from lit_fed.engine.wire.payload import layout_of
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.federation.secure.summed import NodeSums, digits, from_digits
from lit_fed.methods import FedAvg, FedExP, LocalOnly, Scaffold
from lit_fed.participation import Asynchronous, FullParticipation, Stragglers
from lit_fed.privacy import ClientLevel, SampleLevel, SecureSum
from lit_fed.privacy.bounded_sum import BoundedSum, Frame
from lit_fed.robust import ALIE, Median
from tests.support import ROOT, Points, assert_same, rows, run_cli, weights
from tests.support import fit as fit_two

WORKERS = Workers(Fabric(accelerator="cpu", devices=1))
CPU = torch.device("cpu")
PLAIN, MASKED = SecureSum(4, 0.5), SecureSum(4, 0.5, nodes=5)


def fit(folder: Path, **kwargs: Any) -> Any:
    """A run of five clients, one on each of five nodes."""
    return fit_two(folder, data=Points(num_clients=5), **kwargs)


def sums(settings: SecureSum, updates: list[ClientUpdate], uniform: bool, received: Any, logged: Any = None) -> Any:
    frame = Frame(layout_of(updates[0].payload), received)
    reducer = NodeSums(frame, settings, uniform, CPU, logged or {}, lambda words: words.sum(0))
    for one in updates:
        reducer.add(one)
    found = reducer.result(WORKERS)
    return SimpleNamespace(mean=reducer.mean(found), metrics=found.means)


# ---------------------------------------------------------------------- the sum


def test_a_weighted_sum_by_hand() -> None:
    """Client 0 moves (3, 4), of norm 5, and is clipped to (1.5, 2); client 1 moves (1, 0); weights 1 and 3.

    (1 + (1.5 + 3 · 1) / 4, 0 + (2 + 0) / 4) = (2.125, 0.5)
    """
    received = {"w": torch.tensor([1.0, 0.0])}
    sent = [ClientUpdate(0, {"w": torch.tensor([4.0, 4.0])}, 1), ClientUpdate(1, {"w": torch.tensor([2.0, 0.0])}, 3)]
    for nodes in (None, 4):
        assert sums(SecureSum(3, 2.5, nodes), sent, False, received).mean.tolist() == [2.125, 0.5]


@given(st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), min_size=1, max_size=6))
def test_with_equal_weights_it_has_the_bounded_sums_bits(sent: list[list[float]]) -> None:
    received = {"w": torch.tensor([1.0, -1.0, 0.5])}
    updates = [ClientUpdate(position, {"w": torch.tensor(one)}) for position, one in enumerate(sent)]
    bounded = BoundedSum(Frame(layout_of(updates[0].payload), received), 0.7, CPU)
    for one in updates:
        bounded.add(one)
    released = bounded.result(WORKERS)
    due = released.origin + released.total / len(updates)
    for nodes in (None, 4):
        assert sums(SecureSum(3, 0.7, nodes), updates, True, received).mean.equal(due)


def test_weights_beyond_whole_numbers_or_the_range_are_refused() -> None:
    received = {"w": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"client 0 has weight 0[.]5; a secure sum needs a whole number"):
        sums(PLAIN, [ClientUpdate(0, {"w": torch.ones(1)}, 0.5)], False, received)
    with pytest.raises(ConfigError, match="the weights of the secure sum add up to 4194305"):
        sums(PLAIN, [ClientUpdate(0, {"w": torch.ones(1)}, 2**22 + 1)], False, received)
    assert sums(PLAIN, [ClientUpdate(0, {"w": torch.ones(1)}, 0)], False, received).mean is None


# ---------------------------------------------------------------------- metrics


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_digits_of_several_sums_add_up_to_the_exact_sum(values: list[float]) -> None:
    columns = zip(*(digits(Fraction(value)) for value in [0.0, *values]), strict=True)
    try:
        due = math.fsum(values)
    except OverflowError:
        return
    assert from_digits(map(sum, columns)) == due


def test_a_mean_of_metrics_is_exact_and_a_value_that_is_not_finite_spoils_its_own_alone() -> None:
    """(1 · 0.1 + 3 · 0.2) / 4: the products are rounded as the loop rounds them, and their sum once."""
    sent = [ClientUpdate(one, {"w": torch.ones(1)}) for one in (0, 1)]
    logged = {0: ({"train/loss": 0.1, "train/odd": math.nan}, 1), 1: ({"train/loss": 0.2, "train/odd": 1.0}, 3)}
    for nodes in (None, 4):
        found = sums(SecureSum(3, 1.0, nodes), sent, False, {"w": torch.zeros(1)}, logged).metrics
        assert found["train/loss"] == math.fsum([0.1 * 1, 0.2 * 3]) / 4
        assert math.isnan(found["train/odd"])


# ---------------------------------------------------------------------- a run


class Seen(Callback):
    """Keeps what the loop tells of each round."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("method", [FedAvg, lambda: FedAvg(weighting="uniform"), Scaffold])
def test_over_nodes_in_memory_a_run_has_the_plain_sums_bits(tmp_path: Path, method: Any) -> None:
    seen = Seen(), Seen()
    plain = fit(tmp_path / "plain", algorithm=method(), secure_sum=PLAIN, callbacks=[seen[0]])
    masked = fit(tmp_path / "masked", algorithm=method(), secure_sum=MASKED, callbacks=[seen[1]])
    assert_same(weights(plain), weights(masked))
    for one, other in zip(seen[0].records, seen[1].records, strict=True):
        kept = [{k: v for k, v in record.metrics.items() if "time/" not in k} for record in (one, other)]
        assert kept[0] == kept[1]


def test_a_bound_that_clips_nobody_gives_the_methods_mean_but_for_the_grid(tmp_path: Path) -> None:
    """The grid of C = 2^20 is 2^-20: a mean of updates that are cut to it is off by less than 2^-20."""
    plain = weights(fit(tmp_path / "mean", max_rounds=1))
    summed = weights(fit(tmp_path / "sum", max_rounds=1, secure_sum=SecureSum(4, 2.0**20, nodes=5)))
    assert all((plain[name].double() - summed[name].double()).abs().max() < 2**-20 for name in plain)


def test_the_means_of_metrics_are_the_runs_without_it_and_no_clients_value_is_kept(tmp_path: Path) -> None:
    before, after = Seen(), Seen()
    fit(tmp_path / "mean", max_rounds=1, callbacks=[before])
    made = fit(tmp_path / "sum", max_rounds=1, secure_sum=MASKED, callbacks=[after])
    one, other = before.records[0], after.records[0]
    logged = {name: value for name, value in one.metrics.items() if name.startswith("train/")}
    assert logged == {name: value for name, value in other.metrics.items() if name.startswith("train/")}
    assert logged
    assert one.rows
    assert not other.rows
    assert not any(name.startswith("drift/") for name in other.metrics)
    assert rows(made.log_dir / "clients.csv") == []


@pytest.mark.parametrize("std", [0.0, 100.0])
def test_with_client_level_privacy_it_has_the_private_runs_bits(tmp_path: Path, std: float) -> None:
    """Noise of the run's seed is added to the same integers; of a large noise the grid is coarser than of C."""
    pytest.importorskip("dp_accounting")
    seen = Seen(), Seen(), Seen()
    given = [{}, {"secure_sum": PLAIN}, {"secure_sum": MASKED}]
    runs = [
        fit(
            tmp_path / str(one), algorithm=FedAvg(weighting="uniform"), callbacks=[seen[one]], participation=
            FullParticipation(), privacy=ClientLevel(0.5, std, delta=0.01), **given[one],  # type: ignore[arg-type]
        )
        for one in range(3)
    ]  # fmt: skip
    for one in (1, 2):
        assert_same(weights(runs[0]), weights(runs[one]))
        for before, after in zip(seen[0].records, seen[one].records, strict=True):
            kept = [{k: v for k, v in record.metrics.items() if k.startswith(("privacy/", "train/", "clients/"))}
                    for record in (before, after)]  # fmt: skip
            assert kept[0] == kept[1]


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", max_rounds=3, secure_sum=MASKED)
    half = fit(tmp_path / "half", max_rounds=1, secure_sum=MASKED)
    on = fit(tmp_path / "half", max_rounds=3, secure_sum=MASKED, ckpt_path=str(half.log_dir))
    assert_same(weights(whole), weights(on))


@pytest.mark.long
@pytest.mark.parametrize("name", ["secure_sum", "noise_of_nodes", "secure_sum_on_a_ring"])
def test_one_process_and_two_have_the_same_bits_from_the_shipped_file(tmp_path: Path, name: str) -> None:
    files = ["-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / f"configs/privacy/{name}.yaml")]
    found = []
    for devices in ("1", "2"):
        folder = tmp_path / devices
        options = ["--trainer.max_rounds", "2", "--trainer.devices", devices, "--trainer.num_threads", "1"]
        folder.mkdir()
        finished = run_cli("fit", *files, *options, "--trainer.accelerator", "cpu", cwd=folder)
        assert finished.returncode == 0, finished.stderr
        (run,) = (folder / "lightning_logs").iterdir()
        content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        metrics = [{k: v for k, v in row.items() if "time/" not in k} for row in rows(run / "metrics.csv")]
        found.append((content["server"], metrics))
    assert_same(*({name: one for name, one in part[0].items() if torch.is_tensor(one)} for part in found))
    assert found[0][1] == found[1][1]


# ---------------------------------------------------------------------- refusals


LATE = FullParticipation(stragglers=Stragglers(1.0, late="next_round"))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"aggregation": Median()}, "trainer.aggregation needs single updates, which trainer.secure_sum hides"),
        ({"attack": ALIE(clients=[1])}, "trainer.attack needs single updates"),
        ({"uplink_codec": CastCodec("float16")}, "trainer.uplink_codec needs single updates"),
        ({"privacy": SampleLevel(0.5, 1.0)}, "trainer.privacy needs single updates"),
        (
            {"privacy": ClientLevel(1.0, 1.0)},
            "secure_sum.clip is 0.5 and trainer.privacy.clip_norm is 1; set them alike",
        ),
        ({"algorithm": FedExP()}, "trainer.secure_sum cannot go around FedExP"),
        ({"algorithm": LocalOnly()}, "trainer.secure_sum"),
        ({"participation": Asynchronous(2, 1)}, "under Asynchronous the server weighs each by its staleness"),
        ({"participation": LATE}, "set participation.stragglers.late to lost"),
    ],
)
def test_what_reads_single_updates_is_refused_by_name(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        fit(tmp_path, secure_sum=MASKED, **more)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (SecureSum(4, 0.0), "trainer.secure_sum.clip is 0.0"),
        (SecureSum(2, 1.0), "trainer.secure_sum.threshold is 2"),
        (SecureSum(3, 1.0, 5), "trainer.secure_sum.threshold is 3 of 5 nodes; it must be above two thirds of them"),
        (SecureSum(6, 1.0, 5), "trainer.secure_sum.threshold is 6 of 5 nodes"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, settings: SecureSum, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        fit(tmp_path, secure_sum=settings)
