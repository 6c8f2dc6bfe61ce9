"""How far apart resolutions lie among features, against arithmetic and in runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.methods import ClusterTest, FedAvg, FedRAF, LocalOnly
from lit_fed.methods.raf import silhouette
from lit_fed.poses import KeypointEstimator
from tests.methods.raf_support import Scaling, estimator, puppets
from tests.support import ROOT, LeastSquares, Points, assert_same, fit, rows, run_cli, weights


def test_silhouettes_by_hand() -> None:
    # On a line, 0 and 2 beside 5 and 6. Mean distances to the own cluster's others, and to the other cluster:
    # 2 and 5.5, 2 and 3.5, 1 and 4, 1 and 5; (b − a)/max(a, b) = 7/11, 3/7, 3/4, 4/5.
    near, far = torch.tensor([[0.0], [2.0]]), torch.tensor([[5.0], [6.0]])
    assert silhouette(near, far) == pytest.approx((7 / 11 + 3 / 7 + 3 / 4 + 4 / 5) / 4)
    assert math.isnan(silhouette(near, torch.tensor([[math.nan], [6.0]])))
    # Of three clusters the nearest other one counts, which for these is the same as before.
    beyond = torch.tensor([[1000.0], [1000.0]])
    assert silhouette(near, far, beyond) == pytest.approx((7 / 11 + 3 / 7 + 3 / 4 + 4 / 5 + 2) / 6)


class TellsHeight(KeypointEstimator):
    """Its features are the height of the picture and nothing else."""

    def test_features(self, batch: Any) -> Tensor:
        images = batch["image"]
        return torch.full((len(images), 1), float(images.shape[2]))


class Maps(nn.Module):
    """A network that has no features."""

    stride = 1

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 14, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found


def on(network: Any, kind: type[KeypointEstimator] = KeypointEstimator) -> KeypointEstimator:
    return kind(network, lambda p: torch.optim.SGD(p, lr=0.1), num_joints=14, input_shape=(3, 64, 48), flip_test=False)


def test_what_is_reported_and_that_it_changes_nothing(tmp_path: Path) -> None:
    def run(name: str, **more: Any) -> Any:
        return fit(tmp_path / name, estimator(), puppets(), FedRAF(), max_rounds=2, **more)

    tested, plain = run("tested", protocols=[ClusterTest()]), run("plain")
    names = {name for name in tested.metrics if name.startswith("clusters")}
    assert names == {"clusters/resolutions", "clusters/64x48_32x24"}
    assert all(-1 < tested.metrics[name] < 1 for name in names)
    assert_same(weights(tested), weights(plain))


def test_features_that_tell_the_resolution_alone_have_silhouette_one(tmp_path: Path) -> None:
    data = puppets(test_resolutions=[(32, 24), (48, 36), (64, 48)])
    made = fit(tmp_path, on(Maps(), TellsHeight), data, FedRAF(), max_rounds=1, protocols=[ClusterTest()])
    found = {name: value for name, value in made.metrics.items() if name.startswith("clusters")}
    names = ("resolutions", "32x24_48x36", "48x36_64x48")
    assert found == {f"clusters/{name}": 1.0 for name in names}


def test_nothing_without_a_global_model(tmp_path: Path) -> None:
    made = fit(tmp_path, on(Maps(), TellsHeight), puppets(), LocalOnly(), max_rounds=1, protocols=[ClusterTest()])
    assert not any(name.startswith("clusters") for name in made.metrics)


@pytest.mark.long
def test_two_processes_find_what_one_does_and_end_well(tmp_path: Path) -> None:
    """Pictures of poses count joints on the first process alone, for which no other is there to meet."""
    words: dict[str, Any] = {
        "trainer.max_rounds": 1,
        "trainer.local_epochs": 1,
        "trainer.protocols": "[{class_path: GlobalTest}, {class_path: ClusterTest}]",
        "data.init_args.samples_per_client": 8,
        "data.init_args.test_samples": 30,
    }
    found = {}
    for devices in ("1", "2"):
        options = words | {"trainer.devices": devices, "trainer.default_root_dir": tmp_path / devices}
        given = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        done = run_cli("fit", "-c", ROOT / "configs/papers/raf/runs/puppets.yaml", *given, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = tmp_path / devices / "lightning_logs" / "version_0"
        (row,) = rows(run / "metrics.csv")
        found[devices] = {name: float(row[name]) for name in row if name.startswith(("clusters/", "global/"))}
    assert found["2"] == pytest.approx(found["1"], rel=1e-6)
    assert "clusters/resolutions" in found["1"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def refused(task: Any, data: Any) -> str:
        with pytest.raises(ConfigError) as error:
            fit(tmp_path, task, data, FedAvg(), max_rounds=1, protocols=[ClusterTest()])
        return str(error.value)

    assert "and Points has fewer than two; leave the protocol out" in refused(LeastSquares(), Points())
    assert "a task with test_features, and Scaling has none" in refused(Scaling(), puppets())
    assert "network Maps needs a forward_features that returns a map" in refused(on(Maps()), puppets())
