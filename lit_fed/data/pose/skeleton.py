"""The joints of a data set: names, pairs and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_fed.errors import ConfigError

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
