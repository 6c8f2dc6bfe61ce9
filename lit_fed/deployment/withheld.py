"""Metrics that leave a node only as sums over its clients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from lit_fed.deployment.wire import Message
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.engine.wire.totals import totals_of
from lit_fed.errors import WireError

Report = Literal["clients", "aggregate"]
"""Forms in which a node reports its clients' metrics: per client, or as sums."""

_TOLD = frozenset({"lr"})  # a setting, which is known to the server


class Withheld:
    """Collects the metrics of all clients of one request, until all of them are done."""

    def __init__(self, samples: Mapping[int, int]) -> None:
        self.samples = samples
        self._work: tuple[Any, ...] = ()
        self._done: dict[int, dict[str, float]] = {}

    def take(self, message: Message, outcome: ClientUpdate | Exception | None) -> dict[str, Any]:
        """Withhold a client's metrics.

        Args:
            message: The request, with all clients of this node that get the same.
            outcome: The client's outcome; the metrics of an update are removed.

        Returns:
            With the last client, the sums over all by name: the parts of an exact sum, and its weight. Else empty.

        Raises:
            WireError: If the clients are not this node's.
        """
        client_id, together = message.get("client", int), message.get("together", list)
        if not _are_among(together, self.samples) or client_id not in together:
            raise WireError(f"client {client_id} is not among the clients whose sums are requested")
        work = (message.get("run", str), message.word, message.fields.get("protocol"), message.get("round", int))
        if (*work, *together) != self._work:
            self._work, self._done = (*work, *together), {}
        self._done[client_id] = {}
        if isinstance(outcome, ClientUpdate):
            self._done[client_id] = {name: value for name, value in outcome.metrics.items() if name not in _TOLD}
            outcome.metrics = {name: value for name, value in outcome.metrics.items() if name in _TOLD}
        if self._done.keys() < set(together):
            return {}
        return {name: [list(total.parts), total.weight] for name, total in totals_of(self._weighted(message)).items()}

    def _weighted(self, message: Message) -> Iterator[tuple[dict[str, float], int]]:
        """Yield the metrics to average and their weight, as in `lit_fed.engine.loop.ledger`."""
        for client_id, found in self._done.items():
            if message.word == "train":
                yield {name: value for name, value in found.items() if "/" in name}, self.samples[client_id]
            else:
                yield found, 1


def _are_among(clients: Collection[Any], own: Mapping[int, int]) -> bool:
    return len(clients) <= len(own) and all(type(one) is int and one in own for one in clients)
