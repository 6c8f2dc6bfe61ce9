"""A federation over nodes ends in the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.codecs import CastCodec
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import MemoryGrid
from lit_fed.methods import FedAvg, FedGen, FedProx, Scaffold
from lit_fed.participation import UniformParticipation
from lit_fed.tasks import Classifier
from tests.federation.support import Make, Parts, deploy, simulate
from tests.support import LeastSquares, Points, Wanderer, Wandering, assert_same, rows, trainer, weights


def wanderers(algorithm: Any, **kwargs: Any) -> Make:
    settings: dict[str, Any] = {"max_rounds": 4, **kwargs}

    def make(folder: Path) -> Parts:
        torch.manual_seed(0)
        own = dict(settings, participation=UniformParticipation(count=3, **settings.get("taking_part", {})))
        own.pop("taking_part", None)
        return Parts(trainer(folder, **own), Wanderer(), Points(num_clients=5, sizes=(2, 3)), algorithm())

    return make


def logged(folder: Path, name: str) -> list[Any]:
    """A table without what a clock wrote, and what float32 summed in the order of arrival."""
    return sorted(
        tuple((key, value) for key, value in row.items() if not key.startswith(("time/", "drift/")))
        for row in rows(folder / name)
        if row.get("metric") != "time_s"
    )


HOMES = [[0, 3], [1], [2, 4]]


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        pytest.param(FedAvg, {}, id="fedavg"),
        pytest.param(lambda: FedProx(mu=0.1), {"local_epochs": 2}, id="fedprox"),
        pytest.param(Scaffold, {"local_steps": 3}, id="scaffold"),
        pytest.param(lambda: Scaffold(option=1), {"buffers": "local"}, id="scaffold 1, local buffers"),
        pytest.param(Wandering, {"gradient_clip_val": 0.1}, id="personal layer"),
        pytest.param(
            FedAvg, {"uplink_codec": CastCodec(), "downlink_codec": CastCodec("float16")}, id="codecs both ways"
        ),
    ],
)
def test_the_bits_and_the_tables_of_one_process(tmp_path: Path, algorithm: Any, kwargs: dict[str, Any]) -> None:
    make = wanderers(algorithm, **kwargs)
    one, other = simulate(make, tmp_path / "one"), deploy(make, tmp_path / "other", HOMES)
    assert_same(weights(one), weights(other))
    for name in ("metrics.csv", "clients.csv"):
        assert logged(one.log_dir, name) == logged(other.log_dir, name)
    rounds = [{name: at for name, (at, _) in made.run.federation.store.state_dict().items()} for made in (one, other)]
    assert rounds[0] == rounds[1]  # a node numbers a state by the request, and not by its bits


def test_a_node_does_not_judge_what_classes_others_have(tmp_path: Path) -> None:
    """``label_prior`` asks for all ten classes, of which the node's client has some."""

    def make(folder: Path) -> Parts:
        torch.manual_seed(0)
        data = Digits(num_clients=2, partition=ClassesPerClient(5), max_train_samples=100)
        model = Classifier("mlp", num_classes=10, in_channels=1, input_shape=data.input_shape)
        return Parts(trainer(folder, max_rounds=1), model, data, FedGen(label_prior=[1.0] * 10, generator_steps=1))

    assert_same(weights(simulate(make, tmp_path / "one")), weights(deploy(make, tmp_path / "other", [[0], [1]])))


def test_a_server_is_one_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.devices starts 2 processes; it must be 1 for the server"):
        federate(MemoryGrid({}), trainer(tmp_path, devices=2), LeastSquares(), Points(), FedAvg())
