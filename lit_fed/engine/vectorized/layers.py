"""Layers that a group of clients computes differently from one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_MODES = (str, bool)  # arguments that choose what an operation does


class Called(TorchFunctionMode):
    """Notes the operations of torch: another objective, such as a sum for a mean, is another sequence of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence: list[Any] = []

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.sequence.append(func)
        self.sequence += [value for value in args if type(value) in _MODES]
        if kwargs:
            self.sequence += [value for value in kwargs.values() if type(value) in _MODES]
            return func(*args, **kwargs)
        return func(*args)


class GroupLayers(Called):
    """Replaces ``F.linear``, ``F.embedding`` and ``F.dropout`` within ``torch.vmap`` over clients.

    Args:
        dropout: In place of ``F.dropout``; None leaves it.
        by_sample: Whether samples are taken one by one: then ``F.linear`` stays, which joins a client's samples.
    """

    def __init__(self, dropout: Callable[..., Tensor] | None = None, by_sample: bool = False) -> None:
        super().__init__()
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {F.embedding: embedding}
        if not by_sample:
            self._replaced[F.linear] = linear
        if dropout is not None:
            self._replaced[F.dropout] = dropout

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = self._replaced.get(func)
        if own is None:
            return super().__torch_function__(func, types, args, kwargs)
        self.sequence.append(func)
        return own(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` as :math:`(W x^T)^T + b`, whose derivative by W is made in the layout of W.

    Of :math:`x W^T` autograd makes the derivative by the transpose and copies it, which takes half to three quarters of
    a layer's time on a CPU.
    """
    if input.ndim < 2 or weight.ndim != 2:
        return F.linear(input, weight, bias)
    found = torch.matmul(weight, input.reshape(-1, input.shape[-1]).mT).mT
    if bias is not None:
        found = found + bias
    return found.reshape(*input.shape[:-1], weight.shape[0]).contiguous()


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """``F.embedding``, whose ``padding_idx`` has no gradient; torch's rule for ``vmap`` leaves the index out."""
    found = F.embedding(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return found
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), found.detach(), found)
