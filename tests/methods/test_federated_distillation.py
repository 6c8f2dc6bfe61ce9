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
from lit_fed.participation import UniformParticipation
from lit_fed.protocols import ClientGlobalTest, ClientTest, LocalTest
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer, Phase
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import (
    DistillationServer,
    FedAvg,
    FedDF,
    FedDFServer,
    FederatedDistillation,
    FedMD,
    FedMDServer,
)
from lit_fed.networks import MLP, Logistic
from tests.methods.support import Rota
from tests.support import assert_same, fit, rows, weights

LR, PUBLIC = 0.5, 60


def data(**kwargs: Any) -> Digits:
    """Batches that hold everything, so that an epoch is one step in any order."""
    settings: dict[str, Any] = {"num_clients": 2, "partition": ClassesPerClient(3), "public_size": PUBLIC, "seed": 1}
    return Digits(**(settings | {"max_train_samples": 300, "batch_size": 500, "test_batch_size": 25} | kwargs))


def module(kind: Callable[..., FederatedDistillation] = FederatedDistillation, **kwargs: Any) -> FederatedDistillation:
    torch.manual_seed(0)
    network = kwargs.pop("network", None) or Logistic(10, 1, (1, 8, 8))
    return kind(network=network, optimizer=lambda p: torch.optim.SGD(p, lr=LR), **kwargs)


class Algorithm1:
    """The paper's pseudo-code for full batches, with the average for Agg; who takes part is asked each round.

    A client that was not there refines when it next is, on the newest mixture: before it, on which no test looks.
    """

    def __init__(self, population: Digits, epochs: int, first_epochs: int) -> None:
        population.setup("fit")
        self.population, self.epochs, self.first_epochs = population, epochs, first_epochs
        start = module().network.chosen
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
    made = fit(tmp_path, module(first_epochs=3, local_epochs=2), data(), DistillationServer(), max_rounds=3,
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
    torch.testing.assert_close(made.federation.algorithm.targets, paper.targets, rtol=1e-5, atol=1e-7)


def test_a_client_that_appears_late(tmp_path: Path) -> None:
    """Client 0 works in rounds 0 and 2, client 1 first in round 1: it starts afresh, with its first epochs."""
    made = fit(tmp_path, module(first_epochs=3, local_epochs=1), data(), DistillationServer(), max_rounds=3,
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
        state = made.federation.store.get(client_id)
        mine = {name.rpartition("Logistic.")[2]: tensor for name, tensor in state.items()}
        for name, tensor in paper.after_private[client_id].items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-7)
    expected = []
    for network in paper.networks:  # the test refines everybody
        paper.refine(network)
        expected.append(paper.loss(network))
    last = float(rows(made.log_dir / "metrics.csv")[-1]["clients_global/loss_mean"])
    assert last == pytest.approx(np.mean(expected), rel=1e-5)


class Observed(FederatedDistillation):
    """Remembers the models it was tested with, and those that private training started from."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tested: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.started: dict[tuple[int, int], dict[str, Tensor]] = {}

    def copied(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors(self.personal_names()).items()}

    def on_phase_start(self, phase: Phase) -> None:
        super().on_phase_start(phase)
        if phase.name == "train":
            self.started[self.ctx.round_idx, self.ctx.client_id] = self.copied()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested[self.ctx.round_idx, self.ctx.client_id] = self.copied()
        super().test_step(batch, batch_idx)


@pytest.mark.parametrize("evaluate_every", [1, 2])
def test_what_is_tested_is_what_the_next_private_training_starts_from(tmp_path: Path, evaluate_every: int) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10))
    observed = module(Observed, network=network)
    fit(tmp_path, observed, data(batch_size=16, num_clients=3), DistillationServer(), max_rounds=4,
        protocols=[ClientTest()], evaluate_every=evaluate_every)  # fmt: skip
    rounds = [r for r in range(3) if (r + 1) % evaluate_every == 0]
    assert rounds
    for round_idx in rounds:
        for client_id in range(3):
            assert_same(observed.tested[round_idx, client_id], observed.started[round_idx + 1, client_id])


def test_evaluation_changes_nothing_that_follows(tmp_path: Path) -> None:
    runs = [
        fit(tmp_path / str(every), module(), data(batch_size=16), DistillationServer(), evaluate_every=every)
        for every in (0, 1)
    ]
    assert torch.equal(*(made.federation.algorithm.targets for made in runs))


def test_local_test_is_the_model_before_the_mixture(tmp_path: Path) -> None:
    protocols = [LocalTest(), ClientTest()]
    made = fit(tmp_path, module(), data(), DistillationServer(), max_rounds=1, protocols=protocols)
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
    parts = module(), data(), DistillationServer()
    made = fit(tmp_path, *parts, max_rounds=1, protocols=[ClientTest()])
    table = rows(made.predict(*parts, client_id=1, output=str(tmp_path / "p.csv")))
    accuracy = np.mean([row["prediction"] == row["label"] for row in table])
    per_client = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] == "acc"]
    assert accuracy == pytest.approx(float(per_client[1]["value"]))


@pytest.mark.parametrize("aggregate", ["probabilities", "logits"])
def test_aggregates_bytes_and_metrics(tmp_path: Path, aggregate: Any) -> None:
    made = fit(tmp_path, module(), data(), DistillationServer(aggregate), max_rounds=2)
    table = rows(made.log_dir / "metrics.csv")
    # 60 samples × 10 classes × 4 bytes from and to each of 2 clients; nothing comes down before the first mixture.
    assert [float(row["comm/uplink_bytes"]) for row in table] == [4800, 4800]
    assert [float(row["comm/downlink_bytes"]) for row in table] == [0, 4800]
    targets = made.federation.algorithm.targets
    torch.testing.assert_close(targets.sum(1), torch.ones(PUBLIC))
    population = made.federation.data
    labels = population._cut.labels[population._cut.public]
    accuracy = (targets.argmax(1).numpy() == labels).mean()
    assert float(table[-1]["server/teacher_acc"]) == pytest.approx(accuracy)
    assert float(table[-1]["server/chi"]) == 0.5
    assert float(table[-1]["server/weight_entropy"]) == pytest.approx(np.log(2))


# --- clients of several architectures --------------------------------------------------------------------------------

THREE = {
    "networks": ["small_cnn", "vit_tiny_patch16_224", "mlp"],
    "network_args": {
        "small_cnn": {"width": 4},
        "vit_tiny_patch16_224": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
        "mlp": {"hidden": [8]},
    },
}


def three(folder: Path, rounds: int, ckpt_path: str | None = None) -> FederatedTrainer:
    torch.manual_seed(0)
    client = FederatedDistillation(
        **THREE, num_classes=10, input_shape=(1, 8, 8), optimizer=lambda p: torch.optim.Adam(p, lr=1e-2), local_epochs=2
    )
    population = data(num_clients=6, batch_size=10, partition=ClassesPerClient(5), max_train_samples=900)
    return fit(folder, client, population, DistillationServer(), max_rounds=rounds, ckpt_path=ckpt_path,
               participation=UniformParticipation(count=4))  # fmt: skip


def test_three_architectures_train_and_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = three(tmp_path / "whole", 6)
    three(tmp_path / "parts", 3)
    parts = three(tmp_path / "parts", 6, "last")
    assert torch.equal(whole.federation.algorithm.targets, parts.federation.algorithm.targets)
    for client_id in range(6):
        one, other = (made.federation.store.get(client_id) for made in (whole, parts))
        assert one is not None
        assert other is not None
        assert_same(one, other)
        kind = THREE["networks"][client_id % 3]  # its own network, and nothing else
        assert all(name.startswith(f"network.networks.{kind}.") for name in one)
    accuracies = [float(row["clients/acc_mean"]) for row in rows(whole.log_dir / "metrics.csv")]
    assert accuracies[-1] > max(0.3, accuracies[0]), accuracies


def test_an_optimizer_sees_its_clients_network_only(tmp_path: Path) -> None:
    made = three(tmp_path, 1)
    client = made.federation.module
    for client_id, kind in ((0, "small_cnn"), (4, "vit_tiny_patch16_224")):
        made.federation.executor.enter(client_id, {}, 0, "train")
        client.set_trainable(None)
        seen = {id(p) for group in client.configure_optimizers().param_groups for p in group["params"]}
        assert seen == {id(p) for p in client.network.networks[kind].parameters()}
    assert len(client.network.networks) == 3  # one of each, for six clients


def test_a_mapping_assigns_networks_by_client(tmp_path: Path) -> None:
    def client(networks: Any) -> FederatedDistillation:
        return FederatedDistillation(networks=networks, num_classes=10, input_shape=(1, 8, 8))

    made = fit(tmp_path, client({"mlp": [1], "logistic": [0]}), data(), DistillationServer(), max_rounds=1)
    assert [len(made.federation.store.get(client_id)) for client_id in (0, 1)] == [2, 4]
    for networks, message in (
        ({"mlp": [0]}, "names no network for client 1"),
        ({"mlp": [0, 1, 2]}, "names client 2, but clients are 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(tmp_path, client(networks), data(), DistillationServer())
    with pytest.raises(ConfigError, match="gives client 1 to mlp and logistic"):
        client({"mlp": [0, 1], "logistic": [1]})
    with pytest.raises(ConfigError, match=r"model\.networks is empty"):
        client([])


# --- FedMD and FedDF -------------------------------------------------------------------------------------------------


def test_fedmd_two_rounds_by_reference(tmp_path: Path) -> None:
    """Revisit, send; digest, revisit: tested after the revisit."""
    made = fit(tmp_path, module(FedMD), data(), FedMDServer(), max_rounds=2, protocols=[ClientGlobalTest()])
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
    made = fit(tmp_path, module(FedMD, digest="ce"), data(), FedMDServer(), max_rounds=2)
    plain = fit(tmp_path, module(), data(), DistillationServer("logits"), max_rounds=2)
    # Both clients learn from the softmax of the mean logits.
    torch.testing.assert_close(made.federation.algorithm.targets.softmax(1), plain.federation.algorithm.targets)


def test_feddf_without_distillation_is_fedavg(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"network": MLP(10, 1, (1, 8, 8), hidden=(8,))}
    fused = module(FedDF, **copy.deepcopy(settings))
    plain = Classifier(optimizer=lambda p: torch.optim.SGD(p, lr=LR), **copy.deepcopy(settings))
    runs = [
        fit(tmp_path, client, data(batch_size=16), server, max_rounds=3)
        for client, server in ((fused, FedDFServer(epochs=0)), (plain, FedAvg()))
    ]
    mine = {name.replace("network.networks.MLP", "network"): t for name, t in weights(runs[0]).items()}
    assert_same(mine, weights(runs[1]))


def test_feddf_distils_the_mean_of_the_logits(tmp_path: Path) -> None:
    """One round, one full-batch step of the server by hand."""
    server = FedDFServer(lambda p: torch.optim.SGD(p, lr=LR), epochs=1, weighting="uniform")
    made = fit(tmp_path, module(FedDF), data(), server, max_rounds=1)
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
        found = weights(made)[f"network.networks.Logistic.{name}"]
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-7)
    # Up: 650 weights and 60 × 10 logits of each client; down: the weights.
    assert made.metrics["comm/uplink_bytes"] == 2 * 4 * (650 + 600)
    assert made.metrics["comm/downlink_bytes"] == 2 * 4 * 650
    assert "global/acc" in made.metrics


# --- what is refused -------------------------------------------------------------------------------------------------


def test_refused_before_any_training(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: fit(tmp_path, module(), data(public_size=0), DistillationServer()), "needs a public set"),
        (lambda: fit(tmp_path, None, data(), DistillationServer()), "needs a model that exchanges predictions"),
        (lambda: fit(tmp_path, module(), data(), FedDFServer()), "needs a model FedDF"),
        (lambda: FedDF(networks=["mlp", "logistic"], input_shape=(1, 8, 8)), "all clients need the same network"),
        (lambda: FedDFServer(epochs=-1), "algorithm.epochs is -1"),
        (lambda: DistillationServer("votes"), "algorithm.aggregate is 'votes'"),  # type: ignore[arg-type]
        (lambda: FedMD(digest="mse"), "model.digest is 'mse'"),  # type: ignore[arg-type]
        (lambda: module(public_epochs=0), "model.public_epochs is 0"),
        (lambda: module(first_epochs=0), "model.first_epochs is 0"),
        (lambda: FederatedDistillation(networks=["mlp"], input_shape=(1, 8, 8), network_args={"cnn": {}}), "'cnn'"),
    ]
    for make, message in cases:
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_mixture_of_another_public_set_is_refused(tmp_path: Path) -> None:
    made = fit(tmp_path, module(), data(), DistillationServer(), max_rounds=1)
    with pytest.raises(CheckpointError, match="mixture has shape"):
        made.federation.algorithm.load_state_dict({"targets": torch.zeros(3, 10)})
