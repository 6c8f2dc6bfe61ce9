"""Federated distillation against a hand-written Algorithm 1, and FedMD and FedDF against what they reduce to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier, Client
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg, FedDF, FederatedDistillation, FedMD, Prox
from lit_fed.networks import MLP, Logistic
from lit_fed.protocols import ClientGlobalTest, ClientTest, LocalTest, PersonalTest
from tests.methods.support import Rota
from tests.support import LeastSquares, Points, assert_same, fit, kept, rows, weights

LR, PUBLIC = 0.5, 60


def data(**kwargs: Any) -> Digits:
    """Batches that hold everything, so that an epoch is one step in any order."""
    settings: dict[str, Any] = {"num_clients": 2, "partition": ClassesPerClient(3), "seed": 1}
    return Digits(**(settings | {"max_train_samples": 300, "batch_size": 500, "test_batch_size": 25} | kwargs))


def module(network: nn.Module | None = None, kind: type[Classifier] = Classifier) -> Classifier:
    torch.manual_seed(0)
    return kind(network or Logistic(10, 1, (1, 8, 8)), optimizer=lambda p: torch.optim.SGD(p, lr=LR))


def distillation(kind: Callable[..., Any] = FederatedDistillation, **kwargs: Any) -> Any:
    return kind(**({"public_size": PUBLIC} | kwargs))


class Algorithm1:
    """The paper's pseudo-code for full batches, with the average for Agg; who takes part is asked each round.

    A client that was not there refines when it next is, on the newest mixture: before it, on which no test looks.
    """

    def __init__(self, population: Digits, epochs: int, first_epochs: int) -> None:
        population.reserve(PUBLIC)
        population.setup("fit")
        self.population, self.epochs, self.first_epochs = population, epochs, first_epochs
        start = module().network
        self.networks = [copy.deepcopy(start) for _ in range(population.num_clients)]
        self.public = torch.cat([x for x, _ in population.public_loader()])
        self.test = tuple(map(torch.cat, zip(*population.test_loader(), strict=True)))
        self.targets: Tensor | None = None
        self.seen: set[int] = set()
        self.after_private: dict[int, dict[str, Tensor]] = {}

    def step(self, network: nn.Module, x: Tensor, y: Tensor) -> None:
        gradients = torch.autograd.grad(F.cross_entropy(network(x), y), list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter -= LR * gradient

    def private(self, client_id: int) -> None:
        x, y = next(iter(self.population.train_loader(client_id, torch.Generator())))
        for _ in range(self.epochs if client_id in self.seen else self.first_epochs):
            self.step(self.networks[client_id], x, y)
        self.seen.add(client_id)
        self.after_private[client_id] = copy.deepcopy(self.networks[client_id].state_dict())

    @torch.no_grad()
    def mix(self, cohort: list[int]) -> None:
        self.targets = torch.stack([self.networks[i](self.public).softmax(1) for i in cohort]).mean(0)

    def refine(self, network: nn.Module) -> None:
        assert self.targets is not None
        self.step(network, self.public, self.targets)

    @torch.no_grad()
    def loss(self, network: nn.Module) -> float:
        return F.cross_entropy(network(self.test[0]), self.test[1]).item()


def test_three_rounds_are_algorithm_1(tmp_path: Path) -> None:
    made = fit(tmp_path, module(), data(), distillation(first_epochs=3), max_rounds=3, local_epochs=2,
               protocols=[ClientGlobalTest()])  # fmt: skip
    found = [float(row["clients_global/loss_mean"]) for row in rows(made.log_dir / "metrics.csv")]
    paper = Algorithm1(data(), epochs=2, first_epochs=3)
    for round_idx in range(3):
        for client_id in (0, 1):
            paper.private(client_id)
        paper.mix([0, 1])
        for client_id in (0, 1):
            paper.refine(paper.networks[client_id])
        # float32 sums of 2 to 3 full-batch steps a round, in another order.
        assert found[round_idx] == pytest.approx(np.mean([paper.loss(n) for n in paper.networks]), rel=1e-5)
    assert paper.targets is not None
    torch.testing.assert_close(made.run.federation.server["targets"], paper.targets, rtol=1e-5, atol=1e-7)


def test_a_client_that_appears_late(tmp_path: Path) -> None:
    """Client 0 works in rounds 0 and 2, client 1 first in round 1: it starts afresh, with its first epochs."""
    made = fit(tmp_path, module(), data(), distillation(first_epochs=3), max_rounds=3,
               participation=Rota(), protocols=[ClientGlobalTest()])  # fmt: skip
    paper = Algorithm1(data(), epochs=1, first_epochs=3)
    paper.private(0)
    paper.mix([0])
    paper.refine(paper.networks[1])  # on the mixture that was there when it came
    paper.private(1)
    paper.mix([1])
    paper.refine(paper.networks[0])  # on the newest one
    paper.private(0)
    paper.mix([0])
    for client_id in (0, 1):
        mine = kept(made, client_id)
        for name, tensor in paper.after_private[client_id].items():
            torch.testing.assert_close(mine[f"network.{name}"], tensor, rtol=1e-5, atol=1e-7)
    expected = []
    for network in paper.networks:  # the test refines everybody
        paper.refine(network)
        expected.append(paper.loss(network))
    last = float(rows(made.log_dir / "metrics.csv")[-1]["clients_global/loss_mean"])
    assert last == pytest.approx(np.mean(expected), rel=1e-5)


class Observed(Classifier):
    """Remembers the models that it was tested with."""

    method: ObservedDistillation

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.method.note(self.method.tested)
        super().test_step(batch, batch_idx)


class ObservedDistillation(FederatedDistillation):
    """Remembers the models that private training started from."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.client: Client | None = None
        self.tested: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.started: dict[tuple[int, int], dict[str, Tensor]] = {}

    def note(self, where: dict[tuple[int, int], dict[str, Tensor]]) -> None:
        assert self.client is not None
        where.setdefault((self.client.round_idx, self.client.id), self.client.model.copy())

    def start(self, client: Client) -> dict[str, Tensor]:
        self.client = client
        return super().start(client)

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        if client.phase == "train":
            self.note(self.started)
        return super().objective(client, batch)


@pytest.mark.parametrize("evaluate_every", [1, 2])
def test_what_is_tested_is_what_the_next_private_training_starts_from(tmp_path: Path, evaluate_every: int) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10))
    observed, method = module(network, Observed), distillation(ObservedDistillation)
    observed.method = method
    fit(tmp_path, observed, data(batch_size=16, num_clients=3), method, max_rounds=4, protocols=[ClientTest()],
        evaluate_every=evaluate_every)  # fmt: skip
    rounds = [r for r in range(3) if (r + 1) % evaluate_every == 0]
    assert rounds
    for round_idx in rounds:
        for client_id in range(3):
            assert_same(method.tested[round_idx, client_id], method.started[round_idx + 1, client_id])


def test_evaluation_changes_nothing_that_follows(tmp_path: Path) -> None:
    runs = [
        fit(tmp_path / str(every), module(), data(batch_size=16), distillation(), evaluate_every=every)
        for every in (0, 1)
    ]
    assert torch.equal(*(made.run.federation.server["targets"] for made in runs))


def test_local_test_is_the_model_before_the_mixture(tmp_path: Path) -> None:
    protocols = [LocalTest(), ClientTest()]
    made = fit(tmp_path, module(), data(), distillation(), max_rounds=1, protocols=protocols)
    paper = Algorithm1(data(), epochs=1, first_epochs=1)
    losses: dict[str, list[float]] = {"local": [], "clients": []}
    for client_id in (0, 1):
        paper.private(client_id)
    paper.mix([0, 1])
    for client_id, network in enumerate(paper.networks):
        paper.test = tuple(map(torch.cat, zip(*paper.population.test_loader(client_id), strict=True)))
        losses["local"].append(paper.loss(network))
        paper.refine(network)
        losses["clients"].append(paper.loss(network))
    for name, values in losses.items():
        assert made.metrics[f"{name}/loss_mean"] == pytest.approx(np.mean(values), rel=1e-5)


def test_predictions_of_a_client_are_those_of_the_tested_model(tmp_path: Path) -> None:
    parts = module(), data(), distillation()
    made = fit(tmp_path, *parts, max_rounds=1, protocols=[ClientTest()])
    made.predict(*parts, client_position=1, output=str(tmp_path / "p.csv"))
    table = rows(tmp_path / "p.csv")
    accuracy = np.mean([row["prediction"] == row["label"] for row in table])
    per_client = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] == "acc"]
    assert accuracy == pytest.approx(float(per_client[1]["value"]))


@pytest.mark.parametrize("aggregate", ["probabilities", "logits"])
def test_aggregates_bytes_and_metrics(tmp_path: Path, aggregate: Any) -> None:
    made = fit(tmp_path, module(), data(), distillation(aggregate=aggregate), max_rounds=2)
    table = rows(made.log_dir / "metrics.csv")
    # 60 samples × 10 classes × 4 bytes from and to each of 2 clients; nothing comes down before the first mixture.
    assert [float(row["comm/uplink_bytes"]) for row in table] == [4800, 4800]
    assert [float(row["comm/downlink_bytes"]) for row in table] == [0, 4800]
    targets = made.run.federation.server["targets"]
    torch.testing.assert_close(targets.sum(1), torch.ones(PUBLIC))
    population = made.run.federation.data
    labels = population.read_parts().train.y[population._cut.public]
    accuracy = (targets.argmax(1).numpy() == labels).mean()
    assert float(table[-1]["server/teacher_acc"]) == pytest.approx(accuracy)
    assert float(table[-1]["server/chi"]) == 0.5
    assert float(table[-1]["server/weight_entropy"]) == pytest.approx(np.log(2))


def test_fine_tuning_begins_with_the_refinement_at_its_own_learning_rate(tmp_path: Path) -> None:
    protocols = [ClientTest(), PersonalTest(epochs=1, lr=1e-12), LocalTest()]
    made = fit(tmp_path, module(), data(), distillation(), max_rounds=1, protocols=protocols)
    # Steps of 1e-12 round to nothing: what is tested is the refined model, and not the one before.
    assert made.metrics["personal/loss_mean"] == made.metrics["clients/loss_mean"] != made.metrics["local/loss_mean"]


def test_a_regularizer_goes_over_private_training_from_the_first_round_on(tmp_path: Path) -> None:
    made = fit(tmp_path, module(), data(batch_size=16), distillation(regularizer=Prox(0.1)), max_rounds=2)
    first, second = rows(made.log_dir / "metrics.csv")
    for row in (first, second):
        terms = float(row["train/task"]) + float(row["train/prox"])
        assert float(row["train/prox"]) > 0
        assert float(row["train/loss"]) == pytest.approx(terms)
    assert not first["train/distillation"]
    assert float(second["train/distillation"]) > 0


# --- FedMD and FedDF -------------------------------------------------------------------------------------------------


def test_fedmd_two_rounds_by_reference(tmp_path: Path) -> None:
    """Revisit, send; digest, revisit: tested after the revisit."""
    made = fit(tmp_path, module(), data(), distillation(FedMD), max_rounds=2, protocols=[ClientGlobalTest()])
    paper = Algorithm1(data(), epochs=1, first_epochs=1)
    for client_id in (0, 1):
        paper.private(client_id)
    with torch.no_grad():
        consensus = torch.stack([network(paper.public) for network in paper.networks]).mean(0)
    for client_id, network in enumerate(paper.networks):
        gradients = torch.autograd.grad(F.l1_loss(network(paper.public), consensus), list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter -= LR * gradient
        paper.private(client_id)
    expected = np.mean([paper.loss(network) for network in paper.networks])
    assert made.metrics["clients_global/loss_mean"] == pytest.approx(expected, rel=1e-5)


def test_fedmd_may_digest_by_cross_entropy(tmp_path: Path) -> None:
    made = fit(tmp_path, module(), data(), distillation(FedMD, digest="ce"), max_rounds=2)
    plain = fit(tmp_path, module(), data(), distillation(aggregate="logits"), max_rounds=2)
    # Both clients learn from the softmax of the mean logits.
    consensus, targets = (run.run.federation.server["targets"] for run in (made, plain))
    torch.testing.assert_close(consensus.softmax(1), targets)


def test_feddf_without_distillation_is_fedavg(tmp_path: Path) -> None:
    network = MLP(10, 1, (1, 8, 8), hidden=(8,))
    runs = [
        fit(tmp_path, module(copy.deepcopy(network)), data(batch_size=16), method, max_rounds=3)
        for method in (distillation(FedDF, epochs=0), FedAvg(public_size=PUBLIC))
    ]
    assert_same(weights(runs[0]), weights(runs[1]))


def test_feddf_distils_the_mean_of_the_logits(tmp_path: Path) -> None:
    """One round, one full-batch step of the server by hand."""
    method = distillation(FedDF, optimizer=lambda p: torch.optim.SGD(p, lr=LR), epochs=1, weighting="uniform")
    made = fit(tmp_path, module(), data(), method, max_rounds=1)
    paper = Algorithm1(data(), epochs=1, first_epochs=1)
    for client_id in (0, 1):
        paper.private(client_id)
    student = copy.deepcopy(paper.networks[0])
    with torch.no_grad():
        paper.targets = torch.stack([network(paper.public) for network in paper.networks]).mean(0).softmax(1)
        for mean, *parts in zip(student.parameters(), *(n.parameters() for n in paper.networks), strict=True):
            mean.copy_(torch.stack(parts).mean(0))
    paper.refine(student)
    for name, tensor in student.state_dict().items():
        found = weights(made)[f"network.{name}"]
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-7)
    # Up: 650 weights and 60 × 10 logits of each client; down: the weights.
    assert made.metrics["comm/uplink_bytes"] == 2 * 4 * (650 + 600)
    assert made.metrics["comm/downlink_bytes"] == 2 * 4 * 650
    assert "global/acc" in made.metrics


# --- what is refused -------------------------------------------------------------------------------------------------


def test_refused_before_any_training(tmp_path: Path) -> None:
    def kinds(method: Any) -> Any:
        return fit(tmp_path, {"a": module(), "b": module()}, data(), method)

    features = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: fit(tmp_path, module(), data(), distillation(public_size=0)), "needs a public set"),
        (lambda: fit(tmp_path, module(features), data(), distillation()), r"logits \(B, 10\).*it gives \(25, 7\)"),
        (lambda: fit(tmp_path, LeastSquares(), Points(8), distillation(public_size=2)), r"it gives \(2, 1\)"),
        (lambda: kinds(distillation(FedDF)), "FedDF combines weights, so all clients need the same network"),
        (lambda: distillation(FedDF, epochs=-1), r"algorithm\.epochs is -1"),
        (lambda: distillation(aggregate="votes"), r"algorithm\.aggregate is 'votes'"),
        (lambda: distillation(FedMD, digest="mse"), r"algorithm\.digest is 'mse'"),
        (lambda: distillation(public_epochs=0), r"algorithm\.public_epochs is 0"),
        (lambda: distillation(first_epochs=0), r"algorithm\.first_epochs is 0"),
    ]
    for make, message in cases:
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_mixture_of_another_public_set_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, module(), data(), distillation(), max_rounds=1)
    with pytest.raises(CheckpointError, match=r"targets has shape \(60, 10\) there and \(30, 10\) here"):
        fit(tmp_path, module(), data(), distillation(public_size=30), max_rounds=2, ckpt_path="last")
