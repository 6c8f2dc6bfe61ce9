"""The wire between server and clients: payloads are packed by codecs, and their bytes are counted, only here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from lit_fed.engine.wire.payload import ClientUpdate, Payload, num_bytes


class Codec(ABC):
    """Packs a payload for the wire, such as by rounding or compression.

    The two ends are different machines: `decode` knows the packed payload and nothing else.
    """

    @abstractmethod
    def encode(self, payload: Payload) -> Payload:
        """The tensors as sent; their bytes are counted."""

    @abstractmethod
    def decode(self, payload: Payload) -> Payload:
        """The tensors as the receiver uses them."""


class Arrival(NamedTuple):
    """A payload that crossed the wire.

    Args:
        wire: The tensors as they travelled.
        payload: The tensors as the receiver uses them.
        num_bytes: Bytes on the wire.
    """

    wire: Payload
    payload: Payload
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of the wire.

    Args:
        codec: Packs its payloads; None sends them unchanged.
    """

    codec: Codec | None = None

    def pack(self, payload: Payload) -> Payload:
        """The sender's half: the tensors as they travel."""
        return payload if self.codec is None else self.codec.encode(payload)

    def arrive(self, wire: Payload) -> Arrival:
        """The receiver's half: unpack and count."""
        return Arrival(wire, wire if self.codec is None else self.codec.decode(wire), num_bytes(wire))

    def cross(self, payload: Payload) -> Arrival:
        """Both halves, where sender and receiver share a process."""
        return self.arrive(self.pack(payload))


class Channel:
    """Both directions of the wire, with the clients in this process.

    Args:
        uplink: Codec from a client to the server.
        downlink: Codec from the server to a client.
    """

    def __init__(self, uplink: Codec | None = None, downlink: Codec | None = None) -> None:
        self.uplink, self.downlink = Direction(uplink), Direction(downlink)

    def receive(self, update: ClientUpdate) -> ClientUpdate:
        """Take an update across the uplink; its bytes are in ``uplink_bytes``."""
        if update.flat is not None and self.uplink.codec is None:
            update.uplink_bytes = update.flat.values.nbytes
            return update
        arrived = self.uplink.cross(update.payload)
        update = update.with_payload(arrived.payload)
        update.uplink_bytes = arrived.num_bytes
        return update
