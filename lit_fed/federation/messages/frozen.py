"""Frozen tensors by their hash, so that a node which holds a tensor does not receive it again.

A node holds the frozen tensors of its own models, such as a pretrained base that both ends read or draw by the same
seed, and the tensors that it received last. Its greeting has their hashes; a message names a held tensor by its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from weakref import ref

import torch
from torch import Tensor

from lit_fed.engine.storage.files import write_atomically
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import CheckpointError, WireError
from lit_fed.private_names import version_of
from lit_fed.tensors import check_bytes, hash_of

Hashes = dict[str, dict[str, str]]
"""Hashes by kind of network and name of the tensor."""

NAME = "frozen.pt"


class UnknownTensor(WireError):
    """The server names a tensor that the node does not hold."""


class KnownHashes:
    """The server's hashes of tensors that it sends, computed anew where a tensor has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[ref[Tensor], int, str]] = {}

    def hashes(self, kind: str, tensors: Payload) -> dict[str, str]:
        """The hash of every tensor of a kind."""
        for name, tensor in tensors.items():
            known = self._known.get((kind, name))
            if known is None or known[0]() is not tensor or known[1] != version_of(tensor):
                self._known[kind, name] = ref(tensor), version_of(tensor), hash_of(tensor)
        return {name: self._known[kind, name][2] for name in tensors}

    def divide(self, kind: str, tensors: Payload, there: dict[str, str]) -> tuple[Payload, dict[str, str]]:
        """The tensors that a node lacks, and the hashes of the others.

        Args:
            kind: The kind of network.
            tensors: Its frozen tensors.
            there: The node's hashes, to which those of the result are added.
        """
        hashes = self.hashes(kind, tensors)
        held = {name: one for name, one in hashes.items() if there.get(name) == one}
        there.update(hashes)
        return {name: tensor for name, tensor in tensors.items() if name not in held}, held


class FrozenTensors:
    """A node's frozen tensors, the newest of each name.

    Args:
        own: The frozen tensors that the node's models begin with, by kind.
        folder: Keeps the received tensors for the next process.
        say: Prints a line.
    """

    def __init__(self, own: Mapping[str, Payload], folder: Path, say: Callable[[str], object]) -> None:
        self._path = folder / NAME
        self._own = own
        self._received = self._read(say)
        self.hashes: Hashes = {
            kind: {name: hash_of(self._tensor(kind, name)) for name in {**tensors, **self._received.get(kind, {})}}
            for kind, tensors in own.items()
        }

    def _read(self, say: Callable[[str], object]) -> dict[str, dict[str, Tensor]]:
        """The tensors of earlier messages; none where the file cannot be read, as the server sends them again."""
        if not self._path.is_file():
            return {}
        try:
            content = torch.load(self._path, weights_only=True, map_location="cpu")
            check_bytes(self._path)
            found = {kind: {n: t for n, t in content[kind].items() if isinstance(t, Tensor)} for kind in self._own}
        except Exception as error:  # damaged bytes raise many exceptions
            why = " ".join(str(error).split())[:120]
            say(f"{self._path} cannot be read ({why}); the server sends its tensors again")
            return {}
        return found

    def _tensor(self, kind: str, name: str) -> Tensor:
        received = self._received.get(kind, {})
        return received[name] if name in received else self._own[kind][name]

    def complete(self, kind: str, sent: Payload, named: Mapping[str, str]) -> Payload:
        """All frozen tensors of a message, of which some are sent and others named by their hash.

        Raises:
            UnknownTensor: If a named tensor is not here.
        """
        hashes = self.hashes.setdefault(kind, {})
        if odd := [name for name, one in named.items() if hashes.get(name) != one]:
            raise UnknownTensor(f"the frozen tensor {odd[0][:100]!r} that the server names is not on this node")
        if sent:
            own = {name: tensor.clone() for name, tensor in sent.items()}  # which keep no message in memory
            self._received.setdefault(kind, {}).update(own)
            hashes.update({name: hash_of(tensor) for name, tensor in sent.items()})
            with suppress(CheckpointError):  # a full disk: the next process receives them again
                write_atomically(self._received, self._path)
        return {**sent, **{name: self._tensor(kind, name) for name in named}}
