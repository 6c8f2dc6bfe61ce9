"""A client's objective is a LightningModule, and the task stays the plain one it was."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_fed import Classifier, Client, objective_of
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.methods import NTD, FedAvg, FedProx, Prox, Scaffold
from tests.support import LeastSquares, Points, assert_same, fit, trainer, weights

X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
Y = torch.tensor([2.0, 4.0, 4.0])
INIT = DataLoader.__init__


def plainly(folder: Path, task: LightningModule, epochs: int = 3, batch_size: int = 2) -> dict[str, Tensor]:
    """What a plain ``lightning.Trainer`` makes of a module."""
    plain = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    plain.fit(task, DataLoader(TensorDataset(X, Y), batch_size=batch_size))
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


class Momentum(LeastSquares):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedProx(mu=10.0), Scaffold(), FedAvg(regularizer=Prox(weight=10.0))],
    ids=["fedavg", "fedprox", "scaffold", "regularizer"],
)
def test_centrally_terms_without_anything_received_vanish(tmp_path: Path, algorithm: Any) -> None:
    assert_same(plainly(tmp_path, Momentum()), plainly(tmp_path, objective_of(Momentum(), algorithm)))


class Shrinking(FedAvg):
    """A term of the method's own, which needs nothing received: ½‖w‖²."""

    needs = frozenset({"loss"})

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        squares = [parameter.square().sum() for parameter in client.parameters.values()]
        return {**super().objective(client, batch), "shrink": 0.5 * torch.stack(squares).sum()}


def test_centrally_a_methods_own_terms_stay(tmp_path: Path) -> None:
    # One step of lr ½ from (0, 0) over the first two samples: half of (−2, 0) and (0, −4): (½, 1). Then the third:
    # gradient (0, 1 − 4) and the term's (½, 1): (½, 1) − ½·(½, −2) = (¼, 2).
    found = plainly(tmp_path, objective_of(LeastSquares(), Shrinking()), epochs=1)
    assert found["network.weight"].tolist() == [[0.25, 2.0]]


def test_centrally_what_a_method_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs .*algorithm\.head; model LeastSquares"):
        objective_of(LeastSquares(), FedAvg(regularizer=NTD()))


class Plain(LightningModule):
    """Knows nothing of federations, and has what a former one could leave something on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.body[0].bias.requires_grad_(False)
        self.head = nn.Linear(4, 5)
        self.save_hyperparameters()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1].long())
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1].long()))


def plainness(task: LightningModule) -> dict[str, Any]:
    """Everything on a module but its tensors' values and its mode."""
    hooks = {place: len(module._forward_hooks) for place, module in task.named_modules()}
    own = {key: str(type(value)) for key, value in task.__dict__.items()}
    return {
        "attributes": own,
        "hooks": hooks,
        "trains": {name: parameter.requires_grad for name, parameter in task.named_parameters()},
        "gradients": {name: parameter.grad is None for name, parameter in task.named_parameters()},
        "fabric": (task._fabric, task._fabric_optimizers),
    }


ALGORITHMS = {
    "fedavg": FedAvg,
    "scaffold": lambda: Scaffold(freeze_head=True),
    "on logits": lambda: FedAvg(regularizer=NTD()),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_federation_leaves_nothing_on_its_task(tmp_path: Path, algorithm: str) -> None:
    task, data, method = Plain(), Points(sizes=(2, 3)), ALGORITHMS[algorithm]()
    before = plainness(task)
    made = trainer(tmp_path, max_rounds=1)
    made.fit(task, data, method)
    assert plainness(task) == before
    made.test(task, data, method)
    assert plainness(task) == before
    copied, pickled = copy.deepcopy(task), pickle.loads(pickle.dumps(task))  # noqa: S301  # of our own making
    trained = [plainly(tmp_path, one, batch_size=3) for one in (task, copied, pickled)]
    assert_same(trained[0], trained[1])
    assert_same(trained[0], trained[2])
    made.max_rounds = 2  # and the federation goes on from its own model, whatever was done with the task
    made.fit(task, data, method)
    assert_same(weights(made), weights(fit(tmp_path / "whole", Plain(), Points(sizes=(2, 3)), ALGORITHMS[algorithm]())))


def test_a_federation_that_ends_in_an_error_leaves_nothing_either(tmp_path: Path) -> None:
    class Failing(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled():  # and not when the head is looked at, before any training
                raise RuntimeError("no battery")
            return super().training_step(batch, batch_idx)

    task = Failing()
    before = plainness(task)
    with pytest.raises(ClientFailure, match="no battery"):
        fit(tmp_path, task, Points(sizes=(2, 3)), FedAvg(regularizer=NTD()))
    assert plainness(task) == before
    assert DataLoader.__init__ is INIT, "Fabric leaves it changed where an error passes through its launch"


def test_one_that_is_refused_leaves_nothing_either(tmp_path: Path) -> None:
    class NoOptimizer(Plain):
        def configure_optimizers(self) -> Any:
            return None

    task = NoOptimizer()
    before = plainness(task)
    with pytest.raises(ConfigError, match="must return an optimizer"):
        fit(tmp_path, task, Points(sizes=(2, 3)))
    assert plainness(task) == before


def test_the_head_is_listened_to_only_where_a_step_asks(tmp_path: Path) -> None:
    """What it sees in evaluation would pile up, batch by batch, on the device."""
    most = []

    class Watching(Plain):
        def on_test_batch_end(self, *args: Any) -> None:
            most.append(len(self.state.task_run._captured))  # type: ignore[union-attr,arg-type]  # the objective's

    data = Points(num_clients=4, sizes=(2, 3), test_batch_size=1)
    fit(tmp_path, Watching(), data, FedAvg(regularizer=NTD()), max_rounds=1)
    assert max(most) <= 1


@pytest.mark.parametrize("skips", [None, {"loss": None}], ids=["none", "a dict without a loss"])
def test_a_batch_that_the_task_skips_is_skipped_under_every_term(tmp_path: Path, skips: Any) -> None:
    class Skipping(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return skips if len(batch[0]) == 3 else self.loss(batch)

    for algorithm in (FedProx(mu=1.0), FedAvg(regularizer=Prox(weight=1.0, objective_weight=0.5)), Shrinking()):
        found = weights(fit(tmp_path, Skipping(), algorithm=algorithm, max_rounds=1, protocols=[]))
        share = 0.5 if algorithm.regularizer else 1.0
        # Client 0 makes its first step from 0, where the terms have no gradient; client 1 skips: (share·1/4, 0).
        assert found["network.weight"].tolist() == [[0.25 * share, 0.0]]


def test_a_dict_gives_the_loss_logits_and_features(tmp_path: Path) -> None:
    class Telling(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            features = torch.ones(len(batch[0]), 3)
            return {"loss": super().training_step(batch, batch_idx), "logits": batch[0], "features": features}

    seen = []

    class Asking(FedAvg):
        needs = frozenset({"loss", "logits", "features"})

        def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
            outputs = client.run(batch)
            assert outputs.logits is not None
            assert outputs.features is not None
            seen.append((torch.equal(outputs.logits, batch[0]), outputs.features.sum().item() / len(batch[0])))
            return super().objective(client, batch)

    fit(tmp_path, Telling("logistic", input_shape=(2,), num_classes=5), algorithm=Asking(), max_rounds=1)
    assert set(seen) == {(True, 3.0)}


def test_within_a_step_each_batch_runs_once(tmp_path: Path) -> None:
    runs = []

    class Counted(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            runs.append(id(batch))
            return super().training_step(batch, batch_idx)

    class Twice(FedAvg):
        needs = frozenset({"loss"})

        def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
            other = (batch[0].clone(), batch[1])
            first, second = client.run(batch), client.run(other)
            assert client.run(batch) is first
            assert client.run(other) is second
            return {"task": first.loss, "other": second.loss}  # type: ignore[dict-item]  # this task skips no batch

    made = fit(tmp_path, Counted(), Points(1), Twice(), max_rounds=2, local_epochs=2, evaluate_every=0)
    assert len(runs) == 2 * 2 * 2
    # Twice the gradient is a learning rate of 1, which finds w₁ = 2 at once.
    assert weights(made)["network.weight"].tolist() == [[2.0, 0.0]]


def test_self_trainer_is_the_clients(tmp_path: Path) -> None:
    class Asking(LeastSquares):
        def on_train_start(self) -> None:
            seen.append((self.current_epoch, self.trainer.max_epochs, self.trainer.training, self.global_step))
            self.print("hello")

        def on_train_end(self) -> None:
            seen.append(self.global_step)
            assert self.trainer.datamodule is data

    seen: list[Any] = []
    data = Points(1)
    fit(tmp_path, Asking(), data, max_rounds=2, local_epochs=3, protocols=[])
    assert seen == [(0, 2, True, 0), 3, (1, 2, True, 0), 3]
