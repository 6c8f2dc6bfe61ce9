"""Linear layers of a group of clients, each with its own weights, as batched products.

Under ``torch.vmap`` autograd computes the transpose of the weights' gradient and copies it into their layout: half to
three quarters of a layer's time on a CPU. Here the product is computed in the layout of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class GroupLayers(TorchFunctionMode):
    """Makes ``F.linear`` run as batched products, and ``F.dropout`` by clients, within ``torch.vmap`` over clients.

    Args:
        dropout: In place of ``F.dropout``; None leaves it.
    """

    def __init__(self, dropout: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self._dropout = dropout

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not torch.is_autocast_enabled(args[0].device.type):
            return _linear(*args, **(kwargs or {}))
        if func is F.dropout and self._dropout is not None:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # named as in `F.linear`
    if input.ndim < 2 or weight.ndim != 2:
        return F.linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    found: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return found.view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """Rows (m, i), weights (o, i) and a bias (o,) or None, for one client; its ``vmap`` is for several."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.mT @ x if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        """Products of all clients; of all samples, where only the rows are batched."""
        at, of_weight, of_bias = in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if at is None else x.movedim(at, 0)
        if of_weight is None and of_bias is None:
            found: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
            return found.view(*x.shape[:-1], -1), 0
        weight = weight.expand(info.batch_size, *weight.shape) if of_weight is None else weight.movedim(of_weight, 0)
        if bias is not None:
            bias = bias.expand(info.batch_size, *bias.shape) if of_bias is None else bias.movedim(of_bias, 0)
        several: Tensor = _Batched.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return several, 0


class _Batched(torch.autograd.Function):
    """Rows (n, m, i), weights (n, o, i) and biases (n, o) or None."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(gradient, weight) if of_x else None,
            torch.bmm(gradient.mT, x) if of_weight else None,
            gradient.sum(1) if of_bias else None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *stacks: Tensor | None) -> tuple[Tensor, int]:
        """Batched products within a further batch."""
        x, weight, bias = (
            None if stack is None else stack.unsqueeze(0).expand(info.batch_size, *stack.shape)
            if at is None else stack.movedim(at, 0)
            for stack, at in zip(stacks, in_dims, strict=True)
        )  # fmt: skip
        assert x is not None
        flat = [None if one is None else one.flatten(0, 1) for one in (x, weight, bias)]
        found: Tensor = _Batched.apply(*flat)  # type: ignore[no-untyped-call]
        return found.unflatten(0, x.shape[:2]), 0
