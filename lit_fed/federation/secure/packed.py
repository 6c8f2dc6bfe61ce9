"""Messages of the protocol on a wire: the fields around them by stage, and their own in JSON's types and one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta

from lit_fed.engine.wire.payload import Payload
from lit_fed.federation.messages.schema import Key, SumOffer
from lit_fed.federation.messages.wire import MOST_METRICS
from lit_fed.federation.secure.messages import MOST_NODES, Invitation, Masked, Refusal, digest

WORDS = "words"
"""Name of a message's tensor."""

Plain = tuple[dict[str, Any], Payload]
"""Fields and tensors of a message."""


class SumCall(SumOffer):
    """The beginning of an attempt."""

    call: Invitation
    names: Annotated[list[str], Meta(max_length=MOST_METRICS)]
    grid: int | float
    deviation: int | float
    nodes: Annotated[Mapping[str, Key], Meta(max_length=MOST_NODES)]


def pack(message: Any) -> Plain:
    """Return a message's fields in JSON's types, and its tensors."""
    if type(message) is Masked:
        return {}, {WORDS: torch.from_numpy(message.words.view(np.int64))}
    return msgspec.to_builtins(message), {}


def unpack(kind: type, content: Any, tensors: Payload) -> Any:
    """Return the message of a kind from untrusted fields and tensors.

    Raises:
        Refusal: If they are no such message.
    """
    try:
        if kind is Masked:
            if (words := tensors[WORDS]).dtype != torch.int64 or words.dim() != 1:
                raise TypeError("no words")
            return kind(words.numpy().view(np.uint64))
        return msgspec.convert(content, kind)
    except (KeyError, TypeError, UnicodeError, msgspec.ValidationError):
        raise Refusal(f"a message {kind.__name__} of the secure sum is malformed") from None


def about(model: str, size: int, grid: float, names: tuple[str, ...]) -> str:
    """Return the hash of what is summed: the model that clients worked with, and the coordinates."""
    return digest("about", model, size, grid, list(names)).hex()
