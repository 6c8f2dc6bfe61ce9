"""FedProto against arithmetic: features f(x) = w·x from w = 1, a task's loss without gradient, learning rate 1/32.

Client 0 has x = 1 and 3 of class 0 and x = 2 of class 1, client 1 has x = 4 of class 0.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.methods import FedProto
from lit_fed.methods.fedproto import PrototypeHead
from lit_fed.protocols import ClientTest, GlobalTest
from tests.methods.support import client_state
from tests.support import LeastSquares, fit


class Numbers(TensorDataModule):
    num_classes = 2
    input_shape = (1,)

    def __init__(self) -> None:
        super().__init__(num_clients=2, partition=Natural(), batch_size=8)

    def load_arrays(self) -> Arrays:
        x, y = np.array([[1], [3], [2], [4]], dtype=np.float32), np.array([0, 0, 1, 0])
        clients = np.array([0, 0, 0, 1])
        return Arrays(x, y, x, y, clients, clients, "numbers")


class Blank(Classifier):
    """Its own loss is 0."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return 0.0 * self(batch[0]).sum()


def task() -> Blank:
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2)
    nn.init.ones_(body.weight)
    network = nn.Sequential(OrderedDict(body=body, head=head))
    return Blank(network, lambda parameters: torch.optim.SGD(parameters, lr=1 / 32))


def prototypes(made: Any) -> list[float]:
    return made.run.federation.server["prototypes"].flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("weighting", "mean"), [("samples", 8 / 3), ("uniform", 3.0)])
def test_two_rounds_by_hand(tmp_path: Path, weighting: Any, mean: float) -> None:
    # Round 0 has no prototypes. After it client 0 sends 2 for both classes, with 2 and 1 samples, client 1 4 with 1:
    #   class 0: (2·2 + 4)/3 = 8/3, or the plain mean (2 + 4)/2 = 3; class 1: 2.
    # Round 1, with C the first: client 0: gradient 2/3·((1 − C)·1 + (3 − C)·3 + 0); client 1: 2·(4 − C)·4.
    once = fit(tmp_path / "once", task(), Numbers(), FedProto(weighting=weighting), max_rounds=1)
    assert prototypes(once) == pytest.approx([mean, 2.0])
    made = fit(
        tmp_path / "twice", task(), Numbers(), FedProto(weighting=weighting), protocols=[GlobalTest(), ClientTest()]
    )
    w = [1 - 2 / 3 * (10 - 4 * mean) / 32, 1 - 2 * (4 - mean) * 4 / 32]
    assert [client_state(made, client)["network.body.weight"][0] for client in (0, 1)] == [
        pytest.approx([one], rel=1e-6) for one in w
    ]
    expected = (4 * w[0] + 4 * w[1]) / 3 if weighting == "samples" else (2 * w[0] + 4 * w[1]) / 2
    assert prototypes(made) == pytest.approx([expected, 2 * w[0]])
    # Two prototypes and two counts up, as float32, for two clients; as many down, from the second round on.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (32, 32)
    assert once.metrics["comm/downlink_bytes"] == 0
    assert "global/loss" not in made.metrics
    # The nearest of about 2.8 and 2: of 1, 3, 2 and of 4·w₁ the first is taken for class 1, the others are right.
    assert made.metrics["clients/acc_mean"] == pytest.approx((2 / 3 + 1) / 2)


def test_the_head_is_linear_in_training_and_finds_the_nearest_prototype_in_evaluation() -> None:
    linear = nn.Linear(2, 3)
    head, f = PrototypeHead(linear), torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    torch.testing.assert_close(head.eval()(f), linear(f))  # no prototypes yet
    head.prototypes.copy_(torch.tensor([[0.0, 1.0], [3.0, 0.0], [3.0, 4.0]]))
    head.known.copy_(torch.tensor([1.0, 1.0, 0.0]))
    # Distances 1, 3, 5 and √18, 4, 0; the third class has no prototype.
    torch.testing.assert_close(head(f), torch.tensor([[-1.0, -3.0, -105.0], [-(18**0.5), -4.0, -(18**0.5) - 100]]))
    torch.testing.assert_close(head.train()(f), linear(f))


def test_prototypes_have_the_precision_of_the_weights_and_at_least_float32(tmp_path: Path) -> None:
    for precision, dtype in (("64-true", torch.float64), ("bf16-true", torch.float32)):
        made = fit(tmp_path / precision, task(), Numbers(), FedProto(), max_rounds=1, precision=precision, protocols=[])
        assert made.run.federation.server["prototypes"].dtype == dtype


def test_a_class_without_prototype_has_no_distance(tmp_path: Path) -> None:
    made = fit(tmp_path, task(), Numbers(), FedProto(), max_rounds=1)
    method, server = made.run.federation.algorithm, made.run.federation.server
    server["known"][0] = 0.0
    client = made.run.federation.session
    with client.at_work():
        entered = client.enter(0, made.run.federation.broadcast(1), "train")
        batch = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1])
        terms = method.objective(entered, batch)
    assert terms["prototypes"].item() == pytest.approx(3.0)  # (5 − 2)² of one in three


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.lam is -1"):
        FedProto(lam=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.weighting is 'size'"):
        FedProto(weighting="size")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm FedProto needs .* as algorithm\.head"):
        fit(tmp_path, LeastSquares(), algorithm=FedProto())
    with pytest.raises(ConfigError, match=r"FedProto compares .*, which must be an nn\.Linear"):
        fit(tmp_path, task(), Numbers(), FedProto(head="network"))
