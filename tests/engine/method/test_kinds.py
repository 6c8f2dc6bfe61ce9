"""Clients with different networks: whose they are, what travels, what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import Algorithm, ClientUpdate, Cohort, FederatedTrainer, Model, Payload
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.engine.method.kinds import Choice, Kinds, assign
from lit_fed.engine.method.reducers import Reducer, WeightedMean
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg, FederatedDistillation, Scaffold
from lit_fed.participation import UniformParticipation
from lit_fed.protocols import ClientTest, GlobalTest
from tests.support import LeastSquares, Points, assert_same, fit, kept, rows

# ---------------------------------------------------------------------- whose network


def test_clients_take_kinds_in_turn() -> None:
    kinds = Kinds(("a", "b", "c"))
    kinds.check(Points(7))
    assert [kinds[client_id] for client_id in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_clients_have_the_kinds_that_name_them() -> None:
    models = {"a": LeastSquares(), "b": LeastSquares()}
    kinds = assign(models, {"a": {"clients": [2, 0]}, "b": {"clients": range(1, 2)}})
    kinds.check(Points(3))
    assert [kinds[client_id] for client_id in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"a": [0], "b": [1]}, r"trainer\.kinds names no network for client 2"),
        ({"a": [0, 1, 2], "b": [3]}, r"trainer\.kinds\.b\.clients: there is no client 3; clients are 0 to 2"),
        ({"a": [0, 1, 2], "b": []}, r"trainer\.kinds 'b' has no client"),
        ({"a": [0, 1], "b": [1, 2]}, r"trainer\.kinds gives client 1 to a and b"),
    ],
)
def test_who_has_no_network_or_two_is_refused(named: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Kinds(("a", "b"), {kind: Choice(own) for kind, own in named.items()}).check(Points(3))


def test_kinds_that_cannot_be_are_refused() -> None:
    one, other = LeastSquares(), LeastSquares()
    other.network = one.network
    cases: list[tuple[Any, Any, str]] = [
        ({}, {}, r"trainer\.kinds is empty"),
        ({"a": one}, {"b": {}}, r"trainer\.kinds and the models differ in 'a'"),
        ({"a": one, "b": other}, None, "the models of kinds 'a' and 'b' share parameters"),
        (
            {"a": one, "b": LeastSquares()},
            {"a": {"clients": [0]}, "b": {}},
            r"'b' names no clients, and other kinds do",
        ),
        ({"a": one}, {"a": {"clients": 3}}, r"trainer\.kinds\.a\.clients is 3; it must be a list of clients' names"),
    ]
    for models, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            assign(models, options)
    with pytest.raises(ConfigError, match=r"'c' has no client, because there are 3 kinds and 2 clients"):
        Kinds(("a", "b", "c")).check(Points(2))


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()])
def test_methods_that_average_weights_refuse_several_kinds(tmp_path: Path, method: Algorithm[Any]) -> None:
    name = type(method).__name__
    with pytest.raises(ConfigError, match=rf"algorithm {name} combines weights.*trainer\.kinds has a, b"):
        fit(tmp_path, {"a": LeastSquares(), "b": LeastSquares()}, Points(2), method)


# ---------------------------------------------------------------------- a mean for each kind


class Affine(LeastSquares):
    """f(x) = w·x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class MeanByKind(Reducer[dict[str, Payload]]):
    """A mean of each kind's models."""

    def __init__(self, kinds: list[str]) -> None:
        self.means = {kind: WeightedMean() for kind in kinds}

    def add(self, update: ClientUpdate) -> None:
        self.means[update.kind].add(update)

    def result(self, workers: Workers) -> dict[str, Payload] | None:
        found = {kind: mean.result(workers) for kind, mean in self.means.items()}
        return {kind: mean for kind, mean in found.items() if mean is not None} or None


class AvgByKind(Algorithm[dict[str, Payload]]):
    """FedAvg among the clients of each kind."""

    needs = frozenset()

    def setup(self, models: Any, population: Any) -> dict[str, Any]:
        self.models: dict[str, Model] = dict(models)
        return {"models": {kind: model.copy() for kind, model in models.items()}}

    def broadcast(self, server: dict[str, Any], round_idx: int, kind: str, stage: Any = "train") -> Payload:
        return {name: server["models"][kind][name] for name in self.models[kind].shared_names("down")}

    def reducer(self, server: dict[str, Any]) -> Reducer[dict[str, Payload]]:
        return MeanByKind(list(self.models))

    def step(self, server: dict[str, Any], aggregate: dict[str, Payload], cohort: Cohort) -> dict[str, float]:
        for kind, mean in aggregate.items():
            for name, tensor in mean.items():
                server["models"][kind][name].copy_(tensor)
        return {}


def by_kind(folder: Path, rounds: int = 1, ckpt_path: str | None = None, **kwargs: Any) -> FederatedTrainer:
    models = {"plain": LeastSquares(), "affine": Affine()}
    return fit(folder, models, Points(4), AvgByKind(), max_rounds=rounds, ckpt_path=ckpt_path, **kwargs)


def test_every_kind_has_its_global_model_its_tests_and_its_bytes(tmp_path: Path) -> None:
    made = by_kind(tmp_path)
    # Clients 0 and 2 see x = (1, 0), y = 2, have f(x) = w·x: the gradient at 0 is −2·(1, 0), a step of ½ gives (1, 0).
    # Clients 1 and 3 see x = (0, 1), y = 4, have f(x) = w·x + b: −4·(0, 1) and −4 give w = (0, 2), b = 2.
    plain, affine = (made.run.federation.global_model(0, kind) for kind in ("plain", "affine"))
    assert {name: tensor.tolist() for name, tensor in plain.items()} == {"network.weight": [[1, 0]]}
    assert {name: tensor.tolist() for name, tensor in affine.items()} == {
        "network.weight": [[0, 2]],
        "network.bias": [2],
    }
    # The shared test set is 2 × ((1, 0), 2) and 6 × ((0, 1), 4). plain: (2·½·1² + 6·½·4²)/8 = 49/8;
    # affine: f is 0 + 2 = 2 and 2 + 2 = 4, without an error.
    assert made.metrics["global_plain/loss"] == 49 / 8
    assert made.metrics["global_affine/loss"] == 0
    assert not any(name.startswith("global/") for name in made.metrics)
    # 2 and 3 numbers of 4 bytes, both ways; there is no angle between networks.
    sent = {
        (row["client_id"], row["metric"]): float(row["value"])
        for row in rows(made.log_dir / "clients.csv")
        if row["metric"].endswith("_bytes")
    }
    assert sent == {
        (str(client_id), f"{way}_bytes"): 12.0 if client_id % 2 else 8.0
        for client_id in range(4)
        for way in ("uplink", "downlink")
    }
    assert not any(name.startswith("drift/") for name in made.metrics)
    assert made.run.names.monitor == "clients/loss_mean", "one kind's model does not speak for all"


def test_a_checkpoint_holds_every_kind(tmp_path: Path) -> None:
    whole = by_kind(tmp_path / "whole", 3)
    by_kind(tmp_path / "parts", 1)
    parts = by_kind(tmp_path / "parts", 3, "last")
    for kind in ("plain", "affine"):
        assert_same(*(made.run.federation.global_model(2, kind) for made in (whole, parts)))
    content = torch.load(parts.log_dir / "checkpoints/last.ckpt", weights_only=True)
    assert_same(content["models"]["plain"], parts.run.federation.global_model(2, "plain"))
    assert_same(content["models"]["affine"], parts.run.federation.global_model(2, "affine"))
    models = {"plain": LeastSquares(), "other": Affine()}
    with pytest.raises(CheckpointError, match=r"trainer\.kinds differ from this one's in 'affine'"):
        fit(tmp_path / "parts", models, Points(4), AvgByKind(), max_rounds=4, ckpt_path="last")


class Predicting(LeastSquares):
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def test_to_predict_with_several_global_models_a_client_is_named(tmp_path: Path) -> None:
    parts: Any = {"a": Predicting(lr=0.5), "b": Predicting(lr=0.25)}, Points(4), AvgByKind()
    made = fit(tmp_path, *parts, max_rounds=1)
    with pytest.raises(ConfigError, match=r"each of the kinds a, b has a global model; name a client with client"):
        made.predict(*parts, output=str(tmp_path / "all.csv"))
    # Client 1 has (0, 1), 4 three times, and the mean of kind b: a step of ¼ along −4·(0, 1) gives w₂ = 1.
    made.predict(*parts, client_position=1, output=str(tmp_path / "one.csv"))
    table = rows(tmp_path / "one.csv")
    assert [float(row["output"]) for row in table] == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------- strangers


class Stranger(LightningModule):
    """A LightningModule that knows nothing of us."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Normed(Stranger):
    """Another one: with buffers, and another optimizer."""

    def __init__(self) -> None:
        super().__init__(8)
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 10))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def strangers(folder: Path, rounds: int, ckpt_path: str | None = None) -> FederatedTrainer:
    torch.manual_seed(0)
    models = {"small": Stranger(4), "large": Stranger(16), "normed": Normed()}
    settings: dict[str, Any] = {"max_train_samples": 900, "drop_last": True, "seed": 1}  # batch norm needs two samples
    population = Digits(num_clients=6, batch_size=10, partition=ClassesPerClient(5), **settings)
    return fit(folder, models, population, FederatedDistillation(public_size=60), max_rounds=rounds, local_epochs=2,
               participation=UniformParticipation(count=4), protocols=[GlobalTest(), ClientTest()],
               ckpt_path=ckpt_path)  # fmt: skip


def test_strangers_as_kinds_learn_and_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = strangers(tmp_path / "whole", 6)
    strangers(tmp_path / "parts", 3)
    parts = strangers(tmp_path / "parts", 6, "last")
    assert torch.equal(*(made.run.federation.server["targets"] for made in (whole, parts)))
    loops = whole.run.federation.loops
    for client_id in range(6):
        state = kept(whole, client_id)
        assert_same(state, kept(parts, client_id))
        own = loops[("small", "large", "normed")[client_id % 3]].model
        assert {name: tensor.shape for name, tensor in state.items()} == {n: own.tensor(n).shape for n in own.names}
    content = torch.load(whole.log_dir / "checkpoints/last.ckpt", weights_only=True)
    assert {kind: len(tensors) for kind, tensors in content["initial"].items()} == {"small": 4, "large": 4, "normed": 7}
    accuracies = [float(row["clients/acc_mean"]) for row in rows(whole.log_dir / "metrics.csv")]
    assert accuracies[-1] > max(0.3, accuracies[0]), accuracies


def test_an_optimizer_sees_its_clients_network_only(tmp_path: Path) -> None:
    federation = strangers(tmp_path, 1).run.federation
    models = {kind: loop.model for kind, loop in federation.loops.items()}
    for client_id, kind in ((0, "small"), (4, "large")):
        before = {other: model.copy() for other, model in models.items()}
        with federation.session.at_work("fit"):
            client = federation.session.enter(client_id, federation.broadcast(0), "train")
            federation.session.train(client)
        moved = {other for other, model in models.items() if any(
            not torch.equal(tensor, before[other][name]) for name, tensor in model.tensors().items())}  # fmt: skip
        assert moved == {kind}
