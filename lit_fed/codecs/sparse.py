"""A part of each tensor's entries: the largest, or a random choice."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.codecs.compressor import Compressor, pack, unpack
from lit_fed.engine.wire.channel import Feedback
from lit_fed.errors import WireError


class _Sparse(Compressor):
    """Sends k = ⌈share · d⌉ of the d entries of each tensor, and 0 for the others.

    Args:
        share: Of the entries.
        difference: See `Compressor`.
        feedback: See `Compressor`.
    """

    def __init__(self, share: float = 0.01, difference: bool = True, feedback: Feedback = True) -> None:
        super().__init__(difference, feedback)
        self.share = check_range(f"{type(self).__name__}.share", share, above=0, most=1)

    def _count(self, size: int) -> int:
        return math.ceil(self.share * size)

    def _filled(self, parts: Mapping[str, Tensor], places: Tensor, like: Tensor) -> Tensor:
        """The sent values at their places, and zeros."""
        values, size = parts["values"], like.numel()
        if values.shape != places.shape or values.dtype != like.dtype or int(places.max()) >= size:
            raise WireError("a tensor on the wire has other entries than its shape; use the same codec on both ends")
        return values.new_zeros(size).index_copy_(0, places.to(values.device), values)


def _bits(size: int) -> int:
    """The bits of a place among several."""
    return max(1, (size - 1).bit_length())


class TopK(_Sparse):
    r"""Sends the largest entries of each tensor, and their places, of :math:`\lceil \log_2 d \rceil` bits each.

    Its error is bounded: :math:`\lVert C(x) - x \rVert^2 \le (1 - k/d) \lVert x \rVert^2`. With error feedback
    (Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018; Karimireddy et al., ICML 2019) what one update leaves
    out comes with a later one:

    .. math:: p_t = \Delta_t + e_t, \qquad \text{send } C(p_t), \qquad e_{t+1} = p_t - C(p_t),

    so that :math:`\sum_{t<T} C(p_t) + e_T = \sum_{t<T} \Delta_t`. With ``ef21`` (Richtárik, Sokolov, Fatkhullin: "EF21:
    A New, Simpler, Theoretically Better, and Practically Faster Error Feedback", NeurIPS 2021) client and server hold
    an estimate g of the client's movement, 0 at first,

    .. math:: \text{send } c_t = C(\Delta_t - g_t), \qquad g_{t+1} = g_t + c_t,

    and the server takes :math:`g_{t+1}` for :math:`\Delta_t`.

    Args:
        share: k/d, the share of a tensor's entries that is sent; at least one is.
        difference: See `Compressor`.
        feedback: Error feedback, ``ef21``, or neither.

    Note:
        The papers choose k entries of one vector; here each tensor has its own k, so that no layer is left out. EF21's
        clients compress gradients, and all take part; here a client's movement is in a gradient's place, and the
        server averages the estimates of the clients whose updates arrived.
    """

    @override
    def compress(self, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        flat = tensor.reshape(-1)
        places = flat.abs().topk(self._count(len(flat)), sorted=False).indices.sort().values
        return {"values": flat[places], "places": pack(places, _bits(len(flat)))}

    @override
    def expand(self, parts: Mapping[str, Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
        return self._filled(parts, unpack(parts["places"], _bits(like.numel()), self._count(like.numel())), like)


class RandomK(_Sparse):
    r"""Sends k random entries of each tensor; both ends draw their places from one seed, so that no places travel.

    With error feedback as `TopK`. Without it entries are multiplied by d/k, so that the mean over draws is the tensor,
    with :math:`\mathbb{E} \lVert C(x) - x \rVert^2 = (d/k - 1) \lVert x \rVert^2` (Stich et al., NeurIPS 2018;
    Wangni et al., NeurIPS 2018).

    Args:
        share: k/d, the share of a tensor's entries that is sent; at least one is.
        difference: See `Compressor`.
        feedback: Error feedback or ``ef21``, without which entries are scaled.
        common_seed: Draw the same places for all clients of a round, and others in the next round, so that updates add
            up at these places alone: under ``trainer.secure_sum`` nodes mask k values in place of d, and
            `lit_fed.privacy.ClientLevel` adds noise to these alone.
    """

    def __init__(
        self, share: float = 0.01, difference: bool = True, feedback: Feedback = True, common_seed: bool = False
    ) -> None:
        super().__init__(share, difference, feedback)
        self.common_seed = common_seed

    @override
    def places(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(size, generator=generator, device="cpu")[: self._count(size)]

    @override
    def compress(self, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        flat = tensor.reshape(-1)
        values = flat[self.places(len(flat), generator).to(flat.device)]
        return {"values": values if self.feedback else values * (len(flat) / len(values))}

    @override
    def expand(self, parts: Mapping[str, Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
        return self._filled(parts, self.places(like.numel(), generator), like)
