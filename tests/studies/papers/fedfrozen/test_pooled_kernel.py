"""What local steps do for FedAvg and for a kernel, where both are the same descent and where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lit_fed.studies.papers.fedfrozen import PooledKernel
from lit_fed.studies.papers.fedfrozen.descent import Work, profile, train
from lit_fed.studies.papers.fedfrozen.linear_attention import Clients, TeacherTask, draw

SMALL = TeacherTask(num_clients=3, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)
ALONE = TeacherTask(num_clients=1, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)


def measured(task: TeacherTask, *steps: int) -> dict[tuple[str, str], dict[int, float]]:
    figure = PooledKernel(task=task, seeds=2, rounds=4, lr=0.05, ridge=0.1, steps=steps)
    return {place: dict(seeds) for place, seeds in figure.readings(figure.points())[0].items()}


def test_one_client_knows_no_drift() -> None:
    # E steps of one client, round after round, are gradient descent on its data.
    values = measured(ALONE, 1, 5)
    for column in ("E=1", "E=5"):
        assert values["kernel", column] == pytest.approx(values["pooled", column], rel=1e-5)


def test_kernels_are_of_federated_and_of_pooled_descent() -> None:
    values, data, work = measured(SMALL, 5), draw(SMALL, 1.0, [0, 1]), Work(0.05, 5, 0.1)
    # one client that holds what the three hold: 4 · ¾ rounds of 5 steps on all of it
    inputs, targets = (tensor.flatten(1, 2).unsqueeze(1) for tensor in (data.inputs, data.targets))
    together = Clients(replace(SMALL, num_clients=1, examples=21), inputs, targets, data.weights, data.teacher)
    for row, clients in (("kernel", data), ("pooled", together)):
        expected = profile(clients, train(clients, work, 3).weights[3], 0.1).log()
        assert list(values[row, "E=5"].values()) == pytest.approx(expected.tolist(), rel=1e-4)
    assert values["kernel", "E=5"] != pytest.approx(values["pooled", "E=5"], rel=1e-3)
    assert list(values["fedavg", "E=5"].values()) == pytest.approx(train(data, work, 4).loss.log().tolist(), rel=1e-5)
