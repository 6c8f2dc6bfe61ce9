"""Metrics that leave a node only as sums over its clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from lit_fed.deployment.wire import TOLD, Message
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.engine.wire.totals import totals_of
from lit_fed.errors import WireError

Report = Literal["clients", "aggregate"]
"""Forms in which a node reports its clients' metrics: per client, or as sums."""


class Withheld:
    """Collects the metrics of all clients of one request, until all of them are done.

    A sum of fewer than ``least`` clients' values stays here. So do the sums of a group that overlaps another group of
    the same request and round, because their difference is a sum of fewer clients.

    Args:
        samples: Training samples by client.
        least: Minimum number of clients of a sum.
    """

    def __init__(self, samples: Mapping[int, int], least: int = 2) -> None:
        self.samples, self.least = samples, least
        self._work: tuple[Any, ...] = ()
        self._done: dict[int, dict[str, float]] = {}
        self._reported: dict[tuple[Any, ...], set[int]] = {}  # groups by request and round; a bit is a client

    def take(self, message: Message, outcome: ClientUpdate | Exception | None) -> dict[str, Any]:
        """Withhold a client's metrics.

        Args:
            message: The request, with all clients of this node that get the same.
            outcome: The client's outcome; the metrics of an update are removed.

        Returns:
            With the last client, the sums over all by name: the parts of an exact sum, and its weight. Else empty, and
            without sums of fewer than ``least`` clients.

        Raises:
            WireError: If the clients are not this node's.
        """
        client_id, together = message.get("client", int), message.get("together", list)
        if not _are_among(together, self.samples) or client_id not in together:
            raise WireError(f"client {client_id} is not among the clients whose sums are requested")
        asked = (message.fields.get("protocol"), message.fields.get("subset"))
        work = (message.get("run", str), message.word, *asked, message.get("round", int))
        if (*work, *together) != self._work:
            self._work, self._done = (*work, *together), {}
        self._done[client_id] = {}
        if isinstance(outcome, ClientUpdate):
            self._done[client_id] = {name: value for name, value in outcome.metrics.items() if name not in TOLD}
            outcome.metrics = {name: value for name, value in outcome.metrics.items() if name in TOLD}
        if self._done.keys() < set(together):
            return {}
        counts = Counter(name for found in self._done.values() for name in found)
        totals = totals_of(self._weighted(message)).items()
        sums = {name: [list(total.parts), total.weight] for name, total in totals if counts[name] >= self.least}
        return sums if sums and self._is_disjoint(work, together) else {}

    def _is_disjoint(self, work: tuple[Any, ...], together: Collection[int]) -> bool:
        """Record a group that shares no client with another reported group of the same request, or is that group."""
        reported, own = self._reported.setdefault(work, set()), sum(1 << client_id for client_id in set(together))
        if any(own & other for other in reported - {own}):
            return False
        reported.add(own)
        return True

    def _weighted(self, message: Message) -> Iterator[tuple[dict[str, float], int]]:
        """Yield the metrics to average and their weight, as in `lit_fed.engine.loop.ledger`, without a test's NaN."""
        for client_id, found in self._done.items():
            if message.word == "train":
                yield {name: value for name, value in found.items() if "/" in name}, self.samples[client_id]
            else:
                yield {name: value for name, value in found.items() if not math.isnan(value)}, 1


def _are_among(clients: Collection[Any], own: Mapping[int, int]) -> bool:
    return len(clients) <= len(own) and all(type(one) is int and one in own for one in clients)
