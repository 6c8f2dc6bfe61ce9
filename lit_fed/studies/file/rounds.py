"""The evaluated round of a run that counts, and quantiles of numbers that may be infinite."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lit_fed.engine.lightning.metric_names import ON_VALIDATION


def quantile(numbers: Sequence[float], share: float) -> float:
    """Return NumPy's ``median_unbiased`` quantile; unlike NumPy's, it is not NaN between infinite numbers."""
    ordered, count = sorted(numbers), len(numbers)
    place = round(min(max(share * (count + 1 / 3) + 1 / 3, 1), count), 9)  # from 1; Hyndman and Fan, 1996, definition 8
    below, above = ordered[int(place) - 1], ordered[min(int(place), count - 1)]
    rest = place - int(place)
    return below if rest == 0 or below == above else below + rest * (above - below)


REPORTS = ("last", "best", "mean")
WANTED_REPORT = f"{', '.join(REPORTS)}, 'best of' and a metric, or 'first', a metric, 'at' and a number"
_GUIDE = "best of "
_GOAL = re.compile(r"first (\S+) at (-?\d+(?:\.\d+)?)")
_WORDS = {"last": "last round", "best": "best evaluated round", "mean": "mean over evaluated rounds"}

ON_TEST = " on the test set"
"""Words that follow a ``report`` whose round the test set chose."""

Curve = Sequence[tuple[int, float]]  # round and value, in the order of rounds


def is_report(report: object) -> bool:
    """Whether a ``report`` is valid."""
    return isinstance(report, str) and (report in REPORTS or bool(guide_of(report)))


def guide_of(report: str) -> str:
    """Return the metric that selects the round of ``best of METRIC`` or ``first METRIC at NUMBER``; else empty."""
    if goal := _GOAL.fullmatch(report):
        return goal[1]
    return report.removeprefix(_GUIDE).strip() if report.startswith(_GUIDE) else ""


def goal_of(report: str) -> float | None:
    """Return the number of ``first METRIC at NUMBER``; else None."""
    goal = _GOAL.fullmatch(report)
    return None if goal is None else float(goal[2])


def report_words(report: str, guide: str) -> str:
    """Return a ``report`` in words for a caption, with its `guide_of` as `guide`."""
    if (goal := goal_of(report)) is not None:
        return f"in the first evaluated round with {guide} at {goal:g}"
    return _WORDS.get(report) or f"in the best evaluated round of {guide}"


def chosen_on_test(report: str, metric: str, evaluated_on: str) -> str:
    """Return words that follow a ``report`` whose round the test set chose; else empty.

    Args:
        report: The report.
        metric: The reported metric.
        evaluated_on: ``test`` or ``val``: the data of the protocols.
    """
    by = metric if report == "best" else guide_of(report)
    chose = by and evaluated_on == "test" and not by.startswith((ON_VALIDATION, "train/"))
    return ON_TEST if chose else ""


def reported(report: str, curve: Curve, guide: Curve, lower: bool) -> float | None:
    """Return the number of a run.

    Args:
        report: The ``last`` evaluated round, the ``best`` one, the ``mean`` over all of them, or ``best of METRIC``,
            the round in which METRIC was best, the first of several, as for ``best.ckpt``, which goes by
            ``val/global/…`` where there are validation data; or ``first METRIC at NUMBER``, the first round in which
            METRIC was at the number or better.
        curve: The reported metric.
        guide: The metric that selects the best round; by default the reported one.
        lower: Whether smaller values of the guide are better.

    Returns:
        The number; infinite if METRIC never reached its number; None if the metric was never evaluated, or never
        together with the guide.
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
    if there and (goal := goal_of(report)) is not None:
        most = goal if lower else -goal
        return next((at[round_idx] for value, round_idx in there if value <= most), math.inf)
    if there:
        return at[min(there)[1]]
    return values[-1] if report == "best" else None
