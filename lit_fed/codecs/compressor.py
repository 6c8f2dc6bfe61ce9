"""The common part of sparse and quantised codecs: names on the wire, and codes of a few bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Size, Tensor
from typing_extensions import override

from lit_fed.engine.wire.channel import Codec, Context, Feedback
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import WireError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
"""The dtypes that a tensor's name may end with: it comes from another machine."""


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


class Compressor(Codec):
    """Packs floating-point tensors one by one; integers, empty tensors and the model's buffers travel as they are.

    The name of a packed tensor is ``<name>|<dtype>|<sizes>|<part>`` on the wire, and that of another ``<name>|``.

    Args:
        difference: Pack the difference of a client's tensor to the broadcast's of the same name; a tensor without one
            travels as it is.
        feedback: Add the error of a tensor's last packing to the tensor; the client keeps the error, which takes as
            many bytes on disk as the update without a codec. With ``ef21`` client and server keep as many each.
    """

    def __init__(self, difference: bool, feedback: Feedback) -> None:
        self.difference, self.feedback = difference, feedback

    @abstractmethod
    def compress(self, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The parts of a tensor on the wire."""

    @abstractmethod
    def expand(self, parts: Mapping[str, Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
        """Undo `compress`, up to its error, in any shape; ``like`` has the dtype and the shape, and no values."""

    @override
    def encode(self, payload: Payload, context: Context) -> Payload:
        wire = dict[str, Tensor]()
        for name, tensor in payload.items():
            if not context.packs(name, tensor):
                wire[f"{name}|"] = tensor
                continue
            label = f"{name}|{name_of(tensor.dtype)}|{','.join(map(str, tensor.shape))}|"
            parts = self.compress(tensor.detach(), context.generator(name, self.common_seed))
            wire |= {label + part: sent for part, sent in parts.items()}
        return wire

    @override
    def decode(self, payload: Payload, context: Context) -> Payload:
        packed = dict[str, dict[str, Tensor]]()
        for key, tensor in payload.items():
            label, _, part = key.rpartition("|")
            packed.setdefault(label, {})[part] = tensor
        found = dict[str, Tensor]()
        for label, parts in packed.items():
            if "" in parts:
                found[label] = parts[""]
                continue
            name, dtype, sizes = label.rsplit("|", 2)
            shape = Size(int(size) for size in sizes.split(",") if size)
            if not 0 < math.prod(shape) <= context.most_values or min(shape, default=1) < 1:
                raise WireError(f"{name!r} on the wire has an odd shape; use the same codec on both ends")
            like = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            found[name] = self.expand(parts, like, context.generator(name, self.common_seed)).reshape(shape)
        return found


def pack(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers below 2^bits, (n,), as ⌈n · bits / 8⌉ bytes, the lowest bits first; ``bits`` is at least 1."""
    digits = torch.stack([(codes >> place & 1).to(torch.uint8) for place in range(bits)], 1).reshape(-1)
    filled = torch.nn.functional.pad(digits, (0, -len(digits) % 8)).view(-1, 8)
    return torch.stack([filled[:, place] << place for place in range(8)]).sum(0, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that `pack` packed, (count,) in int64; raise `WireError` if the bytes are not of so many."""
    if packed.dtype != torch.uint8 or packed.shape != (-(-count * bits // 8),):
        raise WireError("a tensor on the wire has another length than its shape; use the same codec on both ends")
    digits = torch.stack([packed >> place & 1 for place in range(8)], 1).reshape(-1)[: count * bits].view(count, bits)
    return torch.stack([digits[:, place].long() << place for place in range(bits)]).sum(0)
