"""Methods whose classifier is frozen: against arithmetic, reduced to known ones, and what stays where it is."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from lit_fed import Classifier, objective_of
from lit_fed.errors import ConfigError
from lit_fed.methods import (
    FD,
    KD,
    LD,
    NTD,
    DotRegression,
    FedAvg,
    FedBABU,
    FedDrPlus,
    FedETF,
    Prox,
    SphereFed,
)
from lit_fed.methods.frozen_heads.frozen import FrozenHead
from lit_fed.protocols import GlobalTest, PersonalTest
from tests.methods.frozen_heads.support import EACH, SGD, Mixed, TwoClasses, digits, model, on_plane
from tests.support import assert_same, fit, weights


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
        ConfigError, match=r"which must be an nn\.Linear, and the head of model Classifier is a SimplexHead"
    ):
        fit(tmp_path / "third", task, digits(), SphereFed())


def test_a_fedbabu_task_is_handed_back_with_a_head_that_trains(tmp_path: Path) -> None:
    task = model()
    fit(tmp_path, task, digits(), FedBABU(fine_tunes="head"), max_rounds=1, protocols=[PersonalTest()])
    assert all(parameter.requires_grad for parameter in task.parameters())
