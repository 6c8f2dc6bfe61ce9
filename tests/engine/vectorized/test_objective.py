"""Every attribute of a client is right in every hook, or refused by name, whoever trains its cohort."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_fed.data import Arrays
from lit_fed.engine.method.client import Client, EffectiveSteps, Pass, Phase, Stage, Tensors, Update
from lit_fed.engine.method.model import Model
from lit_fed.engine.method.task_run import TaskRun
from lit_fed.engine.vectorized.objective import NotVectorizable
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedPer
from tests.engine.vectorized.test_executor import NUM_CLIENTS, digits, federate
from tests.support import LeastSquares, Points, fit, kept

FIELDS = [field.name for field in dataclasses.fields(Client) if not field.name.startswith("_")]
PROPERTIES = [name for name, one in vars(Client).items() if isinstance(one, property) and not name.startswith("_")]
# Another batch than the clients', on which the task counts nothing.
X, Y = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]]), torch.tensor([1.0, 0.0, 2.0])


def loss_of(client: Client) -> Tensor:
    with client.muted():
        loss = client.run((X, Y)).loss
    assert loss is not None
    client.forget()
    return loss


METHODS: dict[str, Callable[[Client], Any]] = {
    "run": loss_of,
    "run with others": lambda client: client.run((X, Y), {"network.weight": torch.ones(1, 2)}).loss,
    "forward": lambda client: client.forward(X),
    "teach": lambda client: client.teach((X, Y)).loss,
    "gradients": lambda client: client.gradients(loss_of(client), create_graph=True),
    "targets": lambda client: client.targets((X, Y)),
    "derive_seed": lambda client: client.derive_seed("reading") % 1000,
    "generator": lambda client: torch.rand(1, generator=client.generator("reading")),
    "train_loader": lambda client: len(client.train_loader()),  # type: ignore[arg-type]  # a TensorLoader
    "rate_of": lambda client: client.rate_of(Phase("x", [], epochs=1)),
}
READ: dict[str, Callable[[Client], Any]] = {
    name: (lambda client, name=name: getattr(client, name)) for name in FIELDS + PROPERTIES
} | METHODS
NAMES = list(READ)


def fold(value: Any) -> Tensor:
    """Any attribute as a number."""
    if isinstance(value, Tensor):
        return value.detach().double().sum()
    if isinstance(value, Mapping):
        parts = [(idx + 1) * fold(value[name]) for idx, name in enumerate(sorted(value))]
        return sum(parts, torch.tensor(float(len(value)), dtype=torch.float64))
    if isinstance(value, Model):
        return fold(value.tensors()) + 2 * fold(value.parameters) + 3 * fold(value.copy(value.personal_names))
    if isinstance(value, EffectiveSteps):
        return torch.tensor(value.distance, dtype=torch.float64)
    if isinstance(value, TaskRun):
        return fold(value.forward(X))
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    return torch.tensor(float(len(str(value)) if not hasattr(value, "num_clients") else value.num_clients)).double()


class Probe(LeastSquares):
    """f(x) = w·x + b, a counter of training batches, and two parameters that take what hooks have read."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.own = nn.Parameter(torch.tensor([0.5]))
        self.from_objective = nn.Parameter(torch.zeros(len(NAMES)))
        self.from_correct = nn.Parameter(torch.zeros(len(NAMES)))
        self.count: Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x) + self.own
        return output

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if len(batch[0]) != len(X):
            self.count = self.count + 1.0
        return self.loss(batch)


class Reads(FedPer):
    """Reads everything in every hook; ``own`` stays with the client."""

    needs = frozenset({"loss", "one_optimizer"})

    def __init__(self, skip: Collection[tuple[str, str]] = ()) -> None:
        super().__init__(personal=["own"])
        self.skip = skip
        self.seen: dict[tuple[str, int, str], float] = {}
        self.refused: dict[tuple[str, str], str] = {}

    def read(self, hook: str, client: Client) -> Tensor:
        """The attributes as numbers in (-1, 1), (len(NAMES),); 0 for those that are left out, or refused to a group."""
        found = []
        for name in NAMES:
            try:
                if (hook, name) in self.skip:
                    found.append(torch.zeros(()))
                    continue
                found.append(torch.tanh(0.01 * fold(READ[name](client))).float())
            except NotVectorizable as error:
                if hook == "finish":  # then each client is asked
                    raise
                self.refused[hook, name] = str(error)
                found.append(torch.zeros(()))
        return torch.stack(found)

    def note(self, hook: str, client: Client) -> None:
        for name, value in zip(NAMES, self.read(hook, client).tolist(), strict=True):
            self.seen[hook, client.round_idx * NUM_CLIENTS + client.id, name] = value

    def address(
        self, server: dict[str, Any], client_id: int, round_idx: int, kind: str, stage: Stage = "train"
    ) -> Tensors:
        return {"own number": torch.tensor([1.0, 10 * client_id + round_idx])}

    def initial_state(self, client: Client) -> Tensors:
        self.note("initial_state", client)
        return {"rounds": torch.zeros(1)}

    def start(self, client: Client) -> Tensors:
        begun = super().start(client)
        assert {name: tensor.tolist() for name, tensor in client.model.tensors().items()} == {
            name: begun[name].tolist() for name in client.model.names
        }
        self.note("start", client)
        return begun

    def phases(self, client: Client) -> list[Phase | Pass]:
        self.note("phases", client)
        return [
            Pass("reading", client.train_loader(), lambda one, batch: {"f": one.forward(batch[0])}, gather="sum"),
            Phase("one", client.train_loader(), epochs=1),
            Phase("still", client.train_loader(), epochs=1, moves=False),
            Phase("two", client.train_loader(), epochs=2, begin=dict(client.begun)),
        ]

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        terms = super().objective(client, batch)
        read = self.read("objective", client).detach()
        parameters = client.parameters
        terms["read"] = (parameters["from_objective"] * read).sum() + 0 * parameters["from_correct"].sum()
        return terms

    def correct(self, client: Client, gradients: Tensors) -> Tensors:
        return {**gradients, "from_correct": self.read("correct", client)}

    def finish(self, client: Client) -> Update:
        made = super().finish(client)
        model = {name: client.model.tensor(name) for name in ("from_objective", "from_correct", "count")}
        return Update(
            made.payload, {"rounds": client.state["rounds"] + 1, "finish": self.read("finish", client), **model}
        )


class Fours(Points):
    """Clients of 4, 8 and 12 samples, in batches of 4."""

    num_classes = 5

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(3), [4, 8, 12])
        x = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
        y = np.arange(24) % 5
        return Arrays(x, y, x, y, clients, clients, "fours")


def read(folder: Path, how: str, skip: Collection[tuple[str, str]] = ()) -> tuple[Reads, list[dict[str, Tensor]]]:
    """What a method reads, and what its clients keep of it."""
    data, method = Fours(num_clients=3), Reads(skip)
    data.batch_size = 4
    made = fit(folder, Probe(), data, method, executor=how, max_rounds=2)
    return method, [kept(made, client_id) for client_id in range(3)]


def test_every_attribute_is_right_in_every_hook_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Reads] = []

    def setup(self: Reads, *args: Any) -> Any:
        asked.append(self)
        return FedPer.setup(self, *args)

    monkeypatch.setattr(Reads, "setup", setup)
    with pytest.raises(ConfigError, match="'from_"):  # what is refused counts as 0, and comes out differently
        read(tmp_path / "first", "vectorized")
    refused = asked[0].refused
    for (hook, name), why in refused.items():
        assert why.startswith(f"algorithm.{hook} "), why
        if name in FIELDS:
            assert f"client.{name}," in why, why
    # What is a tensor, or the same for all, is refused in no hook; what is a client's own number is.
    right = {"model", "state", "received", "addressed", "begun", "left", "own", "results", "parameters", "anchor"}
    right |= {"phase", "is_new"}
    assert not {name for _, name in refused} & right
    assert {name for hook, name in refused if hook == "objective"} >= {"id", "steps", "num_samples"}

    alone, states = read(tmp_path / "alone", "sequential", refused)
    grouped, others = read(tmp_path / "grouped", "vectorized", refused)
    assert not alone.refused
    assert not grouped.refused
    for key, value in alone.seen.items():
        assert grouped.seen[key] == pytest.approx(value, abs=1e-5), key
    for state, other in zip(states, others, strict=True):
        assert other["state/count"].tolist() == state["state/count"].tolist()
        for kind in ("from_objective", "from_correct", "finish"):
            pairs = zip(NAMES, state[f"state/{kind}"].tolist(), other[f"state/{kind}"].tolist(), strict=True)
            for name, expected, value in pairs:
                assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), (kind, name)


class Shaped(FedAvg):
    """Keeps a tensor whose shape follows from the client's data, and uses it in its objective."""

    def phases(self, client: Client) -> list[Phase | Pass]:
        client.results["own"] = {"rows": torch.ones(client.num_samples)}
        return super().phases(client)

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        return super().objective(client, batch) | {"size": 0 * client.results["own"]["rows"].sum()}


class Steers(FedAvg):
    """Corrects by the network's output."""

    def correct(self, client: Client, gradients: Tensors) -> Tensors:
        scale = client.forward(torch.zeros(1, 1, 8, 8)).mean()
        return {name: scale * gradient for name, gradient in gradients.items()}


class Wavers(FedAvg):
    """Answers with noise."""

    def finish(self, client: Client) -> Update:
        sent = super().finish(client).payload
        return Update({name: tensor + torch.rand(()).item() for name, tensor in sent.items()})


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Shaped, r"algorithm\.objective uses client\.results\['own'\]\['rows'\], which differs between the clients"),
        (Steers, r"algorithm\.correct runs the task, which a group does only in objective"),
        (Wavers, r"algorithm\.finish gives a different 'network\.\S+' for a client in a group than alone"),
    ],
)
def test_a_refusal_names_the_hook_and_the_tensor(tmp_path: Path, method: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        federate(tmp_path, "vectorized", method(), data=digits())
