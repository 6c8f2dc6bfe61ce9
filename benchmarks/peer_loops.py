"""The same federation by one library, in a process of its own: writes the seconds of every round as JSON.

FedAvg over all clients in every round, plain SGD, one thread, no evaluation; the same network, samples, epochs and
batches. Each library is used as its own examples use it. Run by ``peers.py``,
as a module that Flower's workers import, with this folder on the path::

    PYTHONPATH=benchmarks python -c 'import peer_loops; peer_loops.main()' pfl logistic 5 seconds.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from networks import logistic, mlp, two_convs  # beside this file
from numpy.typing import NDArray
from torch import Tensor, nn

LR = 0.05
Moments = list[tuple[float, float]]  # by the clock, and the CPU time of the library's processes


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        clients: How many clients there are, all of which take part in every round.
        samples: Samples of each.
        shape: Of an input.
        batch_size: Samples per step.
        epochs: Passes over a client's samples in a round.
        network: Makes the network.
    """

    clients: int
    samples: int
    shape: tuple[int, ...]
    batch_size: int
    epochs: int
    network: Callable[[], nn.Module]


TASKS = {
    "logistic": Task(1000, 5, (60,), 5, 1, logistic),
    "mlp": Task(1000, 5, (60,), 5, 5, mlp),
    "cnn": Task(10, 500, (3, 32, 32), 50, 1, two_convs),
}


def samples_of(task: Task) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Noise, a client after the other: inputs of shape (clients, samples, …), labels of shape (clients, samples)."""
    return _noise(task.clients, task.samples, task.shape)


@lru_cache(maxsize=1)  # a process of Flower's makes it once, rather than being sent it with every message
def _noise(clients: int, samples: int, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, samples, *shape), dtype=np.float32)
    return x, rng.integers(0, 10, (clients, samples))


def now() -> tuple[float, float]:
    """By the clock, and the CPU time of this process with all its threads."""
    return time.monotonic(), time.process_time()


def lit_fed(task: Task, rounds: int, executor: Literal["sequential", "vectorized"]) -> Moments:
    """By this library, with its checkpoints and logs."""
    from lit_fed import Classifier, FederatedTrainer
    from lit_fed.callbacks import Callback
    from lit_fed.data import Arrays, Natural, TensorDataModule
    from lit_fed.methods import FedAvg

    ends: Moments = []

    class Ends(Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            ends.append(now())

    class Noise(TensorDataModule):
        num_classes = 10
        input_shape = task.shape

        def load_arrays(self) -> Arrays:
            x, y = samples_of(task)
            owners = np.repeat(np.arange(task.clients), task.samples)
            x, y = x.reshape(-1, *task.shape), y.reshape(-1)
            return Arrays(x, y, x[:10], y[:10], owners, owners[:10], "noise")

    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=rounds,
            local_epochs=task.epochs,
            evaluate_every=0,
            executor=executor,
            num_threads=1,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[Ends()],
        )
        model = Classifier(network=task.network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
        trainer.fit(model, Noise(num_clients=task.clients, partition=Natural(), batch_size=task.batch_size), FedAvg())
    return ends


def pfl(task: Task, rounds: int) -> Moments:
    """By pfl's simulation in one process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
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

    ends: Moments = []

    class Ends(TrainingProcessCallback):  # type: ignore[misc]  # pfl is not installed where types are checked
        def after_central_iteration(self, *_args: Any, **_kwargs: Any) -> tuple[bool, Metrics]:
            ends.append(now())
            return False, Metrics()

    x, y = (torch.from_numpy(values) for values in samples_of(task))
    data = FederatedDataset(
        lambda client: PyTorchTensorDataset((x[client], y[client])),
        get_user_sampler("minimize_reuse", list(range(task.clients))),
    )
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    local = NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=task.epochs, local_batch_size=task.batch_size)
    settings = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=task.clients,
        val_cohort_size=0,
    )
    FederatedAveraging().run(settings, SimulatedBackend(data, data), model, local, callbacks=[Ends()])
    return ends


def trainer_each(task: Task, rounds: int) -> Moments:
    """By a Lightning Trainer made anew for every client, which logs and saves nothing, and the mean of the weights."""
    from lightning import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from lit_fed import Classifier

    x, y = (torch.from_numpy(values) for values in samples_of(task))
    model = Classifier(network=task.network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ends: Moments = []
    for _ in range(rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client in range(task.clients):
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
                total[name] += tensor / task.clients
        state = total
        ends.append(now())
    return ends


def flower(task: Task, rounds: int) -> Moments:
    """By Flower's simulation with its FedAvg, in processes that fill their one core: the clock is also its CPU time."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    ends: Moments = []
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        x, y = (torch.from_numpy(values[client]) for values in samples_of(task))
        network = task.network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), lr=LR)
        for _ in range(task.epochs):
            for chosen in torch.randperm(task.samples).split(task.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
                optimizer.step()
        found = MetricRecord({"num-examples": task.samples})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": found}), reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]  # as above
    def main(grid: Grid, context: Context) -> None:
        def ended(_round: int, _arrays: ArrayRecord) -> None:
            ends.append((time.monotonic(),) * 2)

        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=task.clients, min_available_nodes=task.clients)
        first = ArrayRecord(task.network().state_dict())
        strategy.start(grid, first, num_rounds=rounds, train_config=ConfigRecord({"lr": LR}), evaluate_fn=ended)

    resources = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, task.clients, backend_config=resources)
    return ends[1:]  # the first is before any round


LOOPS: dict[str, Callable[[Task, int], Moments]] = {
    "lit_fed, sequential": lambda task, rounds: lit_fed(task, rounds, "sequential"),
    "lit_fed, vectorized": lambda task, rounds: lit_fed(task, rounds, "vectorized"),
    "pfl": pfl,
    "flower": flower,
    "trainer": trainer_each,
}


def main() -> None:
    """Run one, and write both clocks' seconds between the ends of its rounds where the last argument says."""
    loop, task, rounds, path = sys.argv[1:]
    torch.set_num_threads(1)
    ends = LOOPS[loop](TASKS[task], int(rounds))
    Path(path).write_text(json.dumps(np.diff(ends, axis=0).tolist()), encoding="utf-8")
