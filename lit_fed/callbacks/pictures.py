"""Pictures of a run, drawn without a display and without pyplot's global state, and cards of its wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.callbacks.boards import boards, show_picture
from lit_fed.callbacks.recorder import RoundTable
from lit_fed.data.population.pictures import (
    MOST_CLASSES,
    MOST_CLIENTS,
    counted,
    even_subset,
    label_axis,
    new_figure,
    render,
    shortened,
    text_width,
)
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.engine.method.wrapper import Wrapper
from lit_fed.engine.storage.files import in_place_of, write_text
from lit_fed.participation import Fate, Participant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_BINS = 400
_TITLE_SIZE = 8  # points, over a predicted image
_LONGEST_TITLE = 18
_WIDEST = 4.5  # inches of a picture of predictions
_MOST_BARS = 600
_MOST_ROWS = 60
_MOST_PARTICIPANTS = 200_000  # fates computed for a map, 0.5 to 3 s; beyond, a subset of rounds

# In order of importance; the position is the value in a map, 0 stands for "not selected".
_FATES = (Fate.ON_TIME, Fate.LATE, Fate.LOST_AFTER, Fate.LOST_BEFORE)
_FATE_COLORS = {
    "not selected": "#ededed",
    "on time": "#2a7fba",
    "late, arrives a round later": "#f2b134",
    "lost after training": "#d1495b",
    "lost before training": "#5b2a6e",
}

_LEFT_OUT = {"honest": ("#a9cfe8", "#0b4f8a"), "attacker": ("#f6b8a8", "#a50f15")}  # left out, counts in full
_NOT_SENT = "#ffffff"


def participation_map(
    plan: Callable[[int], Sequence[Participant]],
    num_rounds: int,
    num_clients: int,
    cohort_size: int,
    names: Sequence[str] | None = None,
) -> Figure:
    """A map of clients and rounds by the fate of each client's work.

    Args:
        plan: A pure function from a round to its participants.
        num_rounds: Completed rounds.
        num_clients: Size of the population.
        cohort_size: Clients that a round asks for.
        names: The clients' names, in the order of their ids; None for their ids.
    """
    clients = even_subset(num_clients, MOST_CLIENTS)
    rounds = even_subset(num_rounds, max(1, min(num_rounds, _MOST_PARTICIPANTS // max(cohort_size, 1))))
    num_bins = min(len(rounds), _MOST_BINS)
    counts = np.zeros((num_bins, len(clients), len(_FATES)), dtype=np.int32)
    rows = {client_id: row for row, client_id in enumerate(clients.tolist())}
    fates = {fate: position for position, fate in enumerate(_FATES)}
    for position, round_idx in enumerate(rounds.tolist()):
        for participant in plan(round_idx):
            row = rows.get(participant.client_id)
            if row is not None:
                counts[position * num_bins // len(rounds), row, fates[participant.fate]] += 1
    # The most frequent fate of a bin; in case of a tie, the most important one.
    most_frequent = len(_FATES) - counts[:, :, ::-1].argmax(axis=2)
    values = np.where(counts.any(axis=2), most_frequent, 0)

    from matplotlib.colors import ListedColormap

    scale: dict[str, Any] = {
        "cmap": ListedColormap(list(_FATE_COLORS.values())),
        "vmin": -0.5,
        "vmax": len(_FATES) + 0.5,
    }
    entries = list(_FATE_COLORS.items())
    legend = [entries[value] for value in sorted({0, 1, *np.unique(values).tolist()})]
    figure, axes = _map_of_rounds(values.T, num_rounds, clients, names, legend, **scale)
    title = f"Who took part: {counted(num_rounds, num_rounds, 'round')}, {counted(num_clients, len(clients), 'client')}"
    if len(rounds) < num_rounds:
        title += f"\n{len(rounds)} of the rounds are shown, each as wide as the rounds that it represents"
    if num_bins < len(rounds):
        title += f"\n{num_bins} bins of rounds, each in the colour of its most frequent fate"
    axes.set_title(title)
    return figure


def _map_of_rounds(
    cells: NDArray[Any],
    num_rounds: int,
    clients: NDArray[np.int64],
    names: Sequence[str] | None,
    legend: Sequence[tuple[str, str]],
    **scale: Any,
) -> tuple[Figure, Axes]:
    """Draw rounds along x and clients along y.

    Args:
        cells: Values or colours, shape (len(clients), n, …), spread over all rounds.
        num_rounds: Completed rounds.
        clients: The clients' ids.
        names: The clients' names, in the order of their ids; None for their ids.
        legend: Labels with their colours.
        scale: Further settings of ``imshow``.
    """
    from matplotlib.patches import Patch

    figure, axes = new_figure()
    extent = (-0.5, num_rounds - 0.5, -0.5, len(clients) - 0.5)
    axes.imshow(cells, aspect="auto", origin="lower", interpolation="nearest", extent=extent, **scale)
    axes.locator_params("x", integer=True, min_n_ticks=1)
    axes.set_xlabel("round")
    label_axis(axes.yaxis, clients, "client", names)
    handles = [Patch(facecolor=color, edgecolor="#999999", label=label) for label, color in legend]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure, axes


def schedule_picture(
    plan: Callable[[int], Sequence[Participant]],
    num_rounds: int,
    num_clients: int,
    cohort_size: int,
    names: Sequence[str] | None = None,
    at_work: Sequence[Participant] = (),
) -> Figure:
    """Clients over virtual time, a bar from a client's download to its arrival, and how often each one arrived.

    The last steps are shown, about `_MOST_BARS` bars; bars of the clients `at_work` end with the last step, and are
    hatched in the colour of their staleness so far. The other arguments are those of `participation_map`.
    """
    first = max(0, num_rounds - max(1, _MOST_BARS // max(cohort_size, 1)))
    steps = [plan(round_idx) for round_idx in range(first, num_rounds)]
    every = [(round_idx, one) for round_idx, step in enumerate(steps, start=first) for one in step]
    clients = np.arange(num_clients)
    if num_clients > _MOST_ROWS:  # those at work in these steps
        clients = np.unique([one.client_id for one in (*(one for _, one in every), *at_work)])
        clients = clients[even_subset(len(clients), _MOST_ROWS)]
    rows = {client_id: row for row, client_id in enumerate(clients.tolist())}
    shown = [(round_idx, one) for round_idx, one in every if one.client_id in rows]
    arrivals = Counter(one.client_id for _, one in every if one.fate is Fate.ON_TIME)

    figure, axes = new_figure()
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    now = max((one.ended for _, one in every), default=0.0)
    still = [(num_rounds, replace(one, ended=now)) for one in at_work if one.client_id in rows]
    drawn = [*shown, *still]
    stale = np.array([round_idx - (one.version or 0) for round_idx, one in drawn], dtype=np.int64)
    scale = ScalarMappable(Normalize(0, int(stale.max(initial=1))), "viridis_r")
    colors = scale.to_rgba(stale)
    colors[[one.fate is not Fate.ON_TIME for _, one in shown] + [False] * len(still)] = 0.93
    bars = axes.barh(
        [rows[one.client_id] for _, one in drawn],
        [one.ended - one.began for _, one in drawn],
        left=[one.began for _, one in drawn],
        height=0.8,
        color=colors,
        edgecolor="white",
        linewidth=0.5,
    )
    for bar in bars.patches[len(shown) :]:
        bar.set(facecolor="white", edgecolor=bar.get_facecolor(), hatch="//////")
    axes.set_xlabel("virtual time, s")
    label_axis(axes.yaxis, clients, "client", names)
    figure.colorbar(scale, ax=axes, label="staleness", location="left").ax.locator_params("y", integer=True)
    counts = axes.inset_axes((1.03, 0, 0.2, 1), sharey=axes)
    counts.barh(range(len(clients)), [arrivals[client_id] for client_id in clients.tolist()], color="#2a7fba")
    counts.tick_params(labelleft=False)
    counts.set_xlabel("updates")
    counts.locator_params("x", integer=True, nbins=2)
    part = f", {len(clients)} of {num_clients:,} clients" if len(clients) < num_clients else ""
    figure.suptitle(f"Clients at work, steps {first} to {num_rounds - 1}{part}\n(hatched: still at work, grey: lost)")
    return figure


def left_out_map(
    shares: NDArray[np.float64], attackers: NDArray[np.bool_], weighted: bool, names: Sequence[str] | None = None
) -> Figure:
    """A map of clients and rounds by how much an update counted, with the attackers in another colour.

    Args:
        shares: An update's weight over that of an equal share, from 0 to 1, shape (num_rounds, num_clients); NaN where
            a client sent none.
        attackers: The clients that attack, shape (num_clients,).
        weighted: Whether the rule gives updates weights; otherwise, `shares` are 1.
        names: The clients' names, in the order of their ids; None for their ids.
    """
    from matplotlib.colors import to_rgb

    num_rounds, num_clients = shares.shape
    rounds, clients = even_subset(num_rounds, _MOST_BINS), even_subset(num_clients, MOST_CLIENTS)
    shown, marked = shares[np.ix_(rounds, clients)], attackers[clients]
    none, full = (np.array([to_rgb(_LEFT_OUT[who][end]) for who in ("honest", "attacker")]) for end in (0, 1))
    role = marked.astype(np.int64)
    colors = none[role] + np.nan_to_num(shown)[:, :, None] * (full - none)[role]
    colors[np.isnan(shown)] = to_rgb(_NOT_SENT)

    legend = [
        (f"{who}, {what}" if weighted else who, color)
        for who, ends in _LEFT_OUT.items()
        if who == "honest" or marked.any()
        for what, color in zip(("left out", "counts in full"), ends, strict=True)
        if weighted or what == "counts in full"
    ]
    if np.isnan(shown).any():
        legend.append(("no update", _NOT_SENT))
    figure, axes = _map_of_rounds(colors.transpose(1, 0, 2), num_rounds, clients, names, legend)
    size = f"{counted(num_rounds, len(rounds), 'round')}, {counted(num_clients, len(clients), 'client')}"
    axes.set_title(f"{'Who was left out' if weighted else 'Who attacked'}: {size}")
    return figure


def weights_picture(weights: NDArray[np.float64], clients: NDArray[np.int64]) -> Figure:
    """The weight of each client in the mixture, per class.

    Args:
        weights: Mean weight per client and class, shape (n, num_classes); NaN if there is none.
        clients: The clients' ids, shape (n,).
    """
    classes = even_subset(weights.shape[1], MOST_CLASSES)
    figure, axes = new_figure()
    image = axes.imshow(
        np.ma.masked_invalid(weights[:, classes].T),
        aspect="auto",
        origin="lower",
        cmap="viridis_r",
        interpolation="nearest",
        vmin=0,
    )
    figure.colorbar(image, ax=axes, label="mean weight (white: not in this round)", pad=0.02)
    label_axis(axes.xaxis, clients, "client")
    label_axis(axes.yaxis, classes, "class predicted by the mixture")
    axes.set_title(f"Mean weight by client and class: {counted(int(clients[-1]) + 1, len(clients), 'client')}")
    return figure


def predictions_picture(
    images: NDArray[np.float32], predicted: Sequence[int], true: Sequence[int], names: Sequence[str] | None = None
) -> Figure:
    """Images with their predicted classes.

    Args:
        images: Inputs as the model sees them, shape (n, channels, height, width), 1 or 3 channels, any scale.
        predicted: Classes, n of them.
        true: Classes, n of them.
        names: Names of the classes, in order; None for their numbers. Long names are cut.
    """
    from matplotlib.figure import Figure

    low, high = float(images.min()), float(images.max())
    pixels = np.clip((images - low) / max(high - low, 1e-12), 0, 1).transpose(0, 2, 3, 1)
    shown = [shortened(str(label) if names is None else names[label], _LONGEST_TITLE) for label in (*predicted, *true)]
    guesses, truths = shown[: len(predicted)], shown[len(predicted) :]
    width = max([0.75, *(text_width(f"not {name}", _TITLE_SIZE, "bold") + 0.1 for name in set(shown))])
    num_columns = min(4, len(pixels), max(1, int(_WIDEST / width)))
    num_rows = -(-len(pixels) // num_columns)
    figure = Figure(figsize=(max(width * num_columns, 4), 1.1 * num_rows + 0.4), dpi=200, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    right = [guess == label for guess, label in zip(predicted, true, strict=True)]
    for axes, image, is_right, guess, label in zip(grid.flat, pixels, right, guesses, truths, strict=False):
        axes.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
        axes.set_title(
            f"\n{guess}" if is_right else f"{guess}\nnot {label}",
            fontsize=_TITLE_SIZE,
            color="#1b7837" if is_right else "#b2182b",
            fontweight="normal" if is_right else "bold",
            parse_math=False,
        )
    figure.suptitle(f"Global model on test images: {sum(right)} of {len(pixels)} right", fontsize=11)
    return figure


def views_picture(values: Mapping[str, float], metric: str) -> Figure:
    """The global model's metric by view of the test data.

    Args:
        values: Values by view, in drawing order.
        metric: Name of the metric.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 0.27 * len(values) + 1.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(values), list(values.values()), height=0.7, color="#2a7fba")
    axes.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(metric)
    axes.set_title("The global model by view of the test data")
    return figure


def curves_picture(rounds: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Curves over rounds, a panel per title, in two columns.

    Args:
        rounds: Rounds of the curves' values, length n.
        panels: Curves of length n by title and label; every panel has the same labels.
    """
    from matplotlib.figure import Figure

    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(4.5, 1.8 * num_rows + 0.3), dpi=200, layout="constrained")
    grid = list(figure.subplots(num_rows, 2, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, curves) in zip(grid, panels.items(), strict=False):
        for label, values in curves.items():
            axes.plot(rounds, values, label=label, linewidth=1.5, marker="." if len(rounds) < 30 else None)
        axes.set_title(title, fontsize=10)
        axes.locator_params("x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[min(len(panels), len(figure.axes) - 1)].legend(handles, labels, loc="center", frameon=False)
    return figure


_CELLS = 10**7  # of a map in memory


class LeftOut(Callback):
    """Draws clients and rounds by how much an update counted, as ``left_out.png`` in the run's folder and for loggers.

    Draws when the run ends, from ``clients.csv``, if `trainer.aggregation` or `trainer.attack` is set.
    """

    def on_fit_end(self, run: Run) -> None:
        """Draw the map, before `Dashboard` closes the loggers.

        Raises:
            CheckpointError: If ``clients.csv`` cannot be read, or the picture not written.
        """
        reports = any(type(one).client_rows is not Wrapper.client_rows for one in run.federation.wrappers.stack)
        drawn = reports and run.settings.enable_pictures
        num_clients, num_rounds = run.federation.data.num_clients, run.next_round
        if not drawn or run.withholds or not run.fabric.is_global_zero or not 0 < num_clients * num_rounds <= _CELLS:
            return
        shares, attackers, weighted = _read(run.log_dir / "clients.csv", num_rounds, num_clients)
        if not weighted and not attackers.any():
            return
        figure = left_out_map(shares, attackers, weighted, run.federation.data.client_names)
        path = run.log_dir / "left_out.png"
        with in_place_of(path) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": None})
        show_picture(run, "pictures/left_out", render(figure), num_rounds - 1)


def _read(path: Path, num_rounds: int, num_clients: int) -> tuple[NDArray[np.float64], NDArray[np.bool_], bool]:
    """The arguments of `left_out_map`, from the file of a run."""
    weights, sent = np.full((num_rounds, num_clients), np.nan), np.zeros((num_rounds, num_clients), bool)
    attackers = np.zeros(num_clients, bool)
    for row in RoundTable(path).rows():
        if row["stage"] != "train":
            continue
        round_idx, client_id = int(row["round"]), int(row["client_id"])
        sent[round_idx, client_id] = True
        if row["metric"] == "aggregation/weight":
            weights[round_idx, client_id] = float(row["value"])
        elif row["metric"] == "attack/attacker":
            attackers[client_id] = True
    counts = (~np.isnan(weights)).sum(1, keepdims=True)
    if not counts.any():
        return np.where(sent, 1.0, np.nan), attackers, False
    weights[sent & (counts == 0)] = 0  # a skipped round
    return np.clip(weights * counts, 0, 1), attackers, True


class Cards(Callback):
    """Writes ``<name>.md`` after every round, and shows it to loggers that take texts when the run ends."""

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the cards, before the round's checkpoint.

        Raises:
            CheckpointError: If they cannot be written.
        """
        if run.fabric.is_global_zero:
            for name, card in run.federation.wrappers.cards().items():
                write_text([card], run.log_dir / f"{name}.md")

    def on_fit_end(self, run: Run) -> None:
        """Show the cards, before `Dashboard` closes the loggers."""
        for name, card in run.federation.wrappers.cards().items() if run.next_round else ():
            for board in boards(run):
                board.text(name, card, run.next_round - 1)
