"""Regularizers and their losses against arithmetic, and on top of any objective."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.errors import ConfigError
from lit_fed.losses import knowledge_distillation, not_true_distillation
from lit_fed.methods import FedNTD, FedProx
from lit_fed.regularizers import FD, KD, LD, NTD, REGULARIZERS, Prox
from tests.methods.support import global_weight, run_quickstart
from tests.support import LeastSquares, assert_same, fit, rows, saved_weights


def test_distillation_by_hand() -> None:
    # Student (1/3, 2/3), teacher (1/2, 1/2): ½·ln(½/⅓) + ½·ln(½/⅔) = ½·ln(9/8) = 0.0588915. With τ = 2 on doubled
    # logits the same, times τ² = 4. A second row on which they agree halves the mean.
    student, teacher = torch.tensor([[0.0, math.log(2)], [1.0, 2.0]]), torch.tensor([[3.0, 3.0], [5.0, 6.0]])
    assert knowledge_distillation(student, teacher).item() == pytest.approx(0.0588915 / 2, rel=1e-5)
    assert knowledge_distillation(2 * student, 2 * teacher, 2.0).item() == pytest.approx(4 * 0.0588915 / 2, rel=1e-5)


def test_not_true_distillation_by_hand() -> None:
    # The same distributions over the two classes that are not the true one, wherever that one stands.
    for label, columns in ((0, [2, 0, 1]), (1, [0, 2, 1]), (2, [0, 1, 2])):
        student = torch.tensor([[0.0, math.log(2), 7.0]])[:, columns]
        teacher = torch.tensor([[3.0, 3.0, -5.0]])[:, columns]
        loss = not_true_distillation(student, teacher, torch.tensor([label]))
        assert loss.item() == pytest.approx(0.0588915, rel=1e-5)


def test_the_true_class_gets_no_gradient_from_not_true_distillation() -> None:
    student = torch.randn(6, 5, requires_grad=True)
    labels = torch.arange(6) % 5
    not_true_distillation(student, torch.randn(6, 5), labels, 3.0).backward()
    assert student.grad is not None
    assert student.grad.gather(1, labels.unsqueeze(1)).abs().max() == 0
    torch.testing.assert_close(student.grad.sum(1), torch.zeros(6))  # a softmax's gradient sums to 0


@pytest.mark.parametrize(
    ("weight", "objective_weight", "expected"),
    [
        # Client 0, the teacher at 0: w₁ = 1, then (1 − 2) + 2·(1 − 0) = 1 → w₁ = 0.5; client 1: 2, then 2 → w₂ = 1;
        # mean with weights 1 and 3: (0.125, 0.75). The gradient of (w − 0)² is 2w.
        (1.0, 1.0, [0.125, 0.75]),
        # Half of the objective: ½·(−2) → w₁ = 0.5, then ½·(−1.5) + 1 = 0.25 → w₁ = 0.375; client 1 twice that.
        (1.0, 0.5, [0.09375, 0.5625]),
        # Without the term: 1.5 and 3.
        (0.0, 1.0, [0.375, 2.25]),
    ],
)
def test_logit_distillation_by_hand(
    tmp_path: Path, weight: float, objective_weight: float, expected: list[float]
) -> None:
    module = LeastSquares(local_epochs=2, regularizer=LD(weight, objective_weight))
    made = fit(tmp_path, module, max_rounds=1)
    assert global_weight(made) == expected
    if weight == objective_weight == 1.0:
        # Client 0: (0 + 1²)/2 over its two steps, client 1: (0 + 2²)/2; weights 1 and 3.
        assert made.metrics["train/ld"] == pytest.approx((0.5 + 3 * 2) / 4)


def test_feature_distillation_is_the_papers() -> None:
    # 1/d·‖f − f_g‖², then the mean over the batch: (1² + 2²)/2 and (0 + 4²)/2 → (2.5 + 8)/2 = 5.25
    class Taught:
        def teach(self, x: Tensor) -> Any:
            return type("Outputs", (), {"features": torch.zeros(2, 2)})

    features = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    outputs: Any = type("Outputs", (), {"features": features})
    module: Any = Taught()
    assert FD().term(module, torch.zeros(2), outputs, torch.zeros(2)).item() == 5.25


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize("method", ["Classifier", "Scaffold", "FedPer", "Moon", "PerFedAvg"])
def test_every_regularizer_on_top_of_a_method(tmp_path: Path, name: str, method: str) -> None:
    server = ("--algorithm", "ScaffoldServer") if method == "Scaffold" else ()
    options = ("--model", method, "--model.regularizer", name, *server)
    term = f"train/{name}"
    values = [float(row[term]) for row in rows(run_quickstart(tmp_path, *options) / "metrics.csv")]
    assert all(0 < value < 10 for value in values), values


def test_by_class_with_settings(tmp_path: Path) -> None:
    options = ("--model.regularizer", "NTD", "--model.regularizer.weight", "0.1")
    options = (*options, "--model.regularizer.objective_weight", "0.9", "--model.regularizer.temperature", "1")
    run = run_quickstart(tmp_path, *options)
    assert "weight: 0.1" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(("method", "options"), [("FedProx", ("--model.mu", "0")), ("FedNTD", ("--model.beta", "0"))])
def test_methods_without_their_term_are_fedavg(tmp_path: Path, method: str, options: tuple[str, ...]) -> None:
    without = run_quickstart(tmp_path / "without", "--model", method, *options)
    assert_same(saved_weights(without), saved_weights(run_quickstart(tmp_path / "fedavg")))


@pytest.mark.parametrize(
    ("method", "regularizer"),
    [
        (("--model", "FedProx", "--model.mu", "0.3"), ("prox", "Prox", "--model.regularizer.weight", "0.3")),
        (("--model", "FedNTD"), ("ntd", "NTD", "--model.regularizer.temperature", "3")),
    ],
)
def test_a_method_is_its_regularizer(tmp_path: Path, method: tuple[str, ...], regularizer: tuple[str, ...]) -> None:
    named = run_quickstart(tmp_path / "named", *method)
    term = run_quickstart(tmp_path / "term", "--model.regularizer", *regularizer[1:])
    assert_same(saved_weights(named), saved_weights(term))
    assert (
        rows(named / "metrics.csv")[-1][f"train/{regularizer[0]}"]
        == rows(term / "metrics.csv")[-1][f"train/{regularizer[0]}"]
    )


class Dropping(Classifier):
    """Half of its features are dropped in training."""

    def __init__(self) -> None:
        super().__init__(network=nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))


def test_a_teacher_is_in_eval_mode_and_leaves_no_trace() -> None:
    module = Dropping()
    x = torch.randn(8, 4)
    weight, bias = (tensor.clone() for tensor in (module.network[1].weight.detach(), module.network[1].bias.detach()))
    teacher = {"network.1.weight": 2 * weight}  # what is not named stays the network's own
    taught = module.teach(x, teacher)
    torch.testing.assert_close(taught.logits, F.linear(x, 2 * weight, bias))
    assert not taught.logits.requires_grad
    assert module.network.training
    assert torch.equal(module.network[1].weight, weight)


def test_a_teacher_does_not_move_batch_norm() -> None:
    module = Classifier("test_resnet", in_channels=1, input_shape=(1, 8, 8))
    before = {name: tensor.clone() for name, tensor in module.network.state_dict().items()}
    module.teach(torch.randn(4, 1, 8, 8), dict(module.tensors(module.state_names())))
    assert_same(before, dict(module.network.state_dict()))


def test_the_downloaded_model_has_the_clients_own_part(tmp_path: Path) -> None:
    """A teacher must not see the head that the student is just training."""
    seen = []

    class Watched(FedProx):
        def split(self, round_idx: int) -> Any:
            from lit_fed import Split

            head = self.head_names()
            return Split(tuple(n for n, _ in self.named_parameters() if n not in head), head)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            name = "network.head.weight"
            seen.append((self.downloaded[name].clone(), self.tensor(name).clone()))
            return super().training_step(batch, batch_idx)

    from tests.support import Points

    module = Watched(network="mlp", num_classes=5, in_channels=1, input_shape=(2,), local_epochs=3)
    fit(tmp_path, module, Points(1), max_rounds=1)
    downloaded, own = zip(*seen, strict=True)
    assert all(torch.equal(tensor, own[0]) for tensor in downloaded)
    assert not torch.equal(own[2], own[0])


@pytest.mark.parametrize("make", [lambda: LD(-1.0), lambda: Prox(objective_weight=-1.0), lambda: NTD(temperature=0.0)])
def test_wrong_settings(make: Any) -> None:
    with pytest.raises(ConfigError, match="regularizer"):
        make()


def test_a_regularizer_is_absent_outside_a_federation() -> None:
    module = FedNTD(network="mlp", in_channels=1, input_shape=(2,), regularizer=KD())
    terms = module.loss_terms((torch.randn(3, 2), torch.tensor([0, 1, 2])))
    assert list(terms) == ["ce"]
