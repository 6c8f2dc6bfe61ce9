"""Pictures of a population, without a display or pyplot's global state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLIENTS = 200  # on one axis; more are indistinguishable
MOST_CLASSES = 200
_MOST_NAMES = 24  # on one axis
_LONGEST_NAME = 16
_WIDTH = 2.6  # least width of axes in inches
_MOST_BINS = 40  # of a target's range; finer bins are mostly empty with a few hundred samples per client


@dataclass(frozen=True)
class Names:
    """Names of clients and classes in pictures.

    Args:
        clients: The clients' names, in the order of their ids; None for their ids.
        classes: The classes' names, in their order; None for their numbers.
    """

    clients: Sequence[str] | None = None
    classes: Sequence[str] | None = None


NAMELESS = Names()


def even_subset(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of ``0 … count − 1``, evenly spread, with the first and the last."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.round(np.linspace(0, count - 1, most)).astype(np.int64)


def partition_picture(
    histogram: NDArray[np.int64], client_ids: NDArray[np.int64] | None = None, names: Names = NAMELESS
) -> Figure:
    """Training samples per client and class, shape (num_clients, num_classes); None counts the client ids from 0."""
    num_clients, num_classes = histogram.shape
    clients, classes = even_subset(num_clients, MOST_CLIENTS), even_subset(num_classes, MOST_CLASSES)
    figure, axes = new_figure()
    _counts(figure, axes, histogram[np.ix_(clients, classes)])
    label_axis(axes.xaxis, clients if client_ids is None else client_ids[clients], "client", names.clients)
    label_axis(axes.yaxis, classes, "class", names.classes)
    title = f"Who has what: {int(histogram.sum()):,} training samples, {counted(num_clients, len(clients), 'client')}"
    if len(classes) < num_classes:
        title += f", {counted(num_classes, len(classes), 'class')}"
    axes.set_title(title)
    return figure


def target_picture(
    targets: NDArray[Any],
    owners: NDArray[np.int64],
    num_clients: int,
    client_ids: NDArray[np.int64],
    names: Names = NAMELESS,
) -> Figure:
    """Distribution of each client's targets.

    Args:
        targets: Targets of training samples, shape (n,), or (n, k) to draw the first column.
        owners: The row of each sample's client, shape (n,).
        num_clients: Number of rows.
        client_ids: The clients' ids, shape (num_clients,).
        names: Names of the clients.
    """
    from matplotlib.ticker import AutoLocator, ScalarFormatter

    values = targets.reshape(len(targets), -1)[:, 0].astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    high = high if high > low else low + 1.0
    bins = np.minimum(((values - low) / (high - low) * _MOST_BINS).astype(np.int64), _MOST_BINS - 1)
    cells = np.bincount(owners * _MOST_BINS + bins, minlength=num_clients * _MOST_BINS)
    clients = even_subset(num_clients, MOST_CLIENTS)
    figure, axes = new_figure()
    image = _counts(figure, axes, cells.reshape(num_clients, _MOST_BINS)[clients])
    image.set_extent((-0.5, len(clients) - 0.5, low, high))
    label_axis(axes.xaxis, client_ids[clients], "client", names.clients)
    axes.yaxis.set_major_locator(AutoLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylabel("target" if targets.ndim == 1 else f"first of {targets.shape[1]} targets")
    axes.set_title(f"Who has what: {len(values):,} training samples, {counted(num_clients, len(clients), 'client')}")
    return figure


def sizes_picture(sizes: NDArray[np.int64], client_ids: NDArray[np.int64], names: Names = NAMELESS) -> Figure:
    """Training samples of each client, shape (num_clients,), without classes or targets."""
    clients = even_subset(len(sizes), MOST_CLIENTS)
    figure, axes = new_figure()
    axes.bar(np.arange(len(clients)), sizes[clients], width=0.9, color="#2a7fba")
    label_axis(axes.xaxis, client_ids[clients], "client", names.clients)
    axes.set_ylabel("training samples")
    axes.locator_params("y", integer=True)
    axes.set_title(f"Who has how much: {sizes.sum():,} training samples, {counted(len(sizes), len(clients), 'client')}")
    return figure


def render(figure: Figure) -> NDArray[np.uint8]:
    """A figure as pixels, shape (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def new_figure() -> tuple[Figure, Axes]:
    """An empty figure in the size for TensorBoard."""
    from matplotlib.figure import Figure

    # TensorBoard shows pictures 350 pixels wide, where a letter of 10 points is then 11 pixels high.
    figure = Figure(figsize=(4.5, 2.75), dpi=200, layout="constrained")
    return figure, figure.subplots()


def label_axis(axis: Any, ids: NDArray[np.int64], name: str, names: Sequence[str] | None = None) -> None:
    """Ticks with ids or names: all if they fit, else ids in round steps."""
    axis.set_label_text(name)
    most = 12
    if names is not None and len(ids) <= _MOST_NAMES:
        size = 8 if len(ids) <= most else 5.5
        texts = axis.set_ticks(np.arange(len(ids)), [shortened(names[i], _LONGEST_NAME) for i in ids.tolist()])
        axis.set_tick_params(labelsize=size)
        widest = max(text_width(text.label1.get_text(), size) for text in texts)
        if axis.axis_name == "x" and widest > _WIDTH / len(ids):
            axis.set_tick_params(rotation=90)
        for text in texts:
            text.label1.set_parse_math(False)
        return
    if len(ids) == ids[-1] + 1:  # nothing left out: positions are ids
        step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if len(ids) <= most * s * 10**e)
        positions = np.arange(0, len(ids), step)
    else:
        positions = even_subset(len(ids), 11)
    axis.set_ticks(positions, [str(i) for i in ids[positions].tolist()])


def shortened(name: str, most: int) -> str:
    """A name in one line of at most `most` letters."""
    plain = " ".join(name.split())
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width in inches of a line in a font of `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0]) / 72


def counted(total: int, shown: int, name: str) -> str:
    """A count with its noun, and the number shown if it is less."""
    plural = name if total == 1 else f"{name}es" if name.endswith("s") else f"{name}s"
    return f"{total:,} {plural}" if shown == total else f"{shown} of {total:,} {plural}, evenly spread"


def _counts(figure: Figure, axes: Axes, counts: NDArray[np.int64]) -> Any:
    """Samples per client (rows) and bin (columns) as colours."""
    # White for zero, which a colour scale alone would not tell from a few.
    shown = counts.T
    image = axes.imshow(
        np.ma.masked_equal(shown, 0),
        aspect="auto",
        origin="lower",
        cmap="viridis_r",
        interpolation="nearest",
        vmin=1,
        vmax=max(2, int(shown.max(initial=0))),
    )
    bar = figure.colorbar(image, ax=axes, label="training samples (white: none)", pad=0.02)
    bar.ax.locator_params("y", integer=True, min_n_ticks=1)
    return image
