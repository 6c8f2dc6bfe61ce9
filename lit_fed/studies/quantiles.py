"""Quantiles of numbers that may be infinite."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(numbers: Sequence[float], share: float) -> float:
    """Return NumPy's ``median_unbiased`` quantile; unlike NumPy's, it is not NaN between infinite numbers."""
    ordered, count = sorted(numbers), len(numbers)
    place = round(min(max(share * (count + 1 / 3) + 1 / 3, 1), count), 9)  # from 1; Hyndman and Fan, 1996, definition 8
    below, above = ordered[int(place) - 1], ordered[min(int(place), count - 1)]
    rest = place - int(place)
    return below if rest == 0 or below == above else below + rest * (above - below)
