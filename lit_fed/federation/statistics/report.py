"""The statistics of a federation: a mapping for a file, and a table for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.population.figures import FORMAT
from lit_fed.federation.statistics.site import Floats, Inquiry, SiteStatistics, Variable, edges
from lit_fed.printing import counted

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MOST_COLUMNS, _MOST_CLIENTS, _MOST_CLASSES = 40, 30, 12  # of the table


@dataclass(frozen=True)
class Statistics:
    """Statistics of all clients.

    Args:
        columns: The columns.
        question: The question that the sites got, with its ranges.
        whole: All sites together, of what they do not withhold.
        answers: The sites by name: of the clients, or of nodes that report in sums only.
        by_client: Whether a site is a client, of which the file may tell.
        shape: Shape of an input.
        class_names: Names of the classes, if they have names.
        privacy: Facts of the noise; None if the statistics are exact.
    """

    columns: Sequence[Variable]
    question: Inquiry
    whole: SiteStatistics
    answers: Mapping[str, SiteStatistics]
    by_client: bool
    shape: tuple[int, ...]
    class_names: Sequence[str] | None = None
    privacy: Mapping[str, Any] | None = None

    @property
    def sites(self) -> Mapping[str, SiteStatistics]:
        """The clients of which the file may tell."""
        return self.answers if self.by_client else {}

    def as_dict(self) -> dict[str, Any]:
        """The file's content, in plain Python values: null where a figure is withheld or does not exist."""
        ranges = [
            {"name": column.name, "role": column.role, "low": float(low), "high": float(high)}
            for column, (low, high) in zip(self.columns, self.question.ranges.tolist(), strict=True)
        ]
        return {
            "lit_fed_statistics": FORMAT,
            "bins": self.question.bins,
            "least": self.question.least,
            "privacy": None if self.privacy is None else dict(self.privacy),
            "input_shape": list(self.shape),
            "ranges": ranges,
            "class_names": None if self.class_names is None else list(self.class_names),
            "all": self.row(self.whole),
            "clients": {name: self.row(site) for name, site in self.sites.items()},
        }

    def json(self) -> str:
        """The file's text."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def row(self, site: SiteStatistics) -> dict[str, Any]:
        """One site in plain Python values."""
        return {
            "samples": _count(site.samples),
            "clients": site.clients,
            "classes": [_count(count) for count in site.classes.tolist()] if len(site.classes) else None,
            "columns": [self._column(site, place) for place in range(len(self.columns))],
        }

    def _column(self, site: SiteStatistics, place: int) -> dict[str, Any]:
        column, count = self.columns[place], site.count[place]
        figures: dict[str, Any] = {"name": column.name, "role": column.role}
        figures |= {"count": _count(count), "missing": _count(site.missing[place])}
        mean = variance = low = high = None
        if count >= 1:
            exact = site.total[place] / Fraction(count)
            mean, variance = float(exact), max(0.0, float(site.squares[place] / Fraction(count) - exact * exact))
            if self.question.least <= 1 and self.privacy is None:
                low, high = _number(site.low[place]), _number(site.high[place])
        figures |= {"mean": mean, "variance": variance, "std": None if variance is None else variance**0.5}
        figures |= {"minimum": low, "maximum": high}
        cells = site.cells[place]
        figures["cells"] = [_count(number) for number in cells[1:-1].tolist()]
        figures |= {"below": _count(cells[0]), "above": _count(cells[-1])}
        least, most = self.question.ranges[place].tolist()
        borders = edges(least, most, self.question.bins)
        bounds = quantiles(cells, count, borders, site.masked[place] | np.isnan(cells))
        return figures | {"quantiles": bounds}

    # ------------------------------------------------------------------ the table

    def text(self) -> str:
        """A table of columns over all clients, and one of clients."""
        rows = self.as_dict()
        whole, bins = rows["all"], self.question.bins
        kind = "figures are noisy" if self.privacy is not None else "figures are exact"
        shape = "×".join(map(str, self.shape))
        of = f"of shape {shape}, of {counted(self.whole.clients, 'client')}"
        lines = [f"{_shown(whole['samples'])} training samples {of}; {kind}"]
        heads = ("column", "role", "count", "missing", "mean", "std", "minimum", "maximum", "median", "within")
        body = [self._line(column) for column in whole["columns"][:_MOST_COLUMNS]]
        lines += ["", *_table(heads, body)] if body else []
        if more := len(self.columns) - _MOST_COLUMNS:
            lines += [f"… and {counted(more, 'column')} more in the file"] if more > 0 else []
        if body:
            lines.append(f"a median is known to within a cell of {bins} by column; the file has five quantiles")
        if whole["classes"] is not None:
            lines += ["", "classes   " + self.class_counts(whole["classes"])]
        if self.sites:
            lines += ["", *self._clients(rows["clients"])]
        hidden = self.hidden()
        if self.question.least > 1:
            lines += [
                "",
                f"withheld: {hidden or 'nothing'}; no count of 1 to {self.question.least - 1} samples is told",
            ]
        if self.privacy is not None:
            lines += ["", privacy_line(self.privacy)]
        return "\n".join(lines)

    def hidden(self) -> str:
        """A sentence about withheld sites and cells."""
        whole = [name for name, site in self.answers.items() if math.isnan(site.samples)]
        others = [site for name, site in self.answers.items() if name not in whole]
        columns = sum(int(np.isnan(site.count).sum()) for site in others)
        classes = sum(int(np.isnan(site.classes).sum()) for site in others)
        cells = sum(int(np.isnan(site.cells[~np.isnan(site.count)]).sum()) for site in others)
        parts = [f"all of {', '.join(whole[:8])}{', …' if len(whole) > 8 else ''}"] if whole else []
        named = ((columns, "column"), (classes, "class count"), (cells, "histogram cell"))
        return ", ".join([*parts, *(counted(count, noun) for count, noun in named if count)])

    def _line(self, column: Mapping[str, Any]) -> list[str]:
        median = next(bound for bound in column["quantiles"] if bound["q"] == 0.5)
        within = None if None in (median["low"], median["high"]) else median["high"] - median["low"]
        keys = ("count", "missing", "mean", "std", "minimum", "maximum")
        figures = [*(column[key] for key in keys), median["value"], within]
        return [_short(column["name"]), column["role"], *map(_shown, figures)]

    def class_counts(self, counts: Sequence[int | float | None]) -> str:
        """Counts of samples beside the first classes' names."""
        names = self.class_names or [str(label) for label in range(len(counts))]
        shown = [f"{_short(name)} {_shown(count)}" for name, count in zip(names, counts, strict=False)]
        return ", ".join(shown[:_MOST_CLASSES]) + (", …" if len(shown) > _MOST_CLASSES else "")

    def _clients(self, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
        inputs = [place for place, column in enumerate(self.columns) if column.role != "size"][:3]
        heads = ["client", "samples", *(f"mean of {_short(self.columns[place].name, 12)}" for place in inputs)]
        heads += ["classes"] if len(self.whole.classes) else []
        body = []
        for name, row in list(rows.items())[:_MOST_CLIENTS]:
            means = [_shown(row["columns"][place]["mean"]) for place in inputs]
            counts = [] if row["classes"] is None else [" ".join(map(_shown, row["classes"][:_MOST_CLASSES]))]
            body.append([_short(name), _shown(row["samples"]), *means, *counts])
        more = len(rows) - _MOST_CLIENTS
        return [*_table(heads, body), *([f"… and {counted(more, 'client')} more in the file"] if more > 0 else [])]


def quantiles(cells: Floats, count: float, borders: Floats, masked: NDArray[np.bool_]) -> list[dict[str, float | None]]:
    """Quantiles from a histogram's cells, each with bounds that hold it; null where no bound is known.

    The q-quantile is the smallest value that at least q · count values do not exceed. Withheld values may be in any of
    the cells that are withheld, so that bounds may be further apart than a cell's edges.

    Args:
        cells: Values below the range, in each cell, and above, (bins + 2,); NaN if withheld.
        count: All values.
        borders: Edges of the cells, (bins + 1,).
        masked: Which cells lack values that a site withholds.
    """
    cells = np.maximum(np.nan_to_num(cells), 0)  # noise may make a count negative
    seen, nothing = np.cumsum(cells), {"value": None, "low": None, "high": None}
    if not count >= 1 or not seen[-1]:
        return [{"q": q, **nothing} for q in QUANTILES]
    unseen = max(count - seen[-1], 0.0) if masked.any() else 0.0
    soonest = seen + unseen * np.logical_or.accumulate(masked)  # if all of them are in the first cell, or in the last
    later = np.append(np.logical_or.accumulate(masked[::-1])[::-1][1:], False)  # a cell further on lacks some
    latest = seen + unseen * ~later
    left, right = np.concatenate([[-np.inf], borders]), np.concatenate([borders, [np.inf]])
    found = list[dict[str, float | None]]()
    for q in QUANTILES:
        rank = q * (count if unseen else seen[-1])
        first, last = (int(np.searchsorted(reached, rank)) for reached in (soonest, latest))
        low, high = float(left[first]), float(right[last])
        bounds = {"low": _number(low), "high": _number(high)}
        inside = (rank - seen[first] + cells[first]) / cells[first] if first == last and cells[first] > 0 else 0.5
        value = low + (high - low) * float(np.clip(inside, 0, 1)) if None not in bounds.values() else None
        found.append({"q": q, "value": value, **bounds})
    return found


def privacy_line(privacy: Mapping[str, Any]) -> str:
    """The promise of noisy statistics in one line."""
    line = (
        f"privacy: epsilon {privacy['epsilon']:.6g} at delta {privacy['delta']:g} for one training sample of a client"
    )
    return line if privacy["noise_from"] == "each site" else f"{line}; a simulation, whose noise follows from the seed"


def _number(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _count(number: float) -> int | float | None:
    """A count as a whole number if it is one; None if it is withheld."""
    if math.isnan(number):
        return None
    return int(number) if float(number).is_integer() else float(number)


def _shown(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:.5g}"


def _short(name: str, most: int = 24) -> str:
    plain = "".join(letter if letter.isprintable() else "?" for letter in name)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Columns in alignment: words to the left, numbers to the right."""
    rows = [list(heads), *map(list, body)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    words = {"column", "role", "client", "classes"}
    return [
        "  ".join(
            cell.ljust(width) if head in words else cell.rjust(width)
            for cell, width, head in zip(row, widths, heads, strict=True)
        ).rstrip()
        for row in rows
    ]
