"""The same federation by one library, in a process of its own: writes its rounds' seconds and its last weights.

FedAvg with plain SGD, one thread, no evaluation; the same network and first weights, samples, epochs and batches. Each
library is used as its own examples use it. Run by ``peers.py``, as a module that Flower's workers import.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from networks import harness_cnn, logistic, mlp, small_cnn  # beside this file
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Executor = Literal["auto", "sequential", "vectorized"]
Pool = Literal["processes", "threads"]


@dataclass(frozen=True)
class Task:
    """A federation.

    Args:
        clients: Number of clients.
        samples: Samples of each client.
        shape: Shape of an input.
        batch_size: Samples per step.
        epochs: Passes over a client's samples in a round.
        make: Makes the network.
        lr: Learning rate.
        cohort: Clients per round; None for all.
        alike: Makes loops comparable that shuffle differently: a client's samples are copies of one, and those of all
            clients if a cohort is drawn; the network has no dropout.
    """

    clients: int
    samples: int
    shape: tuple[int, ...]
    batch_size: int
    epochs: int
    make: Callable[[], nn.Module]
    lr: float = 0.05
    cohort: int | None = None
    alike: bool = False

    @property
    def per_round(self) -> int:
        """Clients per round."""
        return self.cohort or self.clients

    def network(self) -> nn.Module:
        """The network with the same first weights for every library."""
        torch.manual_seed(0)
        network = self.make()
        for module in network.modules():
            if self.alike and isinstance(module, nn.Dropout):
                module.p = 0.0
        return network

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Draw inputs of shape (clients, samples, …) and labels of shape (clients, samples)."""
        return _noise(self.clients, self.samples, self.shape, self.alike, self.cohort is None)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The arrays as tensors."""
        x, y = self.arrays()
        return torch.from_numpy(x), torch.from_numpy(y)


@lru_cache(maxsize=1)  # a worker makes the arrays once, rather than receive them with every message
def _noise(
    clients: int, samples: int, shape: tuple[int, ...], alike: bool, own: bool
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    drawn = (clients if own else 1, 1) if alike else (clients, samples)
    x = rng.standard_normal((*drawn, *shape), dtype=np.float32)
    y = rng.integers(0, 10, drawn)
    repeats = clients // drawn[0], samples // drawn[1]
    return x.repeat(repeats[0], 0).repeat(repeats[1], 1), y.repeat(repeats[0], 0).repeat(repeats[1], 1)


TASKS = {
    "logistic regression": Task(1000, 5, (60,), 5, 1, logistic),
    "MLP": Task(1000, 5, (60,), 5, 5, mlp),
    "pfl's harness": Task(1000, 50, (3, 32, 32), 10, 1, harness_cnn, lr=0.1, cohort=50),
    "BlazeFL's setting": Task(100, 100, (3, 32, 32), 50, 5, small_cnn, lr=0.1),
}


@dataclass
class Baton:
    """Lets one of two processes work.

    Args:
        mine: Pipe from which this process reads its turns.
        other: Pipe to which it writes the other's.
    """

    mine: int
    other: int

    def wait(self) -> None:
        """Wait for a turn, or for the end of the other process."""
        os.read(self.mine, 1)

    def give(self) -> None:
        """Let the other process work, unless it has ended."""
        with suppress(BrokenPipeError):
            os.write(self.other, b"x")


BATONS: list[Baton] = []  # this process's, if it takes turns with another


@dataclass
class Course:
    """The rounds of a run.

    Args:
        several: The library works in several processes.
        seconds: Of every round, by the clock and of CPU of the library's processes; the first with start-up.
        weights: After the last round, the network's parameters side by side.
        remark: On the loop, for the table.
    """

    several: bool = False
    seconds: list[tuple[float, float]] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    remark: str = ""

    def __post_init__(self) -> None:
        self._begun = self._now()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), family_seconds() if self.several else time.process_time()

    def end(self) -> None:
        """Record the end of a round, and give the others their turn."""
        (clock, cpu), begun = self._now(), self._begun
        self.seconds.append((clock - begun[0], cpu - begun[1]))
        for baton in BATONS:
            baton.give()
            baton.wait()
        self._begun = self._now()

    def keep(self, tensors: Any) -> None:
        """Record the last weights."""
        self.weights = torch.cat([tensor.detach().flatten() for tensor in tensors])


def family_seconds() -> float:
    """CPU seconds of this process, its descendants, and those descendants that have ended, to 10 ms."""
    ticks, waiting = 0, [os.getpid()]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, after_name[11:15]))
            waiting += [int(child) for task in folder.glob("task/*/children") for child in task.read_text().split()]
        except FileNotFoundError:  # ended meanwhile: its parent counts it
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def lit_fed(task: Task, rounds: int, executor: Executor, devices: int = 1) -> Course:
    """By this library, with its checkpoints and logs."""
    from lit_fed import Classifier, FederatedTrainer
    from lit_fed.callbacks import Callback
    from lit_fed.data import Arrays, Natural, TensorDataModule
    from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor
    from lit_fed.methods import FedAvg
    from lit_fed.participation import FullParticipation, UniformParticipation

    course = Course(several=devices > 1)

    class Ends(Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            course.end()

        def on_fit_end(self, run: Any) -> None:
            course.keep(run.federation.global_model(rounds).values())
            used = run.federation.executor
            if isinstance(used, AutoExecutor):
                course.remark = "in groups" if isinstance(used.chosen, VectorizedExecutor) else "one after the other"

    class Noise(TensorDataModule):
        num_classes = 10
        input_shape = task.shape

        def load_arrays(self) -> Arrays:
            x, y = task.arrays()
            owners = np.repeat(np.arange(task.clients), task.samples)
            x, y = x.reshape(-1, *task.shape), y.reshape(-1)
            return Arrays(x, y, x[:10], y[:10], owners, owners[:10], "noise")

    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=devices,
            max_rounds=rounds,
            local_epochs=task.epochs,
            participation=FullParticipation() if task.cohort is None else UniformParticipation(task.cohort),
            evaluate_every=0,
            executor=executor,
            num_threads=1,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[Ends()],
        )
        model = Classifier(network=task.network(), optimizer=lambda p: torch.optim.SGD(p, lr=task.lr))
        trainer.fit(model, Noise(num_clients=task.clients, partition=Natural(), batch_size=task.batch_size), FedAvg())
    return course


def lean(task: Task, rounds: int) -> Course:
    """By a loop written by hand, as lean as it gets: `Lean` of ``floor.py``."""
    from floor import Lean  # beside this file

    x, y = task.tensors()
    network = task.network()
    first = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    loop = Lean(network, first, task.epochs, lr=task.lr, momentum=0.0)
    rng = np.random.default_rng(0)
    course = Course()
    for round_idx in range(rounds):
        cohort = rng.choice(task.clients, task.per_round, replace=False)
        loop.round([(x[one], y[one], round_idx * task.clients + int(one)) for one in cohort], task.batch_size)
        course.end()
    course.keep(loop.state)
    return course


def pfl(task: Task, rounds: int) -> Course:
    """By pfl's simulation in one process; it takes samples in their order, as its benchmarks do."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = task.network()

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            return nn.functional.cross_entropy(self.network(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    course = Course()

    class Ends(TrainingProcessCallback):  # type: ignore[misc]  # pfl is not installed where types are checked
        def after_central_iteration(self, *_args: Any, **_kwargs: Any) -> tuple[bool, Metrics]:
            course.end()
            return False, Metrics()

    sampler = get_user_sampler("minimize_reuse" if task.cohort is None else "random", range(task.clients))
    data = FederatedDataset.from_slices(list(zip(*task.tensors(), strict=True)), sampler)
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    local = NNTrainHyperParams(
        local_learning_rate=task.lr, local_num_epochs=task.epochs, local_batch_size=task.batch_size
    )
    settings = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=task.per_round,
        val_cohort_size=0,
    )
    backend = SimulatedBackend(data, data, postprocessors=[WeightByUser()])
    FederatedAveraging().run(settings, backend, model, local, callbacks=[Ends()])
    course.keep(network.parameters())
    return course


def trainer_each(task: Task, rounds: int) -> Course:
    """By a Lightning Trainer made anew for every client, which logs and saves nothing, and the mean of the weights."""
    from lightning import Trainer

    from lit_fed import Classifier

    x, y = task.tensors()
    model = Classifier(network=task.network(), optimizer=lambda p: torch.optim.SGD(p, lr=task.lr))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = np.random.default_rng(0)
    course = Course()
    for _ in range(rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client in rng.choice(task.clients, task.per_round, replace=False):
            model.load_state_dict(state)
            loader = DataLoader(TensorDataset(x[client], y[client]), task.batch_size, shuffle=True)
            trainer = Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=task.epochs,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(model, loader)
            for name, tensor in model.state_dict().items():
                total[name] += tensor / task.per_round
        state = total
        course.end()
    course.keep(state.values())
    return course


def flower(task: Task, rounds: int) -> Course:
    """By Flower's simulation with its FedAvg."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    course = Course(several=True)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        x, y = (values[client] for values in task.tensors())
        network = task.network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
        for _ in range(task.epochs):
            for chosen in torch.randperm(task.samples).split(task.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
                optimizer.step()
        found = MetricRecord({"num-examples": task.samples})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": found}), reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]  # as above
    def main(grid: Grid, context: Context) -> None:
        def ended(_round: int, arrays: ArrayRecord) -> None:
            course.end()
            course.keep(arrays.to_torch_state_dict().values())

        strategy = FedAvg(
            fraction_train=task.per_round / task.clients,
            fraction_evaluate=0.0,
            min_train_nodes=task.per_round,
            min_available_nodes=task.clients,
        )
        first = ArrayRecord(task.network().state_dict())
        strategy.start(grid, first, num_rounds=rounds, train_config=ConfigRecord({"lr": task.lr}), evaluate_fn=ended)

    resources = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, task.clients, backend_config=resources)
    del course.seconds[0]  # before any round
    return course


@dataclass
class Networks:
    """The network, as BlazeFL asks for it."""

    task: Task

    def select_model(self, model_name: str) -> nn.Module:
        """Make it; there is one."""
        return self.task.network()


@dataclass
class Clients:
    """The clients' samples, as BlazeFL asks for them."""

    task: Task

    def set_dataset(self, type_: str, cid: int, dataset: Any) -> None:
        """Keep nothing: a client's samples do not change."""

    def get_dataloader(
        self, type_: str, cid: int, batch_size: int, generator: torch.Generator
    ) -> DataLoader[tuple[Tensor, ...]]:
        """A client's batches, shuffled."""
        data = TensorDataset(*(values[cid] for values in self.task.tensors()))
        return DataLoader(data, batch_size, shuffle=True, generator=generator)


def blazefl(task: Task, rounds: int, pool: Pool | None = None) -> Course:
    """By BlazeFL's FedAvg: one client after the other, or two at once; without its evaluation after every round."""
    from blazefl.contrib import (
        FedAvgBaseClientTrainer,
        FedAvgBaseServerHandler,
        FedAvgProcessPoolClientTrainer,
        FedAvgThreadPoolClientTrainer,
    )
    from blazefl.core import IPCMode

    shared: dict[str, Any] = {
        "model_selector": Networks(task),
        "model_name": "",
        "dataset": Clients(task),
        "device": "cpu",
        "num_clients": task.clients,
        "batch_size": task.batch_size,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(global_round=rounds, sample_ratio=task.per_round / task.clients, **shared)
    shared |= {"epochs": task.epochs, "lr": task.lr}
    task.arrays()  # before processes fork, which share them
    course = Course(several=pool is not None)
    with tempfile.TemporaryDirectory() as folder:
        clients: Any
        if pool is None:
            clients = FedAvgBaseClientTrainer(**shared)
        elif pool == "threads":
            clients = FedAvgThreadPoolClientTrainer(num_parallels=2, **shared)
        else:
            folders = {name: Path(folder) / name for name in ("share_dir", "state_dir")}
            mode = IPCMode.SHARED_MEMORY
            clients = FedAvgProcessPoolClientTrainer(num_parallels=2, ipc_mode=mode, **folders, **shared)
        while not server.if_stop():
            cohort = server.sample_clients()
            clients.local_process(server.downlink_package(), cohort)
            for package in clients.uplink_package():
                server.load(package)
            course.end()
    course.keep(server.model.parameters())
    return course


LOOPS: dict[str, tuple[str, Callable[[Task, int], Course]]] = {  # with the package whose version counts
    "lit_fed, sequential": ("lit_fed", lambda task, rounds: lit_fed(task, rounds, "sequential")),
    "lit_fed, vectorized": ("lit_fed", lambda task, rounds: lit_fed(task, rounds, "vectorized")),
    "lit_fed, auto": ("lit_fed", lambda task, rounds: lit_fed(task, rounds, "auto")),
    "lit_fed, two processes": ("lit_fed", lambda task, rounds: lit_fed(task, rounds, "auto", devices=2)),
    "bare loop": ("torch", lean),
    "pfl": ("pfl", pfl),
    "BlazeFL": ("blazefl", blazefl),
    "BlazeFL, two processes": ("blazefl", lambda task, rounds: blazefl(task, rounds, "processes")),
    "BlazeFL, two threads": ("blazefl", lambda task, rounds: blazefl(task, rounds, "threads")),
    "Flower's simulation": ("flwr", flower),
    "a Trainer per client": ("lightning", trainer_each),
}


def run(loop: str, task: str, rounds: int, alike: bool, path: Path, baton: Baton | None = None) -> None:
    """Run a loop; write its rounds' seconds, but for the first, and its last weights."""
    torch.set_num_threads(1)
    if baton is not None:
        baton.wait()
        BATONS.append(baton)
    course = LOOPS[loop][1](replace(TASKS[task], alike=alike), rounds)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the first of several processes
        weights, remark = course.weights.numpy(), np.array(course.remark)
        np.savez(path, seconds=np.array(course.seconds[1:]), weights=weights, remark=remark)
    if baton is not None:
        baton.give()
