"""A picture of statistics: histograms of the columns, and the clients' samples by class or number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lit_fed.data.population.pictures import shortened
from lit_fed.federation.statistics.report import Statistics
from lit_fed.federation.statistics.site import Floats, SiteStatistics, edges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
_MOST_COLUMNS, _MOST_CLIENTS, _MOST_COLOURS, _WIDE, _MOST_NAMED = 11, 40, 10, 4, 12
_ALL, _WITHHELD = "#2a7fba", "#d98c2b"


def draw(statistics: Statistics) -> Figure:
    """Histograms of the first columns, all clients as bars and each client as a line, and a panel of the clients."""
    from matplotlib.figure import Figure

    columns = list(enumerate(statistics.columns[:_MOST_COLUMNS]))
    panels = len(columns) + 1
    wide = min(_WIDE, max(2, -(-panels // 2)))
    tall = -(-panels // wide)
    height = max(2.5, 0.16 * len(_shown(statistics)))
    figure = Figure(figsize=(3.1 * wide, height * tall + 0.5), dpi=120, layout="constrained")
    axes = np.atleast_1d(figure.subplots(tall, wide)).reshape(-1)
    for axis, (place, column) in zip(axes, columns, strict=False):
        _histogram(axis, statistics, place)
        axis.set_title(column.name if len(column.name) <= 28 else f"{column.name[:27]}…", fontsize=9)
    _clients(axes[len(columns)], statistics)
    for axis in axes[panels:]:
        axis.remove()
    for axis in axes[:panels]:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    more = len(statistics.columns) - _MOST_COLUMNS
    own = "a row" if len(_shown(statistics)) > _MOST_COLOURS else "a line in the colour of its name"
    title = f"Share of values by cell: all clients (bars), each client ({own})"
    figure.suptitle(title + (f"; {more} columns more in the file" if more > 0 else ""), fontsize=10)
    return figure


def _histogram(axis: Any, statistics: Statistics, place: int) -> None:
    """One column: few clients as lines over all clients' bars, many each in a row with these bars."""
    low, high = statistics.question.ranges[place]
    borders = edges(low, high, statistics.question.bins)
    whole = np.nan_to_num(_shares(statistics.whole.cells[place], statistics.whole.count[place]))
    sites = _shown(statistics)
    shares = [_shares(site.cells[place], site.count[place]) for site in sites.values()]
    rows, scale = [0] * max(len(sites), 1), 1.0
    if len(sites) > _MOST_COLOURS:
        rows, scale = list(range(len(sites)))[::-1], 0.9 / max(np.nan_to_num([whole, *shares]).max(), 1e-12)
        axis.set_yticks(rows, [shortened(name, 8) for name in sites])
    for row in set(rows):
        axis.stairs(row + scale * whole, borders, fill=True, color=_ALL, alpha=0.45, baseline=row)
    for row, site, share, colour in zip(rows, sites.values(), shares, _colours(len(sites)), strict=False):
        if site.count[place] > 0:
            axis.stairs(row + scale * share, borders, color=colour, linewidth=1, alpha=0.9, baseline=None)
            if (hidden := np.isnan(share)).any():
                middles = ((borders[:-1] + borders[1:]) / 2)[hidden]
                axis.plot(middles, np.full(len(middles), row), "|", color=_WITHHELD, markersize=5, clip_on=False)
    axis.set_ylim(bottom=0)
    if statistics.question.least > 1:
        axis.set_xlabel("orange: a client withholds the cell", fontsize=7)


def _shown(statistics: Statistics) -> dict[str, SiteStatistics]:
    return dict(list(statistics.sites.items())[:_MOST_CLIENTS])


def _colours(count: int) -> list[Any]:
    """A colour of each client's own, if there are few; else the same for all."""
    return [f"C{place}" if count <= _MOST_COLOURS else "#0b4f8a" for place in range(count)]


def _shares(cells: Floats, count: float) -> Floats:
    return cells[1:-1] / count if count > 0 else np.zeros(len(cells) - 2)


def _clients(axis: Any, statistics: Statistics) -> None:
    """Samples by client, stacked by class if there are classes; all clients together without clients."""
    sites = _shown(statistics) or {"all": statistics.whole}
    places, names = np.arange(len(sites)), list(sites)
    classes = np.array([site.classes for site in sites.values()])
    samples = np.nan_to_num(np.array([site.samples for site in sites.values()]))
    axis.bar(places, samples, color="#dfe4e8" if classes.size else _colours(len(sites)), width=0.85)
    if classes.size:
        from matplotlib import colormaps

        below, count = np.zeros(len(sites)), classes.shape[1]
        for label in range(count):
            height = np.maximum(np.nan_to_num(classes[:, label]), 0)
            colour = colormaps["viridis"](label / max(count - 1, 1))  # not the clients' colours
            name = statistics.class_names[label] if statistics.class_names else str(label)
            axis.bar(places, height, bottom=below, color=colour, width=0.85, label=name[:12])
            below += height
        if count <= _MOST_NAMED:
            axis.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True)
    for place, site in zip(places, sites.values(), strict=True):
        if np.isnan(site.samples):
            axis.plot(place, 0, "x", color=_WITHHELD, clip_on=False)
    step = -(-len(names) // 10)
    axis.set_xticks(places[::step], [shortened(name, 8) for name in names[::step]])
    axis.locator_params("y", integer=True)
    for label, colour in zip(axis.get_xticklabels(), _colours(len(names))[::step], strict=True):
        label.set_color(colour)
    axis.tick_params(axis="x", rotation=45 if max(map(len, names)) > 3 else 0)
    axis.set_title("samples by client" + (" and class" if classes.size else ""), fontsize=9)
