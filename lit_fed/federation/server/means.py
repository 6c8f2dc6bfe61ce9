"""Means of metrics over clients and nodes, without values that would decide a mean alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from statistics import median

from lit_fed.data.partitions.cut import named
from lit_fed.engine.wire.totals import Total, exact_sum
from lit_fed.federation.ends import Alert
from lit_fed.federation.messages.wire import LARGEST

Clients = tuple[int, ...]

NodeTotals = list[tuple[Clients, dict[str, Total]]]
"""Sums of nodes, each with the clients that it is over."""

_FAR = 100.0  # times the median magnitude of a metric


def implausible(values: Mapping[Clients, float]) -> list[Clients]:
    """Find whose value of a metric would decide the mean alone.

    A value must be finite, and its magnitude at most a hundred times the median magnitude of three values or more (and
    of 1, so that metrics near 0 may vary). NaN stands for a metric that a client could not measure.
    """
    finite = [abs(value) for value in values.values() if math.isfinite(value)]
    most = min(_FAR * max(median(finite), 1.0), LARGEST) if len(finite) > 2 else LARGEST
    return [who for who, value in values.items() if abs(value) > most]


class PlausibleMeans:
    """Leaves implausible values out of means, and says once of whom.

    Args:
        say: Prints a line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._said: set[Clients] = set()

    def leave_out(
        self, by_client: Mapping[int, dict[str, float]], sums: NodeTotals, where: str, excluded: Collection[str]
    ) -> None:
        """Leave such values out of the metrics of clients, and of nodes' sums.

        Args:
            by_client: Metrics by client; NaN, as of a metric that could not be measured, replaces such values.
            sums: The nodes' sums; such a sum is removed.
            where: The round, and a prefix of metrics, for the line.
            excluded: Names of metrics that are bounded, or not averaged.
        """
        columns: dict[str, dict[Clients, float]] = {}
        for client_id, metrics in by_client.items():
            for name, value in metrics.items():
                columns.setdefault(name, {})[client_id,] = value
        for clients, totals in sums:
            for name, total in totals.items():
                columns.setdefault(name, {})[clients] = exact_sum(total.parts) / max(total.weight, 1)
        for name in [name for name in columns if name not in excluded]:
            for who in implausible(columns[name]):
                if who not in self._said:
                    self._said.add(who)
                    odd = f"{where}{name} of {named(who)} is {columns[name][who]:.3g}"
                    self._say(Alert(f"{odd}, {_FAR:g} times beyond the median; means leave out such values"))
                for clients, totals in sums:
                    if clients == who:
                        totals.pop(name, None)
                if len(who) == 1 and name in by_client.get(who[0], {}):
                    by_client[who[0]][name] = math.nan
