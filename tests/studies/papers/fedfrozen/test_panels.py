"""Linear attention's gradient against autograd, the ridge solution against descent, rounds against plain loops."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import inf, log
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.studies.file.rounds import quantile
from lit_fed.studies.papers.fedfrozen import Figure1, Figure2
from lit_fed.studies.papers.fedfrozen import linear_attention as attention
from lit_fed.studies.papers.fedfrozen.descent import (
    Work,
    evaluate,
    fix_kernel,
    profile,
    ridge_solution,
    train,
    train_values,
)
from lit_fed.studies.papers.fedfrozen.linear_attention import Clients, TeacherTask, attended, draw, gradient
from lit_fed.studies.papers.fedfrozen.panels import KernelFigure
from lit_fed.studies.simulations.run_simulation import add_arguments, quartiles_of
from lit_fed.studies.simulations.simulation import Point
from tests.support import ROOT

SMALL = TeacherTask(num_clients=3, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)
SOFTMAX = replace(SMALL, feature_map="softmax", reduction="mean")
FILES = [
    path for path in sorted((ROOT / "configs/papers/fedfrozen/simulations").glob("*.yaml")) if "again" not in path.stem
]


def read(path: Path) -> KernelFigure:
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    figure: KernelFigure = parser.instantiate(parser.parse_args(["-c", str(path)])).simulate
    return figure


def clients(rho: float = 1.0, task: TeacherTask = SMALL) -> Clients:
    return draw(task, rho, [0, 1], torch.float64)


def loss(task: TeacherTask, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Eq. 2 as it stands, a client at a time, the squared errors times the reduction's factor: (B,)."""
    losses = []
    for x, y, w in zip(inputs, targets, weights, strict=True):
        query, key, value = w.split([task.key_dim, task.key_dim, task.value_dim], dim=1)
        sigmoid = task.feature_map == "sigmoid"
        total = torch.zeros((), dtype=x.dtype)
        for h, target in zip(x.split(task.tokens), y.split(task.tokens), strict=True):
            q, k = ((h @ block).sigmoid() if sigmoid else (h @ block).softmax(1) for block in (query, key))
            kernel = q @ k.T / task.tokens if sigmoid else q @ k.T
            total = total + (kernel @ h @ value - target).square().sum()
        losses.append(task.loss_scale * total)
    return torch.stack(losses)


@pytest.mark.parametrize("task", [SMALL, SOFTMAX], ids=lambda task: task.feature_map)
def test_gradient_of_linear_attention_is_autograds(task: TeacherTask) -> None:
    data = clients(task=task)
    inputs, targets = data.inputs.flatten(0, 1), data.targets.flatten(0, 1)
    weights = data.weights.repeat_interleave(3, 0).requires_grad_()
    expected = loss(task, inputs, targets, weights)
    slopes = torch.autograd.grad(expected.sum(), weights)[0]
    residuals, found = gradient(task, inputs, targets, weights.detach())
    losses = attention.loss(task, residuals)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, slopes, rtol=1e-10, atol=1e-12)


def test_the_kernel_of_two_tokens_by_hand() -> None:
    # Tokens ln 3 and 0, all weights 1. φ = sigmoid: ¾ and ½, so A = φφᵀ/2 = [[9/32, 3/16], [3/16, 1/8]], and
    # A·(ln 3, 0) = ln 3·(9/32, 3/16).
    task = TeacherTask(num_clients=1, dim=1, key_dim=1, value_dim=1, tokens=2, examples=1)
    tokens, ones = torch.tensor([[[log(3.0)], [0.0]]]), torch.ones(1, 1, 3)
    torch.testing.assert_close(attended(task, tokens, ones)[0, :, 0], log(3.0) * torch.tensor([9 / 32, 3 / 16]))
    # φ = softmax of (ln 3, 0) and (0, 0), with W^Q = W^K = [1, 0]: (¾, ¼) and (½, ½), so A = φφᵀ has
    # 9/16 + 1/16 = 5/8 and 3/8 + 1/8 = ½ in its first column.
    task = replace(task, key_dim=2, feature_map="softmax")
    weights = torch.tensor([[[1.0, 0.0, 1.0, 0.0, 1.0]]])
    torch.testing.assert_close(attended(task, tokens, weights)[0, :, 0], log(3.0) * torch.tensor([5 / 8, 1 / 2]))


def test_a_loss_and_its_gradient_by_hand() -> None:
    # As above with targets 0: the outputs are ln 3·(9/32, 3/16), whose squares sum to (ln 3)²·(81 + 36)/1024, halved
    # over the two tokens. dV = Aᵀ·outputs = ln 3·((81 + 36)/1024, (54 + 24)/1024); dW^V = 2/2·ln 3·dV[0].
    task = TeacherTask(num_clients=1, dim=1, key_dim=1, value_dim=1, tokens=2, examples=1)
    tokens, ones = torch.tensor([[[log(3.0)], [0.0]]]), torch.ones(1, 1, 3)
    residuals, slope = gradient(task, tokens, torch.zeros(1, 2, 1), ones)
    assert attention.loss(task, residuals).item() == pytest.approx(log(3.0) ** 2 * 117 / 2048)
    assert slope[0, 0, 2].item() == pytest.approx(log(3.0) ** 2 * 117 / 1024)
    # dA = outputs·(ln 3, 0); of φφᵀ it is halved: d = (ln 3)²/2·(9/32, 3/16) in its first column. dφ(Q) = d·φ(K)[0] =
    # (ln 3)²/2·(27/128, 9/64); the slope of token ln 3 is ¾·¼·dφ(Q)[0], token 0 counts nothing: times 2/2 and ln 3.
    assert slope[0, 0, 0].item() == pytest.approx(log(3.0) ** 3 / 2 * 3 / 16 * 27 / 128)


@pytest.mark.parametrize(
    # Times the sum of squares: over 7 examples of 3 tokens; over 5 values too.
    ("reduction", "scale"),
    [("tokens", 1 / 21), ("mean", 1 / 105)],
)
def test_reductions(reduction: str, scale: float) -> None:
    assert replace(SMALL, reduction=reduction).loss_scale == pytest.approx(scale)  # type: ignore[arg-type]  # a parameter of the test


def test_the_teacher_explains_the_targets_up_to_the_noise() -> None:
    task = TeacherTask(noise=0.0, num_clients=2, dim=6, key_dim=4, value_dim=5, tokens=3, examples=7)
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


def test_all_figures_have_one_task_and_another_reading_a_name_of_its_own() -> None:
    figures = {path.stem: read(path) for path in FILES}
    others = {"fedfrozen_figure1_softmax"}
    # φ = sigmoid, A = φφᵀ/n, squares summed over values, weights N(0, 1/d), and Table 3's numbers.
    for stem in figures.keys() - others:
        task = TeacherTask(10, 64, 32, 32, 16, 40, 1e-2, feature_map="sigmoid", reduction="tokens", scale=1.0)
        assert figures[stem].task == task, stem
    for stem in others:
        assert figures[stem].task.feature_map == "softmax"
    assert {figure.lr for figure in figures.values() if isinstance(figure, Figure1)} == {1e-3}, "appendix B.1"


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_tiny_version_of_every_figure(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read(path)
    assert (settings.seeds, settings.rounds, settings.local_steps) == (10, 200, 20), "Table 3"
    small = ["--simulate.seeds", "2", "--simulate.rounds", "4", "--processes", "1"]
    for key in ("num_clients", "dim", "key_dim", "value_dim", "tokens", "examples"):
        small += [f"--simulate.task.{key}", str(getattr(SMALL, key))]
    if hasattr(settings, "every"):
        small += ["--simulate.every", "1"]
    main(["simulate", "-c", str(path), "-o", str(tmp_path), *small])
    said = capsys.readouterr().out
    assert str(tmp_path) in said
    assert (tmp_path / f"{path.stem}.png").stat().st_size > 10_000
    with open(tmp_path / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert all(float(row["q25"]) <= float(row["median"]) <= float(row["q75"]) for row in table)
    panels = {row["panel"] for row in table}
    profiles = {f"profile, rho {rho:g}" for rho in settings.rhos}
    expected = {
        "fedfrozen_figure1": profiles,
        "fedfrozen_figure1_softmax": profiles,
        "fedfrozen_figure2": {"loss ratio by E", "loss by warm-up", "loss by rho"},
        "fedfrozen_figure2_pooled": {"loss by E"},
        "fedfrozen_figure3": {"loss by warm-up and rho", "loss by ridge", "drift by ridge"},
        "fedfrozen_figure3_solved": {"drift at rest by ridge", "loss at rest by ridge"},
        "fedfrozen_proposition1": {
            *("freezing bias by round", "residual by round", "residual after phase 2 by round"),
            *("distance of the values by round", "bound by round", "excess by round"),
            *("best warm-up by rho", "loss over the best by rho"),
        },
    }
    assert panels == expected[path.stem]


def test_quartiles_by_hand_with_a_seed_that_diverged() -> None:
    points = [Point("p", "l", 0, seed, value) for seed, value in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0])]
    q25, median, q75 = quartiles_of(points)["p", "l", 0]
    assert (median, q75) == (3.0, float("inf"))  # 1 2 3 4 ∞
    assert 1.0 < q25 < 2.0


def test_quartiles_are_numpys_and_infinite_where_all_between_them_diverged() -> None:
    for count in (1, 2, 3, 7, 10):
        numbers = np.random.default_rng(count).normal(size=count).tolist()
        for share in (0.25, 0.5, 0.75):
            expected = np.quantile(numbers, share, method="median_unbiased")
            assert quantile(numbers, share) == pytest.approx(expected, abs=1e-8)
    assert [quantile([1.0, inf, inf, inf], share) for share in (0.25, 0.5, 0.75)] == [inf, inf, inf]
    assert quantile([1.0, 2.0, 3.0, inf, inf], 0.5) == 3.0


def test_wrong_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"task\.reduction is 'max'; it must be 'tokens' or 'mean'"):
        TeacherTask(reduction="max")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigError, match=r"task\.feature_map is 'elu'; it must be 'sigmoid' or 'softmax'"):
        TeacherTask(feature_map="elu")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(
        ConfigError, match=r"simulate\.warmups is 1\.5; it must be at least 0 and at most 1, a fraction"
    ):
        Figure2(warmups=(1.5,))
    with pytest.raises(ConfigError, match=r"simulate\.every is 0; it must be at least 1"):
        Figure1(every=0)
    path = tmp_path / "figure.yaml"
    figure = "lit_fed.studies.papers.fedfrozen.Figure1"
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
