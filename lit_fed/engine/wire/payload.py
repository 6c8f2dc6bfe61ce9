"""Payloads between the server and its clients, the messages that hold them, and the codecs that pack them.

A payload is a flat mapping from names to tensors, such as weights, deltas, control variates, predictions, densities or
generators. The round loop never looks inside. Bytes are counted only here, by `Channel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fed.tensors import aligned, is_aligned

MOST_VALUES = 2**22
"""Largest payload that is packed into one vector, in values."""

Payload = Mapping[str, Tensor]
Layout = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Names, dtypes and shapes of a payload."""


def num_bytes(payload: Payload) -> int:
    """Bytes of a payload's tensors on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in payload.values())


def layout_of(payload: Payload) -> Layout:
    """Names, dtypes and shapes of a payload's tensors."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in payload.items()}


def add_prefix(prefix: str, payload: Payload) -> dict[str, Tensor]:
    """Prefix the names of tensors, so that several sets fit into one payload or client state."""
    return {prefix + name: tensor for name, tensor in payload.items()}


def split_prefix(prefix: str, payload: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Undo `add_prefix`: the tensors with the prefix, under their short names, and the rest."""
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
    """Whether no tensor holds NaN or infinity; one device synchronisation if all tensors share a device."""
    parts = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    floats = [tensor.detach() for tensor in parts if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return True
    # A sum with a non-finite term is not finite, and one that overflows has values no training survives. That holds for
    # float32's exponents only: in float16 ordinary values overflow.
    sums = [tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None) for tensor in floats]
    together = len({total.device for total in sums}) == 1 and sums[0].device.type != "cpu"
    return all(map(math.isfinite, torch.stack(sums).tolist() if together else [total.item() for total in sums]))


class Flat(NamedTuple):
    """A payload of floating-point tensors as one vector, which sums faster than single tensors.

    Args:
        layout: Names and shapes, in order; payloads of one layout share the object, so that ``is`` compares them.
        values: All tensors, concatenated.
    """

    layout: Mapping[str, torch.Size]
    values: Tensor

    @classmethod
    def copy_of(cls, payload: Payload, like: Mapping[str, torch.Size]) -> Flat | None:
        """A copy of a payload's tensors; None for several dtypes or devices, integers, or over `MOST_VALUES` values.

        Large tensors gain nothing from one vector, and the copy would be another model in memory.

        Args:
            payload: The tensors.
            like: Layout of an earlier payload, shared if it fits.
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
        """Split another vector of this layout into tensors by name."""
        parts = torch.split(values, [shape.numel() for shape in self.layout.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.layout.items(), parts, strict=True)}


def joined(payload: Payload, shapes: Mapping[str, torch.Size], device: torch.device) -> Tensor:
    """Tensors of a payload one after the other, (d,) in float64; 0 for names that it does not have."""
    parts = [torch.empty(0, dtype=torch.float64, device=device)]
    for name, shape in shapes.items():
        held = payload[name].detach() if name in payload else torch.zeros(shape, device=device)
        parts.append(held.to(device, torch.float64).reshape(-1))
    return torch.cat(parts)


def stacked(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors of one length as the rows of a matrix; a view where they are parts of its consecutive rows, as a group's.

    Several columns of a group's matrix, the same for every row, are such parts, too.
    """
    first = vectors[0]
    if len(vectors) == 1:
        return first.unsqueeze(0)
    if not first.is_contiguous() or len({vector.untyped_storage().data_ptr() for vector in vectors}) > 1:
        return torch.stack(list(vectors))
    places = [vector.data_ptr() for vector in vectors]
    step = places[1] - places[0]
    if step < first.nbytes or places != list(range(places[0], places[0] + len(places) * step, step or 1)):
        return torch.stack(list(vectors))
    return first.as_strided((len(vectors), first.numel()), (step // first.element_size(), 1))


class FlatPayload(Mapping[str, Tensor]):
    """A payload held as one vector, and split only on access, which a sum over clients never makes."""

    __slots__ = ("_flat", "_parts")

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._parts: Payload | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._parts is None:
            self._parts = as_arrived(self._flat.split(self._flat.values))
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat.layout)

    def __len__(self) -> int:
        return len(self._flat.layout)


def as_arrived(payload: Payload) -> Payload:
    """A payload as another machine would have it, see `lit_fed.tensors.aligned`; the same object if it already is."""
    if isinstance(payload, FlatPayload) or all(map(is_aligned, payload.values())):
        return payload
    return {name: aligned(tensor) for name, tensor in payload.items()}


class Arrival(NamedTuple):
    """A payload that crossed the wire.

    Args:
        wire: The tensors as they travelled.
        payload: The tensors as the receiver uses them.
        num_bytes: Bytes on the wire.
        decoder: What the receiver's codec keeps of the sender's payloads, this one included.
    """

    wire: Payload
    payload: Payload
    num_bytes: int
    decoder: Payload | None = None


CLAIMS = ("epsilon", "delta", "noise_multiplier")
"""Metrics by which a node tells its promise to the samples of a client, by the node's own account; nonnegative."""


@dataclass(slots=True)
class ClientUpdate:
    """One client's answer to a broadcast.

    Args:
        client_id: The sender.
        payload: Named tensors. They may alias the client's module, which the next client overwrites: a reducer that
            keeps them must clone them.
        weight: The client's weight in a weighted mean, by convention its number of training samples. Integer weights
            keep sums of float32 tensors exact in float64, and so independent of their order.
        metrics: Named scalars of the local work, such as ``train/loss``.
        kind: The client's kind of network.
        probability: Probability that a round yields an update of the client, see
            `lit_fed.participation.Participation.probability`; set by the round loop.
        flat: The payload as one vector, if its trainer had it so.
        uplink_bytes: Bytes on the wire, counted where the update arrived; 0 before.
        staleness: Server steps between the download and this one, both not counted; set by the round loop.
        arrival: The payload as it crosses the uplink, where a codec packed it on the client.
        decoder: See `Arrival`; kept if the update is.
    """

    client_id: int
    payload: Payload
    weight: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)
    kind: str = "model"
    probability: float | None = None
    flat: Flat | None = None
    uplink_bytes: int = 0
    staleness: int = 0
    arrival: Arrival | None = None
    decoder: Payload | None = None

    def with_payload(self, payload: Payload, flat: Flat | None = None) -> ClientUpdate:
        """The same update with other tensors, optionally also as one vector."""
        if payload is self.payload:
            return self
        return replace(self, payload=payload, flat=flat)

    def detached(self) -> ClientUpdate:
        """Clone every tensor, to outlive the next client."""
        payload = {name: tensor.detach().clone() for name, tensor in self.payload.items()}
        return replace(self, payload=payload, metrics=dict(self.metrics), flat=None)

    def to(self, device: torch.device | str) -> ClientUpdate:
        """The same update with its tensors on another device."""
        return self.with_payload({name: tensor.to(device) for name, tensor in self.payload.items()})


def not_finite(state: Any, but: Collection[str] = (), where: str = "") -> list[str]:
    """Names of the entries of a state that hold NaN or infinity; one device synchronisation where there are none.

    Args:
        state: Nested tensors and primitives; integers, texts and booleans are finite.
        but: Names of entries to skip.
        where: Prefix of the entries' names.
    """
    numbers, tensors = dict[str, float](), dict[str, Tensor]()
    for name, entry in _entries(state, where):
        if name in but:
            continue
        if isinstance(entry, Tensor):
            tensors[name] = entry
        else:
            numbers[name] = entry
    odd = [name for name, number in numbers.items() if not math.isfinite(number)]
    once = {id(tensor): tensor for tensor in tensors.values()}  # a global model usually is the state's own
    if not are_finite(once.values()):
        odd += [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    return odd


def _entries(state: Any, where: str) -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(state, Tensor | float):
        yield where, state
    elif isinstance(state, Mapping | list | tuple):
        for key, entry in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _entries(entry, f"{where}.{key}" if where else str(key))


@dataclass(slots=True)
class Broadcast:
    """A round's message after the wire: everything that a client needs besides its data and state.

    Args:
        round_idx: The round, counted from 0.
        payloads: Payloads as clients receive them, by kind.
        frozen: Parameters that neither train nor travel in this round, with the server's values, by kind.
        num_bytes: Bytes that one client downloads, by kind.
        wire: Payloads as they travel, by kind.
        addressed: By client, what it alone gets beside its kind's payload; None where the method addresses nobody.
    """

    round_idx: int
    payloads: Mapping[str, Payload]
    frozen: Mapping[str, Payload] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    wire: Mapping[str, Payload] = field(default_factory=dict)
    addressed: dict[int, Arrival] | None = None
    _sizes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def received(self, client_id: int, kind: str) -> Payload:
        """The tensors that a client of a kind receives."""
        sent = self.payloads[kind]
        return sent if self.addressed is None else {**sent, **self.own(client_id).payload}

    def own(self, client_id: int) -> Arrival:
        """What is addressed to a client; its size is known from then on."""
        assert self.addressed is not None
        arrival = self.addressed[client_id]
        if client_id not in self._sizes:
            self._sizes[client_id] = arrival.num_bytes, num_bytes(arrival.payload)
        return arrival

    def bytes_down(self, client_id: int, kind: str, coded: bool = True) -> int:
        """Bytes that a client of a kind downloads, as they travel or as they are without a codec."""
        common = self.num_bytes[kind] if coded else num_bytes(self.payloads[kind])
        if self.addressed is None:
            return common
        if client_id not in self._sizes:
            self.own(client_id)
        return common + self._sizes[client_id][0 if coded else 1]

    def detached(self, clients: Iterable[int] = ()) -> Broadcast:
        """A copy that outlives the server's step, without `wire`, and with what is addressed to some clients."""

        def copied(payload: Payload) -> Payload:
            return {name: tensor.detach().clone() for name, tensor in payload.items()}

        addressed = None
        if self.addressed is not None:
            found = {client_id: self.addressed[client_id] for client_id in clients}
            addressed = {one: Arrival({}, copied(held.payload), held.num_bytes) for one, held in found.items()}
        payloads = {kind: copied(one) for kind, one in self.payloads.items()}
        frozen = {kind: copied(one) for kind, one in self.frozen.items()}
        return replace(self, payloads=payloads, frozen=frozen, wire={}, addressed=addressed)


class Addressed(dict[int, Arrival]):
    """Payloads addressed to single clients, made on demand; only the last clients' are held.

    Args:
        make: Makes a client's.

    Attributes:
        most: Number of clients whose payloads are held.
    """

    def __init__(self, make: Callable[[int], Arrival]) -> None:
        super().__init__()
        self._make, self.most = make, 1

    def __missing__(self, client_id: int) -> Arrival:
        made = self._make(client_id)
        while len(self) >= self.most:
            del self[next(iter(self))]
        self[client_id] = made
        return made
