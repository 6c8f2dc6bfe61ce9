"""FedROD against arithmetic: two classes, W from 0, learning rate ½, full batches.

Client 0 has x = (1, 0) of class 0 and twice x = (0, 1) of class 1, client 1 one x = (1, 0) of class 0.
"""

from collections import OrderedDict
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.losses import balanced_softmax
from lit_fed.methods import FedAvg, FedROD
from lit_fed.methods.regularizers import logits
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.methods.support import client_state
from tests.support import LeastSquares, assert_same, fit, kept, weights

COUNTS = {0: torch.tensor([1, 2]), 1: torch.tensor([1, 0])}


class TwoClasses(TensorDataModule):
    num_classes = 2
    input_shape = (2,)

    def __init__(self) -> None:
        super().__init__(num_clients=2, partition=Natural(), batch_size=8)

    def load_arrays(self) -> Arrays:
        x, y, clients = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]], np.array([0, 1, 1, 0]), np.array([0, 0, 0, 1])
        return Arrays(x, y, x, y, clients, clients, "two classes")


def task(bias: bool = False) -> Classifier:
    linear = nn.Linear(2, 2, bias=bias)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    network = nn.Sequential(OrderedDict(body=nn.Identity(), head=linear))
    return Classifier(network, lambda parameters: torch.optim.SGD(parameters, lr=0.5))


def run(folder: Path, algorithm: Any, bias: bool = False, **kwargs: Any) -> Any:
    return fit(folder, task(bias), TwoClasses(), algorithm, **{"max_rounds": 1, **kwargs})


def cross_entropy(margin: float) -> float:
    """Of the true one of two classes."""
    return log(1 + exp(-margin))


def test_one_round_by_hand(tmp_path: Path) -> None:
    # Generic, client 0: softmax (1, 2)/3 everywhere. x₁: (1/3 − 1, 2/3)/3, x₂: 2(1/3, 2/3 − 1)/3, so that
    #   W_g = ½((2/9, −2/9), (−2/9, 2/9)). Client 1 has one class, whose softmax is 1: no gradient. Mean: ¾ of W_g.
    # Personal, softmax (½, ½): client 0: x₁: (−½, ½)/3, x₂: 2(½, −½)/3: W_p = ½((1/6, −1/3), (−1/6, 1/3)); client 1:
    #   x₁: (−½, ½): W_p = ½((½, 0), (−½, 0)).
    made = run(tmp_path, FedROD(), protocols=[GlobalTest(), ClientTest()])
    model = weights(made)
    twelfth = pytest.approx([1 / 12, -1 / 12, -1 / 12, 1 / 12])
    assert model["network.head.generic.weight"].flatten().tolist() == twelfth
    own = [kept(made, client)["network.head.personal.weight"].flatten().tolist() for client in (0, 1)]
    assert own == [pytest.approx([1 / 12, -1 / 6, -1 / 12, 1 / 6]), pytest.approx([1 / 4, 0, -1 / 4, 0])]
    # The global model predicts by z_g alone, of margin 1/6; clients by the sum: client 0: 1/6 + 1/6 and 1/6 + 1/3.
    assert model["network.head.personal.weight"].tolist() == [[0, 0], [0, 0]]
    assert made.metrics["global/loss"] == pytest.approx(cross_entropy(1 / 6))
    first = (cross_entropy(1 / 3) + 2 * cross_entropy(1 / 2)) / 3
    assert made.metrics["clients/loss_mean"] == pytest.approx((first + cross_entropy(2 / 3)) / 2)
    # Four float32 of eight travel, to and from two clients.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (32, 32)


class Balanced(FedAvg):
    """FedAvg with the balanced softmax."""

    needs = frozenset({"loss", "logits", "targets"})

    def objective(self, client: Any, batch: Any) -> dict[str, Tensor]:
        return {"balanced": balanced_softmax(logits(client, batch), client.targets(batch), COUNTS[client.id])}


@pytest.mark.parametrize("hidden", [None, 3])
def test_the_generic_model_is_fedavgs_with_the_balanced_softmax(tmp_path: Path, hidden: int | None) -> None:
    generic = {
        name.replace("generic.", ""): tensor
        for name, tensor in weights(run(tmp_path / "rod", FedROD(hidden), True, max_rounds=3)).items()
        if "personal." not in name and "hyper." not in name
    }
    assert_same(generic, weights(run(tmp_path / "fedavg", Balanced(), True, max_rounds=3)))


def test_a_hyper_network_makes_the_personal_classifier(tmp_path: Path) -> None:
    """Against autograd on the formula H(a) = W₂ relu(W₁a + b₁) + b₂, a the shares of classes, reshaped to h_p."""
    torch.manual_seed(0)
    begun = weights(run(tmp_path / "begun", FedROD(hidden=3), max_rounds=1, local_epochs=1, protocols=[]))
    torch.manual_seed(0)
    made = run(tmp_path / "made", FedROD(hidden=3), max_rounds=2, protocols=[ClientTest()])
    names = [f"network.head.hyper.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    x, y = torch.eye(2)[[0, 1, 1, 0]], torch.tensor([0, 1, 1, 0])
    generic = [begun["network.head.generic.weight"]]

    def personal(hyper: list[Tensor], client: int) -> Tensor:
        shares = COUNTS[client] / COUNTS[client].sum()
        return F.linear(F.linear(shares, hyper[0], hyper[1]).relu(), hyper[2], hyper[3]).view(2, 2)

    trained = []
    for client, rows in ((0, slice(0, 3)), (1, slice(3, 4))):
        hyper = [begun[name].clone().requires_grad_() for name in names]
        z = (x[rows] @ generic[0].T).detach() + x[rows] @ personal(hyper, client).T
        gradients = torch.autograd.grad(F.cross_entropy(z, y[rows]), hyper)
        trained.append([(one - 0.5 * gradient).detach() for one, gradient in zip(hyper, gradients, strict=True)])
    expected = [(3 * one + other) / 4 for one, other in zip(*trained, strict=True)]
    found = [weights(made)[name] for name in names]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # Clients keep nothing, and are tested with what the averaged hyper-network makes for them.
    losses = []
    for client, rows in ((0, slice(0, 3)), (1, slice(3, 4))):
        head = weights(made)["network.head.generic.weight"] + personal(found, client)
        losses.append(F.cross_entropy(x[rows] @ head.T, y[rows]).item())
    assert made.metrics["clients/loss_mean"] == pytest.approx(sum(losses) / 2)
    assert made.run.federation.store.get(0) is None


@pytest.mark.parametrize("hidden", [None, 3])
def test_fine_tuning_trains_the_personal_classifier(tmp_path: Path, hidden: int | None) -> None:
    made = run(tmp_path, FedROD(hidden), protocols=[ClientTest(), PersonalTest(epochs=20)], max_rounds=2)
    assert made.metrics["personal/loss_mean"] < made.metrics["clients/loss_mean"] - 0.1
    if hidden is None:
        assert list(client_state(made, 1)) == ["network.head.personal.weight"]


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.hidden is 0"):
        FedROD(hidden=0)
    with pytest.raises(ConfigError, match=r"algorithm FedROD needs .* as algorithm\.head"):
        fit(tmp_path, LeastSquares(), algorithm=FedROD())
    with pytest.raises(ConfigError, match=r"FedROD adds to the head, which must be an nn\.Linear, .* is a Identity"):
        fit(tmp_path, task(), TwoClasses(), FedROD(head="network.body"))
