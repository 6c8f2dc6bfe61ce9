"""Methods over adapters on a module that wraps peft, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed.data import Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import (
    DotRegression,
    FedAvg,
    FedBABU,
    FedETF,
    FedExLoRA,
    FedIT,
    FedPer,
    FedProto,
    FedRep,
    FedROD,
    FedSALoRA,
    FFALoRA,
    FLoRA,
    HetLoRA,
    LGFedAvg,
    SphereFed,
)
from lit_fed.networks import adapters_of
from tests.support import LeastSquares, fit, kept, weights

peft = pytest.importorskip("peft")


class Net(nn.Module):
    """64 → 20 → 10."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classifier = nn.Linear(64, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Any:
        return self.classifier(F.relu(self.hidden(x.flatten(1))))


class Wrapped(LeastSquares):
    """An adapter of rank 2 on the hidden layer, and the classifier trained as one of peft's ``modules_to_save``."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["hidden"], modules_to_save=["classifier"])
        self.network = peft.get_peft_model(Net(), lora)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


HEAD, A, B = 20 * 10 + 10, 2 * 64, 20 * 2
SENT = {FedAvg: A + B, FedExLoRA: A + B, FedIT: A + B, FedSALoRA: A, FFALoRA: B, FLoRA: A + B, HetLoRA: A + B}


@pytest.mark.parametrize("method", SENT)
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_it_runs_and_sends_what_is_shared(method: type[FedAvg], executor: Any, tmp_path: Path) -> None:
    data = Digits(num_clients=4, max_train_samples=120)
    task = Wrapped()
    (one,) = adapters_of(task)
    base = task.get_parameter(one.base).detach().clone()
    made = fit(tmp_path, task, data, method(), max_rounds=3, executor=executor)
    assert made.metrics["comm/uplink_bytes"] == 4 * 4 * (SENT[method] + HEAD)
    moved = not torch.equal(weights(made)[one.base], base)
    assert moved == (method in (FedExLoRA, FLoRA))


class WithHead(Wrapped):
    """Its head is the classifier, whose copy trains."""

    @property
    def head(self) -> nn.Module:
        return self.get_submodule("network.base_model.model.classifier")


class LeftBehind(Wrapped):
    """Its head is the layer that peft copied, which neither trains nor runs."""

    @property
    def head(self) -> nn.Module:
        return self.get_submodule("network.base_model.model.classifier.original_module")


@pytest.mark.parametrize(("method", "sent"), [(FedPer, A + B), (FedRep, A + B), (FedBABU, A + B), (LGFedAvg, HEAD)])
def test_a_method_of_the_head_takes_the_copy_that_trains(method: type[FedAvg], sent: int, tmp_path: Path) -> None:
    data = Digits(num_clients=4, max_train_samples=120)
    made = fit(tmp_path / "copy", WithHead(), data, method(), max_rounds=2)
    assert made.metrics["comm/uplink_bytes"] == 4 * 4 * sent
    if method in (FedPer, FedRep):
        assert "network.base_model.model.classifier.modules_to_save.default.weight" in kept(made, 1)
    said = r"the head of model LeftBehind does not train.*original_module\.weight' is frozen; name the module that"
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path / "original", LeftBehind(), data, method())


@pytest.mark.parametrize("method", [DotRegression, FedETF, FedProto, FedROD, SphereFed])
@pytest.mark.parametrize("task", [WithHead, LeftBehind])
def test_a_method_that_replaces_the_head_refuses_a_copied_one(
    method: type[FedAvg], task: type[Wrapped], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"the head of model WithHead is a ModulesToSaveWrapper|ran 0 times"):
        fit(tmp_path, task(), Digits(num_clients=4, max_train_samples=120), method())
