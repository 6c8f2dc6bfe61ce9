"""Where phase 2 comes to rest, by hand and against the rounds themselves."""

from __future__ import annotations

import pytest
import torch

from lit_fed.studies.papers.fedfrozen import LocalOptima
from lit_fed.studies.papers.fedfrozen.descent import Quadratic, Work, train, train_values
from lit_fed.studies.papers.fedfrozen.linear_attention import TeacherTask, draw
from lit_fed.studies.papers.fedfrozen.local_optima import at_rest

SMALL = TeacherTask(num_clients=3, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)


def of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(1, -1, 1, 1)


@pytest.mark.parametrize(
    ("local_steps", "ridge", "drift", "loss"),
    [
        # F_1 = ½θ² − θ + ½ and F_2 = ½·3θ²: clients' optima 1 and 0, the server's ½. f = (½·¼ − ½ + ½ + ⅜) / 2 = ¼.
        (None, 0.0, 0.5, 0.25),
        # With λ = 1: optima ½ and 0, server ¼, each ¼ away. f = (½·1/16 − ¼ + ½ + 3/32) / 2 = (⅜) / 2.
        (None, 1.0, 0.25, 0.1875),
        # A step of 0.1: 0.9θ + 0.1 and 0.7θ, whose mean stays at θ = ¼: 0.325 and 0.175, each 0.075 away; f as above.
        (1, 0.0, 0.075, 0.1875),
    ],
)
def test_rest_by_hand(local_steps: int | None, ridge: float, drift: float, loss: float) -> None:
    problem = Quadratic(of(1.0, 3.0), of(1.0, 0.0), torch.tensor([[0.5, 0.0]], dtype=torch.float64))
    found = at_rest(problem, 0.1, local_steps, ridge)
    assert found.drift.tolist() == pytest.approx([drift])
    assert found.loss.tolist() == pytest.approx([loss])


def test_rounds_end_where_it_says() -> None:
    figure = LocalOptima(task=SMALL, seeds=2, rounds=4, lr=0.05, local_steps=3, ridge=0.1, ridges=(0.5,))
    data, work = draw(SMALL, 1.0, [0, 1]), Work(0.05, 3, 0.1)
    kernel = train(data, work, 3).weights[3]
    values, found = figure.readings(figure.points())[0], {}
    for row, steps in (("few", 3), ("solved", 20_000)):
        path = train_values(data, Work(0.05, steps, 0.5), kernel, 3_000)
        found[row] = path.drifts[-1].double(), path.loss.double()
    for row, (drift, loss) in found.items():
        for seed in (0, 1):
            assert values[row, "ridge=0.5"][seed] == pytest.approx(drift[seed].log().item(), rel=1e-4)
            assert values[f"loss={row}", "ridge=0.5"][seed] == pytest.approx(loss[seed].log().item(), rel=1e-4)
