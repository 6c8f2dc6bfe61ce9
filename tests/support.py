"""What several tests share: a federation small enough to compute by hand, and ways to run it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback, RoundRecord
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.methods import FedAvg
from lit_fed.networks import Outputs

ROOT = Path(__file__).parents[1]


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


class LeastSquares(Classifier):
    """f(x) = w·x from w = 0, loss ½(f(x) − y)², gradient descent with learning rate ½."""

    def __init__(self, lr: float = 0.5, **kwargs: Any) -> None:
        network = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(network.weight)
        super().__init__(network=network, optimizer=lambda p: torch.optim.SGD(p, lr=lr), **kwargs)

    def objective(self, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        return {"mse": 0.5 * (outputs.logits.squeeze(1) - y).square().mean()}

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test/loss", self.objective(self.outputs(x), y)["mse"])


class Wanderer(LeastSquares):
    """Keeps state of every kind: a personal parameter, a counter of its rounds, batch-norm buffers and dropout.

    Batch norm needs two samples or more: use it with ``Points(sizes=(2, 3))``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.rounds = torch.zeros(())

    def split(self, round_idx: int) -> Any:
        from lit_fed import Split

        names = [name for name, _ in self.named_parameters()]
        return Split(
            shared=tuple(name for name in names if not name.startswith("network.3")),
            personal=tuple(name for name in names if name.startswith("network.3")),
        )

    def client_state_dict(self) -> dict[str, Tensor]:
        return super().client_state_dict() | {"rounds": self.rounds + 1}

    def load_client_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rounds = state["rounds"].clone()
        super().load_client_state_dict({name: tensor for name, tensor in state.items() if name != "rounds"})

    def initial_client_state(self, client_id: int) -> dict[str, Tensor]:
        return super().initial_client_state(client_id) | {"rounds": torch.zeros(())}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("train/rounds", self.rounds)
        return super().training_step(batch, batch_idx)


class Unlucky(Classifier):
    """Its client 7 cannot train."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.ctx is not None and self.ctx.client_id == 7:
            raise OSError("its camera broke")
        return super().training_step(batch, batch_idx)


class Agreement(Callback):
    """Raises unless every process holds the same global model after every round."""

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        assert trainer.federation is not None
        state = trainer.federation.algorithm.global_state()
        flat = torch.cat([tensor.double().flatten() for tensor in state.values()])
        copies = trainer.fabric.all_gather(flat)
        assert len(copies) == trainer.fabric.world_size == 2
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


def weights(made: FederatedTrainer) -> dict[str, Tensor]:
    """The global model, copied."""
    assert made.federation is not None
    return {name: tensor.clone() for name, tensor in made.federation.algorithm.global_state().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit-identical tensors under the same names."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"differ in {different}"


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def saved_weights(run: Path) -> dict[str, Tensor]:
    """The global model of a run's last checkpoint."""
    content: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return content["state_dict"]


def start_cli(*args: str | Path, cwd: Path, program: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen[str]:
    """Start the command line as a user would, in a folder of its own."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    for key in ("OMP_NUM_THREADS", "LOCAL_RANK", "WORLD_SIZE"):
        env.pop(key, None)
    command = [*program, str(ROOT / "cli.py"), *(str(arg) for arg in args)]
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_cli(
    *args: str | Path, cwd: Path, program: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    process = start_cli(*args, cwd=cwd, program=program)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
