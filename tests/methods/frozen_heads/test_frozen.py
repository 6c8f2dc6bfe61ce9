"""Methods whose classifier is frozen: against arithmetic, reduced to known ones, and what stays where it is."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import Classifier, Client, objective_of
from lit_fed.data import IID, Arrays, Digits, Shards
from lit_fed.engine.client import FineTuning
from lit_fed.engine.protocols import GlobalTest, PersonalTest
from lit_fed.errors import ConfigError
from lit_fed.methods import (
    FD,
    KD,
    LD,
    NTD,
    CalibratedTest,
    DotRegression,
    FedAvg,
    FedBABU,
    FedDrPlus,
    FedETF,
    Prox,
    SphereFed,
)
from lit_fed.methods.frozen_heads.frozen import FrozenHead
from lit_fed.networks import ProjectedETFHead, build_network, classifier, features
from tests.support import Points, assert_same, fit, rows, run_cli, weights

FROZEN: list[type[FrozenHead]] = [FedBABU, SphereFed, FedETF, DotRegression, FedDrPlus]
EACH = pytest.mark.parametrize("method", FROZEN, ids=lambda method: method.__name__)
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.1)


class TwoClasses(Points):
    """`Points` with classes 0 and 1: client 0 has one sample x=(1,0), y=0, client 1 three samples x=(0,1), y=1."""

    num_classes = 2

    def load_arrays(self) -> Arrays:
        made = super().load_arrays()
        y = made.y_train // 2 - 1
        return Arrays(made.x_train, y, made.x_test, y, made.client_train, made.client_test, "two classes")


class Plane(nn.Module):
    """Features f = Wx in two dimensions, the same for both clients' x; a linear head with the classes (±1, 0)."""

    def __init__(self, f: tuple[float, float]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.body.weight.data = torch.tensor([[f[0]] * 2, [f[1]] * 2])
        self.head.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        self.head.bias.data.zero_()

    def forward_features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.forward_features(x))
        return logits


def on_plane(
    f: tuple[float, float], lr: float, algorithm: FrozenHead | None = None, head: list[list[float]] | None = None
) -> Classifier:
    """A task on the plane; with an algorithm its head is put there now, and given these classes."""
    task = Classifier(Plane(f), num_classes=2, optimizer=partial(torch.optim.SGD, lr=lr))
    if algorithm is not None:
        algorithm.adapt(task)
    if head is not None:
        task.network.head.weight.data = torch.tensor(head)  # type: ignore[union-attr]
    return task


def digits(**kwargs: Any) -> Digits:
    settings: dict[str, Any] = {"num_clients": 5, "partition": Shards(2), "batch_size": 16, "max_train_samples": 240}
    return Digits(**(settings | kwargs))


def model(seed: int = 0, kind: type[Classifier] = Classifier, **kwargs: Any) -> Classifier:
    """A task for the digits; the same seed gives the same first weights, and the same heads in their place."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"network": "mlp", "num_classes": 10, "input_shape": (1, 8, 8), "optimizer": SGD}
    return kind(**(settings | kwargs))


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_fedbabu_by_hand(tmp_path: Path) -> None:
    # f = (0, 4), so logits are (0, 0) and both classes have probability ½. Client 0 (y=0): the gradient in f is
    # −½(1, 0) + ½(−1, 0) = (−1, 0), so its column of W becomes (1, 4) with learning rate 1; client 1's (−1, 4).
    # Means with weights 1 and 3: ((3·0 + 1)/4, 4) and ((0 − 3·1)/4, 4). The loss is ln 2 for both.
    made = fit(tmp_path, on_plane((0.0, 4.0), lr=1.0), TwoClasses(), FedBABU(), max_rounds=1)
    assert weights(made)["network.body.weight"].tolist() == [[0.25, -0.75], [4.0, 4.0]]
    assert made.metrics["train/loss"] == pytest.approx(math.log(2))


def test_dot_regression_by_hand(tmp_path: Path) -> None:
    # f = (3, 4), f̂ = (0.6, 0.8); the gradient in f is (cos − 1)·(v − cos·f̂)/5.
    # Client 0, v = (1, 0), cos 0.6: −0.4·(0.64, −0.48)/5 = (−0.0512, 0.0384), so f becomes (3.64, 3.52) at rate 12.5.
    # Client 1, v = (−1, 0), cos −0.6: −1.6·(−0.64, 0.48)/5 = (0.2048, −0.1536), so (0.44, 5.92).
    # Columns: ((3·3 + 3.64)/4, (3·4 + 3.52)/4) = (3.16, 3.88) and ((3 + 3·0.44)/4, (4 + 3·5.92)/4) = (1.08, 5.44).
    # Losses ½·0.4² = 0.08 and ½·1.6² = 1.28: (0.08 + 3·1.28)/4 = 0.98.
    method = DotRegression()
    task = on_plane((3.0, 4.0), 12.5, method, [[1.0, 0.0], [-1.0, 0.0]])
    made = fit(tmp_path, task, TwoClasses(), method, max_rounds=1)
    expected = torch.tensor([[3.16, 1.08], [3.88, 5.44]])
    torch.testing.assert_close(weights(made)["network.body.weight"], expected)
    assert made.metrics["train/loss"] == pytest.approx(0.98)


def test_feddr_plus_by_hand(tmp_path: Path) -> None:
    # β = ½, client 0 alone. Step 1 is half of dot-regression's, so rate 25 again gives f = (3.64, 3.52). Step 2 adds
    # the pull back: ½·(2/d)(f − f^g) = ½·(0.64, −0.48) = (0.32, −0.24) to ½·(cos − 1)·(v − cos·f̂)/‖f‖.
    f, rate = (3.64, 3.52), 25.0
    norm = math.hypot(*f)
    cos = f[0] / norm
    pull = [0.5 * (cos - 1) * (v - cos * own / norm) / norm for v, own in zip((1.0, 0.0), f, strict=True)]
    expected = [f[0] - rate * (pull[0] + 0.32), f[1] - rate * (pull[1] - 0.24)]
    method = FedDrPlus(beta=0.5)
    task = on_plane((3.0, 4.0), rate, method, [[1.0, 0.0], [-1.0, 0.0]])
    made = fit(tmp_path, task, TwoClasses(num_clients=1), method, max_rounds=1, local_epochs=2)
    torch.testing.assert_close(weights(made)["network.body.weight"][:, 0], torch.tensor(expected))
    # Means over the two steps: ½·½·(0.4² + (cos − 1)²)/2, and 0 before the first step, ½·½(0.64² + 0.48²) = 0.16 after.
    assert made.metrics["train/dr"] == pytest.approx(0.125 * (0.16 + (cos - 1) ** 2), rel=1e-5)
    assert made.metrics["train/fd"] == pytest.approx(0.08, rel=1e-5)


def test_distillation_alone_stays_where_it_is(tmp_path: Path) -> None:
    made = fit(tmp_path, on_plane((3.0, 4.0), lr=1.0), TwoClasses(), FedDrPlus(beta=0.0), max_rounds=2)
    assert weights(made)["network.body.weight"].tolist() == [[3.0, 3.0], [4.0, 4.0]]


def test_spherefed_by_hand(tmp_path: Path) -> None:
    # Cosines (0.6, 0.8) to the classes (1, 0) and (0, 1). The gradient in f is (I − f̂f̂ᵀ)(cos − e_y)·(2/C)/5, C = 2.
    # Client 0: cos − e = (−0.4, 0.8), along f̂ 0.4, left (−0.64, 0.48)/5: f becomes (3.64, 3.52) at rate 5.
    # Client 1: (0.6, −0.2), along f̂ 0.2, left (0.48, −0.36)/5: (2.52, 4.36).
    # Losses ½(0.4² + 0.8²) = 0.4 and ½(0.6² + 0.2²) = 0.2: (0.4 + 3·0.2)/4 = 0.25.
    method = SphereFed()
    task = on_plane((3.0, 4.0), 5.0, method, [[1.0, 0.0], [0.0, 1.0]])
    made = fit(tmp_path, task, TwoClasses(), method, max_rounds=1)
    expected = torch.tensor([[(9 + 3.64) / 4, (3 + 3 * 2.52) / 4], [(12 + 3.52) / 4, (4 + 3 * 4.36) / 4]])
    torch.testing.assert_close(weights(made)["network.body.weight"], expected)
    assert made.metrics["train/loss"] == pytest.approx(0.25)


class Mixed(TwoClasses):
    """One client with three samples of class 0 and one of class 1."""

    def load_arrays(self) -> Arrays:
        x, y = np.eye(2, dtype=np.float32)[[0, 0, 0, 1]], np.array([0, 0, 0, 1])
        return Arrays(x, y, x, y, np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64), "mixed")


def test_fedetf_by_hand(tmp_path: Path) -> None:
    # With the projection I, cosines are (0.6, −0.6), and counts 3 and 1 weigh the exponentials.
    method = FedETF()
    task = on_plane((3.0, 4.0), 0.1, method, [[1.0, 0.0], [-1.0, 0.0]])
    task.network.head.projection.weight.data = torch.eye(2)  # type: ignore[union-attr]
    made = fit(tmp_path, task, Mixed(num_clients=1), method, max_rounds=1)
    first, second = 3 * math.exp(0.6), math.exp(-0.6)
    losses = -math.log(first / (first + second)), -math.log(second / (first + second))
    assert made.metrics["train/loss"] == pytest.approx((3 * losses[0] + losses[1]) / 4)
    # The temperature's gradient: the mean of Σ p_c·cos_c − cos_y, with p the balanced softmax.
    p = first / (first + second)
    expected = 1 - 0.1 * (0.6 * p - 0.6 * (1 - p) - (3 * 0.6 - 0.6) / 4)
    assert float(weights(made)["network.head.temperature"]) == pytest.approx(expected)


def test_fedetf_learns_nothing_from_clients_of_one_class(tmp_path: Path) -> None:
    # The absent class weighs nothing, so the own class has probability 1 from the start.
    made = fit(tmp_path, on_plane((3.0, 4.0), lr=1.0), TwoClasses(), FedETF(), max_rounds=1)
    assert weights(made)["network.body.weight"].tolist() == [[3.0, 3.0], [4.0, 4.0]]
    assert made.metrics["train/loss"] == 0


# --- reductions ------------------------------------------------------------------------------------------------------


class StillHead(Classifier):
    """A classifier whose head has learning rate 0, which is how the public code freezes it."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [{"params": [p for name, p in named if (".head." in name) == head]} for head in (False, True)]
        groups[1]["lr"] = 0.0  # type: ignore[assignment]  # a group holds parameters and numbers
        return SGD(groups)


class StillSphere(StillHead):
    """As `StillHead`, with SphereFed's objective written out."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x) - torch.eye(10)[y]).square().mean()


def test_fedbabu_is_fedavg_with_a_head_that_does_not_learn(tmp_path: Path) -> None:
    babu = fit(tmp_path, model(), digits(), FedBABU(), max_rounds=3)
    still = fit(tmp_path, model(kind=StillHead), digits(), FedAvg(), max_rounds=3)
    assert_same(weights(babu), weights(still))


def test_spherefed_is_fedavg_with_squared_errors_on_its_network(tmp_path: Path) -> None:
    plain = model(kind=StillSphere)
    SphereFed().adapt(plain)
    sphere = fit(tmp_path, model(), digits(), SphereFed(), max_rounds=3)
    assert_same(weights(sphere), weights(fit(tmp_path, plain, digits(), FedAvg(), max_rounds=3)))


def test_fedetf_of_gamma_0_is_the_cross_entropy_on_its_network(tmp_path: Path) -> None:
    plain = model()
    FedETF().adapt(plain)
    etf = fit(tmp_path, model(), digits(), FedETF(gamma=0.0), max_rounds=3)
    assert_same(weights(etf), weights(fit(tmp_path, plain, digits(), FedAvg(), max_rounds=3)))


def test_feddr_plus_of_beta_1_is_dot_regression(tmp_path: Path) -> None:
    plus = fit(tmp_path, model(), digits(), FedDrPlus(beta=1.0), max_rounds=3)
    plain = fit(tmp_path, model(), digits(), DotRegression(), max_rounds=3)
    assert_same(weights(plus), weights(plain))


def test_feddr_plus_is_dot_regression_with_the_regularizer(tmp_path: Path) -> None:
    regularizer = FD(weight=1 - 0.9, objective_weight=0.9)
    plain = fit(tmp_path, model(), digits(), DotRegression(regularizer=regularizer), max_rounds=3)
    assert_same(weights(fit(tmp_path, model(), digits(), FedDrPlus(), max_rounds=3)), weights(plain))


# --- what stays, and what it costs -----------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    "optimizer", [SGD, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)], ids=["SGD", "AdamW"]
)
def test_frozen_weights_keep_their_bits(method: type[FrozenHead], optimizer: Any, tmp_path: Path) -> None:
    algorithm, task = method(), model(optimizer=optimizer)
    algorithm.adapt(task)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    made = fit(tmp_path, task, digits(), algorithm, max_rounds=2, protocols=[PersonalTest(), GlobalTest()])
    after, frozen = weights(made), algorithm.frozen(task)
    assert frozen
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert all(torch.equal(task.state_dict()[name], before[name]) for name in frozen)
    assert all(not torch.equal(after[name], before[name]) for name in after if name not in frozen)


@EACH
def test_frozen_weights_do_not_travel(method: type[FrozenHead], tmp_path: Path) -> None:
    # mlp: 64·64 + 64 in the body, in float32, from each of 5 clients; FedETF adds its projection 64·10 and temperature.
    numbers = 64 * 64 + 64 + (64 * 10 + 1 if method is FedETF else 0)
    metrics = fit(tmp_path, model(), digits(), method(), max_rounds=1).metrics
    assert metrics["comm/uplink_bytes"] == metrics["comm/downlink_bytes"] == 5 * 4 * numbers


@pytest.mark.parametrize("method", [FedBABU, SphereFed, FedETF, DotRegression])
@pytest.mark.parametrize("regularizer", [Prox, KD, NTD, LD, FD])
def test_every_regularizer_joins_every_frozen_head(method: type[FrozenHead], regularizer: Any, tmp_path: Path) -> None:
    task = model(optimizer=partial(torch.optim.SGD, lr=0.01))
    made = fit(tmp_path, task, digits(), method(regularizer=regularizer()), max_rounds=1, local_steps=2, protocols=[])
    assert made.metrics[f"train/{regularizer.name}"] > 0  # the second step is away from the teacher


@EACH
def test_it_trains_under_a_plain_trainer(method: type[FrozenHead], tmp_path: Path) -> None:
    task, algorithm = model(), method()
    objective = objective_of(task, algorithm)
    frozen = algorithm.frozen(task)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plain = lightning.Trainer(max_steps=3, accelerator="cpu", default_root_dir=tmp_path, **settings)
    plain.fit(objective, digits())
    moved = [name for name, tensor in task.state_dict().items() if not torch.equal(tensor, before[name])]
    assert frozen
    assert set(moved) == before.keys() - set(frozen)


def test_a_task_goes_from_one_federation_to_the_next(tmp_path: Path) -> None:
    # The head of the first is the head of the second, which finds it there, and of what is tested with it.
    task = model()
    fit(tmp_path / "first", task, digits(), DotRegression(), max_rounds=1)
    frame = task.network.head.weight.clone()  # type: ignore[union-attr,operator]
    made = fit(tmp_path / "second", task, digits(), FedDrPlus(), max_rounds=1)
    assert torch.equal(weights(made)["network.head.weight"], frame)
    with pytest.raises(
        ConfigError, match=r"which must be an nn\.Linear, and that of model Classifier is a SimplexHead"
    ):
        fit(tmp_path / "third", task, digits(), SphereFed())


def test_a_fedbabu_task_is_handed_back_with_a_head_that_trains(tmp_path: Path) -> None:
    task = model()
    fit(tmp_path, task, digits(), FedBABU(fine_tunes="head"), max_rounds=1, protocols=[PersonalTest()])
    assert all(parameter.requires_grad for parameter in task.parameters())


# --- any task --------------------------------------------------------------------------------------------------------


class Stranger(LightningModule):
    """Knows of no federation, has no ``head``, and puts more behind its last layer."""

    def __init__(self, num_outputs: int = 10, lr: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        body = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()]
        self.layers = nn.Sequential(*body, nn.Linear(32, num_outputs), nn.LogSoftmax(dim=1))

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.nll_loss(self.layers(batch[0]), batch[1])

    def test_step(self, batch: Any) -> None:
        self.log("test_accuracy", (self.layers(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@EACH
def test_any_task_that_names_its_head_learns(method: type[FrozenHead], tmp_path: Path) -> None:
    algorithm, task = method(head="layers.4"), Stranger(lr=0.5 if method is FedBABU else 2.0)
    made = fit(tmp_path, task, Digits(num_clients=5, partition=IID()), algorithm, max_rounds=8, evaluate_every=8)
    assert made.metrics["global/accuracy"] > 0.5  # a guess is right for one in ten
    assert all(name.startswith("layers.4.") for name in made.run.federation.loops["model"].model.split.frozen)


class ByHand(Stranger):
    """As `Stranger`, optimising by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:  # type: ignore[override]  # returns no loss
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_a_task_that_optimises_by_hand_has_a_frozen_head_but_no_new_one(tmp_path: Path) -> None:
    data = Digits(num_clients=5, partition=IID())
    made = fit(tmp_path, ByHand(), data, FedBABU(head="layers.4"), max_rounds=8, evaluate_every=8)
    assert made.metrics["global/accuracy"] > 0.5
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm DotRegression needs a loss"):
        fit(tmp_path, ByHand(), digits(), DotRegression(head="layers.4"))


class TwoViews(Stranger):
    """Its head runs twice a step, as in contrastive learning."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + super().training_step((batch[0] + 0.1, batch[1]))


def test_a_head_that_runs_twice_freezes_but_has_no_logits(tmp_path: Path) -> None:
    made = fit(tmp_path, TwoViews(), digits(), FedBABU(head="layers.4"), max_rounds=1)
    assert made.metrics["train/loss"] > 0
    with pytest.raises(ConfigError, match="ran 2 times in a training_step of TwoViews"):
        fit(tmp_path, TwoViews(), digits(), SphereFed(head="layers.4"))


TIMM = {"resnet18": "fc", "vit_tiny_patch16_224": "head", "convnext_atto": "head.fc", "efficientnet_b0": "classifier"}


@pytest.mark.parametrize("name", ["small_cnn", "mlp", *TIMM])
def test_a_head_is_replaced_wherever_it_lives(name: str) -> None:
    network = build_network(name, 5, 3, (3, 32, 32))
    task = Classifier(network).eval()
    DotRegression().adapt(task)
    head = network.get_submodule(TIMM.get(name, "head"))
    assert head is task.head is classifier(network)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(task(x), head(features(network, x)))
    assert task(x).abs().max() <= 1


def test_a_head_under_two_names_is_replaced_under_both() -> None:
    class Twice(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.head = self.layers[4]

    task = Twice()
    FedETF().adapt(task)
    assert isinstance(task.head, ProjectedETFHead)
    assert task.layers[4] is task.head


def test_published_numbers_of_parameters() -> None:
    # FedDr+'s networks: VGG-11 for 10 classes and MobileNet for 100, with a head without bias, and with FedETF's.
    published = {"vgg11": (10, 9_750_912, 9_751_013), "mobilenet": (100, 3_309_376, 3_319_377)}
    for name, (num_classes, *expected) in published.items():
        for method, count in zip((DotRegression, FedETF), expected, strict=True):
            task = Classifier(build_network(name, num_classes, 3, (3, 32, 32)))
            method().adapt(task)
            assert sum(parameter.numel() for parameter in task.parameters()) == count


# --- class counts ----------------------------------------------------------------------------------------------------


def test_counts_are_the_clients_own_and_looked_up_once(tmp_path: Path) -> None:
    class Counted(Digits):
        asked = 0

        def class_counts(self, client_id: int) -> Any:
            self.asked += 1
            return super().class_counts(client_id)

    def asked(algorithm: FedAvg) -> int:
        data = Counted(num_clients=5, partition=Shards(2), batch_size=16, max_train_samples=240)
        fit(tmp_path, model(), data, algorithm, max_rounds=2, local_epochs=3, protocols=[])
        return data.asked

    assert asked(FedETF()) == asked(FedAvg()) + 5 * 2  # clients and rounds


def test_a_head_may_have_more_outputs_than_the_data_have_classes(tmp_path: Path) -> None:
    # Classes beyond the data's have no samples, so they weigh nothing: the loss is that of the two there are.
    method = FedETF()
    task = Classifier(build_network("mlp", 4, 1, (2,)), num_classes=4, optimizer=partial(torch.optim.SGD, lr=0.0))
    method.adapt(task)
    made = fit(tmp_path, task, Mixed(num_clients=1), method, max_rounds=1, protocols=[])
    with torch.no_grad():
        z = task(torch.eye(2))[:, :2] + torch.tensor([3.0, 1.0]).log()
    losses = -z.log_softmax(dim=1).diagonal()
    assert made.metrics["train/loss"] == pytest.approx(float(3 * losses[0] + losses[1]) / 4)


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def personal(folder: Path, algorithm: FrozenHead) -> tuple[float, dict[str, Tensor]]:
    made = fit(folder, model(), digits(), algorithm, max_rounds=2, protocols=[PersonalTest(epochs=2)])
    return made.metrics["personal/loss_mean"], weights(made)


def test_either_loss_fine_tunes_either_model(tmp_path: Path) -> None:
    found = {
        (beta, second): personal(tmp_path, FedDrPlus(beta=beta, fine_tuning_beta=second))
        for beta in (0.5, 1.0)
        for second in (None, 0.5, 1.0)
    }
    for beta in (0.5, 1.0):  # the second stage leaves the first as it was, and its default is the first one's β
        for second in (0.5, 1.0):
            assert_same(found[beta, second][1], found[beta, None][1])
        assert found[beta, None][0] == found[beta, beta][0]
        assert found[beta, 0.5][0] != found[beta, 1.0][0]
    assert found[1.0, 1.0][0] == personal(tmp_path, DotRegression())[0]


def test_fedbabu_fine_tunes_what_it_is_told(tmp_path: Path) -> None:
    found = {part: personal(tmp_path, FedBABU(fine_tunes=part)) for part in ("body", "head", "all")}  # type: ignore[arg-type]
    for _, state in found.values():
        assert_same(state, found["body"][1])
    assert len({loss for loss, _ in found.values()}) == 3


@pytest.mark.parametrize(("part", "moves"), [("body", "body"), ("head", "head"), ("all", "body head")])
def test_what_fine_tuning_moves(part: Any, moves: str, tmp_path: Path) -> None:
    federation = fit(tmp_path, model(), digits(), FedBABU(fine_tunes=part), max_rounds=1, protocols=[]).run.federation
    session = federation.session
    with session.at_work():
        entered = session.enter(0, federation.broadcast(0, "test"), "personal", FineTuning())
        before = entered.model.copy()
        with session.prepared(entered):
            moved = [name for name, tensor in entered.model.tensors().items() if not torch.equal(tensor, before[name])]
    assert {name.split(".")[1] for name in moved} == set(moves.split())
    assert_same(entered.model.copy(), before)


def test_fedbabu_starts_from_a_simplex_etf_if_told_so(tmp_path: Path) -> None:
    task = model()
    FedBABU(etf=True).adapt(task)
    frame = task.state_dict()["network.head.weight"].double()
    assert frame.shape == (10, 64)  # norm 1, and a cosine of −1/9 between any two of the 10 classes
    torch.testing.assert_close(frame @ frame.T, 10 / 9 * torch.eye(10).double() - 1 / 9, atol=1e-6, rtol=0)
    # The federation leaves it as it is; fine-tuning trains it where it is told to.
    found = {part: personal(tmp_path, FedBABU(etf=True, fine_tunes=part)) for part in ("body", "all")}  # type: ignore[arg-type]
    for _, state in found.values():
        torch.testing.assert_close(state["network.head.weight"].double(), frame)
        assert not state["network.head.bias"].any()
    assert found["body"][0] != found["all"][0]


def test_a_head_that_is_fine_tuned_has_the_downloaded_one_for_a_teacher(tmp_path: Path) -> None:
    task, algorithm = model(), FedBABU(fine_tunes="head", regularizer=KD())
    federation = fit(tmp_path, task, digits(), algorithm, max_rounds=1, protocols=[]).run.federation
    batch = torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2])

    def taught(client: Client) -> Tensor:
        logits = client.teach(batch).logits
        assert logits is not None
        return logits.clone()

    with federation.session.at_work():
        entered = federation.session.enter(0, federation.broadcast(0, "test"), "personal", FineTuning())
        before = taught(entered)
        task.network.head.weight.data.add_(1.0)  # type: ignore[union-attr,operator]
        assert torch.equal(taught(entered), before)
        assert not torch.equal(task(batch[0]), before)


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_is_the_least_squares_fit_of_all_data(tmp_path: Path) -> None:
    data = digits()
    made = fit(tmp_path, model(), data, SphereFed(), max_rounds=2, protocols=[CalibratedTest(ridge=1e-2)])
    task: Any = model()
    SphereFed().adapt(task)
    task.load_state_dict(weights(made))

    def phi(loader: Any) -> tuple[np.ndarray, np.ndarray]:
        x, y = (torch.cat(part) for part in zip(*loader, strict=True))
        f = task.network.forward_features(x).detach().double().numpy()
        return f / np.linalg.norm(f, axis=1, keepdims=True), y.numpy()

    train, labels = phi(data.train_dataloader())
    # Ridge regression as least squares with one more row for each feature.
    penalty = math.sqrt(1e-2 * (train**2).sum() / train.shape[1])
    extended = np.vstack([train, penalty * np.eye(train.shape[1])])
    targets = np.vstack([np.eye(10)[labels], np.zeros((train.shape[1], 10))])
    solution = np.linalg.lstsq(extended, targets, rcond=None)[0]
    test, truth = phi(data.test_loader())
    accuracy = float(((test @ solution).argmax(1) == truth).mean())
    assert made.metrics["calibrated/acc"] == pytest.approx(accuracy, abs=1e-9)
    # Two moments of each of 5 clients, 64·64 and 10·64 float64 numbers.
    assert made.metrics["calibrated/uplink_bytes"] == 5 * 8 * (64 * 64 + 10 * 64)


def test_calibration_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    with_it = fit(tmp_path, model(), digits(), SphereFed(), max_rounds=3, protocols=[CalibratedTest(), GlobalTest()])
    without = fit(tmp_path, model(), digits(), SphereFed(), max_rounds=3, protocols=[GlobalTest()])
    assert_same(weights(with_it), weights(without))
    assert with_it.metrics["global/loss"] == without.metrics["global/loss"]


def test_calibration_on_two_processes(tmp_path: Path) -> None:
    config = ["configs/quickstart.yaml", "configs/method/spherefed.yaml"]
    words = [word for path in config for word in ("-c", str(Path(__file__).parents[3] / path))]
    words += ["--trainer.max_rounds", "2", "--trainer.evaluate_every", "2", "--trainer.protocols", "[CalibratedTest]"]
    words += ["--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
    found = []
    for devices in ("1", "2"):
        folder = tmp_path / devices
        folder.mkdir()
        done = run_cli("fit", *words, "--trainer.devices", devices, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(rows(folder / "lightning_logs/version_0/metrics.csv")[-1])
    for metric in ("calibrated/acc", "calibrated/loss", "calibrated/uplink_bytes"):
        assert float(found[0][metric]) == pytest.approx(float(found[1][metric]), rel=1e-6)


def test_calibration_of_any_task(tmp_path: Path) -> None:
    algorithm = SphereFed(head="layers.4")
    made = fit(tmp_path, Stranger(), digits(), algorithm, max_rounds=2, protocols=[CalibratedTest()])
    assert made.metrics["calibrated/uplink_bytes"] == 5 * 8 * (32 * 32 + 10 * 32)
    assert 0 <= made.metrics["calibrated/accuracy"] <= 1


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedBABU(fine_tunes="tail"), r"algorithm\.fine_tunes is 'tail'"),  # type: ignore[arg-type]
        (lambda: FedETF(gamma=-1.0), r"algorithm\.gamma is -1"),
        (lambda: FedDrPlus(beta=1.5), r"algorithm\.beta is 1\.5"),
        (lambda: FedDrPlus(fine_tuning_beta=-0.1), r"algorithm\.fine_tuning_beta is -0\.1"),
        (lambda: CalibratedTest(ridge=0.0), r"CalibratedTest\.ridge is 0"),
    ],
)
def test_settings_that_cannot_work(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


class Convolutional(Stranger):
    """Its last layer is a convolution over the whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 10, 6), nn.Flatten())


@pytest.mark.parametrize(
    ("algorithm", "task", "message"),
    [
        (DotRegression(), lambda: model(network="logistic"), "nothing to train below its head, which algorithm DotReg"),
        (SphereFed(), lambda: model(network_args={"hidden": [8]}), "no 10 orthonormal classes in 8 dimensions"),
        (DotRegression(), lambda: model(network_args={"hidden": [8]}), "no simplex ETF of 10 classes in 8 dimensions"),
        (FedBABU(), lambda: model(network=nn.Sequential(nn.Flatten())), "has no single classifier"),
        (FedBABU(etf=True), lambda: model(network_args={"hidden": [8]}), "no simplex ETF of 10 classes in 8"),
        (FedBABU(), Stranger, r"FedBABU needs a last layer: name it as algorithm\.head; model Stranger .* has none"),
        (FedBABU(head="layers.9"), Stranger, r"algorithm\.head is 'layers\.9', and the model's submodules are"),
        (
            FedDrPlus(head="layers.5"),
            Stranger,
            r"replaces the head, which must be an nn\.Linear, .* Stranger is a LogS",
        ),
        (FedETF(head="layers.2"), Convolutional, r"must be an nn\.Linear, and that of model Convolutional is a Conv2d"),
        (
            FedBABU(etf=True, head="layers.2"),
            Convolutional,
            r"algorithm\.etf changes the head, which must be an nn\.Lin",
        ),
        (FedETF(head="layers.4"), lambda: Stranger(7), "head of model Stranger has 7 outputs, and the data have 10"),
    ],
)
def test_tasks_that_cannot_work(algorithm: FrozenHead, task: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, task(), digits(), algorithm)


def test_a_convolution_may_be_frozen(tmp_path: Path) -> None:
    made = fit(tmp_path, Convolutional(), digits(), FedBABU(head="layers.2"), max_rounds=1)
    assert made.run.federation.loops["model"].model.split.frozen == ("layers.2.weight", "layers.2.bias")


def test_calibration_needs_cosines(tmp_path: Path) -> None:
    for algorithm in (FedBABU(), FedAvg()):
        with pytest.raises(ConfigError, match="CalibratedTest needs a model that ends in cosines"):
            fit(tmp_path, model(), digits(), algorithm, protocols=[CalibratedTest()])
