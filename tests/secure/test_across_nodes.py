"""`trainer.secure_sum` over nodes: the plain sum's bits, whatever is lost, and nothing of a single node in clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fed.methods import FedAvg, Scaffold
from lit_fed.secure.summed import SecureSum
from tests.deployment.support import deploy, simulate, small
from tests.support import Points, assert_same, rows, weights

HOMES = [[0, 3], [1], [2, 4]]
PLAIN = SecureSum(3, 0.5)


def make(algorithm: Any = FedAvg, **kwargs: Any) -> Any:
    settings = {"max_rounds": 3, "secure_sum": PLAIN, **kwargs}
    return small(data=lambda: Points(num_clients=5, sizes=(2, 3)), algorithm=algorithm, **settings)


def told(folder: Path) -> list[dict[str, str]]:
    """Rows of metrics that do not depend on where clients are."""
    return [{k: v for k, v in row.items() if k.startswith(("global/", "train/", "clients/")) and "_mean" in k or
             k.startswith(("global/", "train/"))} for row in rows(folder / "metrics.csv")]  # fmt: skip


@pytest.mark.parametrize("method", [FedAvg, lambda: FedAvg(weighting="uniform"), Scaffold])
def test_over_nodes_a_run_has_the_simulations_bits(tmp_path: Path, method: Any) -> None:
    one = simulate(make(method), tmp_path / "one")
    other = deploy(make(method), tmp_path / "other", HOMES)
    assert_same(weights(one), weights(other))
    assert told(one.log_dir) == told(other.log_dir)
