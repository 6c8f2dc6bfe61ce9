"""Pictures of a run: who took part, and what was predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from lit_fed.callbacks.pictures import (
    curves_picture,
    left_out_map,
    participation_map,
    predictions_picture,
    schedule_picture,
    views_picture,
)
from lit_fed.data.population.pictures import partition_picture, render, sizes_picture
from lit_fed.participation import Fate, Participant


def test_participation_map_shows_each_fate_where_it_happened() -> None:
    fates = [Fate.ON_TIME, Fate.LATE, Fate.LOST_AFTER, Fate.LOST_BEFORE]
    figure = participation_map(lambda round_idx: [Participant(round_idx, fates[round_idx])], 4, 5, 1)
    values = figure.axes[0].images[0].get_array()
    assert values is not None
    # classes × rounds: client r takes part in round r with the r-th fate, coded from 1
    assert values.tolist() == [*np.diag([1, 2, 3, 4]).tolist(), [0] * 4]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "not selected",
        "on time",
        "late, arrives a round later",
        "lost after training",
        "lost before training",
    ]


def test_participation_map_has_the_clients_names() -> None:
    names = ["Aarhus", "Basel", "Cork"]
    figure = participation_map(lambda round_idx: [Participant(round_idx, Fate.ON_TIME)], 2, 3, 1, names)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == names


def test_participation_map_bins_long_runs_by_the_most_frequent_fate() -> None:
    def plan(round_idx: int) -> list[Participant]:
        return [
            Participant(0, Fate.LATE if round_idx % 4 == 3 else Fate.ON_TIME),
            Participant(1, Fate.LOST_BEFORE if round_idx % 2 else Fate.ON_TIME),
        ]

    axes = participation_map(plan, 1600, 3, 2).axes[0]
    assert "400 bins of rounds" in axes.get_title()
    values = axes.images[0].get_array()
    assert values is not None
    assert values.shape == (3, 400)
    assert set(values[0].tolist()) == {1}, "three of four on time"
    assert set(values[1].tolist()) == {4}, "of two equally frequent the one worth noticing"
    assert set(values[2].tolist()) == {0}


def test_participation_map_of_a_large_population_looks_at_some_rounds() -> None:
    asked: list[int] = []

    def plan(round_idx: int) -> list[Participant]:
        asked.append(round_idx)
        return [Participant(0, Fate.ON_TIME)]

    axes = participation_map(plan, 1000, 100_000, 20_000).axes[0]
    assert len(asked) == 10
    assert "10 of the rounds are shown" in axes.get_title()
    assert "200 of 100,000 clients" in axes.get_title()


def test_pictures_leave_pyplot_alone_and_render_to_pixels() -> None:
    pixels = render(predictions_picture(np.zeros((1, 3, 4, 4), dtype=np.float32), [1], [2]))
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert pixels.min() < 100 < pixels.max()


def test_bars_of_views_are_in_the_order_in_which_they_are_named() -> None:
    axes = views_picture({"32x24": 20.0, "16x12": 10.0}, "global/pck").axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["32x24", "16x12"]
    assert [bar.get_width() for bar in axes.patches] == [20.0, 10.0]  # type: ignore[attr-defined]  # they are bars
    assert axes.yaxis_inverted()
    assert axes.get_xlabel() == "global/pck"


def test_the_map_of_who_was_left_out_marks_attackers_and_weights() -> None:
    # Client 0 is honest: it counts in full, then by half, then not. Client 1 attacks: left out, sent nothing, in full.
    shares = np.array([[1.0, 0.0], [0.5, np.nan], [0.0, 1.0]])
    figure = left_out_map(shares, np.array([False, True]), weighted=True)
    colors = figure.axes[0].images[0].get_array()
    assert colors is not None
    honest, attacker = np.asarray(colors)
    assert np.allclose(honest[1], (honest[0] + honest[2]) / 2)
    assert len({tuple(color) for color in (*honest, *attacker)}) == 6
    assert attacker[1].tolist() == [1.0, 1.0, 1.0]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        *("honest, left out", "honest, counts in full", "attacker, left out", "attacker, counts in full", "no update")
    ]
    figure = left_out_map(np.ones((3, 2)), np.array([False, True]), weighted=False)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["honest", "attacker"]
    assert figure.axes[0].get_title().startswith("Who attacked")


def test_a_schedule_has_a_bar_from_each_download_to_its_arrival() -> None:
    plans = [
        [Participant(0, Fate.ON_TIME, 0, 0.0, 2.0), Participant(1, Fate.LOST_AFTER, 0, 0.0, 3.0)],
        [Participant(2, Fate.ON_TIME, 0, 0.0, 4.0), Participant(0, Fate.ON_TIME, 1, 3.0, 5.0)],
    ]
    still = [Participant(1, Fate.ON_TIME, 1, 3.5, 9.0)]
    figure = schedule_picture(plans.__getitem__, 2, 3, 2, ["Aarhus", "Basel", "Cork"], still)
    axes, counts = figure.axes[0], figure.axes[0].child_axes[0]
    bars = [(bar.get_x(), bar.get_width(), round(bar.get_y() + 0.4)) for bar in axes.patches]  # type: ignore[attr-defined]
    assert bars[:4] == [(0.0, 2.0, 0), (0.0, 3.0, 1), (0.0, 4.0, 2), (3.0, 2.0, 0)]
    (begun, so_far, _) = bars[4]
    assert (begun, so_far) == (3.5, 1.5), "until the last step"
    hatched = [bar.get_hatch() for bar in axes.patches]
    assert hatched[:4] == [None] * 4
    assert hatched[4], "still at work"
    # Client 2 missed a step, and client 1, which has the model of step 1, misses one when it ends, in step 2 or later.
    assert axes.patches[4].get_edgecolor() == axes.patches[2].get_facecolor() != axes.patches[3].get_facecolor()  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in counts.patches] == [2, 0, 1]  # type: ignore[attr-defined]  # updates that count
    assert [text.get_text() for text in axes.get_yticklabels()] == ["Aarhus", "Basel", "Cork"]
    render(figure)


def test_a_long_schedule_shows_its_last_steps() -> None:
    asked: list[int] = []

    def plan(round_idx: int) -> list[Participant]:
        asked.append(round_idx)
        return [Participant(0, Fate.ON_TIME, round_idx, float(round_idx), round_idx + 1.0)]

    axes = schedule_picture(plan, 10_000, 5, 20).axes[0]
    assert asked == list(range(9970, 10_000))  # 600 bars of 20 a step
    assert axes.get_xlim()[0] > 9900


def test_every_panel_of_curves_has_its_curves() -> None:
    panels = {f"panel {number}": {"a": [1.0, number], "b": [0.0, 2.0]} for number in range(5)}
    figure = curves_picture([3, 4], panels)
    drawn = {axes.get_title(): [line.get_ydata() for line in axes.lines] for axes in figure.axes if axes.axison}
    assert {title: [list(y) for y in lines] for title, lines in drawn.items()} == {
        title: list(curves.values()) for title, curves in panels.items()
    }
    assert figure.axes[5].get_legend() is not None


ON_TIME = [Participant(client_id, Fate.ON_TIME, 0, 0.0, 1.0 + client_id) for client_id in range(3)]
IMAGES = np.zeros((16, 1, 8, 8), np.float32)


@pytest.mark.parametrize(
    "figure",
    [
        participation_map(lambda _: ON_TIME, 2, 3, 3),
        schedule_picture(lambda _: ON_TIME, 1, 3, 3, ["Aarhus", "Basel", "Cork"], ON_TIME),
        left_out_map(np.ones((3, 2)), np.array([False, True]), weighted=True),
        predictions_picture(IMAGES, [0] * 16, [1] * 16, ["ankle boot", "sandal"]),
        views_picture({"48x64": 0.5, "96x128": 0.75}, "global/acc"),
        curves_picture([0, 1], {"gap": {"observed": [0.0, 1.0]}}),
        partition_picture(np.arange(6).reshape(3, 2)),
        sizes_picture(np.arange(3), np.arange(3)),
    ],
)
def test_letters_are_legible_in_a_thumbnail_and_counts_are_whole(figure: Figure) -> None:
    """TensorBoard shows pictures 350 pixels wide; its own smallest letters are of 9 pixels."""
    pixels_per_point = 350 / (72 * figure.get_figwidth())
    render(figure)  # makes the labels of ticks
    letters: list[Any] = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert len(letters) > 5
    assert min(text.get_fontsize() for text in letters) * pixels_per_point >= 8.6
    counts = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    counts += [axis for axes in figure.axes for inset in axes.child_axes for axis in (inset.xaxis,)]
    labels = ("round", "client", "class", "updates", "staleness", "training samples", "training samples (white: none)")
    for axis in counts:
        if axis.get_label_text() in labels:
            assert [tick % 1 for tick in axis.get_ticklocs()] == [0] * len(axis.get_ticklocs()), axis.get_label_text()
