r"""Federated distillation with softmax regression, where every constant of UWA's theory is known.

Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026, arXiv:2509.15147,
Algorithm 1, one round. The model is :math:`f(x, \theta) = \mathrm{softmax}(\theta^\top x)`, the true objective

.. math:: F(\theta) = \frac1M \sum_i F_i(\theta) + \frac\mu2 \lVert\theta\rVert^2,

with client i's cross-entropy F_i. The ridge makes F strongly convex, so that F has one minimiser
:math:`\theta^\star`, and the Polyak-Łojasiewicz condition holds with :math:`\mu_F = \mu`;
:math:`L_F = \mu + \tfrac12 \lambda_{\max}(E\,xx^\top)` (Böhning, "Multinomial logistic regression algorithm", 1992).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed.checks import check_range
from lit_fed.methods.distillation.densities import fit_class_gaussians, log_density
from lit_fed.methods.distillation.teacher_error import mixing_weights
from lit_fed.seeding import torch_generator
from lit_fed.studies.papers.uwa.bounds import Descent, Trace


@dataclass(frozen=True)
class GaussianTask:
    """Gaussian classes of unit variance; each client has a few of them.

    Args:
        num_clients: M.
        num_classes: C.
        known: Classes per client, assigned in turn, so that all classes have equally many clients.
        dim: Features; a constant feature is appended.
        spread: Standard deviation of the entries of the classes' means.
        examples: Private examples per client.
        calibration: Examples per client for fitting densities.
        public: Public examples, of all classes.
        ridge: μ.
    """

    num_clients: int = 10
    num_classes: int = 10
    known: int = 2
    dim: int = 16
    spread: float = 0.75
    examples: int = 80
    calibration: int = 20
    public: int = 500
    ridge: float = 1e-2

    def __post_init__(self) -> None:
        """Check the settings."""
        for key in ("num_clients", "num_classes", "dim", "examples", "calibration", "public"):
            check_range(f"task.{key}", getattr(self, key), least=1)
        check_range("task.known", self.known, least=1, most=self.num_classes, why=", task.num_classes")
        check_range("task.ridge", self.ridge, above=0, why=", so that F is strongly convex")


@dataclass(frozen=True)
class Data:
    """A task's examples, in float64; inputs are divided by √d.

    Args:
        task: The task.
        inputs: Private inputs (M, n, d + 1).
        labels: Their classes (M, n).
        held: Calibration inputs (M, n', d + 1).
        held_labels: Their classes (M, n').
        public: Public inputs (P, d + 1).
    """

    task: GaussianTask
    inputs: Tensor
    labels: Tensor
    held: Tensor
    held_labels: Tensor
    public: Tensor

    @property
    def smoothness(self) -> float:
        """L_F."""
        rows = self.inputs.flatten(0, 1)
        return self.task.ridge + 0.5 * float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1])

    def risk(self, theta: Tensor) -> Tensor:
        """F (B,) at θ (B, d + 1, C)."""
        logits = self.inputs.flatten(0, 1) @ theta
        labels = self.labels.flatten().expand(len(theta), -1)
        fit = F.cross_entropy(logits.mT, labels, reduction="none").mean(1)
        return fit + 0.5 * self.task.ridge * theta.square().sum((1, 2))

    def slope(self, theta: Tensor) -> Tensor:
        """∇F (B, d + 1, C) at θ."""
        targets = F.one_hot(self.labels.flatten(), self.task.num_classes).double()
        return taught_slope(self.inputs.flatten(0, 1), targets, theta) + self.task.ridge * theta


def draw(task: GaussianTask, seed: int) -> Data:
    """Draw classes, their assignment to clients, and examples."""
    generator = torch_generator(seed, "biased descent")
    classes = torch.randperm(task.num_classes, generator=generator)
    means = task.spread * torch.randn(task.num_classes, task.dim, generator=generator, dtype=torch.float64)
    known = torch.arange(task.num_clients)[:, None] * task.known + torch.arange(task.known)
    known = classes[known % task.num_classes]  # (M, known)

    def around(labels: Tensor) -> Tensor:
        noise = torch.randn(*labels.shape, task.dim, generator=generator, dtype=torch.float64)
        return torch.cat([(means[labels] + noise) / task.dim**0.5, torch.ones(*labels.shape, 1).double()], -1)

    def labels_of_clients(count: int) -> Tensor:
        return known.gather(1, torch.randint(task.known, (task.num_clients, count), generator=generator))

    labels, held = labels_of_clients(task.examples), labels_of_clients(task.calibration)
    public = torch.randint(task.num_classes, (task.public,), generator=generator)
    return Data(task, around(labels), labels, around(held), held, around(public))


def taught_slope(inputs: Tensor, targets: Tensor, theta: Tensor) -> Tensor:
    """Return ∇J (B, d + 1, C) at θ of the mean cross-entropy to targets (n, C) on inputs (n, d + 1)."""
    return inputs.T @ ((inputs @ theta).softmax(-1) - targets) / len(inputs)


def descend(theta: Tensor, slope: Callable[[Tensor], Tensor], lr: float, steps: int) -> Tensor:
    """Run gradient descent."""
    for _ in range(steps):
        theta = theta - lr * slope(theta)
    return theta


def minimiser(data: Data) -> Tensor:
    """Return θ* (d + 1, C), up to a gradient of 10⁻⁹."""
    theta = torch.zeros(1, data.public.shape[1], data.task.num_classes, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [theta], max_iter=2000, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = data.risk(theta).sum()
        value.backward()
        return value

    search.step(closure)
    return theta.detach()[0]


def private_training(data: Data, steps: int) -> Tensor:
    """Run stage 1: every client descends from 0 on its examples and the ridge; return θ (M, d + 1, C)."""
    targets = F.one_hot(data.labels, data.task.num_classes).double()

    def slope(theta: Tensor) -> Tensor:
        errors = (data.inputs @ theta).softmax(-1) - targets
        return data.inputs.mT @ errors / data.task.examples + data.task.ridge * theta

    grams = data.inputs.mT @ data.inputs / data.task.examples
    lr = 1 / (data.task.ridge + 0.5 * float(torch.linalg.eigvalsh(grams)[:, -1].max()))
    begin = torch.zeros(len(data.inputs), data.public.shape[1], data.task.num_classes, dtype=torch.float64)
    return descend(begin, slope, lr, steps)


def mixture(data: Data, theta: Tensor, temperature: float) -> Tensor:
    """Return the clients' mixture p_agg (P, C) with UWA's weights at a temperature; 0 is the average."""
    scores = [
        log_density(data.public @ weights, fit_class_gaussians(inputs @ weights, labels))
        for weights, inputs, labels in zip(theta, data.held, data.held_labels, strict=True)
    ]
    weights = mixing_weights(scores, temperature)
    return torch.einsum("mp,mpc->pc", weights, (data.public @ theta).softmax(-1))


def refine(
    data: Data, theta: Tensor, taught: Tensor, best: Tensor, how: Descent, steps: int, batch: int, every: int, seed: int
) -> Trace:
    """Run stage 2 for all clients at once, each on different batches.

    Args:
        data: The data.
        theta: The clients' start (M, d + 1, C).
        taught: p_agg (P, C).
        best: θ*.
        how: The descent.
        steps: T.
        batch: Public examples per step, drawn with replacement.
        every: Steps between two measurements.
        seed: Seed of the batches.
    """
    generator = torch_generator(seed, "biased descent, batches")
    ideal, least = (data.public @ best).softmax(-1), data.risk(best[None])
    measured = []
    for step in range(steps + 1):
        if step % every == 0:
            measured.append((torch.tensor(step).double(), *measure(data, theta, taught, ideal, batch, least)))
        chosen = torch.randint(len(data.public), (len(theta), batch), generator=generator)
        x = data.public[chosen]
        theta = theta - how.lr * x.mT @ ((x @ theta).softmax(-1) - taught[chosen]) / batch
    return Trace(*(torch.stack(column) for column in zip(*measured, strict=True)))


def measure(data: Data, theta: Tensor, taught: Tensor, ideal: Tensor, batch: int, least: Tensor) -> list[Tensor]:
    r"""Return the fields of `Trace` without the step, means over clients.

    With f = f(x, θ), row c of the score matrix is :math:`(e_c - f) \otimes x`, so
    :math:`\lVert S\rVert_F^2 = \lVert x\rVert^2 (C - 2 + C \lVert f\rVert^2)`; a sample's gradient is
    :math:`(f - p_{agg}) \otimes x`, and the variance of the mean over b samples is 1/b of a sample's.
    """
    x, given = data.public, (data.public @ theta).softmax(-1)
    lengths = x.square().sum(-1)
    true, agreed, wanted = data.slope(theta), x.T @ (given - taught) / len(x), x.T @ (given - ideal) / len(x)
    count = given.shape[-1]
    energy = (lengths * (count - 2 + count * given.square().sum(-1))).mean(1)
    single = (lengths * (given - taught).square().sum(-1)).mean(1)
    squares = [part.square().sum((1, 2)) for part in (true, agreed - true, true - wanted, agreed)]
    noise = (single - squares[3]) / batch
    return [part.mean() for part in (data.risk(theta) - least, *squares[:3], energy, noise)]
