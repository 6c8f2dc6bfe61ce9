"""Drawn figures: an embedded data set of key points, and the drawing of articulated figures.

Lengths are in pixels of the canvas, 128 high and 96 wide; angles are in radians, 0 straight down for a limb, positive
away from the body for arms. Each figure has its own seed, so sets of different sizes begin with the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Parts
from lit_fed.data.population.files import NewInputs
from lit_fed.data.population.hooks import SUBSETS, Batches, Subset
from lit_fed.poses.data.files import photograph_loader
from lit_fed.poses.data.module import PoseDataModule
from lit_fed.poses.data.people import LSP, People, PeopleLoader
from lit_fed.poses.data.warp import FLIP_ONLY, PoseAugmentation
from lit_fed.seeding import numpy_generator

HEIGHT, WIDTH = 128, 96
_FINE = 2  # pictures are drawn at this multiple of the size, and averaged
_TORSO = (26.0, 36.0)
_LIMB = (0.5, 0.75)  # of the torso
_LIMB_WIDTH = 0.14  # of the torso
_NOISE = np.float32(6.0)  # standard deviation, of 255
_MARGIN = 4.0  # between the joints and the canvas's border

Colour = tuple[int, int, int]
Generator = np.random.Generator


@dataclass(frozen=True)
class Figure:
    """One figure: its joints in the order of `lit_fed.poses.data.people.LSP`, and its looks.

    Args:
        joints: (14, 2), pixels (x, y).
        torso: Length of the torso.
        front: Seen from the front: its right is on the picture's left.
        right_arm_behind: The right arm is behind the body, or else the left arm.
        skin: Colour of the skin.
        hair: Colour of the hair.
        shirt: Colour of torso and upper arms, and of the lower arms with `long_sleeves`.
        trousers: Colour of the upper legs, and of the lower legs with `long_trousers`.
        long_sleeves: See `shirt`.
        long_trousers: See `trousers`.
        width: Factor of the limbs' width.
    """

    joints: NDArray[np.float64]
    torso: float
    front: bool
    right_arm_behind: bool
    skin: Colour
    hair: Colour
    shirt: Colour
    trousers: Colour
    long_sleeves: bool
    long_trousers: bool
    width: float


def figure_picture(seed: int, part: str, index: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draw a picture (3, 128, 96) of a set with a seed, and the figure's joints (14, 2), pixels (x, y)."""
    generator = numpy_generator(seed, "puppets", part, index)
    picture = _background(generator)
    draw = ImageDraw.Draw(picture)
    for _ in range(generator.integers(2, 6)):
        _shape(draw, generator, 8, 40)
    figure = pose(generator)
    if generator.random() < 0.1:
        _draw_figure(draw, _aside(pose(generator), figure, generator))
    _draw_figure(draw, figure)
    for _ in range(generator.poisson(0.3)):
        _shape(draw, generator, 8, 22)
    small = np.asarray(picture.reduce(_FINE), dtype=np.float32)
    contrast, grey = np.float32(generator.uniform(0.5, 1.0)), small.mean()
    small = (small - grey) * contrast + grey
    small += _NOISE * generator.standard_normal(small.shape, dtype=np.float32)
    return small.clip(0, 255).round().astype(np.uint8).transpose(2, 0, 1), figure.joints.astype(np.float32)


def pose(generator: Generator) -> Figure:
    """A figure in a random pose, near the middle of the canvas."""
    torso = generator.uniform(*_TORSO)
    tilt, front = generator.normal(0.0, 0.2), generator.random() < 0.5
    yaw = generator.uniform(0.6, 1.0)  # shoulders and hips look narrower from the side
    shoulder, hip = (torso * yaw * generator.uniform(*bounds) for bounds in ((0.28, 0.36), (0.15, 0.21)))
    thigh, shin, upper_arm, lower_arm = torso * generator.uniform(*_LIMB, size=4)
    up = np.array([math.sin(tilt), -math.cos(tilt)])
    across = np.array([math.cos(tilt), math.sin(tilt)])  # to the picture's right
    neck = up * torso
    nod = tilt + generator.normal(0.0, 0.2)
    head_top = neck + torso * generator.uniform(0.42, 0.54) * np.array([math.sin(nod), -math.cos(nod)])
    joints = np.zeros((14, 2))
    joints[12], joints[13] = neck, head_top
    for right, (ankle, knee, hip_joint, wrist, elbow, shoulder_joint) in (
        (True, (0, 1, 2, 6, 7, 8)),
        (False, (5, 4, 3, 11, 10, 9)),
    ):
        side = -1.0 if right == front else 1.0  # of the picture
        outwards = side * generator.uniform(-0.5, 1.8)
        leg = side * 0.1 + generator.normal(0.0, 0.45)
        joints[hip_joint] = side * hip * across
        joints[knee] = joints[hip_joint] + thigh * _down(leg - tilt / 2)
        joints[ankle] = joints[knee] + shin * _down(leg - tilt / 2 + generator.normal(0.0, 0.5))
        joints[shoulder_joint] = neck - 0.08 * torso * up + side * shoulder * across
        joints[elbow] = joints[shoulder_joint] + upper_arm * _down(outwards - tilt)
        joints[wrist] = joints[elbow] + lower_arm * _down(outwards - tilt + side * generator.normal(0.3, 0.9))
    skin = _blend((70, 45, 30), (250, 215, 190), generator.random())
    return Figure(
        joints=joints + _place(joints, generator),
        torso=torso,
        front=front,
        right_arm_behind=generator.random() < 0.5,
        skin=skin,
        hair=_blend((15, 10, 8), (150, 100, 50), generator.random()),
        shirt=_colour(generator),
        trousers=_colour(generator),
        long_sleeves=generator.random() < 0.5,
        long_trousers=generator.random() < 0.7,
        width=generator.uniform(0.75, 1.2),
    )


def _down(angle: float) -> NDArray[np.float64]:
    """A downward unit vector, turned to the picture's right by an angle."""
    return np.array([math.sin(angle), math.cos(angle)])


def _place(joints: NDArray[np.float64], generator: Generator) -> NDArray[np.float64]:
    """The shift of the joints' middle to near the canvas's middle, with all joints on the canvas if they fit."""
    low, high = joints.min(axis=0), joints.max(axis=0)
    shift = np.array([WIDTH, HEIGHT]) / 2 - (low + high) / 2 + generator.uniform(-4.0, 4.0, size=2)
    room = np.array([WIDTH, HEIGHT]) - 1 - _MARGIN
    placed: NDArray[np.float64] = np.maximum(np.minimum(shift, room - high), _MARGIN - low)
    return placed


def _aside(other: Figure, figure: Figure, generator: Generator) -> Figure:
    """Another figure, smaller and to one side, as if further away."""
    scale = generator.uniform(0.5, 0.8)
    side = -1.0 if generator.random() < 0.5 else 1.0
    middle = figure.joints.mean(axis=0) + np.array(
        [side * generator.uniform(22.0, 40.0), generator.uniform(-12.0, 6.0)]
    )
    joints = (other.joints - other.joints.mean(axis=0)) * scale + middle
    return Figure(**{**vars(other), "joints": joints, "torso": other.torso * scale})


def _background(generator: Generator) -> Image.Image:
    """Soft colours: a grid of 5 × 3, interpolated bicubically."""
    colours = generator.integers(0, 256, (5, 3, 3), dtype=np.uint8)
    soft = Image.fromarray(colours).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    return soft.resize((WIDTH * _FINE, HEIGHT * _FINE), Image.Resampling.NEAREST)


def _shape(draw: ImageDraw.ImageDraw, generator: Generator, smallest: float, largest: float) -> None:
    """A random rectangle or ellipse, or a bar as thick as a limb."""
    x, y = generator.uniform(0, WIDTH), generator.uniform(0, HEIGHT)
    a, b = generator.uniform(smallest, largest, size=2) / 2
    colour, kind = _colour(generator), generator.integers(3)
    if kind == 2:
        angle, long = generator.uniform(0, math.pi), largest * generator.uniform(0.5, 1.0)
        end = (x + long * math.cos(angle), y + long * math.sin(angle))
        _limb(draw, np.array([x, y]), np.array(end), generator.uniform(3.0, 6.0), generator.uniform(3.0, 6.0), colour)
        return
    box = _fine([(x - a, y - b), (x + a, y + b)])
    (draw.rectangle if kind == 0 else draw.ellipse)(box, fill=colour)


def _draw_figure(draw: ImageDraw.ImageDraw, figure: Figure) -> None:
    """Draw from back to front: the rear arm, legs, torso, head, the front arm.

    Front and back differ in face and chest, as limbs look the same left and right.
    """
    joints, torso = figure.joints, figure.torso
    wide = _LIMB_WIDTH * torso * figure.width
    sleeve = figure.shirt if figure.long_sleeves else figure.skin
    leg = figure.trousers if figure.long_trousers else figure.skin
    right, left = (8, 7, 6), (9, 10, 11)
    behind, before = (right, left) if figure.right_arm_behind else (left, right)

    def arm(shoulder: int, elbow: int, wrist: int) -> None:
        # The halves of a limb differ in shade, so that a bent arm shows before a body of its colour.
        _limb(draw, joints[shoulder], joints[elbow], wide, 0.9 * wide, _shade(figure.shirt, 0.85))
        _limb(draw, joints[elbow], joints[wrist], 0.9 * wide, 0.75 * wide, _shade(sleeve, 1.12))
        _disc(draw, joints[wrist], 0.55 * wide, figure.skin)

    arm(*behind)
    for hip, knee, ankle in ((2, 1, 0), (3, 4, 5)):
        _limb(draw, joints[hip], joints[knee], 1.25 * wide, wide, figure.trousers)
        _limb(draw, joints[knee], joints[ankle], wide, 0.8 * wide, _shade(leg, 0.88))
        _disc(draw, joints[ankle], 0.6 * wide, (30, 25, 25))
    corners = [joints[8], joints[9], joints[3], joints[2]]
    draw.polygon(_fine([tuple(corner) for corner in corners]), fill=figure.shirt)
    _limb(draw, joints[8], joints[9], 1.1 * wide, 1.1 * wide, figure.shirt)
    _limb(draw, joints[2], joints[3], 1.2 * wide, 1.2 * wide, figure.trousers)
    neck, head_top, hips = joints[12], joints[13], (joints[2] + joints[3]) / 2
    if figure.front:  # an open collar
        _limb(draw, neck, neck + 0.45 * (hips - neck), 0.5 * wide, 0.15 * wide, figure.skin)
    else:  # a rucksack
        middle, reach = neck + 0.42 * (hips - neck), 0.3 * (hips - neck)
        _limb(draw, middle - reach / 2, middle + reach / 2, 1.9 * wide, 1.9 * wide, _shade(figure.hair, 1.3))
    _head(draw, neck, head_top, figure)
    arm(*before)


def _head(draw: ImageDraw.ImageDraw, neck: NDArray[np.float64], top: NDArray[np.float64], figure: Figure) -> None:
    """A head from neck to top: hair all over from behind, a face with eyes from the front."""
    along = top - neck
    size = float(np.hypot(*along))
    up = along / size
    across = np.array([-up[1], up[0]])
    _limb(draw, neck, neck + 0.4 * along, 0.3 * size, 0.3 * size, figure.skin)
    middle, radius = neck + 0.62 * along, 0.38 * size
    _disc(draw, middle, radius, figure.hair)
    if figure.front:
        face = middle - 0.2 * radius * up
        _disc(draw, face, 0.82 * radius, figure.skin)
        for side in (-1.0, 1.0):
            _disc(draw, face + 0.35 * radius * (up * 0.3 + side * across), 0.16 * radius, (10, 10, 10))
    else:
        _disc(draw, middle - 0.25 * radius * up, 0.85 * radius, figure.hair)


def _limb(
    draw: ImageDraw.ImageDraw,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    wide: float,
    narrow: float,
    colour: Colour,
) -> None:
    """A bar with round ends, `wide` at the start and `narrow` at the end."""
    along = end - start
    length = float(np.hypot(*along))
    if length > 0:
        across = np.array([-along[1], along[0]]) / length / 2
        corners = (start + across * wide, end + across * narrow, end - across * narrow, start - across * wide)
        draw.polygon(_fine([tuple(corner) for corner in corners]), fill=colour)
    _disc(draw, start, wide / 2, colour)
    _disc(draw, end, narrow / 2, colour)


def _disc(draw: ImageDraw.ImageDraw, middle: NDArray[np.float64], radius: float, colour: Colour) -> None:
    x, y = middle
    draw.ellipse(_fine([(x - radius, y - radius), (x + radius, y + radius)]), fill=colour)


def _fine(points: list[tuple[float, ...]]) -> list[tuple[float, float]]:
    """Pixels of the canvas as pixels of the drawing, where the centre of pixel 0 lies between two pixels."""
    return [((x + 0.5) * _FINE - 0.5, (y + 0.5) * _FINE - 0.5) for x, y in points]


def _colour(generator: Generator) -> Colour:
    red, green, blue = generator.integers(0, 256, 3).tolist()
    return red, green, blue


def _blend(first: Colour, second: Colour, share: float) -> Colour:
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _shade(colour: Colour, factor: float) -> Colour:
    red, green, blue = (min(255, round(value * factor)) for value in colour)
    return red, green, blue


class Puppets(PoseDataModule):
    """Synthetic: articulated figures with 14 joints, drawn on 128×96 pixels. No photographs, no persons, no files.

    Figures differ in pose, size, clothes and light, face the viewer or turn their back, and stand before soft colours,
    among shapes, sometimes beside another figure or behind something. At 64×48 pixels a pose is recognisable, at 32×24
    hands and feet get lost. Left and right look alike, as on photographs; face or rucksack tell them apart.

    A figure is a function of `figure_seed` and its number, drawn once per process in about 2 ms. Joints off the canvas
    are not visible, hidden joints are; `head_size` is the distance from neck to head top.

    Args:
        resolutions: [height, width] of each level, the highest first; a pixel is a mean of the canvas's pixels.
        samples_per_client: Training figures per client.
        test_samples: Figures to test on.
        figure_seed: Seed of the figures.
        augmentation: Random boxes to train on; null mirrors every second picture, and nothing else.
        kwargs: See `PoseDataModule`.

    Raises:
        ConfigError: A setting is out of range.
    """

    skeleton = LSP
    padding = 1.0  # a figure fills its canvas

    def __init__(
        self,
        resolutions: Sequence[tuple[int, int]] = ((64, 48), (48, 36), (32, 24)),
        samples_per_client: int = 300,
        test_samples: int = 300,
        figure_seed: int = 0,
        augmentation: PoseAugmentation | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            resolutions=resolutions,
            samples_per_client=samples_per_client,
            augmentation=augmentation,
            antialias=True,
            mean=(0.5,),
            std=(0.25,),
            **kwargs,
        )
        check_range("data.test_samples", test_samples, least=1)
        self.test_samples, self.figure_seed = test_samples, figure_seed
        self._canvases: dict[Subset, torch.Tensor] = {}
        self._people: dict[Subset, dict[str, torch.Tensor]] = {}
        self._kept: dict[Subset, IntArray] = {}  # the figures still here, if some were freed
        self._device = torch.device("cpu")

    @override
    def default_augmentation(self) -> PoseAugmentation:
        return FLIP_ONLY

    @override
    def pooled(self) -> None:
        """Nothing: figures are drawn from a seed, and are nobody's."""

    @override
    def read_parts(self) -> Parts:
        people = {}
        for subset, count in zip(SUBSETS, (self.max_train_samples or 0, self.test_samples), strict=True):
            canvases, joints = drawn(self.figure_seed, subset, count)
            people[subset] = _people(joints, subset)
            self._canvases[subset] = torch.from_numpy(canvases).to(self._device)
            self._people[subset] = people[subset].tensors()
        return self._measured(people["train"], people["test"])

    @override
    def read_contents(self) -> Iterator[NDArray[Any]]:
        """All joints."""
        yield from (self._people[subset]["keypoints"].numpy() for subset in ("train", "test"))

    @override
    def keep(self, train: IntArray, test: IntArray) -> None:
        for subset, rows in zip(SUBSETS, (train, test), strict=True):
            if len(rows) < len(self._canvases[subset]):
                chosen = torch.from_numpy(rows)
                self._canvases[subset] = self._canvases[subset].index_select(0, chosen.to(self._device))
                self._people[subset] = {name: array[chosen] for name, array in self._people[subset].items()}
                self._kept[subset] = rows

    @override
    def stored_people(self, subset: Subset, rows: IntArray) -> People:
        chosen = self._stored(subset, rows)
        arrays: dict[str, Any] = {name: array[chosen].numpy() for name, array in self._people[subset].items()}
        return People(**arrays)

    @override
    def stored_image(self, subset: Subset, row: int) -> NDArray[np.uint8]:
        canvas = self._canvases[subset][int(self._stored(subset, np.array([row]))[0])]
        return canvas.cpu().numpy().transpose(1, 2, 0)

    @override
    def image_of(self, number: int) -> tuple[int, str, Callable[[], NDArray[np.uint8]]]:
        return number, f"figure {number}", partial(self.stored_image, "test", number)

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        """Photographs, whole or with boxes, see `photograph_loader`."""
        return photograph_loader(self, path, 0, self._device)

    @override
    def write_image(self, subset: Subset, row: int, stem: Path) -> str:
        path = stem.with_suffix(".png")
        Image.fromarray(np.ascontiguousarray(self.stored_image(subset, row))).save(path)
        return path.name

    @override
    def move_to(self, device: torch.device) -> None:
        self._device = torch.device(device)
        self._canvases = {subset: canvases.to(device) for subset, canvases in self._canvases.items()}

    @override
    def make_loader(self, batches: Batches) -> PeopleLoader:
        height, width = self.resolutions[0]
        return self._loader(
            batches,
            augmentation=self.augmentation if batches.training else None,
            upper=self.skeleton.upper,
            aspect=width / height,
            drop_last=batches.training and self.drop_last,
            fresh=batches.training and self.fresh_batches,
        )

    @override
    def make_public_loader(self, batches: Batches) -> PeopleLoader:
        return self._loader(batches, public=True)

    def _loader(self, batches: Batches, **kwargs: Any) -> PeopleLoader:
        subset, size, generator = batches.subset, batches.batch_size, batches.generator
        rows = self._stored(subset, batches.indices)
        return PeopleLoader(self._canvases[subset], self._people[subset], rows, size, generator, **kwargs)

    def _stored(self, subset: Subset, indices: IntArray) -> torch.Tensor:
        """Rows of figures in the tensors."""
        rows = np.searchsorted(self._kept[subset], indices) if subset in self._kept else indices
        return torch.from_numpy(np.asarray(rows, dtype=np.int64))


@lru_cache(maxsize=4)
def drawn(seed: int, part: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draw the first figures of a part of a set: pictures (count, 3, 128, 96) and joints (count, 14, 2), pixels (x, y).

    The arrays are cached and must not be changed.
    """
    pictures = np.empty((count, 3, HEIGHT, WIDTH), dtype=np.uint8)
    joints = np.empty((count, len(LSP.joints), 2), dtype=np.float32)
    for index in range(count):
        pictures[index], joints[index] = figure_picture(seed, part, index)
    return pictures, joints


def _people(joints: NDArray[np.float32], part: str) -> People:
    count = len(joints)
    low, high = joints.min(axis=1), joints.max(axis=1)
    inside = np.all((joints >= -0.5) & (joints < np.array([WIDTH, HEIGHT]) - 0.5), axis=2)
    return People(
        keypoints=joints,
        visible=inside.astype(np.float32),
        head_size=np.linalg.norm(joints[:, 12] - joints[:, 13], axis=1).astype(np.float32),
        centre=np.full((count, 2), [(WIDTH - 1) / 2, (HEIGHT - 1) / 2], dtype=np.float32),
        extent=np.full(count, HEIGHT, dtype=np.float32),
        area=np.prod(high - low, axis=1).astype(np.float32),
        image_id=np.arange(count, dtype=np.int64),
        source=f"the drawn figures to {part}",
    )
