"""`trainer.channels_last`: how a client's images lie in memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedRep, Scaffold
from lit_fed.protocols import ClientTest
from tests.support import fit, weights

LAST = torch.channels_last
Own = partial(FedRep, personal=["network.5"])


class Pictures(TensorDataModule):
    """Two clients with four colour pictures of 4×4 each, and two test pictures."""

    num_classes = 2
    input_shape = (3, 4, 4)

    def __init__(self, shape: tuple[int, ...] = (3, 4, 4)) -> None:
        super().__init__(num_clients=2, partition=Natural(), batch_size=2)
        self.input_shape = shape

    def load_arrays(self) -> Arrays:
        x = np.random.default_rng(0).standard_normal((10, *self.input_shape), dtype=np.float32)
        y = np.arange(10) % 2
        return Arrays(x[:8], y[:8], x[8:], y[8:], np.arange(8) // 4, np.arange(2), "noise")


class Noting(Classifier):
    """Notes how images lie in memory when they come."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(
            network=nn.Sequential(*layers, nn.Linear(4, 2)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, x.is_contiguous(memory_format=LAST) and not x.is_contiguous()))
        found: Tensor = super().forward(x)
        return found


@pytest.mark.parametrize("method", [FedAvg, Scaffold, Own])
def test_images_come_so_and_only_rounding_changes(tmp_path: Path, method: Callable[[], Algorithm[Any]]) -> None:
    tasks = {last: Noting() for last in (False, True)}
    settings: dict[str, Any] = {"max_rounds": 2, "protocols": [ClientTest()]}
    runs = {
        last: fit(tmp_path / str(last), task, Pictures(), method(), channels_last=last, **settings)
        for last, task in tasks.items()
    }
    assert {(True, True), (False, True)} == set(tasks[True].seen)  # in training and in tests
    assert not any(last for _, last in tasks[False].seen)
    plain, other = (weights(run) for run in runs.values())
    for name, tensor in plain.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)
        assert other[name].is_contiguous()  # files and payloads are what they were


def test_a_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"channels_last": True, "seed": 3}
    whole = fit(tmp_path / "whole", Noting(), Pictures(), Own(), max_rounds=4, protocols=[ClientTest()], **settings)
    fit(tmp_path / "half", Noting(), Pictures(), Own(), max_rounds=2, protocols=[ClientTest()], **settings)
    again = fit(
        tmp_path / "half", Noting(), Pictures(), Own(), max_rounds=4, protocols=[ClientTest()],
        ckpt_path="last", **settings,
    )  # fmt: skip
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(again)[name], tensor), name


class Flat(Noting):
    """A network for vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(6, 2)


def test_what_is_no_image_stays_as_it_is(tmp_path: Path) -> None:
    runs = [
        fit(tmp_path / str(last), Flat(), Pictures((6,)), max_rounds=1, channels_last=last) for last in (False, True)
    ]
    plain, other = map(weights, runs)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_groups_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.channels_last lays out one client's images; use sequential"):
        fit(tmp_path, Noting(), Pictures(), max_rounds=1, channels_last=True, executor="vectorized")
