"""The wire: codecs pack payloads, and a channel has both directions of them, with both ends of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.engine.wire.payload import Arrival, Broadcast, ClientUpdate, Layout, Payload, as_arrived, num_bytes
from lit_fed.engine.wire.updates import Updates
from lit_fed.errors import ConfigError, WireError
from lit_fed.seeding import derive_seed, torch_generator

_ERROR = "error/"  # prefix of error feedback in a codec's memory
_ESTIMATE = "estimate/"  # prefix of EF21's, at both ends
_UPDATES = "updates"  # how many updates an estimate is made of: in memory, and on the wire before it
_ANY_SIZE = 2**63

NOT_FINITE = "is no longer finite after trainer.uplink_codec; choose a codec with a wider range"
"""The end of a message about an update that a codec spoilt."""


@dataclass(frozen=True, slots=True)
class Context:
    """A payload on its way, as both ends of the wire know it.

    Args:
        direction: ``up`` from a client, or ``down`` from the server.
        round_idx: The round of the broadcast on which the client works.
        kind: The kind of network.
        stage: ``train``, or ``test`` for a client's answer to a protocol.
        client_id: The client; None on the downlink, where one payload goes to all clients of a kind.
        seed: A function of the run's seed, the direction, the round and the client, which both ends can compute.
        reference: The broadcast as the client received it; empty on the downlink.
        buffers: Names of the model's buffers and, under `Codec.difference`, of tensors without a reference, which
            codecs of this package do not change.
        memory: Tensors by name that the sender's codec keeps for this client until its next update, in the client's
            state; ``encode`` changes the mapping in place. Empty at the receiver and on the downlink.
        decoder: Tensors by name that the receiver keeps of this client's updates, which `Direction.arrive` changes in
            place; empty but for EF21.
        most_values: The largest number of values that a tensor may have, where the receiver knows it.
        common_seed: A function of the run's seed, the stage and the round: the same for all clients.
    """

    direction: Literal["up", "down"] = "up"
    round_idx: int = 0
    kind: str = "model"
    stage: str = "train"
    client_id: int | None = None
    seed: int = 0
    reference: Payload = field(default_factory=dict)
    buffers: Collection[str] = ()
    memory: dict[str, Tensor] = field(default_factory=dict)
    most_values: int = _ANY_SIZE
    common_seed: int = 0
    decoder: dict[str, Tensor] = field(default_factory=dict)

    def generator(self, name: str, common: bool = False) -> torch.Generator:
        """A generator on the CPU for one tensor, the same at both ends and, on demand, for all clients of a round."""
        return torch_generator(self.common_seed if common else self.seed, name)

    def packs(self, name: str, tensor: Tensor) -> bool:
        """Whether codecs may change a tensor: a floating-point one that is neither empty nor a buffer of the model."""
        return tensor.is_floating_point() and tensor.numel() > 0 and name.partition("|")[0] not in self.buffers


Feedback = bool | Literal["ef21"]
"""A setting of `Codec.feedback`."""


class Codec(Checked, ABC):
    """Packs a payload for the wire, such as by rounding or compression.

    The two ends are different machines: `decode` knows the packed payload and the context, and nothing else.

    Note:
        An update's error is kept when the update is made, as the client's state is: it stays as it is where the update
        is lost afterwards, or dropped by the server. A node that does the same work again answers the same bytes.
    """

    difference: bool = False
    """Whether `encode` gets the difference of each floating-point tensor to the broadcast's of the same name and shape.
    The receiver adds what the difference was taken to. A tensor without one is not to be packed (`Context.packs`).
    """

    feedback: Feedback = False
    """Whether the client keeps the error of each packed tensor, and adds it to the tensor in its next update: error
    feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). With ``ef21`` both ends keep an estimate
    of the client's difference, and the codec packs what is left (Richtárik, Sokolov, Fatkhullin, NeurIPS 2021).
    """

    common_seed: bool = False
    """Whether a decoded difference is 0 but at `places`, which all clients of a round draw alike: differences add up at
    these places alone, as `trainer.secure_sum` needs it.
    """

    def places(self, size: int, generator: torch.Generator) -> Tensor:
        """With `common_seed`, the places of the sent entries of a tensor of a size, from a generator of the round."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, payload: Payload, context: Context) -> Payload:
        """The tensors as sent; their bytes are counted."""

    @abstractmethod
    def decode(self, payload: Payload, context: Context) -> Payload:
        """The tensors as the receiver uses them."""


class _Chain(Codec):
    """Several codecs: each packs what the one before it made.

    Args:
        codecs: In the order of encoding. All together take the difference, or give feedback, if one of them does.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = tuple(codecs)
        self.difference = any(codec.difference for codec in codecs)
        self.feedback = next((codec.feedback for codec in codecs if codec.feedback), False)

    @override
    def encode(self, payload: Payload, context: Context) -> Payload:
        for codec in self.codecs:
            payload = codec.encode(payload, context)
        return payload

    @override
    def decode(self, payload: Payload, context: Context) -> Payload:
        for codec in reversed(self.codecs):
            payload = codec.decode(payload, context)
        return payload


def codec_of(key: str, given: Codec | Sequence[Codec] | None) -> Codec | None:
    """The codec of a setting of the trainer, which may be a list; raise `ConfigError` if it cannot work there."""
    codecs = [given] if isinstance(given, Codec) else list(given or ())
    for codec in codecs:
        name = type(codec).__name__
        for half in (codec.encode, codec.decode):
            if len(signature(half).parameters) != 2:
                raise ConfigError(
                    f"{key} {name} has {half.__name__}{signature(half)}; encode and decode take (payload, context)"
                )
        if key == "trainer.downlink_codec" and (codec.difference or codec.feedback):
            why = "difference or feedback, for which all clients would need what the server sent before"
            raise ConfigError(f"{key} {name} has {why}; set difference and feedback to false")
    made = _Chain(codecs) if len(codecs) > 1 else next(iter(codecs), None)
    if made is None:
        return None
    if any(codec.feedback not in (False, made.feedback) for codec in codecs):
        raise ConfigError(f"{key} has feedback true and ef21; set one of them to false")
    if made.feedback == "ef21" and made.common_seed:
        raise ConfigError(f"{key} has feedback ef21 and common_seed; set feedback to true, or common_seed to false")
    if not made.difference and (made.feedback == "ef21" or made.common_seed):
        which = "common_seed" if made.common_seed else "feedback ef21"
        raise ConfigError(f"{key} has {which}, and difference is false; set it to true")
    return made


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of the wire.

    Args:
        codec: Packs its payloads; None sends them unchanged.
    """

    codec: Codec | None = None

    def pack(self, payload: Payload, context: Context) -> Payload:
        """The sender's half: the tensors as they travel."""
        if (codec := self._codec(context)) is None:
            return payload
        if codec.difference:  # what has no reference is no small change of anything, and travels whole
            whole = {name for name, tensor in payload.items() if self.known(name, tensor, context) is None}
            context = replace(context, buffers={*context.buffers, *whole})
        moved = {name: self._moved(name, tensor, context) for name, tensor in payload.items()}
        wire = codec.encode(moved, context)
        if not codec.feedback:
            return wire
        there, memory = codec.decode(wire, context), context.memory
        for name, tensor in moved.items():
            if codec.feedback != "ef21" and context.packs(name, tensor):
                memory[_ERROR + name] = tensor - there[name] if name in there else tensor
            elif name in there and context.packs(name, tensor):
                memory[_ESTIMATE + name] = _estimate(there[name], memory.get(_ESTIMATE + name))
        if codec.feedback != "ef21":
            return wire
        before = memory.get(_UPDATES, torch.tensor(0))
        memory[_UPDATES] = before + 1
        return {**wire, _UPDATES: before}

    def arrive(self, wire: Payload, context: Context) -> Arrival:
        """The receiver's half: unpack and count."""
        if (codec := self._codec(context)) is None:
            return Arrival(wire, as_arrived(wire), num_bytes(wire))
        packed, decoder = dict(wire), context.decoder
        if codec.feedback == "ef21":
            _count(packed.pop(_UPDATES, None), decoder)
        payload = dict(codec.decode(packed, context))
        for name, tensor in payload.items():
            if (known := self.known(name, tensor, context)) is not None:
                moved = tensor
                if codec.feedback == "ef21":
                    moved = decoder[_ESTIMATE + name] = _estimate(tensor, decoder.get(_ESTIMATE + name))
                payload[name] = known + moved
        return Arrival(wire, as_arrived(payload), num_bytes(wire), decoder)

    def cross(self, payload: Payload, context: Context) -> Arrival:
        """Both halves, where sender and receiver share a process."""
        return self.arrive(self.pack(payload, context), context)

    def _codec(self, context: Context) -> Codec | None:
        """The codec; None for answers to protocols, if difference or feedback make it one of updates alone."""
        codec = self.codec
        return None if codec and (codec.difference or codec.feedback) and context.stage != "train" else codec

    def known(self, name: str, tensor: Tensor, context: Context) -> Tensor | None:
        """The tensor to which the difference is taken, if there is one."""
        if self.codec is None or not self.codec.difference or not context.packs(name, tensor):
            return None
        known = context.reference.get(name)
        return None if known is None or known.shape != tensor.shape else known.to(tensor)

    def _moved(self, name: str, tensor: Tensor, context: Context) -> Tensor:
        """A tensor as the codec gets it: as difference, and with the error of the last update."""
        moved = tensor.detach() if (known := self.known(name, tensor, context)) is None else tensor.detach() - known
        feedback = False if self.codec is None else self.codec.feedback
        kept = context.memory.get((_ESTIMATE if feedback == "ef21" else _ERROR) + name) if feedback else None
        if kept is not None and kept.shape != tensor.shape:
            there, here, what = tuple(kept.shape), tuple(tensor.shape), "estimate" if feedback == "ef21" else "error"
            raise ConfigError(
                f"trainer.uplink_codec keeps {there} as {what} of {name!r}, {here} here; set feedback to false"
            )
        if kept is None:
            return moved
        return moved - kept.to(moved) if feedback == "ef21" else moved + kept.to(moved)


def _estimate(change: Tensor, before: Tensor | None) -> Tensor:
    """EF21's g + C(Δ − g), with the same bits at both ends."""
    return change if before is None else before.to(change) + change


def _count(before: Tensor | None, decoder: dict[str, Tensor]) -> None:
    """Count an update; raise `WireError` if its client's estimate is made of other updates than the receiver's."""
    held = int(decoder.get(_UPDATES, 0))
    if before is None or before.dtype != torch.int64 or before.numel() != 1 or int(before) != held:
        raise WireError(f"its update does not follow the {held} updates that the server has of it; start a new run")
    decoder[_UPDATES] = torch.tensor(held + 1)


class Channel:
    """Both directions of the wire, with the clients in this process.

    Args:
        uplink: Codec from a client to the server.
        downlink: Codec from the server to a client.
        seed: The run's, for codecs that draw random numbers.
    """

    def __init__(self, uplink: Codec | None = None, downlink: Codec | None = None, seed: int = 0) -> None:
        self.uplink, self.downlink, self.seed = Direction(uplink), Direction(downlink), seed

    def down(self, round_idx: int, kind: str) -> Context:
        """The context of a broadcast, for training or for a test."""
        return Context("down", round_idx, kind, seed=derive_seed(self.seed, "codec", "down", round_idx, kind))

    def up(self, client_id: int, broadcast: Broadcast, kind: str, stage: str = "train", **known: Any) -> Context:
        """The context of a client's update, or of its answer to a protocol, with further fields of `Context`."""
        seed = derive_seed(self.seed, "codec", stage, broadcast.round_idx, client_id)
        known["common_seed"] = derive_seed(self.seed, "codec", stage, broadcast.round_idx)
        received = {} if self.uplink.codec is None else broadcast.received(client_id, kind)
        return Context("up", broadcast.round_idx, kind, stage, client_id, seed, received, **known)

    def common_places(self, layout: Layout, context: Context) -> Tensor | None:
        """Places at which any client's update can differ from the broadcast, of its tensors one after the other.

        None where these are not the same for all clients of a round (`Codec.common_seed`).

        Args:
            layout: Of an update.
            context: Of any client's.
        """
        codec, start = self.uplink.codec, 0
        if codec is None or not codec.common_seed:
            return None
        found = []
        for name, (dtype, shape) in layout.items():
            packed = self.uplink.known(name, torch.empty(shape, dtype=dtype, device="meta"), context) is not None
            size = shape.numel()
            found.append(start + (codec.places(size, context.generator(name, True)) if packed else torch.arange(size)))
            start += size
        return torch.cat(found) if found else None

    def sent(self, update: ClientUpdate, broadcast: Broadcast) -> Arrival:
        """An update as its client packed it, or the answer to a protocol, packed now."""
        context = self.up(update.client_id, broadcast, update.kind, stage="test")
        return update.arrival or self.uplink.cross(update.payload, context)

    def receive(self, updates: Updates, broadcast: Broadcast) -> Updates:
        """Take updates across the uplink; their bytes are in ``uplink_bytes``."""
        if updates.vectors is None or self.uplink.codec is not None:
            return Updates.of([self.receive_one(update, broadcast) for update in updates])
        values = updates.vectors.values
        updates.uplink_bytes = [values.shape[1] * values.element_size()] * len(updates)
        return updates

    def receive_one(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        """Take an update, or an answer to a protocol, across the uplink; its bytes are in ``uplink_bytes``."""
        arrived = self.sent(update, broadcast)
        received = update.with_payload(arrived.payload)
        received.arrival, received.uplink_bytes, received.decoder = None, arrived.num_bytes, arrived.decoder
        return received
