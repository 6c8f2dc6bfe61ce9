"""Clients that are absent: a run by hand, and where their names are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fed.errors import ConfigError
from lit_fed.participation import Asynchronous, FullParticipation, UniformParticipation
from lit_fed.protocols import ClientGlobalTest, ClientTest
from tests.support import Points, fit, rows


class Named(Points):
    client_names = property(lambda self: ["a", "b"])  # type: ignore[assignment]


def test_only_the_others_train_are_tested_and_weigh(tmp_path: Path) -> None:
    """Client 0 steps from (0, 0) to (1, 0), which alone is the mean; its loss is ½(1 − 2)², on the shared set, too.

    With client 1, whose three samples weigh three times as much, it would be (1/4, 3/2).
    """
    protocols = [ClientTest(), ClientGlobalTest()]
    made = fit(tmp_path, max_rounds=1, protocols=protocols, participation=FullParticipation(absent=[1]))
    assert made.run.federation.server["model"]["network.weight"].tolist() == [[1.0, 0.0]]
    assert made.metrics["clients/loss_mean"] == made.metrics["clients_global/loss_mean"] == 0.5
    assert made.metrics["participation/count"] == 1
    found = {(row["client_id"], row["metric"]) for row in rows(made.log_dir / "clients.csv")}
    assert {metric for client_id, metric in found if client_id == "1"} == {"downlink_bytes"}


def test_clients_with_names_go_by_them(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1, data=Named(), participation=FullParticipation(absent=["b"]))
    assert made.run.federation.participation.absent_clients == {1}
    with pytest.raises(ConfigError, match=r"participation.absent: there is no client named 'c'"):
        fit(tmp_path, max_rounds=1, data=Named(), participation=FullParticipation(absent=["c"]))
    with pytest.raises(ConfigError, match=r"participation.absent 1 is a number, and these clients have names"):
        fit(tmp_path, max_rounds=1, data=Named(), participation=FullParticipation(absent=[1]))
    with pytest.raises(ConfigError, match=r"participation.absent_positions: there is no client 2; clients are 0 to 1"):
        fit(tmp_path, max_rounds=1, data=Named(), participation=FullParticipation(absent_positions=[2]))


def test_a_round_of_absent_clients_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    kinds: Any = {"participation": UniformParticipation(count=1, absent=[1]), "on_client_failure": "skip"}
    made = fit(tmp_path, max_rounds=6, **kinds)
    counts = [int(float(row["participation/count"])) for row in rows(made.log_dir / "metrics.csv")]
    assert set(counts) == {0, 1}


def test_a_recorded_order_has_its_own_fates(tmp_path: Path) -> None:
    replay = Asynchronous(concurrency=1, buffer=1, replay="order.csv", absent=[1])
    with pytest.raises(
        ConfigError, match=r"participation.replay has a recorded run's fates; leave dropout_… and absent"
    ):
        fit(tmp_path, max_rounds=1, participation=replay)
