"""Values of single clients, and their statistics over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lit_fed.engine.wire.totals import Totals, exact_sum


class ClientRow(NamedTuple):
    """A value of a client: a line of ``clients.csv`` without its round.

    Args:
        client_id: The client.
        stage: ``train``, ``test``, ``global``, ``local``, ``personal`` or ``unseen``.
        metric: Name of the value.
        value: The value.
    """

    client_id: int
    stage: str
    metric: str
    value: float


def spread(prefix: str, rows: list[ClientRow], totals: Sequence[Totals] = ()) -> dict[str, float]:
    """Mean, standard deviation, 10th percentile and minimum over clients of every metric.

    Args:
        prefix: Name of the protocol, such as ``clients``.
        rows: One row per client and metric.
        totals: Sums over clients without rows, each of weight 1.

    Returns:
        Values named ``<prefix>/<metric>_mean``, ``_std`` (population), ``_p10`` and ``_min``; only the mean for metrics
        with totals. NaN, a value that a client could not measure, is left out and counted in ``_missing``; a metric
        that nobody could measure is NaN.
    """
    values: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.client_id):
        values.setdefault(row.metric, []).append(row.value)
    found = {}
    for metric in dict.fromkeys([*values, *(name for part in totals for name in part)]):
        column, withheld = values.get(metric, []), [part[metric] for part in totals if metric in part]
        if (measured := [value for value in column if not math.isnan(value)]) and len(measured) < len(column):
            found[f"{prefix}/{metric}_missing"] = float(len(column) - len(measured))
            column = measured
        count = len(column) + sum(total.weight for total in withheld)
        parts = [*column, *(part for total in withheld for part in total.parts)]
        found[f"{prefix}/{metric}_mean"] = exact_sum(parts) / max(count, 1)
        if withheld:
            continue
        array = np.asarray(column, dtype=np.float64)
        found[f"{prefix}/{metric}_std"] = float(array.std())
        found[f"{prefix}/{metric}_p10"] = float(np.percentile(array, 10))
        found[f"{prefix}/{metric}_min"] = float(array.min())
    return found
