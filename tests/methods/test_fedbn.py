"""FedBN against arithmetic: f(x) = w(γx̂ + β), x̂ the normalised x, from w = γ = 1 and β = 0, with learning rate ½.

Client 0 has x = ±1, client 1 x = ±2, so x̂ = ±1 for both, and y = 2x. With y = a·x̂ (a is 2 or 4) and e = wγ − a the
gradients are γe for w, we for γ, and 0 for β.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_fed import Classifier, Model
from lit_fed.data import Arrays, Digits, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.methods import FedBN, FedPer
from tests.methods.support import Rota, client_state
from tests.support import LeastSquares, assert_same, fit, kept, weights


class Pairs(TensorDataModule):
    """Two samples for each of two clients."""

    num_classes = None
    input_shape = (1,)

    def __init__(self) -> None:
        super().__init__(num_clients=2, partition=Natural(), batch_size=2)

    def load_arrays(self) -> Arrays:
        clients = np.array([0, 0, 1, 1])
        x = np.array([[-1.0], [1.0], [-2.0], [2.0]], dtype=np.float32)
        return Arrays(x, 2 * x[:, 0], x, 2 * x[:, 0], clients, clients, "pairs")


class Normed(LeastSquares):
    """Batch norm under a name without "bn", and a weight."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(linear.weight)
        self.network = nn.Sequential(nn.BatchNorm1d(1, eps=1e-12), linear)


def numbers(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name.rpartition(".")[2]: tensor.item() for name, tensor in tensors.items()}


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: client 0: e = −1: w = γ = 1.5; client 1: e = −3: w = γ = 2.5; the mean of w is 2.
    # Round 1: client 0: e = 2·1.5 − 2 = 1: w = 2 − 0.75, γ = 1.5 − 1; client 1: e = 2·2.5 − 4 = 1: w = 2 − 1.25,
    #   γ = 2.5 − 1; the mean of w is (1.25 + 0.75)/2 = 1.
    # The variances of the samples are 2 and 8: 1 → 0.9 + 0.2 → 0.9·1.1 + 0.2, and 1 → 0.9 + 0.8 → 0.9·1.7 + 0.8.
    made = fit(tmp_path, Normed(), Pairs(), FedBN())
    assert weights(made)["network.1.weight"].item() == pytest.approx(1.0)
    own = {"bias": 0.0, "running_mean": 0.0, "num_batches_tracked": 2.0}
    assert numbers(kept(made, 0)) == pytest.approx({**own, "weight": 0.5, "running_var": 1.19})
    assert numbers(kept(made, 1)) == pytest.approx({**own, "weight": 1.5, "running_var": 2.33})
    # One float32 travels, to and from two clients; there is no global model.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (8, 8)
    assert "global/loss" not in made.metrics


def test_a_new_client_begins_with_the_first_batch_norm_and_the_newest_weights(tmp_path: Path) -> None:
    # Client 0 leaves w = 1.5. Client 1 begins with γ = 1: e = 1.5 − 4: w = 1.5 + 1.25, γ = 1 + 1.25·1.5.
    made = fit(tmp_path, Normed(), Pairs(), FedBN(), participation=Rota())
    assert weights(made)["network.1.weight"].item() == pytest.approx(2.75)
    assert client_state(made, 1)["network.0.weight"] == pytest.approx([2.875])
    assert client_state(made, 1)["network.0.num_batches_tracked"] == 1


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_every_batch_norm_stays_whole_whatever_its_name_and_the_policy_for_buffers(buffers: Any) -> None:
    model = Model(Classifier("resnet18", input_shape=(1, 8, 8)), buffers)
    model.divide(FedBN().split(model, 0))
    norms = {name for name, one in model.task.named_modules() if isinstance(one, nn.BatchNorm2d)}
    assert "network.layer2.0.downsample.1" in norms  # which has no "bn" in its name
    owners = {name.rpartition(".")[0] for name in model.personal_names}
    assert owners == norms
    assert len(model.personal_names) == 5 * len(norms)
    assert not owners & {name.rpartition(".")[0] for name in model.shared_names("up") + model.shared_names("down")}


def test_other_buffers_follow_the_policy(tmp_path: Path) -> None:
    task = Normed()
    task.register_buffer("seen", torch.zeros(1))
    model = Model(task)
    model.divide(FedBN().split(model, 0))
    assert model.shared_names() == ["network.1.weight", "seen"]


def test_with_local_buffers_it_is_fedper_that_keeps_batch_norm(tmp_path: Path) -> None:
    one = fit(tmp_path / "fedbn", Normed(), Pairs(), FedBN(), buffers="local")
    other = fit(tmp_path / "fedper", Normed(), Pairs(), FedPer(personal=["network.0"]), buffers="local")
    assert_same(weights(one), weights(other))
    assert [kept(one, client) for client in (0, 1)] == [kept(other, client) for client in (0, 1)]


def test_a_network_without_batch_norm_is_refused_which_would_make_it_fedavg(tmp_path: Path) -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False, track_running_stats=False))
    bare.add_module("head", nn.Linear(8, 10))
    for network in ("mlp", bare):
        task = Classifier(network, input_shape=(1, 8, 8))
        with pytest.raises(ConfigError, match=r"FedBN needs batch norm in model Classifier.*; choose a network with"):
            fit(tmp_path, task, Digits(num_clients=2, max_train_samples=40), FedBN())
