"""The charts of TensorBoard's *Custom Scalars*: of a run's metrics, those that a person watches."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from lit_fed.engine.lightning.metric_names import MetricNames, base_name

Layout = dict[str, dict[str, tuple[str, list[str]]]]
"""Charts by category and title, for ``SummaryWriter.add_custom_scalars``; a line's tag is a regular expression."""

OF_ONE_CLIENT = "per_client/"
"""Prefix of single clients' scalars in TensorBoard, which sorts groups by their first word."""

_LINES = (
    ("Results", "privacy budget spent: epsilon", "privacy/epsilon$"),
    ("Drift", "norm of clients' updates", "drift/update_norm_mean$"),
    ("Drift", "cosine between clients' updates", "drift/cosine_mean$"),
    ("Clock", "staleness, in steps of the server", "staleness/(mean|max)$"),
    ("Clock", "virtual time, s", "clock/virtual_s$"),
    ("Cost", "bytes of a round, up and down", "comm/(uplink|downlink)_bytes$"),
    ("Cost", "seconds of a round", "time/(round|local|eval)_s$"),
    ("Cost", "clients of a round", "participation/(count|failed)$"),
)


def layout_of(metrics: Collection[str], names: MetricNames) -> Layout:
    """The charts for which a run has metrics.

    The lines of a chart do not depend on the run, because TensorBoard merges equal charts of several runs.

    Args:
        metrics: The names of all metrics so far.
        names: The directions of metrics and the most important one.
    """
    layout: Layout = {}
    for category, title, *tags in _charts(metrics, names):
        if any(re.match(tags[0], name) for name in metrics):
            layout.setdefault(category, {})[title] = ("Margin" if len(tags) > 1 else "Multiline", tags)
    return layout


def _charts(metrics: Collection[str], names: MetricNames) -> Iterator[tuple[str, ...]]:
    """Category, title, and the tag of lines or the three tags of a band: first of the task's own metrics."""
    first = [] if names.monitor is None else [base_name(names.monitor)]
    for key in dict.fromkeys([*first, *names.directions, "loss"]):
        yield "Results", key, f"[^/]+/{re.escape(key)}(_mean)?$"
        for name in metrics if key in first else ():
            over, _, end = name.rpartition("_")
            if end == "worst10" and over.count("/") == 1 and base_name(name) == key:
                band = (f"{over}_worst", name) if names.direction(name) == "max" else (name, f"{over}_worst")
                yield "Results", f"{over}: mean, and worst tenth", f"{over}_mean", *band
    yield from _LINES
    for key in first:
        yield "Single clients", f"{key} of each client", f"{OF_ONE_CLIENT}[^/]+/{re.escape(key)}/"
