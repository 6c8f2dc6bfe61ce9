"""Withholding: no count below a threshold leaves a site, nor a sum from which it could be subtracted."""

from __future__ import annotations

from copy import deepcopy
from fractions import Fraction

import numpy as np

from lit_fed.federation.statistics.site import Floats, SiteStatistics


def withheld(site: SiteStatistics, least: int) -> SiteStatistics:
    """Withhold what fewer than `least` samples are in.

    - A site of fewer samples withholds everything.
    - A column with fewer finite, or fewer missing values, but some, withholds everything: its count would tell.
    - A class or a cell of fewer samples withholds its count. So do further cells, the smallest first, until the counts
      withheld add up to `least`: the difference of the whole and of the counts shown is a count, too.
    - Extremes are single samples' values; only a range that the type of the values fixes is shown.

    Of columns with several values per sample, such as pixels, a cell holds `least` samples at least if it has more
    values than one sample less could give.
    """
    if least <= 1:
        return site
    columns = len(site.count)
    if 0 < site.samples < least:
        nan, none = np.full(columns, np.nan), [Fraction()] * columns
        cells, classes = np.full_like(site.cells, np.nan), np.full_like(site.classes, np.nan)
        return SiteStatistics(
            np.nan, site.clients, classes, nan, nan, none, none, nan, nan, cells, site.unit, site.known, site.masked
        )
    shown = deepcopy(site)
    shown.classes, (shown.low, shown.high) = _hide_few(site.classes, least), site.known
    for place in range(columns):
        values = (site.count[place] + site.missing[place]) / max(site.samples, 1)  # of a sample
        few = (least - 1) * values + 1
        if 0 < site.count[place] < few or 0 < site.missing[place] < few:
            shown.count[place] = shown.missing[place] = np.nan
            shown.total[place] = shown.squares[place] = Fraction()
            shown.cells[place : place + 1] = np.nan
        elif len(site.cells):
            shown.cells[place] = _hide_few(site.cells[place], few)
    return shown


def _hide_few(counts: Floats, few: float) -> Floats:
    """Counts with NaN for those to withhold."""
    hidden = (counts > 0) & (counts < few)
    for place in np.argsort(counts, kind="stable"):
        if not hidden.any() or counts[hidden].sum() >= few:
            break
        hidden[place] |= counts[place] > 0
    return np.where(hidden, np.nan, counts)
