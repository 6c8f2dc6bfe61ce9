"""Linear attention's gradient against autograd, the ridge solution against descent, rounds against plain loops."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.studies.simulations.attention_kernel import Figure1, Figure2
from lit_fed.studies.simulations.attention_kernel import linear_attention as attention
from lit_fed.studies.simulations.attention_kernel.descent import (
    Work,
    evaluate,
    fix_kernel,
    profile,
    ridge_solution,
    train,
    train_values,
)
from lit_fed.studies.simulations.attention_kernel.linear_attention import Clients, Task, attended, draw, gradient
from lit_fed.studies.simulations.run_simulation import add_arguments, quartiles_of
from lit_fed.studies.simulations.simulation import Point, Simulation
from tests.support import ROOT

SMALL = Task(num_clients=3, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)
FIGURE_FILES = sorted((ROOT / "configs/papers/fedfrozen/simulations").glob("figure*.yaml"))


def read(path: Path) -> Simulation:
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.instantiate(parser.parse_args(["-c", str(path)])).simulate


def clients(rho: float = 1.0, task: Task = SMALL) -> Clients:
    return draw(task, rho, [0, 1], torch.float64)


def loss(task: Task, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Eq. 2 as it stands, a client at a time, the squared errors times the reduction's factor: (B,)."""
    losses = []
    for x, y, w in zip(inputs, targets, weights, strict=True):
        query, key, value = w.split([task.key_dim, task.key_dim, task.value_dim], dim=1)
        total = torch.zeros((), dtype=x.dtype)
        for h, target in zip(x.split(task.tokens), y.split(task.tokens), strict=True):
            output = (h @ query).softmax(1) @ (h @ key).softmax(1).T @ (h @ value)
            total = total + (output - target).square().sum()
        losses.append(task.loss_scale * total)
    return torch.stack(losses)


def test_gradient_of_linear_attention_is_autograds() -> None:
    data = clients()
    inputs, targets = data.inputs.flatten(0, 1), data.targets.flatten(0, 1)
    weights = data.weights.repeat_interleave(3, 0).requires_grad_()
    expected = loss(SMALL, inputs, targets, weights)
    slopes = torch.autograd.grad(expected.sum(), weights)[0]
    residuals, found = gradient(SMALL, inputs, targets, weights.detach())
    losses = attention.loss(SMALL, residuals)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, slopes, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    # Times the sum of squares: half of it over 7 examples; all of it; both also over 3 tokens; all over 5 values too.
    ("reduction", "scale"),
    [("half_sum", 1 / 14), ("sum", 1 / 7), ("half_tokens", 1 / 42), ("tokens", 1 / 21), ("mean", 1 / 105)],
)
def test_reductions(reduction: str, scale: float) -> None:
    task = Task(num_clients=3, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7, reduction=reduction)  # type: ignore[arg-type]
    assert task.loss_scale == pytest.approx(scale)


def test_the_teacher_explains_the_targets_up_to_the_noise() -> None:
    task = Task(noise=0.0, num_clients=2, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)
    same = [draw(task, rho, [3], torch.float64) for rho in (0.0, 2.0)]
    # A seed's tokens differ between two ρ by the clients' means alone, which one client's tokens have in common.
    shift = (same[1].inputs - same[0].inputs)[0]
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))
    assert torch.equal(same[0].weights, same[1].weights)


def test_ridge_solution_is_where_a_long_descent_ends() -> None:
    data = clients()
    ridge = 0.1
    exact = profile(data, data.weights, ridge)
    problem = fix_kernel(data, data.weights)
    values = torch.zeros(2, 6, 5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([values], lr=1, max_iter=5000, tolerance_grad=1e-12, tolerance_change=1e-16)

    def objective() -> Tensor:
        weights = torch.cat([data.weights[..., :8], values], -1).repeat_interleave(3, 0)
        every = loss(SMALL, data.inputs.flatten(0, 1), data.targets.flatten(0, 1), weights).view(2, 3).mean(1)
        return every + 0.5 * ridge * values.square().sum((1, 2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = objective().sum()
        total.backward()
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(objective().detach(), exact, rtol=1e-9, atol=0)
    solved = ridge_solution(problem.gram.mean(1), problem.cross.mean(1), ridge)
    torch.testing.assert_close(solved, values.detach(), rtol=1e-4, atol=1e-6)


def test_without_a_ridge_the_least_squares_solution_is_no_worse_than_any() -> None:
    data = clients()
    assert (profile(data, data.weights, 0.0) <= profile(data, data.weights, 1e-9) + 1e-12).all()
    assert (profile(data, data.weights, 0.0) <= evaluate(data, data.weights)).all()


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_a_seed_that_diverged_has_an_infinite_profile_and_leaves_the_others_alone(ridge: float) -> None:
    data = clients()
    weights = data.weights.clone()
    weights[1, 0, 0] = torch.nan
    found = profile(data, weights, ridge)
    assert found[1] == torch.inf
    torch.testing.assert_close(found[0], profile(data, data.weights, ridge)[0])


def plain_rounds(data: Clients, work: Work, rounds: int) -> Tensor:
    """The same rounds for seed 0 from the papers' formulas with autograd, without batching."""
    server, own = data.weights[0], [torch.zeros_like(data.weights[0])] * 3
    for _ in range(rounds):
        mean, ends = sum(own) / 3, []
        for client in range(3):
            w = server.clone()
            for _ in range(work.local_steps):
                w.requires_grad_()
                value = loss(SMALL, data.inputs[0, client][None], data.targets[0, client][None], w[None])[0]
                value = value + 0.5 * work.ridge * w[:, 8:].square().sum() + 0.5 * work.mu * (w - server).square().sum()
                slope = torch.autograd.grad(value, w)[0]
                if work.control:
                    slope = slope - own[client] + mean
                w = w.detach() - work.lr * slope
            ends.append(w)
        if work.control:
            own = [c - mean + (server - w) / (work.local_steps * work.lr) for c, w in zip(own, ends, strict=True)]
        server = sum(ends) / 3
    return server


@pytest.mark.parametrize("work", [Work(0.05, 4, 0.1), Work(0.05, 4, 0.1, mu=3.0), Work(0.05, 4, 0.1, control=True)])
def test_rounds_are_those_of_the_formulas(work: Work) -> None:
    data = clients()
    path = train(data, work, 3, keep=(0, 3))
    torch.testing.assert_close(path.weights[3][0], plain_rounds(data, work, 3), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(path.losses[0], evaluate(data, data.weights))
    torch.testing.assert_close(path.loss, evaluate(data, path.weights[3]))


def test_phase_2_is_the_same_descent_with_the_kernel_held() -> None:
    data, work = clients(), Work(0.05, 4, 0.1)
    path = train_values(data, work, data.weights, 3)
    server = data.weights[0]
    for _ in range(3):
        ends = []
        for client in range(3):
            w = server.clone()
            for _ in range(4):
                slope = gradient(SMALL, data.inputs[:1, client], data.targets[:1, client], w[None])[1][0]
                w[:, 8:] -= 0.05 * (slope[:, 8:] + 0.1 * w[:, 8:])
            ends.append(w)
        server = sum(ends) / 3
    torch.testing.assert_close(path.weights[3][0], server)
    assert torch.equal(path.weights[3][..., :8], data.weights[..., :8])
    torch.testing.assert_close(path.loss, evaluate(data, path.weights[3]))


def test_attended_tokens_times_values_are_the_output() -> None:
    data = clients()
    weights = data.weights.repeat_interleave(3, 0)
    output = attended(SMALL, data.inputs.flatten(0, 1), weights) @ weights[..., 8:]
    residual = (output - data.targets.flatten(0, 1)).square().sum((1, 2)) * SMALL.loss_scale
    torch.testing.assert_close(residual.view(2, 3).mean(1), evaluate(data, data.weights))


@pytest.mark.long
@pytest.mark.parametrize("path", FIGURE_FILES, ids=lambda path: path.stem)
def test_a_tiny_version_of_every_figure(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read(path)
    assert (settings.seeds, settings.rounds, settings.local_steps) == (10, 200, 20), "Table 3"
    small = ["--simulate.seeds", "2", "--simulate.rounds", "4", "--processes", "1"]
    main(["simulate", "-c", str(path), "-o", str(tmp_path), *small])
    assert str(tmp_path) in capsys.readouterr().out
    assert (tmp_path / f"{settings.name}.png").stat().st_size > 10_000
    with open(tmp_path / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert all(float(row["q25"]) <= float(row["median"]) <= float(row["q75"]) for row in table)
    panels = {row["panel"] for row in table}
    expected = {
        "figure1": {f"profile, rho {rho:g}" for rho in settings.rhos},
        "figure2": {"loss ratio by E", "loss by warm-up", "loss by rho"},
        "figure3": {"loss by warm-up and rho", "loss by ridge", "drift by ridge"},
    }
    assert panels == expected[settings.name]


def test_quartiles_by_hand_with_a_seed_that_diverged() -> None:
    points = [Point("p", "l", 0, seed, value) for seed, value in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0])]
    q25, median, q75 = quartiles_of(points)["p", "l", 0]
    assert (median, q75) == (3.0, float("inf"))  # 1 2 3 4 ∞
    assert 1.0 < q25 < 2.0


def test_wrong_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"task\.reduction is 'max'"):
        Task(reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"1\.5 is no fraction of the rounds"):
        Figure2(warmups=(1.5,))
    with pytest.raises(ConfigError, match=r"simulate\.every is 0; it must be at least 1"):
        Figure1(every=0)
    path = tmp_path / "figure.yaml"
    figure = "lit_fed.studies.simulations.attention_kernel.Figure1"
    for text, expected in (
        (f"simulate: {{class_path: {figure}, init_args: {{seed: 3}}}}", "Figure1 has no such setting; did you mean"),
        (f"simulate: {{class_path: {figure}, init_args: {{ridges: [3]}}}}", "Figure1 has no such setting"),
        (f"simulate: {{class_path: {figure}, init_args: {{task: {{dimm: 3}}}}}}", "dimm"),
        (f"simulate: {{class_path: {figure}, init_args: {{every: 0}}}}", "simulate.every is 0"),
        (f"simulate: {{class_path: {figure}s}}", "there is no Simulation named"),
        ("trainer: {seed: 1}", "unknown key trainer"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as stop:
            main(["simulate", "-c", str(path)])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("lit-fed: error: ")
        assert said.count("\n") == 1
        assert expected in said
