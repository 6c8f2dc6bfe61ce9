"""Regularizers and their losses against arithmetic, and on top of any objective."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier, Client, Model, Split, objective_of
from lit_fed.engine.lightning.objective import Objective
from lit_fed.engine.method.client import Outputs
from lit_fed.errors import ConfigError
from lit_fed.losses import knowledge_distillation, not_true_distillation
from lit_fed.methods import FD, KD, LD, NTD, FedAvg, FedNTD, FedProx, LocalOnly, Prox
from tests.methods.support import client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, assert_same, fit, rows, saved_weights

REGULARIZERS = ["Prox", "KD", "NTD", "LD", "FD", "FedDecorr"]


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
    algorithm = FedAvg(regularizer=LD(weight, objective_weight), head="network")
    made = fit(tmp_path, algorithm=algorithm, max_rounds=1, local_epochs=2)
    assert global_weight(made) == expected
    if weight == objective_weight == 1.0:
        # Client 0: (0 + 1²)/2 over its two steps, client 1: (0 + 2²)/2; weights 1 and 3.
        assert made.metrics["train/ld"] == pytest.approx((0.5 + 3 * 2) / 4)


def test_feature_distillation_is_the_papers() -> None:
    # 1/d·‖f − f_g‖², then the mean over the batch: (1² + 2²)/2 and (0 + 4²)/2 → (2.5 + 8)/2 = 5.25
    class Taught:
        def run(self, batch: Any) -> Outputs:
            return Outputs(None, features=torch.tensor([[1.0, 2.0], [0.0, 4.0]]))

        def teach(self, batch: Any, tensors: Any = None) -> Outputs:
            return Outputs(None, features=torch.zeros(2, 2))

    client: Any = Taught()
    assert FD().term(client, None).item() == 5.25


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize("method", ["FedAvg", "Scaffold", "FedPer", "Moon", "PerFedAvg", "Ditto", "LocalOnly"])
def test_every_regularizer_on_top_of_a_method(tmp_path: Path, name: str, method: str) -> None:
    options = ("--algorithm", method, "--algorithm.regularizer", name)
    term = f"train/{name.lower()}"
    values = [float(row[term]) for row in rows(run_quickstart(tmp_path, *options) / "metrics.csv")]
    assert all(0 < value < 10 for value in values), values


def test_by_class_with_settings(tmp_path: Path) -> None:
    of = "--algorithm.regularizer"
    options = (of, "NTD", f"{of}.weight", "0.1", f"{of}.objective_weight", "0.9", f"{of}.temperature", "1")
    run = run_quickstart(tmp_path, *options)
    assert "weight: 0.1" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(("method", "weight"), [("FedProx", "mu"), ("FedNTD", "beta")])
def test_methods_without_their_term_are_fedavg(tmp_path: Path, method: str, weight: str) -> None:
    without = run_quickstart(tmp_path / "without", "--algorithm", method, f"--algorithm.{weight}", "0")
    assert_same(saved_weights(without), saved_weights(run_quickstart(tmp_path / "fedavg")))


@pytest.mark.parametrize(
    ("method", "regularizer"),
    [
        (("FedProx", "--algorithm.mu", "0.3"), ("Prox", "--algorithm.regularizer.weight", "0.3")),
        (("FedNTD",), ("NTD", "--algorithm.regularizer.temperature", "3")),
    ],
)
def test_a_method_is_its_regularizer(tmp_path: Path, method: tuple[str, ...], regularizer: tuple[str, ...]) -> None:
    named = run_quickstart(tmp_path / "named", "--algorithm", *method)
    term = run_quickstart(tmp_path / "term", "--algorithm.regularizer", *regularizer)
    assert_same(saved_weights(named), saved_weights(term))
    name = f"train/{regularizer[0].lower()}"
    assert rows(named / "metrics.csv")[-1][name] == rows(term / "metrics.csv")[-1][name]


def teach(module: Any, batch: Any, tensors: Any, head: str | None = None) -> Outputs:
    """What a teacher gives, outside a federation."""
    found = objective_of(module, FedAvg(regularizer=KD(), head=head))
    assert isinstance(found, Objective)
    return found.state.client.teach(batch, tensors)


def test_a_teacher_is_in_eval_mode_and_leaves_no_trace() -> None:
    layer = nn.Linear(4, 3)
    module = Classifier(nn.Sequential(nn.Dropout(0.5), layer))
    batch = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    weight, bias = (tensor.clone() for tensor in (layer.weight.detach(), layer.bias.detach()))
    other = {"network.1.weight": 2 * weight}  # what is not named stays the network's own
    taught = teach(module, batch, other, head="network.1")
    assert taught.logits is not None
    torch.testing.assert_close(taught.logits, F.linear(batch[0], 2 * weight, bias))
    assert not taught.logits.requires_grad
    assert module.network.training
    assert torch.equal(layer.weight, weight)


def test_a_teacher_does_not_move_batch_norm() -> None:
    module = Classifier("test_resnet", in_channels=1, input_shape=(1, 8, 8))
    before = {name: tensor.clone() for name, tensor in module.network.state_dict().items()}
    teach(module, (torch.randn(4, 1, 8, 8), torch.arange(4)), Model(module).copy())
    assert_same(before, dict(module.network.state_dict()))


def test_a_teacher_has_the_clients_own_part(tmp_path: Path) -> None:
    """A teacher must not see the head that the student is just training."""
    seen = []

    class Watched(FedProx):
        def split(self, model: Model, round_idx: int) -> Split:
            head = tuple(name for name in model.parameters if "head" in name)
            return Split(tuple(name for name in model.parameters if name not in head), head)

        def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
            name = "network.head.weight"
            seen.append((client.begun[name].clone(), client.model.tensor(name).clone()))
            return super().objective(client, batch)

    module = Classifier("mlp", num_classes=5, in_channels=1, input_shape=(2,))
    fit(tmp_path, module, Points(1), Watched(), max_rounds=1, local_epochs=3)
    begun, own = zip(*seen, strict=True)
    assert all(torch.equal(tensor, own[0]) for tensor in begun)
    assert not torch.equal(own[2], own[0])


def test_where_nothing_travels_a_client_is_held_to_where_it_began(tmp_path: Path) -> None:
    # ½·2·‖w − w₀‖² over w, from w₀ = 0: client 0: 1, then (1 − 2) + 2·1 = 1 → ½. From w₀ = ½ in the next round:
    # ½ + ½·1.5 = 1.25, then (1.25 − 2) + 2·0.75 = 0.75 → 0.875.
    made = fit(tmp_path, algorithm=LocalOnly(regularizer=Prox(2.0)), max_rounds=2, local_epochs=2)
    assert client_state(made, 0) == {"network.weight": [[0.875, 0.0]]}


@pytest.mark.parametrize("make", [lambda: LD(-1.0), lambda: Prox(objective_weight=-1.0), lambda: NTD(temperature=0.0)])
def test_wrong_settings(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"regularizer|NTD\.temperature"):
        make()


@pytest.mark.parametrize("method", [FedNTD, FedProx])
def test_terms_are_absent_outside_a_federation(method: Any) -> None:
    module = Classifier("mlp", in_channels=1, input_shape=(2,))
    batch = torch.randn(3, 2), torch.tensor([0, 1, 2])
    found = objective_of(module, method(regularizer=KD()))
    assert isinstance(found, Objective)
    assert list(found.state.algorithm.terms(found.state.client, batch)) == ["task"]
    assert found.training_step(batch, 0) == F.cross_entropy(module(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("regularizer", "message"),
    [
        (KD(), "regularizer KD needs logits: name the submodule that puts them out as algorithm.head"),
        (LD(), "regularizer LD needs the head's outputs: name the submodule that puts them out as algorithm.head"),
        (FD(), "regularizer FD needs features: name the submodule that reads them as algorithm.head"),
    ],
)
def test_a_task_that_lacks_what_a_regularizer_needs_is_refused(tmp_path: Path, regularizer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, LeastSquares(), algorithm=FedAvg(regularizer=regularizer))
