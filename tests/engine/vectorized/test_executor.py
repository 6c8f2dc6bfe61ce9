"""Groups of clients as one computation: the results are those of one client after the other, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback
from lit_fed.data import Arrays, Digits, Dirichlet, Natural, TensorDataModule
from lit_fed.engine.vectorized import executor as vectorized
from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.methods import (
    AFL,
    APFL,
    UWA,
    ClientMomentum,
    DotRegression,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedBN,
    FedDrPlus,
    FedDyn,
    FedETF,
    FedLC,
    FedNova,
    FedNTD,
    FedPer,
    FedProx,
    FedRep,
    FedROD,
    FedRS,
    LGFedAvg,
    LocalOnly,
    Moon,
    PerFedAvg,
    QFedAvg,
    Scaffold,
)
from lit_fed.methods.ditto import Ditto
from tests.support import LeastSquares, Points, assert_same, fit, rows, weights

NUM_CLIENTS = 9
METHODS: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: FedProx(mu=0.1),
    "Scaffold": Scaffold,
    "Scaffold-1": lambda: Scaffold(option=1),
    "FedDyn": FedDyn,
    "FedNova": FedNova,
    "QFedAvg": QFedAvg,
    "AFL": AFL,
    "FedAvgM": FedAvgM,
    "ClientMomentum": ClientMomentum,
    "Ditto": Ditto,
    "FedPer": FedPer,
    "FedRep": FedRep,
    "LGFedAvg": LGFedAvg,
    "APFL": APFL,
    "FedROD": FedROD,
    "FedROD-hyper": lambda: FedROD(hidden=32),
    "FedBABU": FedBABU,
    "FedNTD": FedNTD,
    "FedLC": FedLC,
    "FedRS": FedRS,
    "Moon": Moon,
    "FedETF": FedETF,
    "DotRegression": DotRegression,
    "FedDrPlus": FedDrPlus,
    "LocalOnly": LocalOnly,
    "UWA": lambda: UWA(public_size=40, calibration_fraction=0.2),
}


def digits(**kwargs: Any) -> Digits:
    """Nine clients of 10 to 70 samples, so that batches of 8 are ragged in every way."""
    settings: dict[str, Any] = {
        "num_clients": NUM_CLIENTS,
        "max_train_samples": 300,
        "batch_size": 8,
        "partition": Dirichlet(alpha=0.5),
    }
    return Digits(**(settings | kwargs))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def mlp(hidden: int) -> Classifier:
    return Classifier("mlp", input_shape=(1, 8, 8), network_args={"hidden": [hidden]}, optimizer=sgd)


def federate(
    folder: Path, executor: str, algorithm: Any = None, task: Any = None, data: Any = None, **kwargs: Any
) -> FederatedTrainer:
    torch.manual_seed(0)
    made = task() if task else Classifier(network="mlp", input_shape=(1, 8, 8), optimizer=sgd)
    settings = {"max_rounds": 2, "local_epochs": 2} | kwargs
    return fit(folder, made, data or digits(), algorithm or FedAvg(), executor=executor, **settings)


def pads_to(made: FederatedTrainer) -> int:
    """The size to which a run pads smaller batches."""
    executor = made.run.federation.executor
    assert isinstance(executor, VectorizedExecutor)
    return executor.groups["model"].pad_to


def everything(made: FederatedTrainer) -> dict[str, Tensor]:
    """The global model and what every client keeps."""
    store = made.run.federation.store
    states = {f"{c}/{name}": t for c in range(NUM_CLIENTS) for name, t in (store.get(c) or {}).items()}
    return {**weights(made), **states}


def assert_close(*runs: FederatedTrainer, tolerance: float = 2e-6) -> None:
    """Weights, states and logs of two runs."""
    one, other = runs
    a, b = everything(one), everything(other)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-4, atol=tolerance, msg=name)
    for left, right in zip(rows(one.log_dir / "metrics.csv"), rows(other.log_dir / "metrics.csv"), strict=True):
        assert left.keys() == right.keys()
        for key in left:
            if not key.startswith("time/"):
                expected = pytest.approx(float(left[key] or "nan"), rel=1e-4, abs=1e-5, nan_ok=True)
                assert float(right[key] or "nan") == expected, key


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_what_one_client_after_the_other_gives(tmp_path: Path, name: str) -> None:
    alone, grouped = (federate(tmp_path / how, how, METHODS[name]()) for how in ("sequential", "vectorized"))
    assert 0 < pads_to(grouped) < 8  # smaller batches than 8 are there, and padded
    assert_close(alone, grouped)


@pytest.mark.parametrize(
    "method", [PerFedAvg, lambda: PerFedAvg(alpha=0.1, first_order=False)], ids=["Per-FedAvg", "second order"]
)
def test_a_method_that_looks_ahead_of_a_whole_batch_is_not_padded(tmp_path: Path, method: Callable[[], Any]) -> None:
    alone, grouped = (federate(tmp_path / how, how, method()) for how in ("sequential", "vectorized"))
    assert pads_to(grouped) == 0
    assert_close(alone, grouped)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"local_epochs": 0.5},
        {"local_epochs": None, "local_steps": 5},
    ],
    ids=str,
)
def test_gradients_and_lengths(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert_close(*(federate(tmp_path / how, how, **settings) for how in ("sequential", "vectorized")))


def test_accumulation_where_all_have_as_many_batches(tmp_path: Path) -> None:
    def data() -> Digits:
        return digits(partition=Dirichlet(alpha=1e6), max_train_samples=270)  # 30 samples each: 4 batches

    settings: dict[str, Any] = {"accumulate_grad_batches": 3}
    assert_close(*(federate(tmp_path / how, how, data=data(), **settings) for how in ("sequential", "vectorized")))
    with pytest.raises(ConfigError, match="accumulate_grad_batches, the clients of a group need equally many batches"):
        federate(tmp_path / "ragged", "vectorized", **settings)


class Sized(TensorDataModule):
    """Clients of given sizes; 64 numbers a sample, two classes that lie apart."""

    num_classes = 2
    input_shape = (64,)

    def __init__(self, *sizes: int) -> None:
        super().__init__(num_clients=len(sizes), partition=Natural(), batch_size=8)
        self.sizes = sizes

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(len(self.sizes)), self.sizes)
        y = np.arange(len(clients)) % 2
        x = np.random.default_rng(0).standard_normal((len(clients), 64)) + y[:, None]
        x = x.astype(np.float32)
        return Arrays(x, y, x, y, clients, clients, "sized")


class Normed(nn.Module):
    """Batch norm over what a linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(64, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.first(x.flatten(1))).relu())
        return logits


@pytest.mark.parametrize("method", [FedAvg, FedBN])
def test_batch_norm_in_float64_where_batches_cannot_be_padded(tmp_path: Path, method: Any) -> None:
    def task() -> Classifier:
        return Classifier(network=Normed(), optimizer=sgd)

    runs = [
        federate(tmp_path / how, how, method(), task, Sized(11, 26, 14, 11, 12, 5, 21, 3, 16), precision="64-true")
        for how in ("sequential", "vectorized")
    ]
    assert_close(*runs, tolerance=1e-11)
    assert not pads_to(runs[1])


class Summed(Classifier):
    """The loss is a sum: not the mean of what it is on samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 8


class Dropped(nn.Module):
    """Dropout of the input, of the features, and of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.drop, self.never = nn.Dropout(0.25), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(self.never(nn.functional.dropout(x, 0.5, self.training).flatten(1))).relu())
        found: Tensor = self.head(hidden)
        return found


def dropped() -> Classifier:
    return Classifier(network=Dropped(), optimizer=sgd)


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "FedRep", "FedNTD", "Moon"])
def test_dropout_has_each_clients_own_masks(tmp_path: Path, name: str) -> None:
    alone, grouped = (federate(tmp_path / how, how, METHODS[name](), dropped) for how in ("sequential", "vectorized"))
    assert 0 < pads_to(grouped) < 8
    assert_close(alone, grouped)


def test_dropout_does_not_depend_on_the_other_clients_of_a_group(tmp_path: Path) -> None:
    runs = [federate(tmp_path / str(size), "vectorized", task=dropped, group_size=size) for size in (1, 4, 9)]
    for other in runs[1:]:
        assert_same(everything(runs[0]), everything(other))


def test_a_loss_that_is_no_mean_is_not_padded(tmp_path: Path) -> None:
    def task() -> Classifier:
        return Summed(network="mlp", input_shape=(1, 8, 8), optimizer=sgd)

    runs = [federate(tmp_path / how, how, task=task) for how in ("sequential", "vectorized")]
    assert_close(*runs)
    assert not pads_to(runs[1])


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_other_groups_give_the_same_bits(tmp_path: Path, size: int) -> None:
    made = federate(tmp_path / "a", "vectorized", Scaffold())
    other = federate(tmp_path / "b", "vectorized", Scaffold(), group_size=size)
    assert sizes(other) == {"model": size}
    assert_same(everything(made), everything(other))


def sizes(made: FederatedTrainer) -> dict[str, int]:
    return made.run.federation.executor.state_dict()


def test_a_groups_weights_gradients_and_momentum_fit_into_96_mib(tmp_path: Path) -> None:
    # 65·300 + 301·10 weights of 4 bytes, three times: 270,120 bytes a client, of which 372 fit into 3·2²⁵.
    found = federate(tmp_path / "a", "vectorized", task=lambda: mlp(300), max_rounds=1)
    assert sizes(found) == {"model": 372}
    # 2¹⁹ inputs a step are over 512 clients with 8 samples of 64 numbers, and 512 are the most that are stacked.
    assert sizes(federate(tmp_path / "b", "vectorized", task=lambda: mlp(32), max_rounds=1)) == {"model": 512}
    large = digits(batch_size=128)  # 2¹⁹ / (128·64) = 64 clients, and 128 with batches of any size
    assert sizes(federate(tmp_path / "c", "vectorized", task=lambda: mlp(32), data=large, max_rounds=1)) == {
        "model": 128
    }


def test_a_resumed_run_keeps_the_groups_with_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "_CPU_ROOM", 2**17)  # as of another device or release
    begun = sizes(federate(tmp_path, "vectorized", max_rounds=1))
    monkeypatch.undo()
    assert sizes(federate(tmp_path, "auto", max_rounds=2, ckpt_path="last")) == begun != {"model": 512}
    assert sizes(federate(tmp_path, "vectorized", max_rounds=3, ckpt_path="last", group_size=3)) == {"model": 3}


def test_a_group_size_needs_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.group_size is 8, but trainer\.executor=sequential trains one"):
        federate(tmp_path, "sequential", group_size=8)
    with pytest.raises(ConfigError, match=r"trainer\.group_size is 0; it must be at least 1"):
        federate(tmp_path, "auto", group_size=0)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = federate(tmp_path / "whole", "vectorized", Scaffold(), max_rounds=4)
    federate(tmp_path / "parts", "vectorized", Scaffold(), max_rounds=2)
    resumed = federate(tmp_path / "parts", "vectorized", Scaffold(), max_rounds=4, ckpt_path="last")
    assert_same(everything(whole), everything(resumed))


# ---------------------------------------------------------------------- what cannot be


class Mixing(torch.optim.SGD):
    """Divides by the norm of all gradients together, as LARS and its like do a layer's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(norm)
        super().step()


class Dropping(Classifier):
    """Draws random numbers in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] + torch.rand_like(batch[0]), batch[1]), batch_idx)


class Attentive(Classifier):
    """Draws the masks of attention in torch's own kernel."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].squeeze(-3)
        mixed = nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)
        return super().training_step((mixed.unsqueeze(-3), batch[1]), batch_idx)


class ByHand(LeastSquares):
    """Optimises by hand."""

    automatic_optimization = False


class Hooked(Classifier):
    """Looks at every batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = outputs["loss"].item()


class Branching(Classifier):
    """Asks a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 1 else 2 * loss


class Einsum(nn.Linear):
    """A linear layer whose sums a group of clients rounds in another order than one client."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias.expand(*x.shape[:-1], -1)


class Attending(nn.Module):
    """Attention over the rows of a digit, where a bias of the keys adds the same to all scores of a query."""

    def __init__(self, key_bias: bool) -> None:
        super().__init__()
        self.embed, self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.key = Einsum(8) if key_bias else nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(-3)).tanh()  # a pixel that is always black would be a bias too
        shares = (self.query(x) @ self.key(x).mT).softmax(-1)
        found: Tensor = self.head((shares @ self.value(x)).mean(-2))
        return found


def attending(key_bias: bool) -> Callable[[], Classifier]:
    return lambda: Classifier(network=Attending(key_bias), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))


def test_adam_steps_on_rounding_where_a_gradient_is_nothing_else(tmp_path: Path) -> None:
    reason = r"'network\.key\.bias' differs after training .* amplifies rounding, as Adam does"
    with pytest.raises(ConfigError, match=reason):
        federate(tmp_path / "with", "vectorized", task=attending(key_bias=True))
    assert_close(*(federate(tmp_path / how, how, task=attending(False)) for how in ("sequential", "vectorized")))


def classifier(kind: type[Classifier], optimizer: Any = sgd) -> Callable[[], Classifier]:
    return lambda: kind(network="mlp", input_shape=(1, 8, 8), optimizer=optimizer)


@pytest.mark.parametrize(
    ("task", "algorithm", "reason"),
    [
        (classifier(Classifier, lambda p: Mixing(p, lr=0.1)), FedAvg, "mixes clients or samples"),
        (classifier(Dropping), FedAvg, "draws random numbers"),
        (classifier(Attentive), FedAvg, "draws random numbers"),
        (ByHand, FedAvg, "model ByHand optimises by hand"),
        (classifier(Hooked), FedAvg, "on_train_batch_end"),
        (classifier(Branching), FedAvg, "control flow"),
    ],
    ids=["optimizer", "noise", "attention", "by hand", "hook", "branch"],
)
def test_what_cannot_be_is_refused_before_training(tmp_path: Path, task: Any, algorithm: Any, reason: str) -> None:
    data = Points(NUM_CLIENTS) if task is ByHand else None
    with pytest.raises(ConfigError, match=reason) as raised:
        federate(tmp_path, "vectorized", algorithm(), task, data)
    assert str(raised.value).startswith("trainer.executor=vectorized cannot train these clients: ")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "lightning_logs").exists()


def test_mixed_precision_is_refused_for_autocast_does_not_see_through_vmap(tmp_path: Path) -> None:
    """On a CPU a group's convolution stays in full precision, and its loss in half; alone it is the other way round."""
    x, w, y = torch.randn(2, 5, 1, 4), torch.randn(2, 3, 1, 4), torch.zeros(2, 5, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        alone = torch.conv1d(x[0], w[0])
        grouped = torch.vmap(torch.conv1d)(x, w)
        of = alone.squeeze(-1), y[0]
        losses = F.cross_entropy(*of), torch.vmap(F.cross_entropy)(grouped.bfloat16().squeeze(-1), y)
    assert [one.dtype for one in (alone, grouped, *losses)] == [
        torch.bfloat16, torch.float32, torch.float32, torch.bfloat16
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"autocast of precision bf16-mixed .* bf16-true trains in groups; use seq"):
        federate(tmp_path, "vectorized", precision="bf16-mixed")
    federate(tmp_path, "vectorized", precision="bf16-true")


def test_auto_takes_one_after_the_other_where_groups_cannot_be_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hooked = classifier(Hooked)
    made = federate(tmp_path / "a", "auto", task=hooked)
    assert "one client after the other: model Hooked or a callback has on_train_batch_end" in capsys.readouterr().out
    assert_same(everything(made), everything(federate(tmp_path / "b", "sequential", task=hooked)))
    grouped = federate(tmp_path / "c", "auto")
    assert "trains clients in groups" in capsys.readouterr().out
    executor = grouped.run.federation.executor
    assert isinstance(executor, AutoExecutor)
    assert isinstance(executor.chosen, VectorizedExecutor)


def test_auto_leaves_large_networks_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federate(tmp_path / "mlp", "auto", task=lambda: mlp(3000), max_rounds=1)  # 65·3000 + 3001·10 = 225,010 weights
    told = "one client after the other: groups pay for a model of up to 200,000 weights, and this one has 225,010"
    assert told in capsys.readouterr().out
    federate(tmp_path / "cnn", "auto", task=convolved, max_rounds=1)  # 10·8 + 289·200 + 201·10 = 59,890 weights
    assert "groups pay for a model with convolutions of up to 44,000 weights, and this" in capsys.readouterr().out


def convolved() -> Classifier:
    layers = nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 200), nn.ReLU(), nn.Linear(200, 10)
    return Classifier(network=nn.Sequential(*layers), optimizer=sgd)


@pytest.mark.parametrize(("algorithm", "made"), [(FedAvg, 2), (Ditto, 12)])
def test_a_group_makes_a_loader_a_size_where_a_method_leaves_phases_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any, made: int
) -> None:
    """Six clients of two sizes and two phases under Ditto; two rounds, of which the second compares nobody alone."""
    data, asked = Sized(9, 20, 9, 20, 20, 9), list[int]()
    true = TensorDataModule.train_loader
    monkeypatch.setattr(TensorDataModule, "train_loader", lambda *args: asked.append(args[1]) or true(*args))
    monkeypatch.setattr(VectorizedExecutor, "_draw", lambda *args: None)
    counts = list[int]()

    class Counts(Callback):
        def on_round_end(self, run: Any, record: Any) -> None:
            counts.append(len(asked))

    task = partial(Classifier, "mlp", input_shape=(64,), num_classes=2, optimizer=sgd)
    federate(tmp_path, "vectorized", algorithm(), task, data, callbacks=[Counts()])
    assert counts[1] - counts[0] == made


class Cracked(Sized):
    """Client 2's samples cannot be read."""

    def train_loader(self, client_id: int, generator: torch.Generator) -> Any:
        if client_id == 2:
            raise OSError("its disk broke")
        return super().train_loader(client_id, generator)


class Exploding(Sized):
    """Client 2's samples are huge."""

    def load_arrays(self) -> Arrays:
        found = super().load_arrays()
        found.train.x[found.train.clients == 2] *= 1e30
        return found


@pytest.mark.parametrize(("data", "reason"), [(Cracked, "OSError: its disk broke"), (Exploding, "is not finite")])
def test_a_failing_client_of_a_group_is_named_and_the_others_go_on(tmp_path: Path, data: Any, reason: str) -> None:
    def task() -> Classifier:
        return Classifier("mlp", input_shape=(64,), num_classes=2, optimizer=sgd)

    sizes = (11, 26, 14, 9)
    with pytest.raises(ClientFailure, match=f"client 2 failed in round 0: .*{reason}"):
        federate(tmp_path / "a", "vectorized", task=task, data=data(*sizes))
    runs = [
        federate(tmp_path / how, how, task=task, data=data(*sizes), on_client_failure="skip")
        for how in ("sequential", "vectorized")
    ]
    assert_close(*runs)
    assert float(rows(runs[1].log_dir / "metrics.csv")[-1]["participation/failed"]) == 1.0
