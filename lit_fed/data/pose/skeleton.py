"""The joints of a data set: names, pairs and edges, and a picture of photographs with the joints found on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LOWER = ("hip", "pelvis", "knee", "ankle", "heel", "foot", "toe")

_SIGMAS = {
    **{"nose": 0.026, "eye": 0.025, "ear": 0.035, "shoulder": 0.079, "elbow": 0.072},
    **{"wrist": 0.062, "hip": 0.107, "knee": 0.087, "ankle": 0.089},
}
_OTHER_SIGMA = 0.079


@dataclass(frozen=True)
class Skeleton:
    """The joints of a data set.

    Args:
        joints: Names, in the order of all arrays.
        flip_pairs: Joints that swap in a mirror, by number from 0, such as left and right ankle.
        edges: Joints to connect in pictures, by number.
        unscored: Joints that the data set's metric leaves out.
        category: COCO's category of the persons.
        source: The file or data set, for errors.

    Raises:
        ConfigError: A number is out of range, or a joint is in two pairs.
    """

    joints: tuple[str, ...]
    flip_pairs: tuple[tuple[int, int], ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    unscored: tuple[int, ...] = ()
    category: int = field(default=1, compare=False)
    source: str = field(default="the skeleton", compare=False)

    def __post_init__(self) -> None:
        count = len(self.joints)
        if not count:
            raise ConfigError(f"{self.source} has no joints; name at least one")
        for name, pairs in (("flip pair", self.flip_pairs), ("edge", self.edges)):
            for pair in pairs:
                if len(pair) != 2 or not all(0 <= joint < count for joint in pair):
                    raise ConfigError(
                        f"{self.source}: {name} {list(pair)} is out of range; give two of the {count} joints, "
                        f"0 … {count - 1}"
                    )
        paired = [joint for pair in self.flip_pairs for joint in pair]
        if len(set(paired)) < len(paired):
            twice = next(joint for joint in paired if paired.count(joint) > 1)
            raise ConfigError(f"{self.source}: joint {twice} is in two flip pairs; list it once")
        if not all(0 <= joint < count for joint in self.unscored):
            raise ConfigError(
                f"{self.source}: unscored {list(self.unscored)} is out of range; joints are 0 … {count - 1}"
            )

    @property
    def flip_order(self) -> tuple[int, ...]:
        """The joint in each joint's place in a mirror."""
        order = list(range(len(self.joints)))
        for left, right in self.flip_pairs:
            order[left], order[right] = right, left
        return tuple(order)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Annotators' deviation on each joint by its name, as a share of the root of the person's area.

        COCO's for its joints, and CrowdPose's for head, neck and all others.
        """
        known = ((sigma for part, sigma in _SIGMAS.items() if part in name.lower()) for name in self.joints)
        return tuple(next(found, _OTHER_SIGMA) for found in known)

    @property
    def upper(self) -> tuple[bool, ...]:
        """Whether each joint belongs to the upper half: by its name not hip, pelvis, knee, ankle or foot."""
        return tuple(not any(part in name.lower() for part in _LOWER) for name in self.joints)


def pairs_by_name(joints: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Flip pairs by names, such as ``left_ankle`` and ``right_ankle``."""
    places = {name: index for index, name in enumerate(joints)}
    others = ((index, places.get(name.replace("left", "right"))) for name, index in places.items() if "left" in name)
    return tuple((index, other) for index, other in others if other is not None)


LSP = Skeleton(
    joints=(
        *("right_ankle", "right_knee", "right_hip", "left_hip", "left_knee", "left_ankle"),
        *("right_wrist", "right_elbow", "right_shoulder", "left_shoulder", "left_elbow", "left_wrist"),
        *("neck", "head_top"),
    ),
    flip_pairs=((0, 5), (1, 4), (2, 3), (6, 11), (7, 10), (8, 9)),
    edges=(
        *((0, 1), (1, 2), (2, 12), (5, 4), (4, 3), (3, 12)),
        *((6, 7), (7, 8), (8, 12), (11, 10), (10, 9), (9, 12), (12, 13)),
    ),
)
"""The 14 joints of Leeds Sports Pose, person-centred."""

MPII = Skeleton(
    joints=(
        *("right_ankle", "right_knee", "right_hip", "left_hip", "left_knee", "left_ankle"),
        *("pelvis", "thorax", "upper_neck", "head_top"),
        *("right_wrist", "right_elbow", "right_shoulder", "left_shoulder", "left_elbow", "left_wrist"),
    ),
    flip_pairs=((0, 5), (1, 4), (2, 3), (10, 15), (11, 14), (12, 13)),
    edges=(
        *((0, 1), (1, 2), (2, 6), (3, 6), (3, 4), (4, 5), (6, 7), (7, 8), (8, 9)),
        *((10, 11), (11, 12), (12, 7), (7, 13), (13, 14), (14, 15)),
    ),
    unscored=(6, 7),
)
"""The 16 joints of MPII Human Pose; PCKh leaves out pelvis and thorax."""


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
