"""Pose data written as one folder per client, for `ClientPoses`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.population.base import Subset
from lit_fed.data.pose.module import PoseDataModule
from lit_fed.data.pose.people import People
from lit_fed.data.pose.skeleton import Skeleton
from lit_fed.errors import ConfigError

_ASPECT = 3 / 4  # of boxes in files, width divided by height


def pose_settings_of(data: PoseDataModule) -> dict[str, Any]:
    """The settings of a `ClientPoses` with the same persons in batches of the same size; each node sets its ``root``.

    Note:
        The random boxes of drawn figures differ: figures in memory are augmented by the loader, photographs by workers.
    """
    if data.skew is not None:
        raise ConfigError(f"{type(data).__name__} has a skew, which lit-fed split cannot write; split data without it")
    skeleton, folders = data.skeleton, [f"client_{client}" for client in range(data.num_clients)]
    same = ("batch_size", "test_batch_size", "shared_batch_size", "seed", "val_fraction", "drop_last", "fresh_batches")
    return {
        "client_folders": folders,
        "skeleton": {
            "joints": list(skeleton.joints),
            "flip_pairs": [list(pair) for pair in skeleton.flip_pairs],
            "edges": [list(pair) for pair in skeleton.edges],
            "unscored": list(skeleton.unscored),
        },
        "input_sizes": {name: list(data.resolutions[data.level(one)]) for one, name in enumerate(folders)},
        "resolutions": [list(size) for size in data.resolutions],
        "test_resolutions": [list(size) for size in data.test_resolutions],
        "interpolations": list(data.interpolations),
        "augmentation": asdict(data.augmentation),
        "antialias": data.antialias,
        "box_heights": list(data.box_heights),
        "mean": list(data.mean),
        "std": list(data.std),
        "padding": data.padding,
        "test_fraction": 0.0,
    } | {key: getattr(data, key) for key in same}


def write_pose_folders(data: PoseDataModule, folder: Path) -> None:
    """Write a folder per client, ``server`` and, for a public set, ``public``; see `ClientPoses`."""
    cut = data._ready
    for client in range(data.num_clients):
        parts: dict[str, tuple[Subset, IntArray]] = {"train": ("train", cut.train[client])}
        if data.has_val:
            parts["val"] = "train", cut.val[client]
        if data.has_calibration:
            parts["calibration"] = "train", cut.calibration[client]
        parts["test"] = "test", cut.shared_test[cut.test[client]]
        for part, (subset, rows) in parts.items():
            _write(data, folder / f"client_{client}", part, subset, rows)
    _write(data, folder / "server", "test", "test", cut.shared_test)
    if data.has_public:
        _write(data, folder / "public", "train", "train", cut.public)


def _write(data: PoseDataModule, folder: Path, part: str, subset: Subset, rows: IntArray) -> None:
    """Write persons as a key point file, and their images beside it."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    people, names = data.stored_people(subset, rows), dict[int, str]()
    for row, number in zip(rows.tolist(), people.image_id.tolist(), strict=True):
        if number not in names:
            names[number] = data.write_image(subset, row, folder / "images" / f"{subset}_{number:06}")
    content = {
        "images": [{"id": number, "file_name": name} for number, name in names.items()],
        "annotations": [_annotation(people, place, data.padding) for place in range(len(people))],
        "categories": [_category(data.skeleton)],
    }
    (folder / f"{part}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


def _annotation(people: People, place: int, padding: float) -> dict[str, Any]:
    """A person in COCO's format; its box has the extent and the middle of `People` once it is enlarged."""
    (x, y), height = people.centre[place].tolist(), float(people.extent[place]) / padding
    seen = people.visible[place] > 0
    points = np.concatenate([people.keypoints[place].astype(np.float64), 2.0 * seen[:, None]], axis=1)
    known = {name: float(getattr(people, name)[place]) for name in ("area", "head_size")}
    return {
        "id": place + 1,
        "image_id": int(people.image_id[place]),
        "category_id": 1,
        "iscrowd": 0,
        "keypoints": points.flatten().tolist(),
        "num_keypoints": int(seen.sum()),
        "bbox": [x - height * _ASPECT / 2, y - height / 2, height * _ASPECT, height],
        "area": known["area"] if np.isfinite(known["area"]) else None,
        "head_size": known["head_size"] if np.isfinite(known["head_size"]) else 0,
    }


def _category(skeleton: Skeleton) -> dict[str, Any]:
    return {
        "id": 1,
        "name": "person",
        "keypoints": list(skeleton.joints),
        "skeleton": [[one + 1, other + 1] for one, other in skeleton.edges],
        "flip_pairs": [list(pair) for pair in skeleton.flip_pairs],
        "unscored": list(skeleton.unscored),
    }
