r"""Federated linear attention, the task of FedFrozen's simulations, batched over clients and seeds.

Du, Li, Feng, Feng: "FedFrozen: Two-Stage Federated Optimization via Attention Kernel Freezing", 2026, Eq. 2 and
Appendix B.1:

.. math:: O(H) = A(H)\,HW^V, \qquad A(H) = \varphi(HW^Q)\,\varphi(HW^K)^\top.

The weights are concatenated, :math:`W = [W^Q\,|\,W^K\,|\,W^V]`, (…, d, 2·d_k + d_v), so that each step needs two large
products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_fed.checks import check_choice, check_range
from lit_fed.private_names import softmax_backward
from lit_fed.seeding import torch_generator

FeatureMap = Literal["sigmoid", "softmax"]
Reduction = Literal["tokens", "mean"]


@dataclass(frozen=True)
class TeacherTask:
    r"""The task: the outputs of a teacher on tokens whose means differ between clients.

    Client k draws :math:`\mu_k \sim \mathcal N(0, \rho^2 I_d)` and tokens :math:`H \sim \mathcal N(\mu_k, I_d)`;
    :math:`Y = O(H; W^\star) + \sigma\varepsilon`.

    Args:
        num_clients: K.
        dim: d, the length of a token.
        key_dim: d_k.
        value_dim: d_v.
        tokens: n, tokens per example.
        examples: m, examples per client.
        noise: σ.
        feature_map: φ and with it A: ``sigmoid`` is :math:`A = \varphi\varphi^\top / n` with the sigmoid of each entry,
            ``softmax`` is :math:`A = \varphi\varphi^\top` with the softmax of each row.
        reduction: The reduction of squared errors to the loss: ``tokens`` sums over values and averages over tokens and
            examples, ``mean`` averages over everything.
        scale: Standard deviation of the initial weights and of the teacher's, in units of :math:`1/\sqrt d`.

    Note:
        The paper does not state the last three, which decide the outcome. With the defaults, most panels of Figures 1
        to 3 have the published shape; ``docs/results/fedfrozen.md`` lists the others.
    """

    num_clients: int = 10
    dim: int = 64
    key_dim: int = 32
    value_dim: int = 32
    tokens: int = 16
    examples: int = 40
    noise: float = 1e-2
    feature_map: FeatureMap = "sigmoid"
    reduction: Reduction = "tokens"
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        for key, known in (("feature_map", get_args(FeatureMap)), ("reduction", get_args(Reduction))):
            check_choice(f"task.{key}", getattr(self, key), known)
        for key in ("num_clients", "dim", "key_dim", "value_dim", "tokens", "examples"):
            check_range(f"task.{key}", getattr(self, key), least=1)

    @property
    def loss_scale(self) -> float:
        """The factor of a client's sum of squared errors."""
        counted = self.examples * self.tokens
        return 1.0 / (counted * self.value_dim if self.reduction == "mean" else counted)

    @property
    def kernel_scale(self) -> float:
        """The factor of the products of features in the kernel A."""
        return 1.0 / self.tokens if self.feature_map == "sigmoid" else 1.0


@dataclass(frozen=True)
class Clients:
    """A task's data, for several seeds at once.

    Args:
        task: The task.
        inputs: Tokens (S, K, m·n, d).
        targets: The teacher's outputs with noise, (S, K, m·n, d_v).
        weights: The initial weights, (S, d, 2·d_k + d_v).
        teacher: The teacher's weights, in the same shape.
    """

    task: TeacherTask
    inputs: Tensor
    targets: Tensor
    weights: Tensor
    teacher: Tensor


def draw(task: TeacherTask, rho: float, seeds: list[int], dtype: torch.dtype = torch.float32) -> Clients:
    """Draw data and initial weights; a seed gives the same standard normal numbers for every ρ."""
    inputs, targets, weights, teachers = [], [], [], []
    for seed in seeds:
        generator = torch_generator(seed, "linear attention")

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        width = 2 * task.key_dim + task.value_dim
        means = rho * normal(task.num_clients, 1, task.dim)
        tokens = means + normal(task.num_clients, task.examples * task.tokens, task.dim)
        teacher, start = (task.scale / task.dim**0.5 * normal(task.dim, width) for _ in range(2))
        features = attended(task, tokens, teacher.expand(task.num_clients, -1, -1))
        output = features @ teacher[:, 2 * task.key_dim :]
        inputs.append(tokens)
        targets.append(output + task.noise * normal(*output.shape))
        weights.append(start)
        teachers.append(teacher)
    return Clients(task, *(torch.stack(parts).to(dtype) for parts in (inputs, targets, weights, teachers)))


def _maps(task: TeacherTask, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return φ(HW^Q) and φ(HW^K) of tokens (B, m·n, d), by example: (B·m, n, d_k)."""
    blocks = weights[..., : 2 * task.key_dim].split(task.key_dim, -1)
    query, key = (torch.bmm(inputs, block).view(-1, task.tokens, task.key_dim) for block in blocks)
    if task.feature_map == "sigmoid":
        return query.sigmoid(), key.sigmoid()
    return query.softmax(-1), key.softmax(-1)


def _kernel(task: TeacherTask, query: Tensor, key: Tensor) -> Tensor:
    """Return A (B·m, n, n) of features (B·m, n, d_k)."""
    return torch.bmm(query, key.mT).mul_(task.kernel_scale)


def attended(task: TeacherTask, inputs: Tensor, weights: Tensor) -> Tensor:
    """Return the value block's input A(H)·H (B, m·n, d), for tokens (B, m·n, d) and weights (B, d, 2·d_k + d_v)."""
    kernel = _kernel(task, *_maps(task, inputs, weights))
    return torch.bmm(kernel, inputs.reshape(-1, task.tokens, task.dim)).view(inputs.shape)


def gradient(task: TeacherTask, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return a client's residuals and the gradient of its loss, without the ridge.

    With residuals R = AV − Y, V = HW^V: dV = AᵀR, dA = RVᵀ, dφ(Q) = dA·φ(K), dφ(K) = dAᵀφ(Q), both times the factor of
    A, through φ, and dW = Hᵀ[dQ | dK | dV].

    Args:
        task: Sizes and reduction.
        inputs: (B, m·n, d).
        targets: (B, m·n, d_v).
        weights: (B, d, 2·d_k + d_v).

    Returns:
        Residuals (B, m·n, d_v), the input of `loss`, and gradients (B, d, 2·d_k + d_v).
    """
    query, key = _maps(task, inputs, weights)
    kernel = _kernel(task, query, key)
    values = torch.bmm(inputs, weights[..., 2 * task.key_dim :]).view(-1, task.tokens, task.value_dim)
    residual = torch.baddbmm(targets.view(values.shape), kernel, values, beta=-1)
    d_products = torch.bmm(residual, values.mT).mul_(task.kernel_scale)
    d_query = _through_map(task, torch.bmm(d_products, key), query)
    d_key = _through_map(task, torch.bmm(d_products.mT, query), key)
    d_values = torch.bmm(kernel.mT, residual)
    across = inputs.mT
    blocks = [torch.bmm(across, block.view(*inputs.shape[:-1], -1)) for block in (d_query, d_key, d_values)]
    return residual.view(targets.shape), torch.cat(blocks, -1).mul_(2 * task.loss_scale)


def loss(task: TeacherTask, residuals: Tensor) -> Tensor:
    """Return a client's loss (B,) from its residuals (B, m·n, d_v), without the ridge."""
    return task.loss_scale * residuals.square().sum((1, 2))


def _through_map(task: TeacherTask, gradient: Tensor, output: Tensor) -> Tensor:
    """Backpropagate through φ: φ(1 − φ)g for the sigmoid, φ ⊙ (g − ⟨g, φ⟩) for the softmax of rows."""
    if task.feature_map == "sigmoid":
        return gradient * output * (1 - output)
    return softmax_backward(gradient, output, -1, output.dtype)
