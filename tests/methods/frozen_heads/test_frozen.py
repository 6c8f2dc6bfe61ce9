"""Methods whose classifier is frozen: against arithmetic, reduced to known ones, and what stays where it is."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lit_fed.client import FineTuning
from lit_fed.frozen import FrozenClassifier
from lit_fed.protocols import GlobalTest, PersonalTest
from lit_fed.regularizers import FD, KD, REGULARIZERS
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import Arrays, Digits, Shards
from lit_fed.errors import ConfigError
from lit_fed.methods import CalibratedTest, DotRegression, FedAvg, FedBABU, FedDrPlus, FedETF, SphereFed
from lit_fed.networks import Outputs
from tests.support import Points, assert_same, fit, rows, run_cli, weights

FROZEN = [FedBABU, SphereFed, FedETF, DotRegression, FedDrPlus]
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
    method: type[FrozenClassifier], f: tuple[float, float], head: list[list[float]] | None, lr: float, **kwargs: Any
) -> FrozenClassifier:
    module = method(network=Plane(f), num_classes=2, optimizer=partial(torch.optim.SGD, lr=lr), **kwargs)
    if head is not None:
        module.network.head.weight.data = torch.tensor(head)
    return module


def digits(**kwargs: Any) -> Digits:
    settings: dict[str, Any] = {"num_clients": 5, "partition": Shards(2), "batch_size": 16, "max_train_samples": 240}
    return Digits(**(settings | kwargs))


def client(method: type[Classifier], seed: int = 0, **kwargs: Any) -> Classifier:
    """A client for the digits; the same seed gives the same first weights."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"network": "mlp", "num_classes": 10, "input_shape": (1, 8, 8), "optimizer": SGD}
    return method(**(settings | kwargs))


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_fedbabu_by_hand(tmp_path: Path) -> None:
    # f = (0, 4), so logits are (0, 0) and both classes have probability ½. Client 0 (y=0): the gradient in f is
    # −½(1, 0) + ½(−1, 0) = (−1, 0), so its column of W becomes (1, 4) with learning rate 1; client 1's (−1, 4).
    # Means with weights 1 and 3: ((3·0 + 1)/4, 4) and ((0 − 3·1)/4, 4). The loss is ln 2 for both.
    made = fit(tmp_path, on_plane(FedBABU, (0.0, 4.0), None, lr=1.0), TwoClasses(), max_rounds=1)
    assert weights(made)["network.body.weight"].tolist() == [[0.25, -0.75], [4.0, 4.0]]
    assert made.metrics["train/loss"] == pytest.approx(math.log(2))


def test_dot_regression_by_hand(tmp_path: Path) -> None:
    # f = (3, 4), f̂ = (0.6, 0.8); the gradient in f is (cos − 1)·(v − cos·f̂)/5.
    # Client 0, v = (1, 0), cos 0.6: −0.4·(0.64, −0.48)/5 = (−0.0512, 0.0384), so f becomes (3.64, 3.52) at rate 12.5.
    # Client 1, v = (−1, 0), cos −0.6: −1.6·(−0.64, 0.48)/5 = (0.2048, −0.1536), so (0.44, 5.92).
    # Columns: ((3·3 + 3.64)/4, (3·4 + 3.52)/4) = (3.16, 3.88) and ((3 + 3·0.44)/4, (4 + 3·5.92)/4) = (1.08, 5.44).
    # Losses ½·0.4² = 0.08 and ½·1.6² = 1.28: (0.08 + 3·1.28)/4 = 0.98.
    module = on_plane(DotRegression, (3.0, 4.0), [[1.0, 0.0], [-1.0, 0.0]], lr=12.5)
    made = fit(tmp_path, module, TwoClasses(), max_rounds=1)
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
    module = on_plane(FedDrPlus, (3.0, 4.0), [[1.0, 0.0], [-1.0, 0.0]], lr=rate, beta=0.5, local_epochs=2)
    made = fit(tmp_path, module, TwoClasses(num_clients=1), max_rounds=1)
    torch.testing.assert_close(weights(made)["network.body.weight"][:, 0], torch.tensor(expected))
    # Means over the two steps: ½·½·(0.4² + (cos − 1)²)/2, and 0 before the first step, ½·½(0.64² + 0.48²) = 0.16 after.
    assert made.metrics["train/dr"] == pytest.approx(0.125 * (0.16 + (cos - 1) ** 2), rel=1e-5)
    assert made.metrics["train/fd"] == pytest.approx(0.08, rel=1e-5)


def test_distillation_alone_stays_where_it_is(tmp_path: Path) -> None:
    made = fit(tmp_path, on_plane(FedDrPlus, (3.0, 4.0), None, lr=1.0, beta=0.0), TwoClasses(), max_rounds=2)
    assert weights(made)["network.body.weight"].tolist() == [[3.0, 3.0], [4.0, 4.0]]


def test_spherefed_by_hand(tmp_path: Path) -> None:
    # Cosines (0.6, 0.8) to the classes (1, 0) and (0, 1). The gradient in f is (I − f̂f̂ᵀ)(cos − e_y)·(2/C)/5, C = 2.
    # Client 0: cos − e = (−0.4, 0.8), along f̂ 0.4, left (−0.64, 0.48)/5: f becomes (3.64, 3.52) at rate 5.
    # Client 1: (0.6, −0.2), along f̂ 0.2, left (0.48, −0.36)/5: (2.52, 4.36).
    # Losses ½(0.4² + 0.8²) = 0.4 and ½(0.6² + 0.2²) = 0.2: (0.4 + 3·0.2)/4 = 0.25.
    module = on_plane(SphereFed, (3.0, 4.0), [[1.0, 0.0], [0.0, 1.0]], lr=5.0)
    made = fit(tmp_path, module, TwoClasses(), max_rounds=1)
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
    module = on_plane(FedETF, (3.0, 4.0), [[1.0, 0.0], [-1.0, 0.0]], lr=0.1)
    module.network.head.projection.weight.data = torch.eye(2)
    made = fit(tmp_path, module, Mixed(num_clients=1), max_rounds=1)
    first, second = 3 * math.exp(0.6), math.exp(-0.6)
    losses = -math.log(first / (first + second)), -math.log(second / (first + second))
    assert made.metrics["train/loss"] == pytest.approx((3 * losses[0] + losses[1]) / 4)
    # The temperature's gradient: the mean of Σ p_c·cos_c − cos_y, with p the balanced softmax.
    p = first / (first + second)
    expected = 1 - 0.1 * (0.6 * p - 0.6 * (1 - p) - (3 * 0.6 - 0.6) / 4)
    assert float(weights(made)["network.head.temperature"]) == pytest.approx(expected)


def test_fedetf_learns_nothing_from_clients_of_one_class(tmp_path: Path) -> None:
    # The absent class weighs nothing, so the own class has probability 1 from the start.
    made = fit(tmp_path, on_plane(FedETF, (3.0, 4.0), None, lr=1.0), TwoClasses(), max_rounds=1)
    assert weights(made)["network.body.weight"].tolist() == [[3.0, 3.0], [4.0, 4.0]]
    assert made.metrics["train/loss"] == 0


# --- reductions ------------------------------------------------------------------------------------------------------


class StillHead(Classifier):
    """A plain classifier whose head has learning rate 0, which is how the public code freezes it."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [{"params": [p for name, p in named if (".head." in name) == head]} for head in (False, True)]
        groups[1]["lr"] = 0.0  # type: ignore[assignment]  # a group holds parameters and numbers
        return SGD(groups)


class StillSphere(StillHead):
    """As `StillHead`, with SphereFed's objective written out."""

    def objective(self, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        error = outputs.logits - torch.eye(10)[y]
        return {"mse": error.square().mean()}


def test_fedbabu_is_fedavg_with_a_head_that_does_not_learn(tmp_path: Path) -> None:
    babu = fit(tmp_path, client(FedBABU), digits(), max_rounds=3)
    assert_same(weights(babu), weights(fit(tmp_path, client(StillHead), digits(), max_rounds=3)))


def test_spherefed_is_fedavg_with_squared_errors_on_a_head_that_does_not_learn(tmp_path: Path) -> None:
    sphere = client(SphereFed)
    plain = client(StillSphere, network=client(SphereFed).network)
    assert_same(
        weights(fit(tmp_path, sphere, digits(), max_rounds=3)), weights(fit(tmp_path, plain, digits(), max_rounds=3))
    )


class PlainETF(FrozenClassifier):
    """Cross-entropy on FedETF's network."""

    make_head = FedETF.make_head  # type: ignore[assignment]  # a method of another class


def test_fedetf_of_gamma_0_is_the_cross_entropy_on_its_network(tmp_path: Path) -> None:
    etf = fit(tmp_path, client(FedETF, gamma=0.0), digits(), max_rounds=3)
    assert_same(weights(etf), weights(fit(tmp_path, client(PlainETF), digits(), max_rounds=3)))


def test_feddr_plus_of_beta_1_is_dot_regression(tmp_path: Path) -> None:
    plus = fit(tmp_path, client(FedDrPlus, beta=1.0), digits(), max_rounds=3)
    plain = fit(tmp_path, client(DotRegression), digits(), max_rounds=3)
    assert_same(weights(plus), weights(plain))


def test_feddr_plus_is_dot_regression_with_the_regularizer(tmp_path: Path) -> None:
    regularizer = FD(weight=1 - 0.9, objective_weight=0.9)
    plain = fit(tmp_path, client(DotRegression, regularizer=regularizer), digits(), max_rounds=3)
    assert_same(weights(fit(tmp_path, client(FedDrPlus), digits(), max_rounds=3)), weights(plain))


# --- what stays, and what it costs -----------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    "optimizer", [SGD, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)], ids=["SGD", "AdamW"]
)
def test_frozen_weights_keep_their_bits(method: type[FrozenClassifier], optimizer: Any, tmp_path: Path) -> None:
    module = client(method, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = fit(tmp_path, module, digits(), max_rounds=2, protocols=[PersonalTest(), GlobalTest()])
    after = weights(made)
    assert isinstance(module, FrozenClassifier)
    assert module.frozen
    assert all(torch.equal(after[name], before[name]) for name in module.frozen)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in module.frozen)
    assert all(not torch.equal(after[name], before[name]) for name in after if name not in module.frozen)


@EACH
def test_frozen_weights_do_not_travel(method: type[FrozenClassifier], tmp_path: Path) -> None:
    # mlp: 64·64 + 64 in the body, in float32, from each of 5 clients; FedETF adds its projection 64·10 and temperature.
    numbers = 64 * 64 + 64 + (64 * 10 + 1 if method is FedETF else 0)
    metrics = fit(tmp_path, client(method), digits(), max_rounds=1).metrics
    assert metrics["comm/uplink_bytes"] == metrics["comm/downlink_bytes"] == 5 * 4 * numbers


@pytest.mark.parametrize("method", [FedBABU, SphereFed, FedETF, DotRegression])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_every_regularizer_joins_every_frozen_classifier(
    method: type[FrozenClassifier], regularizer: Any, tmp_path: Path
) -> None:
    calm = partial(torch.optim.SGD, lr=0.01)
    module = client(method, regularizer=regularizer, optimizer=calm, local_epochs=None, local_steps=2)
    metrics = fit(tmp_path, module, digits(), max_rounds=1, protocols=[]).metrics
    assert metrics[f"train/{regularizer}"] > 0  # the second step is away from the teacher


@EACH
def test_it_trains_without_a_federation(method: type[FrozenClassifier]) -> None:
    module = client(method)
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    module.on_train_start()
    loss = module.training_step((x, y), 0)
    loss.backward()
    assert torch.isfinite(loss)


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def personal(folder: Path, module: Classifier) -> tuple[float, dict[str, Tensor]]:
    made = fit(folder, module, digits(), max_rounds=2, protocols=[PersonalTest(epochs=2)])
    return made.metrics["personal/loss_mean"], weights(made)


def test_either_loss_fine_tunes_either_model(tmp_path: Path) -> None:
    found = {
        (beta, second): personal(tmp_path, client(FedDrPlus, beta=beta, fine_tuning_beta=second))
        for beta in (0.5, 1.0)
        for second in (None, 0.5, 1.0)
    }
    for beta in (0.5, 1.0):  # the second stage leaves the first as it was, and its default is the first one's β
        for second in (0.5, 1.0):
            assert_same(found[beta, second][1], found[beta, None][1])
        assert found[beta, None][0] == found[beta, beta][0]
        assert found[beta, 0.5][0] != found[beta, 1.0][0]
    assert found[1.0, 1.0][0] == personal(tmp_path, client(DotRegression))[0]


def test_fedbabu_fine_tunes_what_it_is_told(tmp_path: Path) -> None:
    found = {part: personal(tmp_path, client(FedBABU, fine_tunes=part)) for part in ("body", "head", "all")}
    for _, state in found.values():
        assert_same(state, found["body"][1])
    assert len({loss for loss, _ in found.values()}) == 3


def test_fedbabu_starts_from_a_simplex_etf_if_told_so(tmp_path: Path) -> None:
    frame = client(FedBABU, etf=True, fine_tunes="all").state_dict()["network.head.weight"].double()
    assert frame.shape == (10, 64)  # norm 1, and a cosine of −1/9 between any two of the 10 classes
    torch.testing.assert_close(frame @ frame.T, 10 / 9 * torch.eye(10).double() - 1 / 9, atol=1e-6, rtol=0)
    # The federation leaves it as it is; fine-tuning trains it where it is told to.
    found = {part: personal(tmp_path, client(FedBABU, etf=True, fine_tunes=part)) for part in ("body", "all")}
    for _, state in found.values():
        torch.testing.assert_close(state["network.head.weight"].double(), frame)
        assert not state["network.head.bias"].any()
    assert found["body"][0] != found["all"][0]


def test_a_head_that_is_fine_tuned_has_the_downloaded_one_for_a_teacher(tmp_path: Path) -> None:
    module = client(FedBABU, fine_tunes="head", regularizer=KD())
    federation = fit(tmp_path, module, digits(), max_rounds=1, protocols=[]).federation
    assert federation is not None
    x = torch.randn(3, 1, 8, 8)
    ctx = federation.executor.enter(0, federation.evaluation_broadcast(0), 0, "personal", FineTuning())
    before = module.teach(x).logits
    module.phases(ctx)
    module.network.head.weight.data.add_(1.0)
    assert torch.equal(module.teach(x).logits, before)
    assert not torch.equal(module(x), before)


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_is_the_least_squares_fit_of_all_data(tmp_path: Path) -> None:
    data = digits()
    made = fit(tmp_path, client(SphereFed), data, max_rounds=2, protocols=[CalibratedTest(ridge=1e-2)])
    module: Any = client(SphereFed)
    module.load_state_dict(weights(made))

    def phi(loader: Any) -> tuple[np.ndarray, np.ndarray]:
        x, y = (torch.cat(part) for part in zip(*loader, strict=True))
        f = module.network.forward_features(x).detach().double().numpy()
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
    with_it = fit(tmp_path, client(SphereFed), digits(), max_rounds=3, protocols=[CalibratedTest(), GlobalTest()])
    without = fit(tmp_path, client(SphereFed), digits(), max_rounds=3, protocols=[GlobalTest()])
    assert_same(weights(with_it), weights(without))
    assert with_it.metrics["global/loss"] == without.metrics["global/loss"]


def test_calibration_on_two_processes(tmp_path: Path) -> None:
    config = ["configs/quickstart.yaml", "configs/method/spherefed.yaml"]
    words = [word for path in config for word in ("-c", str(Path(__file__).parents[2] / path))]
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


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedBABU(fine_tunes="tail"), r"model\.fine_tunes is 'tail'"),
        (lambda: FedETF(gamma=-1.0), r"model\.gamma is -1"),
        (lambda: FedDrPlus(beta=1.5), r"model\.beta is 1\.5"),
        (lambda: FedDrPlus(fine_tuning_beta=-0.1), r"model\.fine_tuning_beta is -0\.1"),
        (lambda: CalibratedTest(ridge=0.0), r"CalibratedTest\.ridge is 0"),
        (lambda: client(DotRegression, network="logistic"), "nothing to train below its classifier"),
        (lambda: client(SphereFed, network_args={"hidden": [8]}), "no 10 orthonormal classes in 8 dimensions"),
        (lambda: client(DotRegression, network_args={"hidden": [8]}), "no simplex ETF of 10 classes in 8 dimensions"),
        (lambda: client(FedBABU, network=nn.Sequential(nn.Flatten())), "has no single classifier"),
        (lambda: client(FedBABU, network_args={"hidden": [8]}, etf=True), "no simplex ETF of 10 classes in 8"),
    ],
)
def test_settings_that_cannot_work(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_calibration_needs_cosines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CalibratedTest needs a model that ends in cosines"):
        fit(tmp_path, client(FedBABU), digits(), FedAvg(), protocols=[CalibratedTest()])
