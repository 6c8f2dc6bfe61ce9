"""The joints and the persons of a data set: names, boxes, images and batches; found joints as tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.arguments import checked_class
from lit_fed.data.loaders.tensor_loader import draw_order, sizes
from lit_fed.data.partitions.csr import IntArray
from lit_fed.errors import ConfigError
from lit_fed.poses.data.warp import PoseAugmentation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LOWER = ("hip", "pelvis", "knee", "ankle", "heel", "foot", "toe")

_SIGMAS = {
    **{"nose": 0.026, "eye": 0.025, "ear": 0.035, "shoulder": 0.079, "elbow": 0.072},
    **{"wrist": 0.062, "hip": 0.107, "knee": 0.087, "ankle": 0.089},
}
_OTHER_SIGMA = 0.079


@checked_class
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
        return tuple(next(matching, _OTHER_SIGMA) for matching in known)

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
            for first, other in skeleton.edges:
                color = colors[first] if colors[first] != _MIDDLE else colors[other]
                axes.plot(*points[[first, other]].T, color=color, linewidth=2.0, solid_capstyle="round")
            size = 6 if skeleton.edges else 14
            axes.scatter(*points.T, s=size, color=colors, edgecolors="black", linewidths=0.3, zorder=3)
        axes.set_xlim(-0.5, width - 0.5)
        axes.set_ylim(height - 0.5, -0.5)
        axes.set_title(shown.title, fontsize=8)
    return figure


def found_records(
    keypoints: np.ndarray, scores: np.ndarray, images: Sequence[tuple[int, str]], joints: Sequence[str], category: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Joints as rows of a table, one per joint, and as results in COCO's format, one per person.

    Args:
        keypoints: (n, K, 2), in pixels of the images.
        scores: (n, K).
        images: Number and file of each person's image, n.
        joints: Their names, K.
        category: COCO's category of the persons.
    """
    rows, results, persons = list[dict[str, Any]](), list[dict[str, Any]](), dict[int, int]()
    for points, values, (number, file) in zip(keypoints.tolist(), scores.tolist(), images, strict=True):
        person = persons[number] = persons.get(number, -1) + 1
        score = float(np.mean(values))
        for name, (x, y), value in zip(joints, points, values, strict=True):
            rows.append(
                {"image_id": number, "file": file, "person": person, "joint": name, "x": x, "y": y, "score": value}
            )
        flat = [number for (x, y), value in zip(points, values, strict=True) for number in (x, y, value)]
        results.append(
            {"image_id": number, "category_id": category, "keypoints": flat, "score": score, "file_name": file,
             "joints": list(joints)}
        )  # fmt: skip
    return rows, results


def by_image(images: Sequence[tuple[int, str]]) -> Mapping[int, list[int]]:
    """The places of the persons on each image."""
    places_by_image: dict[int, list[int]] = {}
    for place, (number, _) in enumerate(images):
        places_by_image.setdefault(number, []).append(place)
    return places_by_image


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class People:
    """Persons with their joints, in pixels (x, y) of their image; 0 is the centre of the first pixel.

    Args:
        keypoints: Joints, shape (n, K, 2); any finite value if not visible.
        visible: 1 for labelled joints, else 0, shape (n, K).
        head_size: PCKh's length in pixels, NaN if unknown, shape (n,).
        centre: Middle of the box, shape (n, 2).
        extent: Height of the box in pixels, shape (n,); its width follows from the resolution.
        area: Area in square pixels, for object key point similarity, NaN if unknown, shape (n,).
        image_id: Number of the image, shape (n,) int64.
        source: The persons' origin, for errors.
    """

    keypoints: Floats
    visible: Floats
    head_size: Floats
    centre: Floats
    extent: Floats
    area: Floats
    image_id: NDArray[np.int64]
    source: str = "the data set"

    def __len__(self) -> int:
        return len(self.keypoints)

    def checked(self, num_joints: int) -> People:
        """These persons, checked."""
        n = len(self.keypoints)
        if n == 0:
            raise ConfigError(f"{self.source} has no person with a visible joint; give at least one")
        shapes = {"keypoints": (n, num_joints, 2), "visible": (n, num_joints), "centre": (n, 2)}
        for name, array in self.arrays().items():
            wanted = shapes.get(name, (n,))
            if array.shape != wanted:
                raise ConfigError(f"{self.source}: {name} has shape {array.shape}; it must be {wanted}")
        for bad, what in (
            (~np.isfinite(self.keypoints).all((1, 2)), "a joint that is not finite"),
            (~np.isfinite(self.centre).all(1) | ~(self.extent > 0) | ~np.isfinite(self.extent), "a box without size"),
            (~(self.visible > 0).any(1), "no visible joint"),
        ):
            if bad.any():
                raise ConfigError(f"{self.source}: person {int(bad.argmax())} has {what}; correct or remove the person")
        return self

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "source"}

    def tensors(self) -> dict[str, Tensor]:
        """All arrays as tensors, by name; they share memory."""
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.arrays().items()}


_ASPECT = 3 / 4  # width of a box divided by its height


class Album(NamedTuple):
    """Persons with their images.

    Args:
        people: The persons, n.
        paths: The image of each person, n.
        clients: The data set's own client of each person, counted from 0, −1 for a client without training data,
            shape (n,); None without clients.
        listed: The number of each person's image in the data's files, n, where `People.image_id` has others; None for
            the same.
        sizes: Width and height of each person's image as the annotations state them, n, 0 where they do not; None
            without any.
    """

    people: People
    paths: list[Path]
    clients: IntArray | None = None
    listed: list[int] | None = None
    sizes: list[tuple[float, float]] | None = None


def stated_size(image: Mapping[str, Any], path: Path) -> tuple[float, float]:
    """Width and height of an image's entry, 0 where it does not state them."""
    try:
        width, height = (float(image.get(side) or 0) for side in ("width", "height"))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: image {image['id']} has a width or height that is not a number; correct it"
        ) from error
    return width, height


def check_size(path: Path, found: tuple[int, int], stated: tuple[float, float], source: str) -> None:
    """Refuse an image whose width and height differ from those that the annotations state, 0 where they do not."""
    wide, high = stated
    if (wide or found[0], high or found[1]) != found:
        raise ConfigError(
            f"{path} has {found[0]}×{found[1]} pixels, upright by its EXIF orientation, and {source} states "
            f"{wide:g}×{high:g}; annotate the photograph as it is shown, or restore the file that was annotated"
        )


def stacked(rows: Sequence[Mapping[str, Any]], source: str) -> People:
    """Persons from one dictionary each, with the names of `People`'s arrays."""
    float_rows = {name: np.asarray([row[name] for row in rows], dtype=np.float32) for name in _FLOATS}
    ids = np.asarray([row["image_id"] for row in rows], dtype=np.int64)
    return People(**float_rows, image_id=ids, source=source)


_FLOATS = ("keypoints", "visible", "head_size", "centre", "extent", "area")


def box_row(box: Sequence[float], padding: float) -> dict[str, Any]:
    """A box [x, y, width, height] as `People` has it, widened to 3:4 and enlarged."""
    left, top, width, height = map(float, box)
    return {
        "centre": (left + width / 2, top + height / 2),
        "extent": max(height, width / _ASPECT) * padding,
    }


def read_json(path: Path, settings: str) -> Any:
    """The content of a JSON file; errors name the `settings` of its path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; put it there, or set {settings}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); replace it") from error


class PeopleLoader:
    """Batches of chosen persons for a `PoseView`; cheap enough to be made for every client.

    With a generator every iteration is a new shuffle: all random numbers of an epoch are drawn at once. Without a
    generator the order is that of `indices`.

    Args:
        canvases: Images of one size, uint8 (N, 3, h, w), on any device; never changed.
        people: The arrays of `People` by name, (N, …), on the CPU.
        indices: The persons to iterate over, int64 on the CPU, shape (n,).
        batch_size: Persons per batch; the last batch may be smaller.
        generator: A CPU generator to shuffle and augment with.
        augmentation: Draws boxes with the generator; None for the persons' own boxes.
        upper: Whether each joint belongs to the upper half, for the augmentation.
        aspect: Width of a picture divided by its height, for the augmentation.
        drop_last: Drop a smaller last batch, unless it is the only one.
        public: Replace the truth with positions in `indices`.
        fresh: Make every batch the first of a new shuffle, see `TensorLoader`.
    """

    def __init__(
        self,
        canvases: Tensor,
        people: Mapping[str, Tensor],
        indices: Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        augmentation: PoseAugmentation | None = None,
        upper: tuple[bool, ...] = (),
        aspect: float = 0.75,
        drop_last: bool = False,
        public: bool = False,
        fresh: bool = False,
    ) -> None:
        self._canvases, self._people, self._indices = canvases, people, indices
        self._generator, self._augmentation = generator, augmentation
        self._upper, self._aspect, self._public, self._fresh = upper, aspect, public, fresh
        self.batch_size, self.num_samples = sizes(len(indices), batch_size, drop_last, fresh)

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """One pass over the persons, in pairs of crops and truth."""
        if self.num_samples == 0:
            return
        generator, device = self._generator, self._canvases.device
        places = torch.arange(self.num_samples)
        if generator is not None:
            places = draw_order(len(self._indices), self.num_samples, self.batch_size, self._fresh, generator)
        chosen = self._indices[places]
        truth = {name: array[chosen] for name, array in self._people.items()}
        person = {"centre": truth.pop("centre"), "extent": truth.pop("extent")}
        if self._augmentation is not None:
            person = self._augmentation.draw(truth | person, self._upper, self._aspect, generator)
        else:
            person["origin"] = torch.zeros_like(person["centre"])
        # All but the images move once per epoch, so that no step waits for it.
        person, truth, chosen, places = move_data_to_device((person, truth, chosen, places), device)
        for start in range(0, self.num_samples, self.batch_size):
            part = slice(start, start + self.batch_size)
            seen = {name: array[part] for name, array in person.items()}
            seen["canvas"] = self._canvases.index_select(0, chosen[part])
            yield seen, places[part] if self._public else {name: array[part] for name, array in truth.items()}
