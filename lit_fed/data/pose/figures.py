"""Drawings of articulated figures.

Lengths are in pixels of the canvas, 128 high and 96 wide; angles are in radians, 0 straight down for a limb, positive
away from the body for arms. Each figure has its own seed, so sets of different sizes begin with the same figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

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
    """One figure: its joints in the order of `lit_fed.data.pose.skeleton.LSP`, and its looks.

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
