"""What several tests share: a federation small enough to compute by hand, and ways to run it."""

from __future__ import annotations

import csv
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import Client, FederatedTrainer, Model, Split, Update
from lit_fed.algorithm import Cohort, Gather, Population, Stage
from lit_fed.callbacks import Callback, RoundRecord
from lit_fed.callbacks.boards import COLUMNS_FILE, event_files
from lit_fed.command.refusals.suggest import subclasses
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.engine.loop.run import Run
from lit_fed.engine.storage.packs import VersionedFiles
from lit_fed.engine.storage.store import read_table
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.methods import FedAvg

ROOT = Path(__file__).parents[1]
_BY_PATH = ("lit_fed.federation.", "lit_fed.record.unlearning.", "lit_fed.studies.papers.")


def called_by_name(bases: Sequence[type]) -> list[type]:
    """Classes that configurations call by short names, whatever other tests of this process have imported."""
    return [cls for cls in subclasses(bases) if not cls.__module__.startswith(_BY_PATH)]


class Points(TensorDataModule):
    """Client 0 has one sample x=(1,0), y=2; client 1 has three samples x=(0,1), y=4.

    With loss ½(w·x − y)² the gradients are (w₁ − 2)·(1,0) and (w₂ − 4)·(0,1). More clients repeat these two.
    """

    def __init__(self, num_clients: int = 2, sizes: tuple[int, int] = (1, 3), **kwargs: Any) -> None:
        super().__init__(num_clients=num_clients, partition=Natural(), batch_size=8, **kwargs)
        self.sizes = sizes

    num_classes = 5
    input_shape = (2,)

    def load_arrays(self) -> Arrays:
        sizes = [self.sizes[client % 2] for client in range(self.num_clients)]
        clients = np.repeat(np.arange(self.num_clients), sizes)
        x = np.eye(2, dtype=np.float32)[clients % 2]
        y = np.where(clients % 2 == 0, 2, 4)
        return Arrays(x, y, x, y, clients, clients, "points")


class Threes(Points):
    """As `Points` with three samples for every client, of different lengths."""

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(self.num_clients), 3)
        lengths = np.tile(np.array([1, 2, 3], np.float32), self.num_clients)
        x = np.eye(2, dtype=np.float32)[clients % 2] * lengths[:, None]
        y = np.where(clients % 2 == 0, 2, 4)
        return Arrays(x, y, x, y, clients, clients, "threes")


class LeastSquares(LightningModule):
    """f(x) = w·x from w = 0, loss ½(f(x) − y)², gradient descent with learning rate ½; it knows of no federation."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.network: nn.Module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.network.weight)  # type: ignore[arg-type]  # a linear layer's
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x)
        return output

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return 0.5 * (self(x).squeeze(1) - y).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))


class Wanderer(LeastSquares):
    """A network with batch-norm buffers and dropout; batch norm needs two samples: ``Points(sizes=(2, 3))``."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__(lr)
        self.network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))


class Wandering(FedAvg):
    """FedAvg whose clients keep state: the last layer of `Wanderer`, and a counter of their rounds.

    The counter is logged as ``train/rounds``; it is added to the loss, which moves no gradient.
    """

    needs = frozenset({"loss"})

    def split(self, model: Model, round_idx: int) -> Split:
        personal = tuple(name for name in model.parameters if name.startswith("network.3"))
        return Split(tuple(name for name in model.parameters if name not in personal), personal)

    def initial_state(self, client: Client) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(())}

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        return {**super().objective(client, batch), "rounds": client.state["rounds"]}

    def finish(self, client: Client) -> Update:
        return replace(super().finish(client), state={"rounds": client.state["rounds"] + 1})


class Neighbours(FedAvg):
    """FedAvg with equal weights, whose server addresses to client i of n the last model of client i + 1 (modulo n).

    A client adds ½‖w − that model‖² to its loss, over parameters. Before its first update a client's last model is the
    initial one.
    """

    needs = frozenset({"loss"})

    def setup(self, models: Mapping[str, Model], population: Population) -> dict[str, Any]:
        server = super().setup(models, population)
        clients = population.num_clients
        return {**server, "last": {name: torch.stack([one] * clients) for name, one in server["model"].items()}}

    def address(
        self, server: dict[str, Any], client_id: int, round_idx: int, kind: str, stage: Stage = "train"
    ) -> dict[str, Tensor]:
        return {f"next.{name}": stack[(client_id + 1) % len(stack)] for name, stack in server["last"].items()}

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        assert {f"next.{name}" for name in client.model.names} == client.addressed.keys() <= client.received.keys()
        away = [(w - client.addressed[f"next.{name}"]).square().sum() for name, w in client.parameters.items()]
        return {**super().objective(client, batch), "away": 0.5 * torch.stack(away).sum()}

    def reducer(self, server: dict[str, Any]) -> Any:
        return Gather()

    def step(self, server: dict[str, Any], aggregate: list[ClientUpdate], cohort: Cohort) -> dict[str, float]:  # type: ignore[override]
        for update in aggregate:
            for name, tensor in update.payload.items():
                server["last"][name][update.client_id] = tensor
        for name, tensor in server["model"].items():
            mean = torch.stack([update.payload[name].double() for update in aggregate]).mean(0)
            tensor.copy_(mean if tensor.is_floating_point() else mean.round())
        return {}


class Unlucky(FedAvg):
    """Its client 7 cannot train."""

    needs = frozenset({"loss"})

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        if client.id == 7:
            raise OSError("its camera broke")
        return super().objective(client, batch)


class Ending(FedAvg):
    """Its client 7 ends its process in round 1: ``exit``, ``_exit``, or the name of a signal."""

    needs = frozenset({"loss"})

    def __init__(self, how: str = "exit") -> None:
        super().__init__()
        self.how = how

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        if client.id == 7 and client.round_idx == 1 and client.stage == "train":
            if self.how == "exit":
                sys.exit(3)
            if self.how == "_exit":
                os._exit(0)
            os.kill(os.getpid(), signal.Signals[self.how])
        return super().objective(client, batch)


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class SmallDisk(Callback):
    """From round 1 on no file may grow beyond the event file's present size."""

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        if round_idx == 1:
            (events,) = (path for path in event_files(run.log_dir) if path.name != COLUMNS_FILE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 10, resource.RLIM_INFINITY))


class KilledOnce(Callback):
    """The last process is killed in a round; the file says that it was.

    Args:
        round_idx: The round.
    """

    def __init__(self, round_idx: int) -> None:
        self.round_idx = round_idx

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        done, last = Path("killed"), run.workers.rank + 1 == run.workers.world_size
        if run.next_round == self.round_idx and last and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class KilledBeforeTheCheckpoint(Callback):
    """The first process is killed when a round's states are written, and no checkpoint names them yet.

    Args:
        round_idx: The round.
    """

    def __init__(self, round_idx: int) -> None:
        self.round_idx = round_idx

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        if record.round_idx == self.round_idx and run.fabric.is_global_zero:
            os.kill(os.getpid(), signal.SIGKILL)


class Agreement(Callback):
    """Raises unless every process holds the same global model after every round."""

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        state = run.federation.global_model(record.round_idx)
        flat = torch.cat([tensor.double().flatten() for tensor in state.values()])
        copies = run.fabric.all_gather(flat)
        assert len(copies) == run.fabric.world_size == 2
        assert torch.equal(copies[0], copies[1]), f"the processes differ after round {record.round_idx}"


def trainer(folder: Path, **kwargs: Any) -> FederatedTrainer:
    """A quiet trainer on one CPU process."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "default_root_dir": str(folder)}
    defaults |= {"max_rounds": 2, "enable_progress_bar": False, "logger": False, "num_threads": 1}
    return FederatedTrainer(**(defaults | kwargs))


def fit(folder: Path, module: Any = None, data: Any = None, algorithm: Any = None, **kwargs: Any) -> FederatedTrainer:
    """Run a small federation; `ckpt_path` and the trainer's settings by keyword."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    made = trainer(folder, **kwargs)
    made.fit(module or LeastSquares(), data or Points(), algorithm or FedAvg(), ckpt_path)
    return made


def flip_tensor_bit(path: Path, tensor: Tensor) -> None:
    """Flip the lowest bit of a tensor's first byte in a file, which ``torch.load`` does not notice."""
    content, stored = bytearray(path.read_bytes()), tensor.numpy().tobytes()
    assert content.count(stored) == 1
    content[content.index(stored)] ^= 1
    path.write_bytes(content)


def weights(made: FederatedTrainer) -> dict[str, Tensor]:
    """The global model, copied."""
    model = made.run.federation.global_model(max(made.run.next_round - 1, 0))
    return {name: tensor.clone() for name, tensor in model.items()}


def kept(made: FederatedTrainer, client_id: int) -> dict[str, Tensor]:
    """What a client keeps: its personal tensors by name, and ``state/<name>`` for what its method keeps."""
    state = made.run.federation.store.get(client_id)
    assert state is not None, f"client {client_id} keeps nothing"
    return dict(state)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit-identical tensors under the same names."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"differ in {different}"


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def events_of(run: Path) -> str:
    """The folder of a run's events, by whose path TensorBoard calls the run."""
    (folder,) = {path.parent for path in event_files(run)}
    return str(folder)


def saved_weights(run: Path) -> dict[str, Tensor]:
    """The global model of a run's last checkpoint."""
    content: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return content["state_dict"]


def client_states(run: Path) -> dict[tuple[str, int], dict[str, Tensor]]:
    """What clients keep, by client and round, as a run's last checkpoint names it."""
    index = read_table(torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["clients"])
    files = VersionedFiles(run / "checkpoints" / "clients")
    return {(name, version[0]): files.read(name, version) for name, version in sorted(index.items())}


def start_cli(
    *args: str | Path, cwd: Path, program: tuple[str, ...] = (sys.executable,), start_new_session: bool = False
) -> subprocess.Popen[str]:
    """Start the command line as a user would, in a folder of its own."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    for key in ("OMP_NUM_THREADS", "LOCAL_RANK", "WORLD_SIZE"):
        env.pop(key, None)
    command = [*program, str(ROOT / "cli.py"), *(str(arg) for arg in args)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=start_new_session,
    )


def run_cli(
    *args: str | Path, cwd: Path, program: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    process = start_cli(*args, cwd=cwd, program=program)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
