"""Methods whose server trains: where that ends in NaN or infinity, nothing of the round is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import Algorithm
from lit_fed.data import Digits
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.wire.payload import not_finite
from lit_fed.errors import NonFiniteServer
from lit_fed.methods import FedDF, FedGen, HFedCKD
from lit_fed.tasks import Classifier
from tests.support import assert_same, fit, rows, saved_weights

SMALL: dict[str, Any] = {"generator_steps": 5, "generator_batch_size": 8, "noise_size": 4}
PSEUDO: dict[str, Any] = {"generator": "features", "pseudo_size": 8, "distillation_steps": 5, "width": 8, **SMALL}


def sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


METHODS: dict[str, tuple[str, Callable[[float], Algorithm[Any]]]] = {
    "FedDF, its student": ("model", lambda lr: FedDF(optimizer=sgd(lr), epochs=5, public_size=16)),
    # With features the classifier alone learns, whose gradients are bounded: it is large, and finite.
    "HFedCKD, its networks": (
        "network.body",
        lambda lr: HFedCKD(distillation_optimizer=sgd(lr), **PSEUDO | {"generator": "images"}),
    ),
    "HFedCKD, its generator": ("generator", lambda lr: HFedCKD(generator_optimizer=sgd(lr), **PSEUDO)),
    "FedGen, its generator": ("generator", lambda lr: FedGen(generator_optimizer=sgd(lr), **SMALL)),
}


def federate(folder: Path, method: Algorithm[Any], max_rounds: int, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    task = Classifier("mlp", input_shape=(1, 8, 8), num_classes=10, network_args={"hidden": [8]})
    data = Digits(num_clients=2, max_train_samples=64, max_test_samples=32, batch_size=32)
    return fit(folder, task, data, method, max_rounds=max_rounds, local_steps=1, **kwargs)


@pytest.mark.parametrize("name", METHODS)
def test_a_server_that_bursts_is_refused_by_method_and_round_and_the_last_checkpoint_stays(
    tmp_path: Path, name: str
) -> None:
    where, make = METHODS[name]
    good = federate(tmp_path, make(1e-9), 1)
    run = good.log_dir
    before = saved_weights(run)
    method = make(1e30)
    with pytest.raises(NonFiniteServer) as error:
        federate(tmp_path, method, 3, ckpt_path="last")
    message = str(error.value)
    assert message.startswith(f"{name.partition(',')[0]}'s step in round 1 left NaN or infinity in ")
    assert where in message.partition(" of the server")[0]
    assert message.endswith("the last checkpoint is from the previous round")
    assert_same(saved_weights(run), before)
    for file in ("last.ckpt", "best.ckpt"):
        content = read_checkpoint(run / "checkpoints" / file)
        assert content["round_idx"] == 1
        assert not not_finite(content["server"])
    assert len(rows(run / "metrics.csv")) == 1
    # It goes on from there with a rate that is none too large.
    again = federate(tmp_path, make(1e-9), 2, ckpt_path="last")
    assert all(math.isfinite(value) for value in again.metrics.values())
    assert len(rows(run / "metrics.csv")) == 2
