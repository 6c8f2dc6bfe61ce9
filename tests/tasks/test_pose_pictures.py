"""Pictures of key points: what stands where, and in which colour."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lit_fed.tasks.pose_pictures import Shown, features_figure, poses_figure, readable
from tests.tasks.test_keypoint_estimator import JOINTS, drawn, oracle

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
        targets=maps,
        score=score,
    )


def test_a_row_a_resolution_with_what_is_found_beside_what_is_true() -> None:
    figure = poses_figure([shown("16x12"), shown("8x6", score=float("nan"))], EDGES, PAIRS)
    panels = np.array(figure.axes).reshape(2, 6)
    assert [axes.get_ylabel() for axes in panels[:, 0]] == ["16×12\nPCK 50 %", "8×6"]
    assert [axes.get_title() for axes in panels[0]] == ["joints", "heatmaps", "their truth"] * 2
    first, second = panels[0, 0], panels[0, 3]
    # The truth in white, then what was found, a pixel to the right; the first joint's side, then the other joint's.
    lines = [(line.get_color(), *np.array(line.get_xydata()).ravel().tolist()) for line in first.lines]
    assert lines == [
        ("white", 2, 3, 5, 8),
        ("white", 5, 8, 9, 12),
        ("#33a1ff", 3, 3, 6, 8),
        ("#ff9b21", 6, 8, 10, 12),
    ]
    assert len(second.lines) == 2, "joints that are not to be seen are connected to nothing"
    found, true = (axes.images[0].get_array() for axes in panels[0, 1:3])
    assert (found.shape, found.max(), true.max()) == ((8, 6), 0.5, 1.0)
    assert found[4, 2] == 0.5
    assert panels[0, 1].images[0].get_clim() == panels[0, 2].images[0].get_clim() == (0, 1), "one scale for both"


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
    assert list(figures) == ["poses"], "this network makes no features"
    axes = figures["poses"].axes
    assert axes[0].get_ylabel() == "32×24\nPCK 100 %"
    true, found = (np.asarray(line.get_xydata()) for line in axes[0].lines)
    np.testing.assert_allclose(true, JOINTS[0].numpy())
    np.testing.assert_allclose(found, true, atol=0.01)
