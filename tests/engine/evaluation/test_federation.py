"""Clients and protocols that fail in an evaluation: named in a line, or left out, counted and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_fed.data import Arrays
from lit_fed.engine.wire.workers import ClientParallelStrategy
from lit_fed.errors import ClientFailure, ConfigError, EvaluationFailure
from lit_fed.methods import FedAvg
from lit_fed.protocols import ClientTest, PersonalTest
from tests.federation.support import deploy, small
from tests.support import LeastSquares, Points, Wanderer, fit, rows

WAYS = ["alone", "in groups", "2 processes"]


def options(how: str) -> dict[str, Any]:
    """Settings of a trainer."""
    if how == "2 processes":
        return {"devices": 2, "strategy": ClientParallelStrategy(start_method="fork")}
    return {"executor": "vectorized"} if how == "in groups" else {}


class Picky(LeastSquares):
    """Its test cannot take a batch of fours alone, such as client 1's."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if bool((batch[1] == 4).all()):
            raise RuntimeError("fours are too many")
        super().test_step(batch, batch_idx)


def values_of(folder: Path) -> dict[str, str]:
    """The values over clients in the last row of the only run in a folder."""
    (file,) = folder.rglob("metrics.csv")
    return {name: value for name, value in rows(file)[-1].items() if name.startswith("clients/")}


@pytest.mark.parametrize("how", WAYS)
def test_a_client_that_cannot_be_tested_ends_the_run_by_name(tmp_path: Path, how: str) -> None:
    expected = "client 1 failed in round 0, asked by protocol clients: RuntimeError: fours are too many"
    with pytest.raises(Exception, match="fours are too many") as raised:  # a forked process tells its error as text
        fit(tmp_path, Picky(), protocols=[ClientTest()], **options(how))
    assert expected in str(raised.value)
    assert how == "2 processes" or (type(raised.value) is ClientFailure and str(raised.value) == expected)


@pytest.mark.parametrize("how", WAYS)
def test_a_tolerated_client_is_left_out_counted_and_said_once(tmp_path: Path, how: str, capfd: Any) -> None:
    """Client 0 alone: after a round its w₁ is 1/4, see test_across_logging, and ½·(7/4)² = 1.53125; then less."""
    fit(tmp_path, Picky(), protocols=[ClientTest()], on_client_failure="skip", max_rounds=1, **options(how))
    found = values_of(tmp_path)
    assert float(found.pop("clients/loss_missing")) == 1
    assert float(found.pop("clients/loss_std")) == 0
    assert {float(value) for value in found.values()} == {1.53125}
    lines = [line for line in capfd.readouterr().out.splitlines() if "fours are too many" in line]
    assert lines == [
        "client 1 failed in round 0, asked by protocol clients: RuntimeError: fours are too many; its clients metrics "
        "are missing; further failures of this cause are not printed"
    ]


def test_a_node_tells_its_clients_failure_as_a_process_does(tmp_path: Path) -> None:
    make = small(Picky, protocols=[ClientTest()], max_rounds=1)
    with pytest.raises(ClientFailure, match=r"client 1 failed in round 0, asked by protocol clients: RuntimeError in "):
        deploy(make, tmp_path / "raise", [[0], [1]])
    made = deploy(small(Picky, protocols=[ClientTest()], max_rounds=1, on_client_failure="skip"), tmp_path, [[0], [1]])
    assert (made.metrics["clients/loss_missing"], made.metrics["clients/loss_worst"]) == (1, 1.53125)


def test_fine_tuning_names_the_client_the_layer_and_the_shape(tmp_path: Path) -> None:
    """A round takes client 0's batch of 8 alone; a pass of fine-tuning also takes its last one, of one sample."""
    message = (
        r"client 0 failed in round 0, asked by protocol personal: ValueError in the layer network\.1, BatchNorm1d.*, "
        r"on an input \(1, 4\): Expected more than 1 value per channel"
    )
    with pytest.raises(ClientFailure, match=message):
        fit(tmp_path, Wanderer(), Points(sizes=(9, 3)), local_steps=1, protocols=[PersonalTest()])


@pytest.mark.parametrize("how", ["alone", "2 processes"])
def test_an_error_on_the_shared_test_set_names_protocol_and_round(tmp_path: Path, how: str) -> None:
    expected = "protocol global failed in round 0, on the test data: RuntimeError: fours are too many"
    with pytest.raises(Exception, match="fours are too many") as raised:
        fit(tmp_path, Picky(), Points(sizes=(3, 1), shared_batch_size=1), **options(how))  # the last of four batches
    assert expected in str(raised.value)
    assert how == "2 processes" or type(raised.value) is EvaluationFailure


class Wide(Points):
    """Its test samples have four inputs, its training samples two."""

    def load_arrays(self) -> Arrays:
        found = super().load_arrays()
        wide = np.concatenate([found.test.x, found.test.x], axis=1)
        return Arrays(found.train.x, found.train.y, wide, found.test.y, found.train.clients, found.test.clients, "wide")


def test_test_data_of_another_shape_are_refused_before_the_run(tmp_path: Path) -> None:
    message = (
        r"model LeastSquares cannot be tested: a test sample is float32 \(4,\), int64 \(\), and a training sample of "
        r"client 0 is float32 \(2,\), int64 \(\): RuntimeError in the layer network, Linear"
    )
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, data=Wide())
    assert not list(tmp_path.rglob("version_*"))
    fit(tmp_path, data=Wide(), evaluate_every=0)  # they are never used


def test_test_data_of_another_shape_that_the_model_takes_are_not_refused(tmp_path: Path) -> None:
    class Any1(LeastSquares):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :2])

    made = fit(tmp_path, Any1(), Wide(), max_rounds=1)
    assert made.metrics == pytest.approx(
        {**fit(tmp_path, max_rounds=1).metrics, **{k: v for k, v in made.metrics.items() if k.startswith("time/")}}
    )


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_failing_client_leaves_the_others_results_as_they_were(tmp_path: Path, executor: Any) -> None:
    class Fragile(LeastSquares):
        broken = False

        def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            if self.broken and bool((batch[1] == 4).all()):
                raise RuntimeError("broken")
            super().test_step(batch, batch_idx)

    whole, broken = Fragile(), Fragile()
    broken.broken = True
    runs = [
        fit(tmp_path / str(n), module, Points(num_clients=4), FedAvg(), on_client_failure="skip", executor=executor)
        for n, module in enumerate((whole, broken))
    ]
    tests = [rows(made.log_dir / "clients.csv") for made in runs]
    even = [[row for row in one if row["stage"] == "test" and row["client_id"] in ("0", "2")] for one in tests]
    assert even[0] == even[1]
    assert len(even[0]) == 4
    weights = [torch.nn.utils.parameters_to_vector(module.parameters()) for module in (whole, broken)]
    assert torch.equal(*weights)
