"""The client module: what travels, what stays, what is put back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed import Classifier, ClientModule, load_network
from lit_fed.errors import ConfigError
from lit_fed.networks import SmallCNN
from tests.support import LeastSquares, Points, fit, weights

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
    state = made.federation.store.get(0)
    if policy == "local":
        assert state is not None
        assert state["network.0.running_mean"].tolist() == pytest.approx([0.1, 0.0])
    else:
        assert state is None


def test_preserved_puts_everything_back() -> None:
    module = Classifier(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    module.prepare_round(0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with module.preserved():
        module(torch.randn(8, 2))
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        assert not torch.equal(before["network.0.running_mean"], module.state_dict()["network.0.running_mean"])
    for name, tensor in module.state_dict().items():
        assert torch.equal(before[name], tensor), name


def test_rebound_buffers_are_found() -> None:
    """Some modules replace a buffer by a new tensor; the module must then send the new one."""
    module = Classifier(nn.BatchNorm1d(2))
    module.prepare_round(0)
    module.network.running_mean = torch.tensor([5.0, 6.0])  # type: ignore[assignment]
    assert module.shared_tensors()["network.running_mean"].tolist() == [5.0, 6.0]


def test_buffers_that_are_not_saved_do_not_travel() -> None:
    module = Classifier(nn.Linear(2, 1))
    module.network.register_buffer("cache", torch.zeros(3), persistent=False)
    assert module.state_names() == ["network.weight", "network.bias"]


def test_tensors_of_another_model_are_refused_by_name() -> None:
    module = Classifier(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"no parameter or buffer named 'network\.scale'"):
        module.load_tensors({"network.scale": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"'network\.weight' has shape \(1, 3\) where the model has \(1, 2\)"):
        module.load_tensors({"network.weight": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    ("lengths", "message"), [({"local_epochs": 0}, "local_epochs is 0"), ({"local_steps": -1}, "-1")]
)
def test_local_work_needs_a_length(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Classifier("logistic", input_shape=(2,), **lengths)


def test_log_outside_a_federation_is_silent() -> None:
    Classifier("logistic", input_shape=(2,)).log("train/loss", torch.tensor(1.0))
    ClientModule().log_dict({"a": 1.0})


def test_a_trained_network_is_a_plain_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = fit(tmp_path, max_rounds=2)
    network = load_network(made.log_dir, nn.Linear(2, 1, bias=False))
    assert type(network) is nn.Linear
    assert network.weight.tolist() == [[0.46875, 2.4375]]  # see test_fedavg
    assert not network.training
    assert type(Classifier(SmallCNN()).deployable()) is SmallCNN
