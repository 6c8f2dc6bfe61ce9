"""Clients' steps as graphs: each client's own tensors, and refusals; recorded and repeated on the CPU here.

`tests/engine/test_across_on_a_gpu.py` does the same with CUDA graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torchmetrics.classification import BinaryAccuracy

from lit_fed.algorithm import Client
from lit_fed.command.cli import main
from lit_fed.engine.clients import graphs
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.engine.clients import replaying
from tests.engine.loop.test_checkpoint import without_times
from tests.methods.run_methods import METHODS, words_of
from tests.methods.test_across_every_method import assert_same_run
from tests.support import LeastSquares, Points, Wanderer, Wandering, assert_same, fit, kept, weights

GRAPH: dict[str, Any] = {"compile": "graph"}
REFUSED = {"fedgen", "spherefed", "fedala", "pfedme", "fedsam", "mofedsam", "fedspeed", "fedsmoo"}
"""Methods that read a number from the device here (on a CPU, ``one_hot`` looks at the labels), remember something from
step to step, or repeat random numbers in a second pass."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have this machine's CPU record graphs; counts the recordings."""
    made: list[int] = []

    def record(*args: Any) -> Any:
        made.append(1)
        return replaying.record(*args)

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "has_graphs", lambda _device: True)
    return made


SOON = ("fedadam", "fedamp", "fedavg", "feddr_plus", "fedper", "fedprox", "moon", "raf", "scaffold")
"""Of those that run."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in (*SOON, *REFUSED) else pytest.mark.long) for name in METHODS]
)
def test_a_method_gives_the_same_bits_or_is_refused(method: str, tmp_path: Path, recorded: list[int]) -> None:
    runs = []
    for compile in ("false", "graph"):
        words = [*words_of(method, tmp_path / compile, 2), "--trainer.compile", compile]
        if compile == "graph" and method in REFUSED:
            with pytest.raises(SystemExit):
                main(["fit", *words])
            return
        main(["fit", *words])
        runs.append(tmp_path / compile / "lightning_logs" / "version_0")
    assert recorded
    assert_same_run(*runs)


def test_every_client_trains_with_its_own_state_and_statistics(tmp_path: Path, recorded: list[int]) -> None:
    """Batch norm, dropout, kept state, personal layers; clients of two and three samples alternate."""
    made = []
    for options in ({}, GRAPH):
        torch.manual_seed(0)
        data = Points(num_clients=4, sizes=(2, 3))
        made.append(fit(tmp_path / str(len(made)), Wanderer(), data, Wandering(), max_rounds=3, logger=True, **options))
    assert_same(*map(weights, made))
    for client_id in range(4):
        assert_same(*(kept(one, client_id) for one in made))
    assert without_times(made[0].log_dir / "clients.csv") == without_times(made[1].log_dir / "clients.csv")
    # Two sizes of batches, of new clients and of known ones.
    assert len(recorded) == 4


class Passing(LeastSquares):
    """Adds a count of its steps, in a buffer that is not saved, to its predictions."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        x, y = batch
        return (0.5 * (self.network(x).squeeze(1) + self.count - y) ** 2).mean()


def test_a_buffer_that_is_not_saved_begins_anew_for_every_client(tmp_path: Path, recorded: list[int]) -> None:
    made = [
        fit(tmp_path / str(idx), Passing(), Points(num_clients=4), max_rounds=2, local_epochs=3, **options)
        for idx, options in enumerate(({}, GRAPH))
    ]
    assert_same(*map(weights, made))


class Marking(LeastSquares):
    """Marks the nodes by which autograd accumulates its gradients; as long as a pass is held, so are they."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        for parameter in self.parameters():
            get_gradient_edge(parameter).node.metadata["marked"] = True
        return loss


def test_no_earlier_pass_is_held_while_a_graph_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes would belong to another stream, which ends a recording on a GPU."""
    task, held = Marking(), []

    def is_marked() -> bool:
        return any("marked" in get_gradient_edge(parameter).node.metadata for parameter in task.parameters())

    def record(step: Any, *args: Any) -> Any:
        for _ in range(2):
            held.append(is_marked())
            step()
        monkeypatch.setattr(graphs, "record", replaying.record)  # which holds the tensors of its pass
        return replaying.record(step, *args)

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "has_graphs", lambda _device: True)
    fit(tmp_path, task, Points(), max_rounds=1, **GRAPH)
    assert held == [False, False]


class Hoarder(LeastSquares):
    """Keeps its last loss, and with it the graph of autograd."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last: Tensor = super().training_step(batch, batch_idx)
        return self.last


def test_a_task_that_holds_a_pass_is_refused(tmp_path: Path, recorded: list[int]) -> None:
    with pytest.raises(ConfigError, match="holds the result of an earlier training_step"):
        fit(tmp_path, Hoarder(), Points(), max_rounds=1, **GRAPH)


class Odd(LeastSquares):
    """Runs an action on its batch in every training step."""

    def __init__(self, act: Callable[[Any, Any, int], Any]) -> None:
        super().__init__()
        self.act = act
        self.register_buffer("seen", torch.zeros(()))
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss: Tensor = super().training_step(batch, batch_idx)
        return None if self.act(self, batch, batch_idx) == "skip" else loss


def rebind(task: Any, _batch: Any, _idx: int) -> None:
    task.seen = task.seen + 1


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda task, batch, idx: idx + 1, "batch_idx"),
        (lambda task, batch, idx: task.current_epoch > 0, "self.current_epoch"),
        (lambda task, batch, idx: task.global_step * 2, "self.global_step"),
        (lambda task, batch, idx: task.log("rate", 0.5), "logs 'train/rate' as a Python number"),
        (lambda task, batch, idx: task.log("sum", batch[0].sum(), reduce_fx="sum"), "reduce_fx='sum'"),
        (lambda task, batch, idx: task.accuracy.update(batch[0].clamp(0, 1), batch[0].long()), "torchmetrics"),
        (rebind, "replaces a buffer"),
        (lambda task, batch, idx: "skip", "returns None"),
        (lambda task, batch, idx: float(batch[0].sum()), "cannot be recorded"),
        (lambda task, batch, idx: random.random(), "draws from Python's random"),
        (lambda task, batch, idx: np.random.beta(1, 1), "draws from NumPy's"),  # noqa: NPY002  # as mixup does
    ],
    ids=["batch_idx", "epoch", "step", "number", "fold", "metric", "rebound", "skip", "sync", "random", "numpy"],
)
def test_a_step_that_no_graph_repeats_is_refused(act: Any, said: str, tmp_path: Path, recorded: list[int]) -> None:
    fit(tmp_path / "plain", Odd(act), max_rounds=1)  # without graphs it trains
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path / "graph", Odd(act), max_rounds=1, **GRAPH)


class Asking(FedAvg):
    """Uses something of the client in its objective."""

    def __init__(self, ask: Callable[[Client], Any]) -> None:
        super().__init__()
        self.ask = ask

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        return {**super().objective(client, batch), "asked": torch.zeros(()) * self.ask(client)}


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda client: client.id, "client.id"),
        (lambda client: client.num_samples, "client.population"),
        (lambda client: client.derive_seed("x"), "client.seed"),
        (lambda client: client.steps.steps, "client.steps"),
    ],
    ids=["id", "samples", "seed", "steps"],
)
def test_an_objective_that_asks_who_trains_is_refused(ask: Any, said: str, tmp_path: Path, recorded: list[int]) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, LeastSquares(), Points(), Asking(ask), max_rounds=1, **GRAPH)


def test_an_objective_that_reads_the_round_is_recorded_in_every_round(tmp_path: Path, recorded: list[int]) -> None:
    class Rising(FedAvg):
        """The loss times the number of the round, from 1."""

        def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
            return {"task": super().objective(client, batch)["task"] * (client.round_idx + 1)}

    made = [
        fit(tmp_path / str(idx), LeastSquares(0.1), Points(), Rising(), max_rounds=3, **options)
        for idx, options in enumerate(({}, GRAPH))
    ]
    assert_same(*map(weights, made))
    assert len(recorded) == 1 + 3 * 2 - 1  # the trial has the first client's of the first round; two sizes of batches


class Switching(LeastSquares):
    """Its dropout is on in the second epoch only, by a hook within the phase."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.epoch = 0

    def on_train_start(self) -> None:
        self.epoch = 0

    def on_train_epoch_start(self) -> None:
        self.drop.train(self.epoch == 1)
        self.epoch += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (0.5 * (self.network(self.drop(x)).squeeze(1) - y) ** 2).mean()


def test_a_mode_that_a_hook_switches_is_the_steps_own(tmp_path: Path, recorded: list[int]) -> None:
    made = [
        fit(tmp_path / str(idx), Switching(), Points(num_clients=4), max_rounds=2, local_epochs=3, **options)
        for idx, options in enumerate(({}, GRAPH))
    ]
    assert_same(*map(weights, made))


def test_as_many_kinds_of_clients_are_kept_as_graphs(
    tmp_path: Path, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MOST", 1)
    made = []
    for options in ({}, GRAPH):
        torch.manual_seed(0)
        data = Points(num_clients=4, sizes=(2, 3))
        made.append(fit(tmp_path / str(len(made)), Wanderer(), data, Wandering(), max_rounds=3, **options))
    assert_same(*map(weights, made))
    (loop,) = made[1].run.federation.session.loops.values()
    assert len(loop.replays._clients) == len(loop.replays._graphs) == 1


class ByHand(LeastSquares):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Listening(LeastSquares):
    def on_after_backward(self) -> None:
        self.network.weight.grad *= 2  # type: ignore[operator, union-attr]  # present after backward


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (ByHand, {}, "optimises by hand"),
        (Listening, {}, "on_after_backward"),
        (LeastSquares, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2"),
        (LeastSquares, {"executor": "vectorized"}, "executor is vectorized"),
    ],
    ids=["by_hand", "hook", "accumulate", "groups"],
)
def test_a_setting_that_no_graph_knows_is_refused(
    module: Any, settings: dict[str, Any], said: str, tmp_path: Path, recorded: list[int]
) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, module(), max_rounds=1, **GRAPH, **settings)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a GPU, and clients train on cpu"):
        fit(tmp_path, max_rounds=1, **GRAPH)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.compile is 'graphs'; it must be"):
        fit(tmp_path, max_rounds=1, compile="graphs")
