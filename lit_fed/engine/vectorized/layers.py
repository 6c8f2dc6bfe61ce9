"""Layers that a group of clients computes differently from one client, dropout with each client's own masks among them.

A client that trains alone draws its masks from the device's generator, seeded with (seed, round, client). In a group
each client has a generator with that seed, hence the same masks. On a CPU only: a GPU draws masks in its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lit_fed.engine.method.client import Client

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
        replacement = self._replaced.get(func)
        if replacement is None:
            return super().__torch_function__(func, types, args, kwargs)
        self.sequence.append(func)
        return replacement(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` as :math:`(W x^T)^T + b`, whose derivative by W is made in the layout of W.

    Of :math:`x W^T` autograd makes the derivative by the transpose and copies it, which takes half to three quarters of
    a layer's time on a CPU.
    """
    if input.ndim < 2 or weight.ndim != 2:
        return F.linear(input, weight, bias)
    product = torch.matmul(weight, input.reshape(-1, input.shape[-1]).mT).mT
    if bias is not None:
        product = product + bias
    return product.reshape(*input.shape[:-1], weight.shape[0]).contiguous()


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """``F.embedding``, whose ``padding_idx`` has no gradient; torch's rule for ``vmap`` leaves the index out."""
    rows = F.embedding(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), rows.detach(), rows)


Part = Literal["sample", "padded", "batch"]


class Streams:
    """The random numbers of each client of a group.

    Args:
        clients: The group.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self._generators: dict[int, torch.Generator] = {}  # made for clients that draw

    def seed(self, idx: int, seed: int) -> None:
        """Seed a client's numbers anew."""
        self._generator_of(idx).manual_seed(seed)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw the same numbers again on leaving."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)

    def states(self) -> dict[int, Tensor]:
        """States of the generators that have been drawn from."""
        return {idx: generator.get_state() for idx, generator in self._generators.items()}

    def restore(self, states: Mapping[int, Tensor]) -> None:
        """Draw as after `states`."""
        self._generators = {idx: self._generators[idx].set_state(state) for idx, state in states.items()}

    def keep(self, idx: int, shape: Sequence[int], p: float, like: Tensor) -> Tensor:
        """A client's next mask as torch's ``dropout`` draws it on a CPU: 0 with probability p, else 1 / (1 − p)."""
        mask = torch.empty(shape, dtype=like.dtype)
        return mask.bernoulli_(1 - p, generator=self._generator_of(idx)).div_(1 - p)

    def _generator_of(self, idx: int) -> torch.Generator:
        if idx not in self._generators:
            self._generators[idx] = torch.Generator().manual_seed(self._clients[idx].derive_seed("training"))
        return self._generators[idx]


class GroupDropout:
    """``F.dropout`` within ``torch.vmap`` over clients.

    Args:
        streams: The group's random numbers.
        rows: Positions of the clients in the group.
        counts: Samples of each client's batch, where it is padded and taken sample by sample; else None.
    """

    def __init__(self, streams: Streams, rows: Sequence[int], counts: Sequence[int] | None) -> None:
        self.streams, self.rows, self.counts = streams, rows, counts

    def __call__(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Values of one client's batch or sample, named as in ``F.dropout``."""
        if not training or inplace or not 0 < p < 1 or input.device.type != "cpu":
            return F.dropout(input, p, training, inplace)
        dropped: Tensor = _Dropout.apply(input, p, self, "batch" if self.counts is None else "sample")
        return dropped

    def masks(self, shape: Sequence[int], p: float, part: Part, like: Tensor) -> Tensor:
        """The next mask of every client, (clients, …); 0 for padding."""
        if part == "batch":
            masks = [self.streams.keep(idx, shape, p, like) for idx in self.rows]
        else:
            masks = []
            for idx, count in zip(self.rows, self.counts or (), strict=True):
                mask = self.streams.keep(idx, (count, *shape[1:]), p, like)
                masks.append(torch.cat([mask, mask.new_zeros(shape[0] - count, *shape[1:])]))
        return torch.stack(masks)


class _Dropout(torch.autograd.Function):
    """Passes through the levels of ``torch.vmap``, from a sample to a client's batch to the group."""

    @staticmethod
    def forward(x: Tensor, p: float, group: GroupDropout, part: Part) -> Tensor:
        raise RuntimeError("dropout outside of a group")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: `vmap` is differentiable itself."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, p: float, group: GroupDropout, part: Part
    ) -> tuple[Tensor, int | None]:
        """A batch from its samples, or all clients' batches."""
        at = in_dims[0]
        if part != "sample":
            x = x.unsqueeze(0) if at is None else x.movedim(at, 0)
            masks = group.masks(x.shape[1:], p, part, x)
            return x * masks.expand(info.batch_size, *masks.shape[1:]), 0  # one client is computed as two equal ones
        if at is None:  # the same for all samples
            same: Tensor = _Dropout.apply(x, p, group, "batch")
            return same, None
        x = x.movedim(at, 0)
        if x.ndim < 2 or x.shape[1] != 1:
            raise RuntimeError("dropout of values whose first dimension is not the samples needs another randomness")
        dropped: Tensor = _Dropout.apply(x.squeeze(1), p, group, "padded")
        return dropped.unsqueeze(1), 0
