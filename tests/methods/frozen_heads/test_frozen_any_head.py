"""Frozen heads on any task that names its head, and wherever a network keeps it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lit_fed import Classifier
from lit_fed.data import IID, Digits, Shards
from lit_fed.data.population.census import Census
from lit_fed.errors import ConfigError
from lit_fed.methods import (
    DotRegression,
    FedAvg,
    FedBABU,
    FedETF,
    SphereFed,
)
from lit_fed.methods.frozen_heads.frozen import FrozenHead
from lit_fed.networks import ProjectedETFHead, build_network, classifier, features
from tests.methods.frozen_heads.support import EACH, Mixed, Stranger, digits, model
from tests.support import fit

# --- any task --------------------------------------------------------------------------------------------------------


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


def test_counts_are_the_clients_own_and_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(algorithm: FedAvg) -> int:
        counts = Mock(side_effect=Census.class_counts)
        monkeypatch.setattr(Census, "class_counts", lambda census, client_id: counts(census, client_id))
        data = Digits(num_clients=5, partition=Shards(2), batch_size=16, max_train_samples=240)
        fit(tmp_path, model(), data, algorithm, max_rounds=2, local_epochs=3, protocols=[])
        monkeypatch.undo()
        return counts.call_count

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
