"""Rounds of FedAvg, FedProx, SCAFFOLD and FedFrozen on federated linear attention, batched over clients and seeds.

Full-batch gradient descent, full participation, uniform averaging: Algorithm 1 of FedFrozen and Appendix B.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_fed.studies.papers.fedfrozen.linear_attention import Clients, attended, gradient, loss

_CHUNK = 1280  # tokens per step, which fit into a core's cache


@dataclass(frozen=True)
class Work:
    """The clients' local work.

    Args:
        lr: η.
        local_steps: E.
        ridge: λ, on the value block.
        mu: FedProx's μ.
        control: Whether SCAFFOLD's control variates (option 2) correct the gradients.
    """

    lr: float = 1e-3
    local_steps: int = 20
    ridge: float = 1e-3
    mu: float = 0.0
    control: bool = False


@dataclass
class Path:
    """The trajectory of a run.

    Args:
        weights: The global weights (S, d, 2·d_k + d_v) after selected rounds; 0 stands for the initial weights.
        losses: The global loss f, without the ridge, before each round, and after the last: (S,) each.
        drifts: The mean distance of the clients from the global model after each round's local work: (S,) each.
    """

    weights: dict[int, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    drifts: list[Tensor] = field(default_factory=list)

    @property
    def loss(self) -> Tensor:
        """The last global loss (S,)."""
        return self.losses[-1]


def train(
    clients: Clients,
    work: Work,
    rounds: int,
    keep: Sequence[int] = (),
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Train all parameters.

    Args:
        clients: Data and initial weights.
        work: The local work.
        rounds: The number of rounds.
        keep: Rounds after which the weights are kept; the final weights always are.
        progress: Called after each round with the number of finished rounds.
    """
    task = clients.task
    num_seeds, num_clients = clients.inputs.shape[:2]
    inputs, targets = clients.inputs.flatten(0, 1), clients.targets.flatten(0, 1)
    server = clients.weights
    local = server.repeat_interleave(num_clients, 0)
    controls = torch.zeros_like(local) if work.control else None
    path = Path({0: server} if 0 in keep else {})
    for round_idx in range(rounds):
        start = server.repeat_interleave(num_clients, 0)
        control = None
        if controls is not None:
            mean = controls.view(num_seeds, num_clients, *controls.shape[1:]).mean(1)
            control = mean.repeat_interleave(num_clients, 0) - controls
        losses = []
        for chunk in _chunks(inputs):
            anchor = start[chunk]
            weights = anchor.clone()
            for step in range(work.local_steps):
                residuals, slope = gradient(task, inputs[chunk], targets[chunk], weights)
                if step == 0:
                    losses.append(loss(task, residuals))
                values = slice(2 * task.key_dim, None)
                slope[..., values].add_(weights[..., values], alpha=work.ridge)
                if work.mu:
                    slope.add_(weights, alpha=work.mu).sub_(anchor, alpha=work.mu)
                if control is not None:
                    slope.add_(control[chunk])
                weights.sub_(slope, alpha=work.lr)
            local[chunk] = weights
        if controls is not None and control is not None:
            # c_k ← c_k − c + (w − w_k)/(Eη), and control is c − c_k
            controls = (start - local) / (work.local_steps * work.lr) - control
        moved = (local - start).flatten(1).norm(dim=1)
        server = local.view(num_seeds, num_clients, *local.shape[1:]).mean(1)
        path.losses.append(torch.cat(losses).view(num_seeds, num_clients).mean(1))
        path.drifts.append(moved.view(num_seeds, num_clients).mean(1))
        if round_idx + 1 in keep or round_idx + 1 == rounds:
            path.weights[round_idx + 1] = server
        if progress is not None:
            progress(round_idx + 1)
    path.losses.append(evaluate(clients, server))
    return path


def evaluate(clients: Clients, weights: Tensor) -> Tensor:
    """Return the global loss f (S,), without the ridge, of weights (S, d, 2·d_k + d_v)."""
    num_seeds, num_clients = clients.inputs.shape[:2]
    every = weights.repeat_interleave(num_clients, 0)
    inputs, targets = clients.inputs.flatten(0, 1), clients.targets.flatten(0, 1)
    task = clients.task
    parts = [loss(task, gradient(task, inputs[c], targets[c], every[c])[0]) for c in _chunks(inputs)]
    return torch.cat(parts).view(num_seeds, num_clients).mean(1)


@dataclass(frozen=True)
class Quadratic:
    r"""The clients' losses in θ under a fixed kernel, :math:`F_k = \tfrac12\theta^\top G_k\theta - B_k\theta + c_k`.

    Args:
        gram: G (S, K, d, d), in float64.
        cross: B (S, K, d, d_v).
        constant: c (S, K).
    """

    gram: Tensor
    cross: Tensor
    constant: Tensor

    def loss(self, values: Tensor, ridge: float = 0.0) -> Tensor:
        """Return the global loss f_λ (S,) of value blocks (S, d, d_v); f without a ridge."""
        gram, cross = self.gram.mean(1), self.cross.mean(1)
        fitted = ((0.5 * gram @ values - cross) * values).sum((1, 2)) + self.constant.mean(1)
        return fitted + 0.5 * ridge * values.square().sum((1, 2))

    def best(self, ridge: float) -> Tensor:
        r"""Return the optimal value blocks (S, d, d_v), :math:`\theta^\star = (G + \lambda I)^{-1} B`."""
        return ridge_solution(self.gram.mean(1), self.cross.mean(1), ridge)


def fix_kernel(clients: Clients, weights: Tensor) -> Quadratic:
    """Return the problem in θ under the fixed kernel of weights (S, d, 2·d_k + d_v)."""
    num_seeds, num_clients = clients.inputs.shape[:2]
    grams, crosses, constants = [], [], []
    scale = 2 * clients.task.loss_scale
    for seed in range(num_seeds):
        every = weights[seed].double().expand(num_clients, -1, -1)
        features = attended(clients.task, clients.inputs[seed].double(), every)
        targets = clients.targets[seed].double()
        grams.append(scale * features.mT @ features)
        crosses.append(scale * features.mT @ targets)
        constants.append(0.5 * scale * targets.square().sum((1, 2)))
    return Quadratic(torch.stack(grams), torch.stack(crosses), torch.stack(constants))


def profile(clients: Clients, weights: Tensor, ridge: float) -> Tensor:
    r"""Solve the profile objective :math:`h_\lambda(\Phi) = \min_\theta f_\lambda(\Phi, \theta)` (S,), Eq. 7, exactly.

    Args:
        clients: The data.
        weights: (S, d, 2·d_k + d_v), whose kernel counts.
        ridge: λ; 0 gives the least-squares solution of smallest norm.

    Returns:
        h; infinite for weights that are not finite.
    """
    finite = torch.isfinite(weights).all((1, 2))
    problem = fix_kernel(clients, torch.where(finite[:, None, None], weights, 0.0))
    return torch.where(finite, problem.loss(problem.best(ridge), ridge), torch.inf)


def ridge_solution(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return the minimiser of ½θᵀGθ − Bθ + λ/2‖θ‖², (S, d, d_v)."""
    if ridge == 0:
        inverse: Tensor = torch.linalg.pinv(gram, hermitian=True)
        return inverse @ cross
    solution: Tensor = torch.linalg.solve(gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype), cross)
    return solution


def train_values(clients: Clients, work: Work, weights: Tensor, rounds: int) -> Path:
    r"""Train the value block under the kernel of the given weights: phase 2 of FedFrozen.

    Under a fixed kernel the clients' losses are quadratic, so that E steps of size η are one affine map of θ:

    .. math:: \theta \leftarrow P^E \theta + \eta \sum_{j<E} P^j B, \qquad P = I - \eta (G + \lambda I) .
    """
    problem = fix_kernel(clients, weights)
    split = 2 * clients.task.key_dim
    values = weights[..., split:].double()
    path = Path(losses=[problem.loss(values)])
    identity = torch.eye(values.shape[1], dtype=values.dtype)
    step, offset = (1.0 - work.lr * work.ridge) * identity - work.lr * problem.gram, torch.zeros_like(problem.cross)
    for _ in range(work.local_steps):
        offset = step @ offset + work.lr * problem.cross
    power = torch.linalg.matrix_power(step, work.local_steps)
    for _ in range(rounds):
        local = power @ values[:, None] + offset
        path.drifts.append((local - values[:, None]).flatten(2).norm(dim=2).mean(1))
        values = local.mean(1)
        path.losses.append(problem.loss(values))
    path.weights[rounds] = torch.cat([weights[..., :split], values.to(weights.dtype)], -1)
    return path


def _chunks(inputs: Tensor) -> list[slice]:
    """Return slices of clients (B, m·n, d) that are batched."""
    size = max(1, _CHUNK // inputs.shape[1])
    return [slice(start, start + size) for start in range(0, len(inputs), size)]
