"""Features of local models against arithmetic, without a trace in the training."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lit_fed.codecs import CastCodec
from lit_fed.data import Arrays
from lit_fed.errors import ConfigError
from lit_fed.methods import UWA, Alignment, DotRegression, FedAvg, FedBABU, FedETF, FedPer, Scaffold
from lit_fed.networks import SmallCNN
from lit_fed.participation import UniformParticipation
from tests.methods.frozen_heads.support import Stranger, TwoClasses, digits, model, on_plane
from tests.support import ROOT, LeastSquares, Points, assert_same, events_of, fit, rows, run_cli, weights

PREFIXES = ("alignment/", "alignment/gap_", "alignment/acc_", "alignment/acc_gap_")
PREFIXES += ("features/distance_", "features/angle_", "features/norm_difference_")
NAMES = [prefix + group for prefix in PREFIXES for group in ("observed", "unobserved")]


def test_one_round_by_hand(tmp_path: Path) -> None:
    # As in `test_dot_regression_by_hand`: from f^g = (3, 4) with cosines ±0.6, client 0 moves the features of its class
    # to (3.64, 3.52), client 1 those of its class to (0.44, 5.92); what each has for the other class stays.
    method = DotRegression()
    task = on_plane((3.0, 4.0), 12.5, method, [[1.0, 0.0], [-1.0, 0.0]])
    metrics = fit(tmp_path, task, TwoClasses(), method, max_rounds=1, callbacks=[Alignment()]).metrics
    norms = math.hypot(3.64, 3.52), math.hypot(0.44, 5.92)
    cosines = 3.64 / norms[0], -0.44 / norms[1]
    # The angles between (3, 4)/5 and the two.
    angles = [math.degrees(math.acos(dot / 5 / norm)) for dot, norm in zip((25.0, 25.0), norms, strict=True)]
    expected = {
        "alignment/observed": sum(cosines) / 2,
        "alignment/unobserved": (-0.6 + 0.6) / 2,
        "alignment/gap_observed": (cosines[0] - 0.6 + cosines[1] + 0.6) / 2,
        "alignment/gap_unobserved": 0.0,
        # All features still point to class 0: right for client 0's own class and for the other class of client 1.
        "alignment/acc_observed": 0.5,
        "alignment/acc_unobserved": 0.5,
        "alignment/acc_gap_observed": 0.0,
        "alignment/acc_gap_unobserved": 0.0,
        "features/distance_observed": (math.hypot(0.64, 0.48) + math.hypot(2.56, 1.92)) / 2,
        "features/distance_unobserved": 0.0,
        "features/angle_observed": sum(angles) / 2,
        "features/norm_difference_observed": (abs(norms[0] - 5) + abs(norms[1] - 5)) / 2,
        "features/norm_difference_unobserved": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert metrics["features/angle_unobserved"] == pytest.approx(0, abs=0.1)  # arccos is steep at 1


class Normed(nn.Module):
    """Batch norm and dropout before a head: what evaluation must not disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(SmallCNN().body, nn.BatchNorm1d(128), nn.Dropout(0.3))
        self.head = nn.Linear(128, 10)

    def forward_features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.forward_features(x))
        return logits


@pytest.mark.parametrize("buffers", ["average", "server"])
@pytest.mark.parametrize("method", [FedAvg, DotRegression, FedETF, Scaffold])
def test_training_does_not_notice(method: Any, buffers: Any, tmp_path: Path) -> None:
    def run(callbacks: list[Any]) -> Any:
        torch.manual_seed(0)
        network = Normed()
        task = model(network=network, optimizer=partial(torch.optim.SGD, lr=0.02))
        return fit(tmp_path, task, digits(), method(), max_rounds=3, buffers=buffers, callbacks=callbacks)

    with_it, without = run([Alignment()]), run([])
    assert_same(weights(with_it), weights(without))
    assert with_it.metrics.keys() - without.metrics.keys() == set(NAMES)
    same = [name for name in without.metrics if not name.startswith("time/")]
    assert [with_it.metrics[name] for name in same] == [without.metrics[name] for name in same]


def test_a_trained_head_is_compared_with_the_downloaded_one(tmp_path: Path) -> None:
    # With learning rate 0 nothing moves; with a head alone that learns, features stay and alignment does not.
    still = model(optimizer=partial(torch.optim.SGD, lr=0.0))
    metrics = fit(tmp_path, still, digits(), FedAvg(), max_rounds=1, callbacks=[Alignment()]).metrics
    assert metrics["alignment/gap_observed"] == metrics["features/distance_unobserved"] == 0
    head = model(network="logistic")
    metrics = fit(tmp_path, head, digits(), FedAvg(), max_rounds=1, callbacks=[Alignment()]).metrics
    assert metrics["features/distance_observed"] == metrics["features/distance_unobserved"] == 0
    assert metrics["alignment/gap_observed"] > 0


def test_only_every_few_rounds_and_in_the_last(tmp_path: Path) -> None:
    fit(tmp_path, model(), digits(), DotRegression(), max_rounds=5, callbacks=[Alignment(every_n_rounds=2)])
    table = rows(tmp_path / "lightning_logs/version_0/metrics.csv")
    assert [bool(row["alignment/observed"]) for row in table] == [False, True, False, True, True]


def test_a_choice_of_samples_is_fixed(tmp_path: Path) -> None:
    def run(most: int | None) -> dict[str, float]:
        callbacks = [Alignment(1, most)]
        return fit(tmp_path, model(), digits(), DotRegression(), max_rounds=1, callbacks=callbacks).metrics

    whole, few = run(None), run(50)
    assert [run(50)[name] for name in NAMES] == [few[name] for name in NAMES]
    assert few["alignment/observed"] != whole["alignment/observed"]
    assert few["alignment/observed"] == pytest.approx(whole["alignment/observed"], abs=0.1)
    assert [run(359)[name] for name in NAMES] == [whole[name] for name in NAMES]  # all there are


def test_curves_go_on_after_a_resume_and_end_in_a_picture(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Alignment:
        callback = Alignment()
        parts = (model(), digits(), DotRegression())
        cohort = UniformParticipation(count=2)
        settings: dict[str, Any] = {"participation": cohort, "logger": True, "ckpt_path": ckpt_path}
        fit(tmp_path / folder, *parts, max_rounds=rounds, callbacks=[callback], **settings)
        return callback

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4, "last")
    assert whole.rounds == resumed.rounds == [0, 1, 2, 3]
    assert whole.curves == resumed.curves
    events = EventAccumulator(events_of(tmp_path / "parts/lightning_logs/version_0")).Reload()
    assert [picture.step for picture in events.Images("pictures/alignment")][-1] == 3
    assert [event.value for event in events.Scalars("alignment/observed")] == pytest.approx(whole.curves[NAMES[0]])


@pytest.mark.long
def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    words = ["-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/method/feddr_plus.yaml")]
    words += ["-c", str(ROOT / "configs/papers/feddr_plus/tuned/quickstart_feddr_plus.yaml")]
    words += ["--trainer.max_rounds", "2", "--trainer.evaluate_every", "0", "--trainer.callbacks", "[Alignment]"]
    words += ["--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
    tables = []
    for devices in ("1", "2"):
        folder = tmp_path / devices
        folder.mkdir()
        done = run_cli("fit", *words, "--trainer.devices", devices, cwd=folder)
        assert done.returncode == 0, done.stderr
        tables.append(rows(folder / "lightning_logs/version_0/metrics.csv"))
    for one, two in zip(*tables, strict=True):
        assert {name: float(one[name]) for name in NAMES} == {name: float(two[name]) for name in NAMES}


def test_any_task_that_names_its_head(tmp_path: Path) -> None:
    # What the method needs does not matter: FedAvg asks for no head, FedBABU for its parameters alone.
    for algorithm in (FedAvg(head="layers.4"), FedBABU(head="layers.4"), DotRegression(head="layers.4")):
        metrics = fit(tmp_path, Stranger(), digits(), algorithm, max_rounds=1, callbacks=[Alignment()]).metrics
        assert metrics["features/distance_observed"] > 0
        assert -1 <= metrics["alignment/observed"] <= 1


def test_what_a_client_sends_is_looked_at_before_its_codec(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> dict[str, float]:
        return fit(
            tmp_path, model(), digits(), DotRegression(), max_rounds=1, callbacks=[Alignment()], **kwargs
        ).metrics

    exact, coarse = run(), run(uplink_codec=CastCodec())
    assert [coarse[name] for name in NAMES] == [exact[name] for name in NAMES]


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    for settings in ({"every_n_rounds": 0}, {"max_test_samples": 0}):
        with pytest.raises(ConfigError, match=r"Alignment\.\w+ is 0; it must be at least 1"):
            Alignment(**settings)


def classes() -> Any:
    return model(network=Normed())


@pytest.mark.parametrize(
    ("task", "algorithm", "settings", "message"),
    [
        (Stranger, FedAvg(), {}, r"needs features: name the submodule that reads them as algorithm\.head; model Str"),
        (classes, FedPer(), {}, r"under algorithm FedPer they keep network\.head\.weight; leave the"),
        (
            classes,
            FedAvg(),
            {"buffers": "local"},
            r"keep network\.body\.1\.running_mean; set trainer\.buffers to",
        ),
        (classes, UWA(public_size=50), {}, "needs one global model, and algorithm UWA has none"),
    ],
)
def test_federations_without_whole_models_or_heads(
    task: Any, algorithm: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, task(), digits(), algorithm, callbacks=[Alignment()], **settings)


class Numbers(Points):
    """`Points` as a regression."""

    num_classes = None  # type: ignore[assignment]

    def load_arrays(self) -> Arrays:
        made = super().load_arrays()
        y = made.train.y.astype(np.float32)
        return Arrays(made.train.x, y, made.test.x, y, made.train.clients, made.test.clients, "numbers")


def test_numbers_have_no_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="callback Alignment needs integer class labels"):
        fit(tmp_path, LeastSquares(), Numbers(), FedAvg(head="network"), callbacks=[Alignment()])
