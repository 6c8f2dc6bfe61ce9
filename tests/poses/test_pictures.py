"""Pictures of key points: what stands where, and in which colour."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lit_fed.poses.pictures import Shown, features_figure, joints_figure, poses_figure, readable
from tests.poses.test_keypoint_estimator import JOINTS, drawn, oracle

EDGES, PAIRS = [(0, 1), (1, 2)], [(0, 2)]


def shown(name: str, size: tuple[int, int] = (16, 12), score: float = 50.0) -> Shown:
    """Two persons of three joints, the last of which is not to be seen; all are found a pixel to the right."""
    points = np.array([[[2, 3], [5, 8], [9, 12]], [[1, 1], [4, 4], [0, 0]]], dtype=np.float32)
    maps = np.zeros((2, 3, 8, 6), dtype=np.float32)
    maps[:, 1, 4, 2] = 1
    return Shown(
        name=name,
        images=np.zeros((2, 3, *size), dtype=np.float32),
        keypoints=points,
        visible=np.array([[1, 1, 1], [1, 1, 0]], dtype=np.float32),
        found=points + np.array([1, 0], dtype=np.float32),
        heatmaps=0.5 * maps,
        distances=np.array([[0.1, 0.3, np.nan], [0.6, 0.05, np.nan]], dtype=np.float32),
        score=score,
        looked_at=7,
    )


def test_a_row_a_resolution_with_what_is_found_beside_what_is_true() -> None:
    figure = poses_figure([shown("16x12"), shown("8x6", score=float("nan"))], EDGES, PAIRS)
    panels = np.array(figure.axes).reshape(2, 4)
    assert [axes.get_ylabel() for axes in panels[:, 0]] == ["16×12\nPCK 50 %\n(n = 7)", "8×6"]
    assert [axes.get_title() for axes in panels[0]] == ["joints", "heatmaps, 0–0.5"] * 2
    first, second = panels[0, 0], panels[0, 2]
    # The truth in white, then what was found, a pixel to the right; the first joint's side, then the other joint's.
    lines = [(line.get_color(), *np.array(line.get_xydata()).ravel().tolist()) for line in first.lines]
    assert lines == [
        ("white", 2, 3, 5, 8),
        ("white", 5, 8, 9, 12),
        ("#33a1ff", 3, 3, 6, 8),
        ("#ff9b21", 6, 8, 10, 12),
    ]
    assert len(second.lines) == 2, "joints that are not to be seen are connected to nothing"
    picture, heat = panels[0, 1].images
    assert heat.get_array()[4, 2] == 0.5
    assert tuple(heat.get_extent()) == (-0.5, 11.5, 15.5, -0.5) == tuple(picture.get_extent()), (
        "as large as the picture"
    )
    assert [row[1].images[1].get_clim() for row in panels] == [(0, 0.5)] * 2, "one for all that was found"


def test_the_legend_covers_no_picture() -> None:
    for rows in (1, 5):
        figure = poses_figure([shown("16x12")] * rows, EDGES, PAIRS)
        figure.canvas.draw()
        top = figure.legends[0].get_window_extent().y1
        assert all(axes.get_window_extent().y0 >= top for axes in figure.axes)


def test_the_share_of_joints_by_the_distance_and_by_their_kind() -> None:
    found = shown("16x12").distances
    figure = joints_figure({"16x12": found, "8x6": found * np.nan}, {"hand": [0, 1], "foot": [2]}, (0.5, 0.1))
    assert figure is not None
    curve, bars = figure.axes
    (line,) = curve.lines  # of the resolution with joints that count
    share = dict(zip(np.round(line.get_xdata(), 2).tolist(), line.get_ydata(), strict=True))
    # Distances .05, .1, .3 and .6.
    assert [share[limit] for limit in (0.0, 0.06, 0.2, 0.5, 0.61)] == [0, 25, 50, 75, 100]
    assert [bar.get_height() for bar in bars.patches] == [75, 50]  # within .5 and .1, of hands alone
    assert [tick.get_text() for tick in bars.get_xticklabels()] == ["hand"]
    assert len(joints_figure({"16x12": found}, {}, (0.5, 0.1)).axes) == 1  # type: ignore[union-attr]
    assert joints_figure({"16x12": found * np.nan}, {}, (0.5, 0.1)) is None


def test_joints_of_unknown_bones_are_dots() -> None:
    axes = poses_figure([shown("16x12")], (), PAIRS).axes[0]
    assert len(axes.lines) == 0
    assert [len(dots.get_offsets()) for dots in axes.collections] == [3, 3]


def test_features_say_how_far_the_resolutions_are_apart() -> None:
    rng = np.random.default_rng(0)
    near, far = rng.normal(size=(2, 15, 4)).astype(np.float32), rng.normal(size=(15, 4)).astype(np.float32)
    figure = features_figure({"8x6": near[0], "16x12": near[1], "32x24": far + 1000})
    assert isinstance(figure, Figure)
    points = [dots.get_offsets() for dots in figure.axes[0].collections]
    assert [np.shape(part) for part in points] == [(15, 2)] * 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["8×6", "16×12", "32×24"]
    # One cluster is by itself, silhouette 1; the others lie in one another, 0: a third, within what chance gives.
    title = figure.axes[0].get_title()
    assert float(title.partition("silhouette ")[2].rstrip(")").replace("−", "-")) == pytest.approx(1 / 3, abs=0.05)
    assert features_figure({"8x6": near[0]}) is None
    assert features_figure({"8x6": near[0, :5], "16x12": near[1, :5]}) is None
    assert features_figure({"8x6": near[0], "16x12": near[1] * np.nan}) is None
    assert features_figure({"8x6": 0 * near[0], "16x12": 0 * near[1]}) is None


def test_views_are_called_as_people_write_them() -> None:
    assert readable("256x192") == "256×192"
    assert readable("128x96_as_256x192_area") == "128×96 as\n256×192,\narea"


def test_a_task_draws_what_it_finds() -> None:
    batch = drawn(JOINTS)
    batch["image"] = batch["image"].repeat(1, 1, 1, 1)
    with torch.no_grad():
        figures = oracle(skeleton_edges=[[0, 1]]).test_figures({"32x24": batch})
    assert list(figures) == ["poses", "joints"], "this network makes no features"
    axes = figures["poses"].axes
    assert axes[0].get_ylabel() == f"32×24\nPCK 100 %\n(n = {len(JOINTS)})"
    true, found = (np.asarray(line.get_xydata()) for line in axes[0].lines)
    np.testing.assert_allclose(true, JOINTS[0].numpy())
    np.testing.assert_allclose(found, true, atol=0.01)
