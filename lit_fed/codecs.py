"""Codecs: how payloads are packed for the wire. Yours derives from `Codec`."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_fed.engine.wire.channel import Codec
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.face import live_here

__all__ = ["CastCodec", "Codec"]


class CastCodec(Codec):
    """Sends floating-point tensors in a smaller type and restores their own on arrival.

    Args:
        dtype: ``float16`` or ``bfloat16``.

    Raises:
        ConfigError: For any other type.
    """

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in ("float16", "bfloat16"):
            raise ConfigError(f"CastCodec.dtype is {dtype!r}; it must be float16 or bfloat16")
        self.dtype: torch.dtype = getattr(torch, dtype)

    def encode(self, payload: Payload) -> Payload:
        """Cast every floating-point tensor to the wire type; what it was before stands in its name."""
        return {f"{n}|{_name(t)}": t.to(self.dtype) if t.is_floating_point() else t for n, t in payload.items()}

    def decode(self, payload: Payload) -> Payload:
        """Cast every tensor back to the type it had before `encode`."""
        parts = ((name.rpartition("|"), tensor) for name, tensor in payload.items())
        return {name: tensor.to(getattr(torch, dtype)) for (name, _, dtype), tensor in parts}


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


live_here(globals())
