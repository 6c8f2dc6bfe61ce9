"""Messages of the protocol as JSON's types and one tensor, for a wire; what comes from it is checked by its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from lit_fed.engine.wire.payload import Payload
from lit_fed.federation.secure.messages import (
    MOST_NODES,
    AllKeys,
    Consent,
    Consents,
    Invitation,
    Masked,
    Refusal,
    Relayed,
    Sealed,
    SignedKeys,
    Survivors,
    Unmasking,
    digest,
)

WORDS = "words"
"""Name of a message's tensor."""

Plain = tuple[dict[str, Any], Payload]
"""Fields and tensors of a message."""


def pack(message: Any) -> Plain:
    """Return a message's fields in JSON's types, and its tensors."""
    if type(message) is Masked:
        return {}, {WORDS: torch.from_numpy(message.words.view(np.int64))}
    return {one.name: _plain(getattr(message, one.name)) for one in fields(message)}, {}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {name: f"{one:x}" if type(one) is int else _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


def unpack(kind: type, content: Mapping[str, Any], tensors: Payload) -> Any:
    """Return the message of a kind from untrusted fields and tensors.

    Raises:
        Refusal: If they are no such message.
    """
    try:
        return _READERS[kind](content, tensors)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refusal(f"a message {kind.__name__} of the secure sum is malformed") from None


def _bytes(value: Any) -> bytes:
    return bytes.fromhex(value) if len(value) <= 2**11 else b""


def _number(value: Any) -> int:
    return int(value, 16) if len(value) <= 2**8 else -1


def _map(value: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    if len(value) > MOST_NODES:
        raise ValueError("more entries than nodes")
    return {name: read(one) for name, one in value.items()}


def _keys(value: Any) -> SignedKeys:
    masking, sealing, signature = (_bytes(value[key]) for key in ("masking", "sealing", "signature"))
    return SignedKeys(value["name"], masking, sealing, value["clients"], signature)


def _call(content: Mapping[str, Any]) -> Invitation:
    given = {one.name: content[one.name] for one in fields(Invitation)}
    return Invitation(**{**given, "roster": tuple(given["roster"])})


def _masked(tensors: Payload) -> Masked:
    words = tensors[WORDS]
    if words.dtype != torch.int64 or words.dim() != 1:
        raise ValueError("no vector of words")
    return Masked(words.numpy().view(np.uint64))


_READERS: dict[type, Callable[[Mapping[str, Any], Payload], Any]] = {
    Invitation: lambda content, _: _call(content),
    AllKeys: lambda content, _: AllKeys(tuple(_keys(one) for one in content["keys"])),
    Relayed: lambda content, _: Relayed(_map(content["shares"], _bytes), tuple(content["sharing"])),
    Survivors: lambda content, _: Survivors(tuple(content["names"])),
    Consents: lambda content, _: Consents(_map(content["signatures"], _bytes)),
    SignedKeys: lambda content, _: _keys(content),
    Sealed: lambda content, _: Sealed(_map(content["shares"], _bytes), _bytes(content["commitment"])),
    Masked: lambda _, tensors: _masked(tensors),
    Consent: lambda content, _: Consent(_bytes(content["signature"])),
    Unmasking: lambda content, _: Unmasking(*(_map(content[key], _number) for key in ("seeds", "keys"))),
}


def about(model: str, size: int, grid: float, names: tuple[str, ...]) -> str:
    """Return the hash of what is summed: the model that clients worked with, and the coordinates."""
    return digest("about", model, size, grid, list(names)).hex()
