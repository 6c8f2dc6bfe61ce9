"""Key points in the format of COCO."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_fed.data.pose.files import Album, PhotoPose, stacked
from lit_fed.data.pose.skeleton import Skeleton, pairs_by_name
from lit_fed.errors import ConfigError

_ASPECT = 3 / 4  # width of a box divided by its height


class CocoKeypoints(PhotoPose):
    """Persons from COCO's key point files, or any others in their format with any joints; one picture a person.

    Joints, their names and the skeleton are those of the file's category; flip pairs are its ``flip_pairs`` (from 0),
    or else those of names with left and right in them. Boxes are widened to 3:4 and enlarged by `padding`. Crowds,
    persons without a labelled joint and boxes without size are left out, as everywhere. An annotation may have a
    ``head_size`` in pixels for PCKh, which COCO's do not; 0 says that it cannot be used.

    Lin et al.: "Microsoft COCO: Common Objects in Context", ECCV 2014.

    Args:
        root: The folder that all files lie in.
        train_file: Annotations to train on, below `root`.
        test_file: Annotations to test on.
        train_images: Folder of their images, below `root`.
        test_images: Folder of the others'.
        padding: By how much boxes are enlarged.
        kwargs: See `PoseDataModule`, and `PhotoPose` and `DatasetModule` for `remember` and `num_workers`.

    Raises:
        ConfigError: A file or an image is missing, or an annotation has another number of joints.
    """

    def __init__(
        self,
        root: str = "data/coco",
        train_file: str = "annotations/person_keypoints_train2017.json",
        test_file: str = "annotations/person_keypoints_val2017.json",
        train_images: str = "train2017",
        test_images: str = "val2017",
        padding: float = 1.25,
        **kwargs: Any,
    ) -> None:
        super().__init__(root=root, **kwargs)
        if not padding > 0:
            raise ConfigError(f"data.padding is {padding}: it must be above 0, such as 1.25")
        self.train_file, self.test_file = train_file, test_file
        self.train_images, self.test_images = train_images, test_images
        self.padding = padding

    @cached_property
    def skeleton(self) -> Skeleton:
        """The joints of the training file's category."""
        return self._train[0]

    def read_albums(self) -> tuple[Album, Album]:
        """See `PhotoPose.read_albums`."""
        joints = self.skeleton.joints  # the training file's, read first
        test = _read(Path(self.root) / self.test_file, Path(self.root) / self.test_images, self.padding)
        if test[0].joints != joints:
            raise ConfigError(
                f"{self.root}/{self.test_file} has other joints than {self.train_file}: "
                f"{len(test[0].joints)}, {', '.join(test[0].joints[:4])}, …; give files of one data set"
            )
        train = self._train[1]
        del self._train  # read once; the arrays are with the data sets from here on
        return train, test[1]

    @cached_property
    def _train(self) -> tuple[Skeleton, Album]:
        return _read(Path(self.root) / self.train_file, Path(self.root) / self.train_images, self.padding)


def _read(path: Path, images: Path, padding: float) -> tuple[Skeleton, Album]:
    """A file's joints and persons.

    Raises:
        ConfigError: The file is missing, no JSON, or an annotation cannot be used.
    """
    content = read_json(path, "data.root, data.train_file and data.test_file")
    try:
        category = next(entry for entry in content["categories"] if entry.get("keypoints"))
        names = {entry["id"]: entry["file_name"] for entry in content["images"]}
        annotations = content["annotations"]
    except (StopIteration, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no file of COCO key points: it needs images, annotations, and a category with keypoints"
        ) from error
    joints = tuple(str(name) for name in category["keypoints"])
    pairs = tuple((int(a), int(b)) for a, b in category.get("flip_pairs", pairs_by_name(joints)))
    bones = category.get("skeleton", ())
    for bone in bones:
        if len(bone) != 2 or not all(1 <= joint <= len(joints) for joint in bone):
            raise ConfigError(f"{path}: skeleton {bone} is out of range: give two of the joints 1 … {len(joints)}")
    edges = tuple((int(a) - 1, int(b) - 1) for a, b in bones)
    skeleton = Skeleton(joints, pairs, edges, source=str(path))
    rows, paths = [], []
    for annotation in annotations:
        if annotation.get("category_id") == category["id"] and not annotation.get("iscrowd"):
            row = _person(annotation, len(joints), padding, path)
            if row is not None:
                if row["image_id"] not in names:
                    raise ConfigError(f"{path}: annotation {annotation.get('id')} is of an image that is not listed")
                rows.append(row)
                paths.append(images / names[row["image_id"]])
    if not rows:
        raise ConfigError(f"{path}: there is no person with a visible joint: give at least one")
    return skeleton, Album(stacked(rows, str(path)), paths)


def _person(annotation: dict[str, Any], num_joints: int, padding: float, path: Path) -> dict[str, Any] | None:
    """One annotation as arrays; None for a person that nothing can be learnt from.

    Raises:
        ConfigError: It has another number of joints, or no box.
    """
    values = annotation.get("keypoints", ())
    if len(values) != 3 * num_joints:
        raise ConfigError(
            f"{path}: annotation {annotation.get('id')} has {len(values)} numbers for its joints, but {num_joints} "
            f"joints take {3 * num_joints}, x, y and visibility each: correct or remove it"
        )
    if len(annotation.get("bbox", ())) != 4:
        raise ConfigError(f"{path}: annotation {annotation.get('id')} has no bbox [x, y, width, height]: add it")
    table = np.asarray(values, dtype=np.float32).reshape(num_joints, 3)
    left, top, width, height = (float(value) for value in annotation["bbox"])
    visible = table[:, 2] > 0
    if not visible.any() or width <= 0 or height <= 0:
        return None
    head_size = float(annotation.get("head_size", 0))
    return {
        "keypoints": table[:, :2],
        "visible": visible,
        "head_size": head_size if head_size > 0 else np.nan,
        "centre": (left + width / 2, top + height / 2),
        "extent": max(height, width / _ASPECT) * padding,
        "area": float(annotation.get("area", width * height)),
        "image_id": annotation["image_id"],
    }


def read_json(path: Path, settings: str) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        settings: What says where it is, for the message.

    Raises:
        ConfigError: It is missing, or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: put it there, or set {settings}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
