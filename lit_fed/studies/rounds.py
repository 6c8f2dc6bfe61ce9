"""Which evaluated round of a run counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

REPORTS = ("last", "best", "mean")
_GUIDE = "best of "
_WORDS = {"last": "last round", "best": "best evaluated round", "mean": "mean over evaluated rounds"}

Curve = Sequence[tuple[int, float]]  # round and value, in the order of rounds


def wrong_report(report: object) -> str | None:
    """What is wrong with a ``report``; None where nothing is."""
    if isinstance(report, str) and (report in REPORTS or guide_of(report)):
        return None
    return f"expected {', '.join(REPORTS)}, or 'best of' and a metric, not {report!r}"


def guide_of(report: str) -> str:
    """The metric whose best round counts, where that is another than the one reported; else empty."""
    return report.removeprefix(_GUIDE).strip() if report.startswith(_GUIDE) else ""


def report_words(report: str) -> str:
    """A ``report`` for under a table."""
    return _WORDS.get(report) or f"in the best evaluated round of {guide_of(report)}"


def reported(report: str, curve: Curve, guide: Curve, lower: bool) -> float | None:
    """The number of a run.

    Args:
        report: The ``last`` evaluated round, the ``best`` one, the ``mean`` over all of them, or ``best of METRIC``:
            the round in which that metric was best, the first of several, as ``best.ckpt`` is.
        curve: The metric that is reported.
        guide: The metric by which ``best`` is meant; the same where the report names none.
        lower: Whether its smaller values are better.

    Returns:
        The number; None where it was not evaluated, or never together with the guide.
    """
    if not curve:
        return None
    values = [value for _, value in curve]
    if report == "last":
        return values[-1]
    if report == "mean":
        return sum(values) / len(values)
    at = dict(curve)
    finite = [(value if lower else -value, round_idx) for round_idx, value in guide if math.isfinite(value)]
    there = [pair for pair in finite if pair[1] in at]
    if there:
        return at[min(there)[1]]
    return values[-1] if report == "best" else None
