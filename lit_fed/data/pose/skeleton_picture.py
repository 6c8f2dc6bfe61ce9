"""A picture of photographs with the joints found on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.pose.skeleton import Skeleton

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDES, _MIDDLE = ("#33a1ff", "#ff9b21"), "#2fd158"  # the first and the second joint of a pair, and others
_ACROSS = 4
_TALL = 3.4  # height of a photograph in inches


class Posed(NamedTuple):
    """A photograph with persons.

    Args:
        title: Its name.
        image: Shape (h, w, 3).
        persons: Joints, shape (n, K, 2), in its pixels.
    """

    title: str
    image: NDArray[np.uint8]
    persons: NDArray[np.floating[Any]]


def skeletons_picture(photographs: Sequence[Posed], skeleton: Skeleton) -> Figure:
    """Draw each photograph with its persons' edges, or with dots for a skeleton without edges."""
    from matplotlib.figure import Figure

    across = min(_ACROSS, len(photographs))
    down = -(-len(photographs) // across)
    wide = _TALL * float(np.median([shown.image.shape[1] / shown.image.shape[0] for shown in photographs]))
    figure = Figure(figsize=(across * min(max(wide, 1.5), 6.0), down * (_TALL + 0.3)), dpi=120, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    colors = [_MIDDLE] * len(skeleton.joints)
    for pair in skeleton.flip_pairs:
        for joint, color in zip(pair, _SIDES, strict=True):
            colors[joint] = color
    for axes in panels:
        axes.set_axis_off()
    for axes, shown in zip(panels, photographs, strict=False):
        height, width = shown.image.shape[:2]
        axes.imshow(shown.image)
        for points in shown.persons:
            for one, other in skeleton.edges:
                color = colors[one] if colors[one] != _MIDDLE else colors[other]
                axes.plot(*points[[one, other]].T, color=color, linewidth=2.0, solid_capstyle="round")
            size = 6 if skeleton.edges else 14
            axes.scatter(*points.T, s=size, color=colors, edgecolors="black", linewidths=0.3, zorder=3)
        axes.set_xlim(-0.5, width - 0.5)
        axes.set_ylim(height - 0.5, -0.5)
        axes.set_title(shown.title, fontsize=8)
    return figure
