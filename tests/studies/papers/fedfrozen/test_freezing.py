"""The parts of FedFrozen's Proposition 1 by hand, and against the loss that a run ends with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_fed.studies.papers.fedfrozen import Proposition1
from lit_fed.studies.papers.fedfrozen.descent import Work, evaluate, train, train_values
from lit_fed.studies.papers.fedfrozen.freezing import freeze, least_loss
from lit_fed.studies.papers.fedfrozen.linear_attention import Clients, TeacherTask, draw

SMALL = TeacherTask(num_clients=3, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)
ONE = TeacherTask(num_clients=2, dim=1, key_dim=1, value_dim=1, tokens=1, examples=1)


def two_clients(values: float) -> Clients:
    """One token 4 each and weights of the kernel 0: φ = ½, A = ¼, so the output is θ. Targets 1 and 3."""
    weights = torch.tensor([[[0.0, 0.0, values]]], dtype=torch.float64)
    targets = torch.tensor([1.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
    return Clients(ONE, torch.full((1, 2, 1, 1), 4.0, dtype=torch.float64), targets, weights, torch.zeros_like(weights))


@pytest.mark.parametrize(("local_steps", "left"), [(1, 2.0), (2, 0.5)])
def test_freezing_by_hand(local_steps: int, left: float) -> None:
    # f = ½(θ−1)² + ½(θ−3)² = (θ−2)² + 1, and with λ = 2 f_λ = (θ−2)² + 1 + θ²: θ* = 1, h = 1 + 1 + 1 = 3.
    # At θ = 3: f_λ = 1 + 1 + 9 = 11, so R = 8, ‖e‖ = 2. A step of ⅛: 3 − ⅛·8 = 2, f_λ = 0 + 1 + 4 = 5; left: 2.
    # Another: 2 − ⅛·4 = 1.5, f_λ = ¼ + 1 + 9/4 = 3.5; left: ½.
    clients, work = two_clients(3.0), Work(lr=0.125, local_steps=local_steps, ridge=2.0)
    found = freeze(clients, work, clients.weights, 1)
    assert [value.item() for value in found] == pytest.approx([3.0, 8.0, 2.0, left])
    assert least_loss(clients, 2.0, {0: found}).item() == pytest.approx(3.0), "the teacher's kernel is the same"


def test_the_contraction_is_corollary_2s() -> None:
    # ρ = 1 − ¾·2·⅛·2 = 1 − 3/8; the residual 8 may leave 5, and leaves ½.
    assert Proposition1(lr=0.125, local_steps=2, ridge=2.0).contraction == 1 - 3 / 8


def test_a_seed_that_diverged_is_infinite_and_leaves_the_others_alone() -> None:
    data, work = draw(SMALL, 1.0, [0, 1], torch.float64), Work(0.05, 4, 0.1)
    weights = data.weights.clone()
    weights[1, 0, 0] = torch.nan
    sound, found = freeze(data, work, data.weights, 2), freeze(data, work, weights, 2)
    for one, both in zip(found, sound, strict=True):
        assert one[1] == torch.inf
        torch.testing.assert_close(one[0], both[0])


def test_the_panels_are_the_losses_that_runs_end_with() -> None:
    figure = Proposition1(task=SMALL, seeds=2, rounds=4, every=2, lr=0.05, local_steps=3, ridge=0.1, rhos=(1.0,))
    points = figure.points()
    data = draw(SMALL, 1.0, [0, 1])

    def full(weights: Tensor) -> Tensor:
        return evaluate(data, weights).double() + 0.05 * weights[..., 8:].double().square().sum((1, 2))

    def of(panel: str, line: str = "rho 1") -> dict[float, list[float]]:
        found: dict[float, list[float]] = {}
        for point in points:
            if (point.panel, point.line) == (panel, line):
                found.setdefault(point.x, []).append(point.value)
        return found

    path = train(data, figure.work, 2, keep=(0, 2))
    excess, bound = of("excess by round"), of("bound by round")
    for tau in (0, 2):
        begin = path.weights[tau]
        end = train_values(data, figure.work, begin, 4 - tau).weights[4 - tau]
        bias, residual, left = (
            of(f"{name} by round") for name in ("freezing bias", "residual", "residual after phase 2")
        )
        saved = (full(begin) - full(end)).tolist()
        assert [a - b for a, b in zip(residual[tau], left[tau], strict=True)] == pytest.approx(saved, rel=1e-4)
        assert excess[tau] == pytest.approx([a + b for a, b in zip(bias[tau], left[tau], strict=True)])
        rest = (1 - 0.75 * 0.1 * 0.05 * 3) ** (4 - tau)
        assert bound[tau] == pytest.approx([a + rest * b for a, b in zip(bias[tau], residual[tau], strict=True)])
    # Between two freezing rounds the loss that is ended with differs as the excess does: f* is the same for all.
    ends = [full(train_values(data, figure.work, path.weights[tau], 4 - tau).weights[4 - tau]) for tau in (0, 2)]
    assert [a - b for a, b in zip(excess[0], excess[2], strict=True)] == pytest.approx(
        (ends[0] - ends[1]).tolist(), rel=1e-4
    )
    for line, sums in (("bound", bound), ("run", excess)):
        least = [(0, 2)[sums[0][seed] > sums[2][seed]] / 4 for seed in range(2)]
        assert of("best warm-up by rho", line)[1.0] == least
    assert min(of("loss over the best by rho", "bound")[1.0]) >= 1
