"""Persons with their images, from annotations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.pose.people import People
from lit_fed.errors import ConfigError

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
    """Width and height of an image's entry, 0 where it does not state them.

    Raises:
        ConfigError: They are not numbers.
    """
    try:
        width, height = (float(image.get(side) or 0) for side in ("width", "height"))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: image {image['id']} has a width or height that is not a number; correct it"
        ) from error
    return width, height


def check_size(path: Path, found: tuple[int, int], stated: tuple[float, float], source: str) -> None:
    """Refuse an image whose width and height differ from those that the annotations state, 0 where they do not.

    Raises:
        ConfigError: They differ.
    """
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
    """The content of a JSON file; errors name the `settings` of its path.

    Raises:
        ConfigError: The file is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; put it there, or set {settings}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); replace it") from error
