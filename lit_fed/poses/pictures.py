"""Pictures of predicted and true key points at several resolutions, and of the features."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float32]

_SIDES = ("#33a1ff", "#ff9b21")  # of a person: the first and the second of each flip pair
_MIDDLE = "#2fd158"
_TALL = 1.9  # height of a panel in inches
_LEGEND = 0.35  # height of the legend's strip in inches
_ONE_LINE = 4.5  # width in inches from which the legend has one line
_FEWEST = 20  # least number of points in a map of features


@dataclass(frozen=True)
class Shown:
    """Persons at one resolution, with a network's predictions.

    Args:
        name: Name of the resolution.
        images: The network's inputs, shape (n, channels, H, W), any scale.
        keypoints: True joints, (x, y) in pixels, shape (n, K, 2).
        visible: Above 0 for known joints, shape (n, K).
        found: Predicted joints, shape (n, K, 2).
        heatmaps: Predicted heatmaps, shape (n, K, h, w).
        distances: Distance of each joint of all `looked_at` persons to the truth, in lengths of PCK, NaN for joints
            that do not count, shape (looked_at, K).
        score: PCK in percent of `looked_at` persons; NaN if unknown.
        looked_at: Number of persons scored, usually a batch of the test set.
    """

    name: str
    images: Floats
    keypoints: Floats
    visible: Floats
    found: Floats
    heatmaps: Floats
    distances: Floats
    score: float
    looked_at: int


def poses_figure(
    rows: Sequence[Shown], edges: Sequence[tuple[int, int]], flip_pairs: Sequence[tuple[int, int]]
) -> Figure:
    """A row per resolution: each person's joints, found and true, and the predicted heatmaps on the picture.

    Without `edges` to connect, joints are dots; `flip_pairs` get the sides' colours.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    people = len(rows[0].images)
    # One scale for all predictions, so that blurred heatmaps show as such.
    peak = max(float(shown.heatmaps.max()) for shown in rows)
    peak = peak if peak > 0 else 1.0
    height, width = rows[0].images.shape[2:]
    wide, tall = 2 * people * _TALL * width / height + 1.1, _TALL * len(rows) + _LEGEND + 0.3
    layout = ConstrainedLayoutEngine(
        w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02, rect=(0, _LEGEND / tall, 1, 1 - _LEGEND / tall)
    )
    figure = Figure(figsize=(wide, tall), dpi=150, layout=layout)
    panels = figure.subplots(len(rows), 2 * people, squeeze=False)
    for row, shown in zip(panels, rows, strict=True):
        for person in range(people):
            joints, heat = row[2 * person : 2 * person + 2]
            picture, seen = _pixels(shown.images[person]), shown.visible[person] > 0
            joints.imshow(picture, interpolation="nearest")
            _skeleton(joints, shown.keypoints[person], seen, edges, ["white"] * len(seen), 3.2)
            _skeleton(joints, shown.found[person], seen, edges, _colors(len(seen), flip_pairs), 2.0)
            heat.imshow(np.repeat(picture.mean(axis=2, keepdims=True), 3, axis=2) * 0.5, interpolation="nearest")
            maps = shown.heatmaps[person].max(axis=0)
            down, across = picture.shape[:2]
            heat.imshow(
                maps, cmap="inferno", vmin=0, vmax=peak, alpha=np.clip(maps / peak, 0, 1), interpolation="bilinear",
                extent=(-0.5, across - 0.5, down - 0.5, -0.5),
            )  # fmt: skip
            for axes in (joints, heat):
                axes.set_xticks([])
                axes.set_yticks([])
                axes.spines[:].set_visible(False)
        score = "" if np.isnan(shown.score) else f"\nPCK {shown.score:.0f} %\n(n = {shown.looked_at})"
        row[0].set_ylabel(readable(shown.name) + score, fontsize=9, rotation=0, ha="right", va="center", labelpad=6)
    for person in range(people):
        for place, title in enumerate(("joints", f"heatmaps, 0–{peak:.2g}")):
            panels[0][2 * person + place].set_title(title, fontsize=9)
    kinds = (("true", "white"), ("found: one side", _SIDES[0]), ("the other", _SIDES[1]), ("middle", _MIDDLE))
    handles = [Line2D([], [], color=color, linewidth=2.2, label=label) for label, color in kinds]
    columns = 4 if wide > _ONE_LINE else 2
    figure.legend(
        handles=handles, loc="lower center", ncols=columns, fontsize=8, facecolor="#8a8a8a", labelcolor="white",
        edgecolor="#8a8a8a", borderaxespad=0.2,
    )  # fmt: skip
    return figure


def joints_figure(
    distances: Mapping[str, Floats], kinds: Mapping[str, Sequence[int]], limits: tuple[float, float]
) -> Figure | None:
    """The share of joints found by the allowed distance, a line per resolution; and bars of each kind of joint.

    Args:
        distances: Distance of each joint to the truth by resolution, in lengths of PCK, NaN for joints that do not
            count, shape (n, K).
        kinds: Joints of each kind; empty for no bars.
        limits: The distances of the bars, the second within the first.

    Returns:
        None if no joint counts.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    known = {name: column for name, column in distances.items() if not np.isnan(column).all()}
    if not known:
        return None
    shown = {kind: list(joints) for kind, joints in kinds.items()
             if not all(np.isnan(column[:, list(joints)]).all() for column in known.values())}  # fmt: skip
    figure = Figure(figsize=(10.5 if shown else 5, 3.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False, width_ratios=(1, 1.4))[0] if shown else [figure.subplots()]
    colors = colormaps["viridis"](np.linspace(0, 0.88, len(known)))
    allowed = np.linspace(0, 1, 101)
    for place, (name, apart) in enumerate(known.items()):
        panels[0].plot(allowed, [_share(apart, limit) for limit in allowed], color=colors[place], label=readable(name))
        for alpha, limit in zip((0.4, 1.0), limits, strict=True) if shown else ():
            values = [_share(apart[:, joints], limit) for joints in shown.values()]
            middles = np.arange(len(shown)) + (place + 0.5) / len(known) * 0.8 - 0.4
            panels[1].bar(middles, values, 0.8 / len(known), color=colors[place], alpha=alpha)
    panels[0].set(xlabel="allowed distance in lengths of PCK", ylabel="joints found in %", xlim=(0, 1), ylim=(0, 100))
    panels[0].legend(fontsize=8, frameon=False, title="shown at", title_fontsize=8)
    if shown:
        panels[1].set_xticks(range(len(shown)), [kind.replace("_", " ") for kind in shown], rotation=30, ha="right")
        panels[1].set(ylim=(0, 100), title=f"within {limits[0]:g}, and darker within {limits[1]:g}")
    for axes in panels:
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


def _share(distances: Floats, limit: float) -> float:
    """The share of distances within a limit, in percent; NaN without any."""
    known = ~np.isnan(distances)
    return 100 * float((distances[known] <= limit).mean()) if known.any() else float("nan")


def features_figure(features: Mapping[str, Floats]) -> Figure | None:
    """Features (n, d) of pictures by t-SNE, coloured by resolution; None for too few.

    The title has the mean silhouette of the resolutions: 1 for clusters far apart, 0 for touching, below 0 for mixed.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    counts = [len(part) for part in features.values()]
    if len(counts) < 2 or sum(counts) < _FEWEST:
        return None
    points, which = (
        np.concatenate(list(features.values())).astype(np.float64),
        np.repeat(np.arange(len(counts)), counts),
    )
    if not np.isfinite(points).all() or not points.std(axis=0).any():
        return None
    # Starts from the two principal components, so that the picture is reproducible.
    placed = TSNE(perplexity=min(30.0, (len(points) - 1) / 3), init="pca", random_state=0).fit_transform(points)
    figure = Figure(figsize=(5, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = colormaps["viridis"](np.linspace(0, 0.92, len(features)))
    for number, name in enumerate(features):
        chosen = placed[which == number]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=11, color=colors[number], linewidths=0, label=readable(name))
    axes.set_xticks([])
    axes.set_yticks([])
    apart = f"{silhouette_score(points, which):.2f}".replace("-", "−")
    axes.set_title(f"Features of the last block (silhouette {apart})", fontsize=10)
    figure.legend(loc="outside right center", fontsize=8, frameon=False, title="shown at", title_fontsize=8)
    return figure


def readable(name: str) -> str:
    """A view's readable name: ``32x24_as_64x48_area`` is 32×24 as 64×48, area."""
    sizes = re.sub(r"(?<=\d)x(?=\d)", "×", name)
    return re.sub(r"^(\S+?)_as_(\S+?)_(\w+)$", r"\1 as\n\2,\n\3", sizes)


def _pixels(image: Floats) -> Floats:
    """An image (channels, H, W) stretched to [0, 1], in matplotlib's layout."""
    low, high = float(image.min()), float(image.max())
    shown = ((image - low) / max(high - low, 1e-6)).transpose(1, 2, 0)
    return shown if shown.shape[2] == 3 else np.repeat(shown[:, :, :1], 3, axis=2)


def _skeleton(
    axes: Axes,
    points: Floats,
    seen: NDArray[np.bool_],
    edges: Sequence[tuple[int, int]],
    colors: Sequence[str],
    width: float,
) -> None:
    """Lines between joints, in the colour of a side's joint; dots without edges."""
    limits = axes.get_xlim(), axes.get_ylim()
    for first, second in edges:
        if seen[first] and seen[second]:
            color = colors[first] if colors[first] != _MIDDLE else colors[second]
            axes.plot(*points[[first, second]].T, color=color, linewidth=width, solid_capstyle="round", alpha=0.9)
    if not edges:
        shown = [color for color, there in zip(colors, seen, strict=True) if there]
        axes.scatter(points[seen, 0], points[seen, 1], s=6 * width, color=shown)
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])


def _colors(num_joints: int, flip_pairs: Sequence[tuple[int, int]]) -> list[str]:
    colors = [_MIDDLE] * num_joints
    for pair in flip_pairs:
        for joint, color in zip(pair, _SIDES, strict=True):
            colors[joint] = color
    return colors
