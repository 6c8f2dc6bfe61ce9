"""What crosses the wire between the server and its clients.

A payload is a flat mapping from names to tensors. Weights, deltas, control variates, predictions, densities and
generators are all payloads; the round loop never looks inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

MOST_VALUES = 2**22
"""A payload of more is not made one vector."""

Payload = Mapping[str, Tensor]
Layout = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Names with types and shapes: what a payload must look like."""


def num_bytes(payload: Payload) -> int:
    """Bytes that a payload's tensors occupy on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in payload.values())


def layout_of(payload: Payload) -> Layout:
    """What a payload looks like."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in payload.items()}


def add_prefix(prefix: str, payload: Payload) -> dict[str, Tensor]:
    """The same tensors under longer names, so that several sets of them fit into one payload or client state."""
    return {prefix + name: tensor for name, tensor in payload.items()}


def split_prefix(prefix: str, payload: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `add_prefix` added, under its own names again, and the rest."""
    inside, rest, length = dict[str, Tensor](), dict[str, Tensor](), len(prefix)
    for name, tensor in payload.items():
        if name.startswith(prefix):
            inside[name[length:]] = tensor
        else:
            rest[name] = tensor
    return inside, rest


def is_finite(payload: Payload) -> bool:
    """Whether no tensor of a payload holds NaN or infinity; one device synchronisation."""
    return are_finite(payload.values())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity, whatever its type; one device synchronisation where all are on one."""
    parts = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    found = [tensor.detach() for tensor in parts if tensor.is_floating_point() and tensor.numel()]
    if not found:
        return True
    # A sum is not finite if a term is not; a sum that overflows tells of values no training survives. That holds for
    # float32's exponents only: in float16 ordinary values overflow.
    sums = [tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None) for tensor in found]
    together = len({total.device for total in sums}) == 1 and sums[0].device.type != "cpu"
    return all(map(math.isfinite, torch.stack(sums).tolist() if together else [total.item() for total in sums]))


class Flat(NamedTuple):
    """A payload of floating-point tensors as one vector, which sums faster than its tensors one by one.

    Args:
        layout: Names and shapes, in order; one object for many payloads, so that a glance tells that they are alike.
        values: All tensors, one after the other.
    """

    layout: Mapping[str, torch.Size]
    values: Tensor

    @classmethod
    def of(cls, payload: Payload, like: Mapping[str, torch.Size]) -> Flat | None:
        """A payload's tensors, copied; None where they are not all of one floating-point type on one device.

        Nor where they have more than `MOST_VALUES`: large tensors gain nothing from being one, and their copy would be
        one more model in memory.

        Args:
            payload: The tensors.
            like: The layout of an earlier payload, which this one shares where it fits.
        """
        shapes = {name: tensor.shape for name, tensor in payload.items()}
        kinds = {(tensor.dtype, tensor.device) for tensor in payload.values()}
        if len(kinds) != 1 or not next(iter(kinds))[0].is_floating_point:
            return None
        if sum(map(torch.Size.numel, shapes.values())) > MOST_VALUES:
            return None
        layout = like if shapes == like else shapes
        return cls(layout, torch.cat([payload[name].detach().reshape(-1) for name in layout]))

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Another vector of this layout as tensors by name."""
        parts = torch.split(values, [shape.numel() for shape in self.layout.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.layout.items(), parts, strict=True)}


class FlatPayload(Mapping[str, Tensor]):
    """A payload that is one vector, taken apart where somebody looks: a sum of many never does.

    Args:
        flat: The vector.
    """

    __slots__ = ("_flat", "_parts")

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._parts: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._parts is None:
            self._parts = self._flat.split(self._flat.values)
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat.layout)

    def __len__(self) -> int:
        return len(self._flat.layout)


@dataclass(slots=True)
class ClientUpdate:
    """One client's answer to a broadcast.

    Args:
        client_id: Who sent it.
        payload: The named tensors. They may alias the tensors of the client's module, which the next client
            overwrites: a reducer that keeps them must clone them.
        weight: The client's weight in a weighted mean, by convention its number of training samples. An integer
            weight keeps sums of float32 tensors exact in float64, and so independent of their order.
        metrics: Named scalars of the local work, such as ``train/loss``.
        kind: Which kind of network the client has.
        probability: The probability with which an update of the client comes out of a round, see
            `lit_fed.participation.Participation.probability`; set by the round loop.
        flat: The payload as one vector, where whoever trained the client had it so; it stays what it is.
        uplink_bytes: Bytes on the wire, counted where the update arrived; 0 before.
    """

    client_id: int
    payload: Payload
    weight: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)
    kind: str = "model"
    probability: float | None = None
    flat: Flat | None = None
    uplink_bytes: int = 0

    def with_payload(self, payload: Payload, flat: Flat | None = None) -> ClientUpdate:
        """The same update with other tensors, also as one vector where they are at hand so."""
        if payload is self.payload:
            return self
        return ClientUpdate(
            self.client_id, payload, self.weight, self.metrics, self.kind, self.probability, flat, self.uplink_bytes
        )

    def detached(self) -> ClientUpdate:
        """A copy that survives the next client: every tensor cloned."""
        payload = {name: tensor.detach().clone() for name, tensor in self.payload.items()}
        return replace(self, payload=payload, metrics=dict(self.metrics), flat=None)

    def to(self, device: torch.device | str) -> ClientUpdate:
        """The same update with its tensors on another device."""
        return self.with_payload({name: tensor.to(device) for name, tensor in self.payload.items()})
