"""Key points in the format of COCO."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.pose.files import Album, PhotoPose, stacked
from lit_fed.data.pose.skeleton import Skeleton, pairs_by_name
from lit_fed.errors import ConfigError

_ASPECT = 3 / 4  # width of a box divided by its height


class CocoKeypoints(PhotoPose):
    """Persons from key point files in COCO's format with any joints, one picture per person.

    The file's category defines the joints, their names and the skeleton; flip pairs are its ``flip_pairs`` (from 0),
    or else pairs of left and right names. Boxes are widened to 3:4 and enlarged by `padding`. Crowds, persons without a
    labelled joint and empty boxes are left out, as is usual. An annotation may have a ``head_size`` in pixels for PCKh,
    unlike COCO's own; 0 marks it as unusable.

    Lin et al.: "Microsoft COCO: Common Objects in Context", ECCV 2014.

    Args:
        root: The folder of all files.
        train_file: Annotations to train on, below `root`.
        test_file: Annotations to test on, below `root`.
        train_images: Folder of the training images, below `root`.
        test_images: Folder of the test images, below `root`.
        padding: Factor to enlarge boxes by.
        kwargs: See `PoseDataModule`, and `PhotoPose` and `DatasetModule` for `remember` and `num_workers`.

    Raises:
        ConfigError: A file or an image is missing, or an annotation has a wrong number of joints.
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
        check_range("data.padding", padding, above=0, why=", such as 1.25")
        self.train_file, self.test_file = train_file, test_file
        self.train_images, self.test_images = train_images, test_images
        self.padding = padding

    @cached_property
    @override
    def skeleton(self) -> Skeleton:
        """The joints of the training file's category."""
        return self._train[0]

    @override
    def read_albums(self) -> tuple[Album, Album]:
        joints = self.skeleton.joints  # the training file's, read first
        test = _read(Path(self.root) / self.test_file, Path(self.root) / self.test_images, self.padding)
        if test[0].joints != joints:
            raise ConfigError(
                f"{self.root}/{self.test_file} has other joints than {self.train_file} "
                f"({len(test[0].joints)}, {', '.join(test[0].joints[:4])}, …); give files of one data set"
            )
        train = self._train[1]
        del self._train  # the data sets have the arrays from here on
        return train, test[1]

    @cached_property
    def _train(self) -> tuple[Skeleton, Album]:
        return _read(Path(self.root) / self.train_file, Path(self.root) / self.train_images, self.padding)


def _read(path: Path, images: Path, padding: float) -> tuple[Skeleton, Album]:
    """A file's joints and persons.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    content = read_json(path, "data.root, data.train_file and data.test_file")
    try:
        category = next(entry for entry in content["categories"] if entry.get("keypoints"))
        names = {entry["id"]: entry["file_name"] for entry in content["images"]}
        annotations = content["annotations"]
    except (StopIteration, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a file of COCO key points; it needs images, annotations, and a category with keypoints"
        ) from error
    joints = tuple(str(name) for name in category["keypoints"])
    pairs = tuple((int(a), int(b)) for a, b in category.get("flip_pairs", pairs_by_name(joints)))
    bones = category.get("skeleton", ())
    for bone in bones:
        if len(bone) != 2 or not all(1 <= joint <= len(joints) for joint in bone):
            raise ConfigError(f"{path}: skeleton {bone} is out of range; give two of the joints 1 … {len(joints)}")
    edges = tuple((int(a) - 1, int(b) - 1) for a, b in bones)
    skeleton = Skeleton(joints, pairs, edges, source=str(path))
    rows, paths = [], []
    for annotation in annotations:
        if annotation.get("category_id") == category["id"] and not annotation.get("iscrowd"):
            row = _person(annotation, len(joints), padding, path)
            if row is not None:
                if row["image_id"] not in names:
                    raise ConfigError(
                        f"{path}: annotation {annotation.get('id')} names an unlisted image; list it or remove it"
                    )
                rows.append(row)
                paths.append(images / names[row["image_id"]])
    if not rows:
        raise ConfigError(f"{path} has no person with a visible joint; give at least one")
    return skeleton, Album(stacked(rows, str(path)), paths)


def _person(annotation: dict[str, Any], num_joints: int, padding: float, path: Path) -> dict[str, Any] | None:
    """One annotation as arrays; None without a visible joint or a box of positive size.

    Raises:
        ConfigError: The number of joints is wrong, or the box is missing.
    """
    values = annotation.get("keypoints", ())
    if len(values) != 3 * num_joints:
        raise ConfigError(
            f"{path}: annotation {annotation.get('id')} has {len(values)} numbers for its joints, and {num_joints} "
            f"joints take {3 * num_joints} (x, y and visibility each); correct or remove it"
        )
    if len(annotation.get("bbox", ())) != 4:
        raise ConfigError(f"{path}: annotation {annotation.get('id')} has no bbox [x, y, width, height]; add it")
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
