"""Several clients' updates as a table: columns of numbers, and a matrix with a row a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Flat, FlatPayload, Payload, stacked


@dataclass(slots=True)
class Updates:
    """Updates of clients of one kind, trained on one broadcast; one client's is a table of one row.

    Args:
        client_ids: The senders.
        kind: Their kind of network.
        weights: A weight each, see `ClientUpdate`.
        metrics: Named scalars of each one's local work.
        vectors: Their payloads as the rows of a matrix, where they can be.
        staleness: See `ClientUpdate`; of all.
        uplink_bytes: Bytes on the wire by client, counted where the updates arrived; empty before.
        probabilities: By client, see `ClientUpdate`; empty where the method does not ask for them.
    """

    client_ids: list[int]
    kind: str
    weights: list[float]
    metrics: list[dict[str, float]]
    vectors: Flat | None
    staleness: int = 0
    uplink_bytes: list[int] = field(default_factory=list)
    probabilities: list[float | None] = field(default_factory=list)
    _rows: list[ClientUpdate] | None = None

    @classmethod
    def of(cls, rows: Sequence[ClientUpdate]) -> Updates:
        """A table of one client's update, or of several of one kind and broadcast."""
        flats = [row.flat for row in rows if row.flat is not None]
        vectors = None
        if len(flats) == len(rows) and all(flat.layout is flats[0].layout for flat in flats):
            vectors = Flat(flats[0].layout, stacked([flat.values for flat in flats]))
        first = rows[0]
        return cls(
            [row.client_id for row in rows], first.kind, [row.weight for row in rows], [row.metrics for row in rows],
            vectors, first.staleness, [row.uplink_bytes for row in rows], _rows=list(rows),
        )  # fmt: skip

    @classmethod
    def joined(cls, tables: Sequence[Updates]) -> Updates:
        """Several tables of one kind and layout, whose rows nobody has asked for, as one."""
        if len(tables) == 1:
            return tables[0]
        vectors = Flat(tables[0].layout, torch.cat([table.vectors.values for table in tables if table.vectors]))
        ids = [client_id for table in tables for client_id in table.client_ids]
        weights = [weight for table in tables for weight in table.weights]
        return cls(ids, tables[0].kind, weights, [one for table in tables for one in table.metrics], vectors)

    @property
    def layout(self) -> Mapping[str, torch.Size]:
        """Names and shapes of `vectors`, which tables that can be joined share as an object; empty without."""
        return {} if self.vectors is None or self._rows is not None else self.vectors.layout

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def example(self) -> Payload:
        """The first one's payload, whose names and types are those of all."""
        return self._made()[0].payload

    def by_received(self, broadcast: Broadcast) -> Iterator[tuple[Updates, Payload]]:
        """The updates of clients that received the same, with what they received."""
        if broadcast.addressed is None:
            yield self, broadcast.payloads[self.kind]
            return
        for idx, client_id in enumerate(self.client_ids):
            yield self.only([idx]), broadcast.received(client_id, self.kind)

    def only(self, chosen: Sequence[int]) -> Updates:
        """The rows at some positions, ascending."""
        if len(chosen) == len(self):
            return self

        def of(column: list[Any] | None) -> Any:
            return column and [column[idx] for idx in chosen]

        vectors = self.vectors
        if vectors is not None:
            vectors = Flat(vectors.layout, vectors.values[list(chosen)])
        columns = (self.client_ids, self.weights, self.metrics, self.uplink_bytes, self.probabilities, self._rows)
        ids, weights, metrics, counts, probabilities, rows = map(of, columns)
        return Updates(ids, self.kind, weights, metrics, vectors, self.staleness, counts, probabilities, rows)

    def part(self, layout: Mapping[str, torch.Size], first: int, length: int) -> Updates:
        """The same updates with some neighbouring columns of `vectors` alone, named by a layout."""
        assert self.vectors is not None
        vectors = Flat(layout, self.vectors.values.narrow(1, first, length))
        return replace(self, vectors=vectors, _rows=None)

    def stack(self, name: str) -> Tensor:
        """One tensor of every payload, (n, …)."""
        if self.vectors is not None:
            first = 0
            for other, shape in self.vectors.layout.items():
                if other == name:
                    return self.vectors.values.narrow(1, first, shape.numel()).view(len(self), *shape)
                first += shape.numel()
        tensors = [row.payload[name].detach() for row in self._made()]
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)

    def __iter__(self) -> Iterator[ClientUpdate]:
        """One update after the other."""
        for idx, row in enumerate(self._made()):
            row.staleness = self.staleness
            row.uplink_bytes = self.uplink_bytes[idx] if self.uplink_bytes else 0
            row.probability = self.probabilities[idx] if self.probabilities else None
            yield row

    def _made(self) -> list[ClientUpdate]:
        if self._rows is None:
            assert self.vectors is not None
            flats = [Flat(self.vectors.layout, values) for values in self.vectors.values.unbind(0)]
            columns = zip(self.client_ids, flats, self.weights, self.metrics, strict=True)
            self._rows = [
                ClientUpdate(client_id, FlatPayload(flat), weight, metrics, self.kind, flat=flat)
                for client_id, flat, weight, metrics in columns
            ]
        return self._rows


def together(matrices: Sequence[Tensor]) -> Tensor:
    """The rows of several matrices in one."""
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))
