"""Lemma 4.1 of UWA by hand, and against what a run sent; without a trace in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedDF, FederatedDistillation, FedMD, TeacherError
from lit_fed.methods.distillation.teacher_error import lemma, mixing_weights
from lit_fed.participation import UniformParticipation
from tests.methods.distillation.test_uwa import PUBLIC, Eavesdropper, data, module, uwa
from tests.support import assert_same, events_of, fit, kept, rows

SURE = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)  # p* of two inputs, of one class


def predictions(*clients: list[float]) -> Tensor:
    """What clients give the first of two classes, for each input."""
    first = torch.tensor(clients, dtype=torch.float64)
    return torch.stack([first, 1 - first], dim=2)


def test_the_lemma_by_hand_for_independent_errors() -> None:
    # With p* = (1, 0), an error ξ = (−a, a) has ‖ξ‖² = 2a².
    # A: a = .2, .4, so μ has .3 and the rest ±.1; B: a = .6, .6, so μ has .6 and the rest is 0.
    # AVG: a of the mixture is .4, .5: ε = (2·.16 + 2·.25)/2 = .41. Its mean is .45: B² = 2·.2025 = .405.
    # σ² = 2·.01 = .02 (A's), ρ = 0, χ = ½: the bound is .405 + .02·½ = .415.
    found = lemma(predictions([0.8, 0.6], [0.4, 0.4]), torch.full((2, 2), 0.5).double(), SURE)
    expected = {"error": 0.41, "bias": 0.405, "variance": 0.02, "correlation": 0.0, "chi": 0.5, "bound": 0.415}
    assert found == pytest.approx(expected)


def test_the_lemma_by_hand_for_errors_that_go_together() -> None:
    # As above with B: a = .5, .7, whose rest is ±.1 too: averaging gains nothing, ρ = 1, and the bound is met:
    # a of the mixture is .35, .55: ε = (2·.1225 + 2·.3025)/2 = .425 = .405 + .02.
    found = lemma(predictions([0.8, 0.6], [0.5, 0.3]), torch.full((2, 2), 0.5).double(), SURE)
    expected = {"error": 0.425, "bias": 0.405, "variance": 0.02, "correlation": 1.0, "chi": 0.5, "bound": 0.425}
    assert found == pytest.approx(expected)


def test_trust_trades_bias_for_variance() -> None:
    # The first case with all weight on A: ε = (2·.04 + 2·.16)/2 = .2, B² = 2·.09 = .18, χ = 1: .18 + .02 = .2.
    weights = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    found = lemma(predictions([0.8, 0.6], [0.4, 0.4]), weights, SURE)
    assert found == pytest.approx(
        {"error": 0.2, "bias": 0.18, "variance": 0.02, "correlation": 0.0, "chi": 1.0, "bound": 0.2}
    )


def test_classes_have_systematic_errors_of_their_own() -> None:
    # One client, right on class 0 and always wrong on class 1: nothing is left beside the systematic error,
    # B² = (0 + 2)/2 = ε, where one mean over both inputs would see (±½, ∓½) and a variance.
    found = lemma(predictions([1.0, 1.0]), torch.ones(1, 2).double(), torch.eye(2).double())
    assert found == pytest.approx(
        {"error": 1.0, "bias": 1.0, "variance": 0.0, "correlation": 0.0, "chi": 1.0, "bound": 1.0}
    )


def test_the_bound_holds_for_the_average() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        q, p = (torch.from_numpy(draw.dirichlet(np.ones(4), size)) for size in ((5, 30), (30,)))
        found = lemma(q, torch.full((5, 30), 0.2).double(), p)
        assert found["bias"] <= found["error"] <= found["bound"]


def test_weights_are_a_softmax() -> None:
    scores = np.random.default_rng(1).normal(scale=1e3, size=(4, 6))
    tensors = [torch.from_numpy(row) for row in scores]
    for temperature in (0.0, 0.25, 1.0):
        np.testing.assert_allclose(
            mixing_weights(tensors, temperature), softmax(temperature * scores, axis=0), atol=1e-12
        )
    assert torch.equal(mixing_weights(tensors, float("inf")).argmax(0), torch.from_numpy(scores.argmax(0)))


def test_a_run_reports_the_error_of_its_mixture_and_trains_as_without(tmp_path: Path) -> None:
    with_it, ear = TeacherError(epochs=5), Eavesdropper()
    made = fit(tmp_path / "with", module(), data(), uwa(0.25), max_rounds=2, logger=True, callbacks=[with_it, ear])
    without = fit(tmp_path / "without", module(), data(), uwa(0.25), max_rounds=2)
    targets = made.run.federation.server["targets"]
    assert torch.equal(targets, without.run.federation.server["targets"])
    for client_id in range(4):
        assert_same(kept(made, client_id), kept(without, client_id))
    reference = with_it.reference
    assert reference is not None
    error = (targets.double() - reference).square().sum(1).mean().item()
    assert made.metrics["teacher/error"] == pytest.approx(error, abs=1e-6)
    assert made.metrics["teacher/chi"] == pytest.approx(made.metrics["server/chi"])
    each = [(ear.sent[c]["logits"].double().softmax(1) - reference).square().sum(1).mean().item() for c in range(4)]
    assert made.metrics["teacher/client_error"] == pytest.approx(sum(each) / 4)
    assert made.metrics["teacher/bias"] <= made.metrics["teacher/bound"]
    assert made.metrics["teacher/reference_acc"] > 0.8, "it knows what all clients know"
    assert float(rows(made.log_dir / "metrics.csv")[-1]["teacher/error"]) == pytest.approx(error, abs=1e-6)
    events = EventAccumulator(events_of(made.log_dir))
    events.Reload()
    assert [event.step for event in events.Scalars("teacher/error")] == [0, 1]


@pytest.mark.parametrize("method", ["fd_avg", "logits", "fedmd", "feddf"])
def test_every_method_that_mixes_predictions(tmp_path: Path, method: str) -> None:
    algorithm = {
        "fd_avg": FederatedDistillation(public_size=PUBLIC),
        "logits": FederatedDistillation("logits", public_size=PUBLIC),
        "fedmd": FedMD(public_size=PUBLIC),
        "feddf": FedDF(public_size=PUBLIC),
    }[method]
    watch, ear = TeacherError(epochs=1), Eavesdropper()
    made = fit(tmp_path, module(), data(), algorithm, max_rounds=1, callbacks=[watch, ear])
    logits = torch.stack([ear.sent[client_id]["logits"].double() for client_id in range(4)])
    teacher = logits.softmax(2).mean(0) if method == "fd_avg" else logits.mean(0).softmax(1)
    error = (teacher - watch.reference).square().sum(1).mean().item()
    assert made.metrics["teacher/error"] == pytest.approx(error, abs=1e-9)
    assert ("teacher/bound" in made.metrics) == (method == "fd_avg")


def test_a_resumed_run_keeps_its_reference(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, **kwargs: Any) -> dict[str, float]:
        made = fit(tmp_path / folder, module(), data(), uwa(), max_rounds=rounds, callbacks=[TeacherError(2)],
                   enable_checkpointing=True, **kwargs)  # fmt: skip
        return {name: value for name, value in made.metrics.items() if name.startswith("teacher/")}

    whole = run("whole", 3)
    run("cut", 1)
    (saved,) = (tmp_path / "cut").rglob("last.ckpt")
    assert run("cut", 3, ckpt_path=str(saved)) == whole


def test_only_what_arrives_in_time_is_mixed(tmp_path: Path) -> None:
    participation = UniformParticipation(count=4, dropout_after=0.5)
    watch = TeacherError(epochs=1)
    made = fit(tmp_path, module(), data(), uwa(), max_rounds=1, callbacks=[watch], participation=participation)
    assert made.metrics["teacher/chi"] == pytest.approx(made.metrics["server/chi"])


def test_refused_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epochs is 0"):
        TeacherError(epochs=0)
    with pytest.raises(ConfigError, match="algorithm is FedAvg"):
        fit(tmp_path, module(), data(), FedAvg(), callbacks=[TeacherError()])
