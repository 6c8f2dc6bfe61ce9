"""Pictures of a study: bars, curves and lines, drawn without a display."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.engine.storage.files import in_place_of
from lit_fed.studies.file.rounds import goal_of, guide_of
from lit_fed.studies.file.study import Place, Study, Variant
from lit_fed.studies.results.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; further rows get another line style.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7a6a00", "#444444")
_STYLES = ("-", "--", ":", "-.")
_ALONG = {
    "rounds": "round",
    "bytes": "sent up and down, all clients",
    "seconds": "seconds of the rounds, evaluation included",
}
_WIDE = 3  # panels side by side
_DPI = 130


def draw_bars(results: Results, path: Path) -> None:
    """Draw the table as bars: a panel per metric, a group per column, a bar per row; the paper's values as marks."""
    study = results.grid.study
    metrics = list(dict.fromkeys(entry.measure.words for entry in results.entries.values() if entry.seeds))
    panels = {
        metric: [
            c for c in study.columns if any(results.entries[Place(r, c)].measure.words == metric for r in study.rows)
        ]
        for metric in metrics
    }
    widths = [len(columns) for columns in panels.values()]
    size = max(5.0, min(16.0, 1.2 + sum(widths) * (0.55 + 0.26 * len(study.rows))))
    figure = _figure(size, 3.4)
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)
    for axes, (metric, columns) in zip(grid.flat, panels.items(), strict=True):
        width = 0.84 / len(study.rows)
        drawn = []
        for number, (row, variant) in enumerate(study.rows.items()):
            for position, column in enumerate(columns):
                entry = results.entries[Place(row, column)]
                x = position + (number - (len(study.rows) - 1) / 2) * width
                if entry.mean is None or not np.isfinite(entry.mean) or entry.measure.words != metric:
                    continue
                color, style = _look(number)
                axes.bar(
                    x,
                    entry.mean,
                    width * 0.9,
                    color=color,
                    hatch="//" if style != "-" else "",
                    edgecolor="white",
                    label=_text(variant.label) if row not in drawn else "_",
                )
                drawn.append(row)
                if entry.std is not None:
                    axes.errorbar(x, entry.mean, entry.std, color="#222222", linewidth=1, capsize=2)
                if entry.published is not None:
                    axes.plot(
                        [x - width * 0.42, x + width * 0.42], [entry.published[0]] * 2, color="#b00020", linewidth=2
                    )
        axes.set_xticks(range(len(columns)), [_text(study.columns[column].label) for column in columns])
        printed = (entry.measure.printed for entry in results.entries.values() if entry.measure.words == metric)
        axes.set_ylabel(_text(" and ".join(dict.fromkeys(printed))))
        _fit_bars(axes)
    _legend(figure, grid.flat, study.rows, any(entry.published for entry in results.entries.values()))
    _save(figure, path)


def draw_curves(results: Results, path: Path) -> None:
    """Draw the metric over rounds, or over bytes or seconds until a round's end: a panel per column, a line per row.

    The lines are means over n seeds, of both axes. For n > 1 the bands are the standard error, mean ± s/√n with the
    sample standard deviation s (n − 1), or the two-sided 95 % confidence interval, mean ± t·s/√n with the 97.5 %
    quantile t of Student's t with n − 1 degrees of freedom. The axis spans the seeds' values, so that the wide bands of
    few seeds do not flatten the lines. Where the report is ``first METRIC at NUMBER``, METRIC is drawn over the table's
    number, such as virtual seconds, as steps, from the latest first evaluation of a seed to the earliest last one, and
    NUMBER as a grey line.
    """
    grid, study = results.grid, results.grid.study
    columns = list(study.columns)
    wide = min(_WIDE, len(columns))
    tall = -(-len(columns) // wide)
    from matplotlib.ticker import EngFormatter

    figure = _figure(max(5.0, 4.2 * wide), 3.0 * tall + 0.5)
    panels = figure.subplots(tall, wide, squeeze=False)
    for axes, column in zip(panels.flat, columns, strict=False):
        reached: list[float] = []
        for number, row in enumerate(study.rows):
            place = Place(row, column)
            goal = goal_of(results.entries[place].measure.report)
            ways = grid.curve if goal is None else grid.way
            seeds = [seed for seed in study.seeds if place not in study.skip and ways(place, seed)]
            curves = [dict(ways(place, seed)) for seed in seeds]
            if not curves:
                continue
            if goal is None:
                rounds, values = _together(curves)
                spent = [grid.runs[place, seed].spent(study.along) for seed in seeds]
                along = [sum(until[int(r)] for until in spent) / len(spent) for r in rounds]
            else:
                along, values = _as_steps(curves)
                axes.axhline(goal, color="#999999", linewidth=0.8)
                axes.set_xscale("log")
            mean, color_style = values.mean(0), _look(number)
            axes.plot(
                along,
                mean,
                color=color_style[0],
                linestyle=color_style[1],
                linewidth=1.6,
                label=_text(study.rows[row].label),
                marker="o" if len(along) < 3 else "",
            )
            reached += [values.min(), values.max()]
            if len(curves) > 1:
                from scipy.stats import t  # takes a second to import

                times = float(t.ppf(0.975, len(curves) - 1)) if study.band == "interval" else 1.0
                half = times * values.std(0, ddof=1) / len(curves) ** 0.5
                axes.fill_between(along, mean - half, mean + half, color=color_style[0], alpha=0.15, linewidth=0)
        _fit_to(axes, reached)
        axes.set_title(_text(study.columns[column].label), fontsize=10)
        measures = [results.entries[Place(r, column)].measure for r in study.rows]
        goals = [goal_of(measure.report) is not None for measure in measures]
        axes.set_xlabel(_text(measures[0].printed) if all(goals) else _ALONG[study.along])
        if study.along == "bytes" and not any(goals):
            axes.xaxis.set_major_formatter(EngFormatter("B"))
        measured = [
            study.printed(guide_of(m.report)) if has_goal else m.printed
            for m, has_goal in zip(measures, goals, strict=True)
        ]
        axes.set_ylabel(_text(" and ".join(dict.fromkeys(measured))))
        _tidy(axes)
    for axes in list(panels.flat)[len(columns) :]:
        axes.set_axis_off()
    _legend(figure, panels.flat, study.rows, False)
    _save(figure, path)


def _together(curves: Sequence[Mapping[float, float]]) -> tuple[list[float], NDArray[np.float64]]:
    """Return the common points of curves, and the values there, (curves, points)."""
    points = sorted(set(curves[0]).intersection(*curves[1:]))
    return points, np.array([[curve[point] for point in points] for curve in curves])


def _as_steps(curves: Sequence[Mapping[float, float]]) -> tuple[list[float], NDArray[np.float64]]:
    """Return all points of curves that lie within each of them, and the curves as step functions, (curves, points)."""
    first, last = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    points = sorted({point for curve in curves for point in curve if first <= point <= last})
    steps = []
    for curve in curves:
        own = sorted(curve)
        steps.append([curve[own[bisect_right(own, point) - 1]] for point in points])
    return points, np.array(steps)


def has_lines(study: Study) -> bool:
    """Whether all columns, or all rows, have a position on an axis."""
    return any(_all_placed(variants) for variants in (study.columns, study.rows))


def draw_lines(results: Results, path: Path) -> None:
    """Draw the table over the positions of its columns, a line per row; or over its rows' positions, a line per column.

    The lines are means with standard deviations over seeds; the paper's values are dashed.
    """
    study = results.grid.study
    along_columns = _all_placed(study.columns)
    along, lines = (study.columns, study.rows) if along_columns else (study.rows, study.columns)
    figure = _figure(6.4, 3.8)
    axes = figure.subplots()
    for number, (line, variant) in enumerate(lines.items()):
        color, style = _look(number)
        entries = {
            where.x: results.entries[Place(line, name) if along_columns else Place(name, line)]
            for name, where in sorted(along.items(), key=lambda item: item[1].x or 0.0)
        }
        points = [(x, entry.mean, entry.std or 0.0) for x, entry in entries.items() if entry.mean is not None]
        if points:
            xs, means, spreads = zip(*points, strict=True)
            axes.errorbar(
                xs, means, spreads, color=color, linestyle=style, linewidth=1.6, marker="o", markersize=4, capsize=2,
                label=_text(variant.label),
            )  # fmt: skip
        published = [(x, entry.published[0]) for x, entry in entries.items() if entry.published is not None]
        if published:
            axes.plot(*zip(*published, strict=True), color=color, linestyle="--", linewidth=1, marker="_")
    axes.set_xticks([where.x for where in along.values() if where.x is not None])
    axes.set_xlabel(_text(study.x_label))
    metrics = list(dict.fromkeys(entry.measure.printed for entry in results.entries.values() if entry.seeds))
    # Metrics of several views, such as pck_32x24 and pck_64x48, share the part before the view.
    axes.set_ylabel(_text(metrics[0] if len(metrics) == 1 else metrics[0].rpartition("_")[0] or metrics[0]))
    _tidy(axes)
    _legend(figure, [axes], lines, any(entry.published for entry in results.entries.values()))
    _save(figure, path)


def _all_placed(variants: Mapping[str, Variant]) -> bool:
    return all(variant.x is not None for variant in variants.values())


def _text(words: str) -> str:
    """Escape dollars, which begin a formula, and a leading underscore, which hides a label from legends."""
    return (" " if words.startswith("_") else "") + words.replace("$", r"\$")


def _look(number: int) -> tuple[str, str]:
    return _COLORS[number % len(_COLORS)], _STYLES[number // len(_COLORS) % len(_STYLES)]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _fit_bars(axes: Axes) -> None:
    """Start the axis above zero if all bars would look alike, and note this in the title."""
    from matplotlib.patches import Rectangle

    tops = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle) and np.isfinite(bar.get_height())]
    marks = [float(value) for line in axes.lines for value in np.asarray(line.get_ydata()) if np.isfinite(value)]
    if tops and min(tops) > 0:
        low, high = min([*tops, *marks]), max([*tops, *marks])
        if low > 0.6 * high:
            bottom = max(0.0, low - 0.6 * (high - low) - 0.02 * high)
            axes.set_ylim(bottom, high + 0.15 * (high - bottom))
            axes.set_title("the axis does not begin at zero", fontsize=8, color="#666666")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _fit_to(axes: Axes, reached: Sequence[float]) -> None:
    """Let the axis span some values, with a margin."""
    finite = [value for value in reached if np.isfinite(value)]
    if finite and max(finite) > min(finite):
        margin = 0.06 * (max(finite) - min(finite))
        axes.set_ylim(min(finite) - margin, max(finite) + margin)


def _legend(figure: Figure, panels: Iterable[Axes], variants: Mapping[str, Variant], published: bool) -> None:
    """Draw one legend under all panels, in the order of the study file."""
    from matplotlib.lines import Line2D

    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = dict.fromkeys(_text(variant.label) for variant in variants.values())
    entries = {label: handles[label] for label in labels if label in handles}
    if published:
        entries["published"] = Line2D([], [], color="#b00020", linewidth=2)
    for ncols in range(min(5, len(entries)), 0, -1):  # the number of columns that fit
        legend = figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=ncols,
            frameon=False,
            fontsize=8,
        )
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _save(figure: Figure, path: Path) -> None:
    """Write a picture as PNG and SVG; equal runs give equal bytes."""
    from matplotlib import rc_context

    with in_place_of(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
    with rc_context({"svg.hashsalt": path.stem}), in_place_of(path.with_suffix(".svg")) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
