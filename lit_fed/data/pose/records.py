"""Found joints as a table and as results in COCO's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


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
    found: dict[int, list[int]] = {}
    for place, (number, _) in enumerate(images):
        found.setdefault(number, []).append(place)
    return found
