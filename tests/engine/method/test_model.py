"""The tensors of a task: what travels, what stays, what never moves, what is put back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed import Classifier, Model, Split
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, Scaffold
from tests.support import LeastSquares, Points, fit, kept, weights

FLOAT, INT64 = 4, 8


class Normed(LeastSquares):
    """Batch norm in front of the linear map; its learning rate is 0, so that only buffers move."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))


# Client 0 sees (1,0) twice, client 1 (0,1) three times. Running means move a tenth of the way: (0.1, 0) and (0, 0.1);
# their mean with weights 2 and 3 is (0.04, 0.06). Both count one batch.
@pytest.mark.parametrize(
    ("policy", "mean", "count", "up", "down"),
    [
        ("average", [0.04, 0.06], 1, 6 * FLOAT + 4 * FLOAT + INT64, 6 * FLOAT + 4 * FLOAT + INT64),
        ("server", [0.0, 0.0], 0, 6 * FLOAT, 6 * FLOAT + 4 * FLOAT + INT64),
        ("local", [0.0, 0.0], 0, 6 * FLOAT, 6 * FLOAT),
    ],
)
def test_buffer_policies(tmp_path: Path, policy: Any, mean: list[float], count: int, up: int, down: int) -> None:
    made = fit(tmp_path, Normed(), Points(sizes=(2, 3)), max_rounds=1, buffers=policy)
    assert weights(made)["network.0.running_mean"].tolist() == pytest.approx(mean)
    assert int(weights(made)["network.0.num_batches_tracked"]) == count
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (2 * up, 2 * down)
    if policy == "local":
        assert kept(made, 0)["network.0.running_mean"].tolist() == pytest.approx([0.1, 0.0])
    else:
        assert made.run.federation.store.get(0) is None


def test_where_no_parameter_travels_no_buffer_does() -> None:
    model = Model(Normed())
    buffers = [f"network.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    model.divide(Split((), personal=tuple(model.parameters)))
    assert (model.shared_names("up"), model.shared_names("down")) == ([], [])
    assert model.personal_names == [*model.parameters, *buffers]


def test_preserved_puts_everything_back() -> None:
    model = Model(Classifier(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))))
    before = {name: tensor.clone() for name, tensor in model.task.state_dict().items()}
    with model.preserved():
        model.task(torch.randn(8, 2))
        for parameter in model.task.parameters():
            nn.init.normal_(parameter)
        assert not torch.equal(before["network.0.running_mean"], model.tensor("network.0.running_mean"))
    for name, tensor in model.task.state_dict().items():
        assert torch.equal(before[name], tensor), name


def test_rebound_buffers_are_found() -> None:
    """Some modules replace a buffer by a new tensor; the client must then send the new one."""
    model = Model(Classifier(nn.BatchNorm1d(2)))
    model.task.network.running_mean = torch.tensor([5.0, 6.0])  # type: ignore[union-attr]
    assert model.tensors(model.shared_names("up"))["network.running_mean"].tolist() == [5.0, 6.0]


def test_buffers_that_are_not_saved_do_not_travel() -> None:
    task = Classifier(nn.Linear(2, 1))
    task.network.register_buffer("cache", torch.zeros(3), persistent=False)
    assert Model(task).names == ["network.weight", "network.bias"]


def test_tensors_of_another_model_are_refused_by_name() -> None:
    model = Model(Classifier(nn.Linear(2, 1)))
    with pytest.raises(ConfigError, match=r"no parameter or buffer 'network\.scale'"):
        model.load({"network.scale": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"'network\.weight' has shape \(1, 3\) and the model's has \(1, 2\)"):
        model.load({"network.weight": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    ("split", "odd"),
    [
        (Split(("network.weight",)), "network.bias"),
        (Split(("network.weight", "network.bias", "network.scale")), "network.scale"),
        (Split(("network.weight", "network.bias"), frozen=("network.bias",)), "network.bias"),
    ],
)
def test_a_split_names_every_parameter_once(split: Split, odd: str) -> None:
    with pytest.raises(ConfigError, match=f"must name each parameter exactly once; check {odd}"):
        Model(Classifier(nn.Linear(2, 1))).divide(split)


class HalfFixed(LeastSquares):
    """w·x + b with a b of 1 that its author does not train, whatever the optimizer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 1)
        nn.init.zeros_(self.network.weight)
        nn.init.ones_(self.network.bias)
        self.network.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, weight_decay=0.1)


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold()])
def test_what_a_task_does_not_train_stays_and_costs_nothing(tmp_path: Path, algorithm: Any) -> None:
    task = HalfFixed()
    made = fit(tmp_path, task, Points(1), algorithm, max_rounds=1)
    assert weights(made)["network.bias"].tolist() == [1.0]
    assert weights(made)["network.weight"].tolist() == [[0.5, 0.0]]  # 0 − ½·(0 + 1 − 2)
    assert [parameter.requires_grad for parameter in task.network.parameters()] == [True, False]
    travels = 2 if isinstance(algorithm, Scaffold) else 1  # the weight, and its control variate
    assert made.metrics["comm/uplink_bytes"] == travels * 2 * FLOAT


def test_a_phase_cannot_train_what_a_task_does_not() -> None:
    model = Model(HalfFixed())
    model.divide(Split(tuple(model.parameters)))
    assert model.split == Split(("network.weight",), (), ("network.bias",))
    model.set_trainable(["network.bias"])
    assert not any(parameter.requires_grad for parameter in model.parameters.values())
    model.leave()
    assert model.parameters["network.weight"].requires_grad
