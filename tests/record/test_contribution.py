"""Contributions of clients by hand, resumed, over processes, and where they are refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed import Client, Update
from lit_fed.callbacks import Checkpoint, Recorder
from lit_fed.codecs import CastCodec
from lit_fed.data import Arrays
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAdam, FedAvg, FedBuff, LocalOnly, Scaffold
from lit_fed.participation import Asynchronous, FullParticipation, Speeds, Stragglers
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.record.contribution import Contribution
from lit_fed.robust import Median, Mimic, Scaling
from tests.federation.secure import nodes
from tests.federation.support import deploy, small
from tests.support import (
    ROOT,
    LeastSquares,
    Points,
    Wanderer,
    Wandering,
    assert_same,
    fit,
    rows,
    run_cli,
    weights,
)

TARGETS, SAMPLES = (2, 4, 12), (1, 2, 3)


class Spots(Points):
    """Client k has n_k samples x = (1, 0) of target a_k to train on, and n_k for the shared validation set.

    `LeastSquares` moves from w = 0 to a_k / 2.
    """

    num_classes = 101

    def __init__(self, targets: Any = TARGETS, samples: Any = SAMPLES, **kwargs: Any) -> None:
        self.targets, self.samples = np.array(targets, np.int64), np.array(samples)
        super().__init__(num_clients=len(targets), **({"val_fraction": 0.5} | kwargs))

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(len(self.targets)), 2 * self.samples)
        x = np.tile(np.array([[1, 0]], np.float32), (len(clients), 1))
        y = self.targets[clients]
        return Arrays(x, y, x, y, clients, clients, "spots")


def value(members: Any) -> Fraction:
    """The negative validation loss ½(w − a)² of the members' mean a_k / 2, weighted by n_k; of 0 for nobody."""
    total = sum(SAMPLES[one] for one in members)
    w = sum(Fraction(SAMPLES[one] * TARGETS[one], 2) for one in members) / total if total else Fraction(0)
    losses = [n * (w - a) * (w - a) / 2 for n, a in zip(SAMPLES, TARGETS, strict=True)]
    return -sum(losses, Fraction(0)) / sum(SAMPLES)


def told(made: Any, name: str = "contribution") -> dict[tuple[int, int], float]:
    """Values of clients by round and client."""
    found = rows(made.run.log_dir / "clients.csv")
    return {(int(row["round"]), int(row["client_id"])): float(row["value"]) for row in found if row["metric"] == name}


def test_three_clients_by_hand(tmp_path: Path) -> None:
    made = fit(tmp_path, LeastSquares(), Spots(), callbacks=[Contribution("shapley")], max_rounds=1)
    shares = [Fraction(0)] * 3
    for order in permutations(range(3)):
        for place, one in enumerate(order):
            shares[one] += (value(order[: place + 1]) - value(order[:place])) / 6
    assert told(made) == {(0, one): pytest.approx(float(share), abs=1e-5) for one, share in enumerate(shares)}


def alone(folder: Path, *given: Any, data: Any = None, module: Any = None, **kwargs: Any) -> Any:
    """A run with the callback."""
    settings: dict[str, Any] = {"max_rounds": 1, "callbacks": [Contribution(*given)]} | kwargs
    return fit(folder, module or LeastSquares(), data or Spots(), **settings)


def test_leaving_one_out_by_hand(tmp_path: Path) -> None:
    made = alone(tmp_path, "leave_one_out")
    expected = [value((0, 1, 2)) - value([other for other in range(3) if other != one]) for one in range(3)]
    assert told(made) == {(0, one): pytest.approx(float(share), abs=1e-5) for one, share in enumerate(expected)}
    assert made.metrics["contribution/evaluations"] == 3 + 2  # without each, all, and nobody


@pytest.mark.parametrize("rule", ["shapley", "gtg"])
def test_shares_sum_to_what_the_rounds_gain_on_validation_data(rule: Any, tmp_path: Path) -> None:
    given = (rule, "val/global/loss") if rule == "shapley" else (rule, "global/loss", 7, 0.0, 0.0)
    first = fit(tmp_path / "first", LeastSquares(), Spots(), max_rounds=1, evaluate_on="val")
    made = alone(tmp_path / "made", *given, max_rounds=4, evaluate_on="val")
    shares, sums = told(made), told(made, "contribution_sum")
    lines = rows(made.run.log_dir / "metrics.csv")
    losses = [float(line["global/loss"]) for line in lines]
    assert losses[0] == first.metrics["global/loss"]  # the run is as without the callback
    before = [float(-value(())), *losses]
    for round_idx, (old, new) in enumerate(zip(before, losses, strict=False)):
        assert sum(shares[round_idx, one] for one in range(3)) == pytest.approx(old - new, abs=1e-5)
        assert float(lines[round_idx]["contribution/gain"]) == pytest.approx(old - new, abs=1e-6)
    for one in range(3):
        assert sums[3, one] == pytest.approx(sum(shares[round_idx, one] for round_idx in range(4)), abs=1e-12)
    assert (made.run.log_dir / "contribution.png").stat().st_size > 1000


class Weightless(FedAvg):
    """The last client weighs nothing."""

    needs = frozenset({"loss"})
    heaviest = 10.0

    def finish(self, client: Client) -> Update:
        return replace(super().finish(client), weight=0.0 if client.id == 2 else 1.0)


def test_a_client_without_weight_gave_nothing_and_equal_ones_gave_as_much(tmp_path: Path) -> None:
    made = alone(tmp_path, "shapley", data=Spots((4, 4, 12), (2, 2, 2)), algorithm=Weightless())
    shares = told(made)
    assert shares[0, 2] == 0.0
    assert shares[0, 0] == pytest.approx(shares[0, 1], abs=1e-12)
    assert shares[0, 0] != 0.0


def test_shares_of_two_metrics_add_up(tmp_path: Path) -> None:
    """Additivity: 2 (w − a)² of `Doubled` is four times ½(w − a)², in the same round of the same models."""
    made = alone(tmp_path, "shapley", "global/fourfold", module=Doubled())
    single = told(alone(tmp_path / "single", "shapley", "global/loss", module=Doubled()))
    assert told(made) == {key: pytest.approx(4 * share, rel=1e-6) for key, share in single.items()}


class Doubled(LeastSquares):
    """Logs the loss, and four times the loss."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("test/fourfold", 4 * self.loss(batch))

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "min", "fourfold": "min"}


class Counting(FedAvg):
    """Its step depends on how often it was called."""

    calls = 0

    def step(self, server: Any, aggregate: Any, cohort: Any) -> dict[str, float]:
        super().step(server, aggregate, cohort)
        Counting.calls += 1
        for tensor in server["model"].values():
            tensor += Counting.calls
        return {}


class Overflowing(LeastSquares):
    """Its loss is infinite for any weights but the first."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        moved = torch.cat([weight.abs().flatten() for weight in self.parameters()]).sum()
        self.log("test/loss", self.loss(batch) / (1 - moved.sign()))


def test_a_value_that_is_no_number_leaves_no_share_and_ends_no_run(tmp_path: Path) -> None:
    made = alone(tmp_path, "shapley", module=Overflowing(), max_rounds=2)
    assert not any(np.isfinite(share) for share in told(made, "contribution_sum").values())
    assert len(told(made)) == 6
    assert (made.run.log_dir / "contribution.png").is_file()


METHODS: dict[str, dict[str, Any]] = {
    "momentum, whose server remembers": {"algorithm": FedAdam()},
    "control variates": {"algorithm": Scaffold()},
    "buffers and dropout": {"module": Wanderer, "data": lambda: Spots(samples=(2, 3, 4))},
    "late updates": {"participation": lambda: FullParticipation(stragglers=Stragglers(0.025, 0.0, "next_round"))},
    "lost updates": {"participation": lambda: FullParticipation(dropout_after=0.4)},
    "asynchronous": {"participation": lambda: Asynchronous(3, 2, Speeds(sigma=1.0))},
    "buffered": {"participation": lambda: Asynchronous(3, 2, Speeds(sigma=1.0)), "algorithm": FedBuff()},
    "a codec": {"uplink_codec": CastCodec()},
    "an attack on updates": {"attack": Scaling(3.0, clients=[2])},
    "in a group": {"executor": "vectorized"},
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_the_run_stays_as_it_is_and_resumes(name: str, tmp_path: Path) -> None:
    def run(folder: str, rounds: int, *callbacks: Any, **kwargs: Any) -> Any:
        parts = {key: part() if callable(part) else part for key, part in METHODS[name].items()}
        torch.manual_seed(0)
        module, data = parts.pop("module", None), parts.pop("data", None) or Spots()
        settings = {"max_rounds": rounds, "callbacks": [*callbacks, Checkpoint()], **parts, **kwargs}
        return fit(tmp_path / folder, module or LeastSquares(), data, settings.pop("algorithm", None), **settings)

    def gtg() -> Contribution:
        return Contribution("gtg", "global/loss", 6, 0.0, 0.0)

    bare, whole = run("bare", 6), run("whole", 6, gtg())
    assert_same(weights(bare), weights(whole))
    run("stopped", 3, gtg())
    resumed = run("stopped", 6, gtg(), ckpt_path="last")
    assert_same(weights(whole), weights(resumed))
    for metric in ("contribution", "contribution_sum"):
        assert told(whole, metric) == told(resumed, metric)
    gains = [float(line["contribution/gain"] or 0) for line in rows(whole.run.log_dir / "metrics.csv")]
    sums = told(whole, "contribution_sum")
    last = {one: share for (_, one), share in sorted(sums.items())}
    assert sum(last.values()) == pytest.approx(sum(gains), abs=1e-4 * (1 + abs(sum(gains))))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "privacy": (
        {"privacy": ClientLevel(1.0, 1.0), "algorithm": FedAvg(weighting="uniform")},
        "looks at single updates, which trainer.privacy",
    ),
    "a rule": ({"aggregation": Median()}, "sums as the method does, and trainer.aggregation otherwise"),
    "an informed attack": ({"attack": Mimic(clients=[2])}, "sums as the method does, and trainer.attack otherwise"),
    "no validation data": ({"data": Spots(val_fraction=0.0)}, "needs validation data, of which there are none"),
    "no global model": ({"algorithm": LocalOnly()}, "LocalOnly has no global model"),
    "personal parts": ({"algorithm": Wandering(), "module": Wanderer(), "data": Spots(samples=(2, 3, 4))}, "personal"),
    "a hidden state": ({"algorithm": Counting()}, "Counting on a copy of the server, which makes another model"),
    "an unknown metric": ({"callbacks": [Contribution(metric="global/los")]}, "did you mean global/loss"),
    "another order": ({"callbacks": [Recorder(), Contribution()]}, "put it first"),
    "many clients": (
        {"callbacks": [Contribution("shapley")], "data": Spots([1] * 11, [1] * 11)}, "takes 10 clients a round, not 11",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal(name: str, tmp_path: Path) -> None:
    settings, text = REFUSED[name]
    if name == "privacy":
        pytest.importorskip("dp_accounting")
    settings = {"data": Spots(), "module": LeastSquares(), "callbacks": [Contribution()], "max_rounds": 1} | settings
    with pytest.raises(ConfigError, match=text):
        fit(tmp_path, **settings)


def test_a_federation_of_nodes_is_refused(tmp_path: Path) -> None:
    make = small(data=Spots, callbacks=[Contribution()])
    with pytest.raises(ConfigError, match="the server of a federation has no validation data"):
        deploy(make, tmp_path, [[0], [1, 2]])


def test_a_secure_sum_is_refused(tmp_path: Path) -> None:
    halves = lambda: Points(num_clients=5, sizes=(4, 6), val_fraction=0.5)  # noqa: E731
    settings: dict[str, Any] = {"secure_sum": SecureSum(3, 0.5), "callbacks": [Contribution()]}
    with pytest.raises(ConfigError, match=r"needs single updates, which trainer\.secure_sum hides in a sum"):
        nodes.run(small(data=halves, **settings), tmp_path)


def test_settings_of_sampling_are_refused_under_other_rules() -> None:
    with pytest.raises(ConfigError, match="are of gtg, not of shapley; leave them out"):
        Contribution("shapley", samples=50)
    with pytest.raises(ConfigError, match="samples is 0"):
        Contribution(samples=0)


@pytest.mark.long
def test_two_processes_are_one(tmp_path: Path) -> None:
    found = []
    for devices in ("1", "2"):
        (folder := tmp_path / devices).mkdir()
        callback = "{class_path: Contribution, init_args: {rule: leave_one_out}}"
        done = run_cli(
            "fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_rounds", "3", "--trainer.accelerator",
            "cpu", "--trainer.local_epochs", "1", "--trainer.callbacks", f"[{callback}]", "--trainer.devices", devices,
            "--data.val_fraction", "0.2", cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        table = rows(folder / "lightning_logs/version_0/clients.csv")
        found.append([line for line in table if line["metric"].startswith("contribution")])
    assert len(found[0]) > 20
    assert found[0] == found[1]
