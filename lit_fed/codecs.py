"""Codecs pack payloads for the wire. Subclass `Codec` for your own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.engine.wire.payload import Codec, Payload
from lit_fed.face import live_here

__all__ = ["CastCodec", "Codec"]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
"""The dtypes that a tensor's name may end with: it comes from another machine."""


class CastCodec(Codec):
    """Sends floating-point tensors in a smaller dtype, and restores the dtype on arrival.

    Args:
        dtype: Of what is sent.

    Raises:
        KeyError: On arrival, for a name that does not end with a dtype.
    """

    def __init__(self, dtype: Literal["float16", "bfloat16"] = "bfloat16") -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)

    @override
    def encode(self, payload: Payload) -> Payload:
        """Cast every floating-point tensor, and append its dtype to its name."""
        return {f"{n}|{_name(t)}": t.to(self.dtype) if t.is_floating_point() else t for n, t in payload.items()}

    @override
    def decode(self, payload: Payload) -> Payload:
        parts = ((name.rpartition("|"), tensor) for name, tensor in payload.items())
        return {name: tensor.to(_DTYPES[dtype]) for (name, _, dtype), tensor in parts}


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


live_here(globals())
