"""New photographs of persons to find joints on: whole, or with a box per person."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from lit_fed.data.loaders.image_files import image_size
from lit_fed.data.population.new_inputs import IMAGES, image_files
from lit_fed.data.pose.people import Album, box_row, check_size, read_json, stacked, stated_size
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError

_BOXES = ("boxes.json", "boxes.csv")
_SIDES = ("left", "top", "width", "height")


def photographs(path: Path, num_joints: int, padding: float) -> Album:
    """Persons without joints on photographs.

    Args:
        path: A file of boxes; or an image, or a folder of images, whose ``boxes.json`` or ``boxes.csv`` has the boxes.
            An image without boxes shows one person, as tall or as wide as the image. A ``.json`` file is COCO's, with
            ``images`` and ``annotations`` that have a ``bbox``; a ``.csv`` file has the columns ``file``, ``left``,
            ``top``, ``width`` and ``height``, in pixels. Files are named relative to the folder of the file of boxes,
            or to ``images`` in it.
        num_joints: K, of the joints to find.
        padding: Factor to enlarge boxes by.
    """
    boxes = [path / name for name in _BOXES if (path / name).is_file()] if path.is_dir() else []
    if len(boxes) > 1:
        raise ConfigError(f"{path} holds boxes.json and boxes.csv; remove one of them")
    if path.suffix.lower() in (".json", ".csv"):
        boxes = [path]
    if boxes:
        rows = _coco_boxes(boxes[0]) if boxes[0].suffix.lower() == ".json" else _csv_boxes(boxes[0])
    elif path.is_file() and path.suffix.lower() not in IMAGES:
        raise ConfigError(f"{path} is not an image; name photographs, their folder, or a .json or .csv file of boxes")
    else:
        rows, padding = [_whole(number, file) for number, file in enumerate(image_files(path))], 1.0
        remark(f"{path} has no boxes: one person is found on each of {len(rows)} photographs, even where it shows more")
    joints = {"keypoints": np.zeros((num_joints, 2)), "visible": np.zeros(num_joints), "head_size": np.nan}
    made = [joints | box_row(row["box"], padding) | {"image_id": row["image_id"], "area": np.nan} for row in rows]
    return Album(stacked(made, str(path)), [row["path"] for row in rows])


def _whole(number: int, path: Path) -> dict[str, Any]:
    width, height = image_size(path)
    # From edge to edge: 0 is the centre of the first pixel.
    return {"image_id": number, "path": path, "box": [-0.5, -0.5, float(width), float(height)]}


def _coco_boxes(path: Path) -> list[dict[str, Any]]:
    content = read_json(path, "--inputs")
    try:
        listed = {entry["id"]: (entry, str(entry["file_name"])) for entry in content["images"]}
        boxes = [(entry["image_id"], entry["bbox"], entry.get("id")) for entry in content["annotations"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file of COCO boxes; it needs images with file_name, and annotations with image_id and "
            "bbox"
        ) from error
    if bare := [name for number, (_, name) in listed.items() if number not in {image for image, _, _ in boxes}]:
        remark(f"{path}: {len(bare)} images without a box are left out, such as {bare[0]}")
    rows = []
    for image, box, number in boxes:
        if image not in listed or type(image) is not int:
            raise ConfigError(f"{path}: annotation {number} names an unlisted image; list it or remove it")
        entry, name = listed[image]
        rows.append(_checked(path, f"annotation {number}", image, name, box, stated_size(entry, path)))
    return _some(rows, path)


def _csv_boxes(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read ({error}); replace it") from error
    wanted = ("file", *_SIDES)
    if lines and (lacking := [name for name in wanted if name not in lines[0]]):
        raise ConfigError(f"{path} lacks the column {lacking[0]}; it must have {', '.join(wanted)}")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(str(line["file"]) for line in lines))}
    rows = []
    for place, line in enumerate(lines, 2):
        box = [line[side] for side in _SIDES]
        rows.append(_checked(path, f"line {place}", numbers[str(line["file"])], str(line["file"]), box))
    return _some(rows, path)


def _some(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    if not rows:
        raise ConfigError(f"{path} has no box; give one per person")
    once = list({(row["path"], *row["box"]): row for row in rows}.values())
    if len(once) < len(rows):
        remark(f"{path}: {len(rows) - len(once)} of {len(rows)} boxes repeat another of their image; each counts once")
    return once


def _checked(
    path: Path, what: str, number: int, name: str, box: Any, stated: tuple[float, float] = (0, 0)
) -> dict[str, Any]:
    """A box on its image."""
    file = path.parent / name
    file = file if file.is_file() else path.parent / "images" / name
    width, height = image_size(file)
    check_size(file, (width, height), stated, str(path))
    try:
        left, top, wide, high = (float(side) for side in box)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {what} has the box {box}; it must be four numbers, {', '.join(_SIDES)}") from error
    inside = left < width and top < height and left + wide > 0 and top + high > 0
    if not (np.isfinite([left, top, wide, high]).all() and wide > 0 and high > 0 and inside):
        raise ConfigError(
            f"{path}: {what} has the box {[left, top, wide, high]}, which does not lie in {name}, {width}×{height} "
            "pixels; correct or remove it"
        )
    return {"image_id": number, "path": file, "box": [left, top, wide, high]}
