"""Fine-tuning and calibrating what has a frozen head, and what cannot have one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_fed import Client
from lit_fed.engine.method.client import FineTuning
from lit_fed.errors import ConfigError
from lit_fed.methods import (
    KD,
    CalibratedTest,
    DotRegression,
    FedAvg,
    FedBABU,
    FedDrPlus,
    FedETF,
    SphereFed,
)
from lit_fed.methods.frozen_heads.frozen import FrozenHead
from lit_fed.protocols import GlobalTest, PersonalTest
from tests.methods.frozen_heads.support import Mixed, Stranger, digits, model, on_plane
from tests.support import assert_same, fit, rows, run_cli, trainer, weights

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


def stages(task: Any, x: Tensor, y: Tensor, counts: Tensor, alternations: int, epochs: int) -> dict[str, Tensor]:
    """FedETF's fine-tuning written out: full batches, plain gradient descent, 0.05 for all that trains in a round."""
    w = {name: tensor.clone().requires_grad_() for name, tensor in task.state_dict().items()}
    head = "network.head."
    body = ["network.body.weight", head + "projection.weight", head + "projection.bias", head + "temperature"]

    def cosines() -> Tensor:
        projected = x @ w["network.body.weight"].T @ w[head + "projection.weight"].T + w[head + "projection.bias"]
        return projected / projected.norm(dim=1, keepdim=True) @ w[head + "weight"].T

    def descend(loss: Tensor, names: list[str], lr: float) -> None:
        for name, gradient in zip(names, torch.autograd.grad(loss, [w[name] for name in names]), strict=True):
            w[name].data -= lr * gradient

    def nll(logits: Tensor) -> Tensor:
        return -logits.log_softmax(1)[torch.arange(len(y)), y].mean()

    descend(nll(w[head + "temperature"] * cosines() + counts.log()), body, 0.05)
    for _ in range(alternations):
        for names, lr in (([head + "weight"], 0.1), ([head + "projection.weight", head + "projection.bias"], 0.5)):
            for _ in range(epochs):
                descend(nll(w[head + "temperature"] * cosines()), names, lr)
    return {name: tensor.detach() for name, tensor in w.items()}


@pytest.mark.parametrize("alternations", [0, 1, 3])
def test_fedetf_has_a_second_stage_of_personalisation(alternations: int, tmp_path: Path) -> None:
    method = FedETF(projection_bias=True, alternations=alternations, alternation_epochs=2, projection_lr=0.5)
    task = on_plane((3.0, 4.0), 0.05, method)
    federation = fit(tmp_path, task, Mixed(num_clients=1), method, max_rounds=1, protocols=[]).run.federation
    task.load_state_dict(federation.global_model(0))
    x, y = torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 0, 1])
    expected = stages(task, x, y, torch.tensor([3.0, 1.0]), alternations, 2)
    with federation.session.at_work():
        entered = federation.session.enter(0, federation.broadcast(0, "test"), "personal", FineTuning())
        before = entered.model.copy()
        with federation.session.prepared(entered):
            found = entered.model.copy()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    moved = not torch.equal(found["network.head.weight"], before["network.head.weight"])
    assert moved is (alternations > 0)
    assert_same(entered.model.copy(), before)


def test_fedetfs_second_stage_leaves_the_federation_as_it_is(tmp_path: Path) -> None:
    (plain, state), (with_it, other) = (personal(tmp_path, FedETF(alternations=n)) for n in (0, 2))
    assert_same(state, other)
    assert plain != with_it


def test_a_task_that_was_federated_before_has_a_second_stage_too(tmp_path: Path) -> None:
    task, method = model(), FedETF(alternations=1)
    fit(tmp_path, task, digits(), method, max_rounds=1, protocols=[])
    protocols = [PersonalTest()]
    found = trainer(tmp_path, protocols=protocols).test(task, digits(), FedETF(alternations=1), ckpt_path="last")
    assert found == trainer(tmp_path, protocols=protocols).test(model(), digits(), method, ckpt_path="last")


def test_a_head_of_another_kind_is_not_taken_for_the_one_that_is_asked_for(tmp_path: Path) -> None:
    task = model()
    fit(tmp_path, task, digits(), FedETF(), max_rounds=1)
    with pytest.raises(
        ConfigError, match=r"algorithm\.projection_bias is true, and the existing head of model Classifier"
    ):
        fit(tmp_path, task, digits(), FedETF(projection_bias=True), max_rounds=1)


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
    assert made.metrics["calibrated/acc"] == pytest.approx(accuracy, abs=1e-7)  # a batch's is a float32
    # Two moments of each of 5 clients, 64·64 and 10·64 float64 numbers.
    assert made.metrics["calibrated/uplink_bytes"] == 5 * 8 * (64 * 64 + 10 * 64)


def test_calibration_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    with_it = fit(tmp_path, model(), digits(), SphereFed(), max_rounds=3, protocols=[CalibratedTest(), GlobalTest()])
    without = fit(tmp_path, model(), digits(), SphereFed(), max_rounds=3, protocols=[GlobalTest()])
    assert_same(weights(with_it), weights(without))
    assert with_it.metrics["global/loss"] == without.metrics["global/loss"]


@pytest.mark.long
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
        (lambda: FedETF(alternations=-1), r"algorithm\.alternations is -1; it must be at least 0"),
        (lambda: FedETF(alternation_epochs=0), r"algorithm\.alternation_epochs is 0; it must be at least 1"),
        (lambda: FedETF(frame_lr=0.0), r"algorithm\.frame_lr is 0\.0; it must be above 0"),
        (lambda: FedETF(projection_lr=-1.0), r"algorithm\.projection_lr is -1\.0; it must be above 0"),
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
        (DotRegression(), lambda: model(network="logistic"), "no parameters below its head, which algorithm DotReg"),
        (
            SphereFed(),
            lambda: model(network_args={"hidden": [8]}),
            "10 orthonormal classes do not fit into 8 dimensions",
        ),
        (
            DotRegression(),
            lambda: model(network_args={"hidden": [8]}),
            "a simplex ETF of 10 classes does not fit into 8 dimensions",
        ),
        (FedBABU(), lambda: model(network=nn.Sequential(nn.Flatten())), "has no single classifier"),
        (
            FedBABU(etf=True),
            lambda: model(network_args={"hidden": [8]}),
            "a simplex ETF of 10 classes does not fit into 8",
        ),
        (FedBABU(), Stranger, r"FedBABU needs a last layer: name it as algorithm\.head; model Stranger .* has none"),
        (
            FedBABU(head="layers.9"),
            Stranger,
            r"head is 'layers\.9', and no submodule of .* mean layers\.5",
        ),
        (
            FedDrPlus(head="layers.5"),
            Stranger,
            r"replaces the head, which must be an nn\.Linear, .* Stranger is a LogS",
        ),
        (
            FedETF(head="layers.2"),
            Convolutional,
            r"must be an nn\.Linear, and the head of model Convolutional is a Conv2d",
        ),
        (
            FedBABU(etf=True, head="layers.2"),
            Convolutional,
            r"algorithm\.etf changes the head, which must be an nn\.Lin",
        ),
        (FedETF(head="layers.4"), lambda: Stranger(7), "head of model Stranger has 7 outputs; it must have 10"),
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
