"""Floating-point tensors in a smaller dtype."""

from __future__ import annotations

from typing import Literal

import torch
from typing_extensions import override

from lit_fed.codecs.compressor import DTYPES, name_of
from lit_fed.engine.wire.channel import Codec, Context
from lit_fed.engine.wire.payload import Payload


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
    def encode(self, payload: Payload, context: Context) -> Payload:
        """Cast every floating-point tensor, and append its dtype to its name."""
        return {
            f"{name}|{name_of(tensor.dtype)}": tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in payload.items()
        }

    @override
    def decode(self, payload: Payload, context: Context) -> Payload:
        parts = ((name.rpartition("|"), tensor) for name, tensor in payload.items())
        return {name: tensor.to(DTYPES[dtype]) for (name, _, dtype), tensor in parts}
