"""Key points in the format of COCO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.partition import Natural
from lit_fed.data.population.naming import in_order, numbered
from lit_fed.data.pose.files import PhotoPose
from lit_fed.data.pose.people import Album, box_row, read_json, stacked, stated_size
from lit_fed.data.pose.skeleton import Skeleton, pairs_by_name
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError


class CocoKeypoints(PhotoPose):
    """Persons from key point files in COCO's format with any joints, one picture per person.

    The file's category defines the joints, their names and the skeleton; flip pairs are its ``flip_pairs`` (from 0),
    or else pairs of left and right names. Boxes are widened to 3:4 and enlarged by `padding`. Crowds, persons without a
    labelled joint and empty boxes are left out, as is usual. An annotation may have a ``head_size`` in pixels for PCKh,
    unlike COCO's own; 0 marks it as unusable. Joints and boxes are in pixels of the upright photograph, see
    `lit_fed.data.loaders.image_files.read_image`.

    Lin et al.: "Microsoft COCO: Common Objects in Context", ECCV 2014.

    Args:
        root: The folder of all files.
        train_file: Annotations to train on, below `root`.
        test_file: Annotations to test on, below `root`.
        train_images: Folder of the training images, below `root`.
        test_images: Folder of the test images, below `root`.
        padding: Factor to enlarge boxes by.
        client_key: Key of an annotation, or else of its image, that names the client, such as ``camera``; `partition`
            is then `Natural` by default. Null for persons without clients of their own.
        kwargs: See `PoseDataModule`, and `PhotoPose` and `DatasetModule` for `remember` and `num_workers`.

    Raises:
        ConfigError: A file or an image is missing, or an annotation has a wrong number of joints or names no client;
            at reading, if an image has another size than the file states.
    """

    coco_ap = True

    def __init__(
        self,
        root: str = "data/coco",
        train_file: str = "annotations/person_keypoints_train2017.json",
        test_file: str = "annotations/person_keypoints_val2017.json",
        train_images: str = "train2017",
        test_images: str = "val2017",
        padding: float = 1.25,
        client_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        if client_key is not None and kwargs.get("partition") is None:
            kwargs["partition"] = Natural()
        super().__init__(root=root, **kwargs)
        check_range("data.padding", padding, above=0, why=", such as 1.25")
        if client_key is None and isinstance(self.partition, Natural):
            raise ConfigError(
                "data.partition is Natural, and data.client_key is null; set it to the key of an annotation or an "
                "image that names the client, such as camera, or choose IID"
            )
        self.train_file, self.test_file = train_file, test_file
        self.train_images, self.test_images = train_images, test_images
        self.padding, self.client_key = padding, client_key

    @cached_property
    @override
    def skeleton(self) -> Skeleton:
        """The joints of the training file's category."""
        return self._train.skeleton

    @override
    def own_clients(self) -> int | None:
        return None if self.client_key is None else len(self._clients)

    @override
    def own_client_names(self) -> list[str] | None:
        return None if self.client_key is None else self._clients

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.client_key {self.client_key}", "set data.client_key to null"

    @cached_property
    def _clients(self) -> list[str]:
        """The names of the clients with persons to train on, in their order."""
        return in_order(row["client"] for row in self._train.rows)

    @override
    def read_albums(self) -> tuple[Album, Album]:
        skeleton = self.skeleton  # the training file's, read first
        test = self._file(self.test_file, self.test_images)
        check_skeleton(test, skeleton, self.train_file)
        clients = None if self.client_key is None else self._clients
        albums = tuple(album_of(file.rows, str(file.path), clients) for file in (self._train, test))
        del self._train  # the data sets have the arrays from here on
        return albums[0], albums[1]

    @cached_property
    def _train(self) -> CocoFile:
        return self._file(self.train_file, self.train_images)

    def _file(self, name: str, images: str) -> CocoFile:
        root = Path(self.root)
        remedy = "data.root, data.train_file and data.test_file"
        file = read_coco(root / name, root / images, self.padding, remedy, self.client_key)
        if not file.rows:
            raise nobody(file.path)
        return file


class CocoFile(NamedTuple):
    """A file's joints and persons.

    Args:
        path: The file.
        skeleton: The joints of its category.
        rows: The arrays of each usable person by `People`'s names, with the image's ``path`` and stated ``size`` and,
            by a client key, the name of the ``client``.
    """

    path: Path
    skeleton: Skeleton
    rows: list[dict[str, Any]]


def nobody(path: Path) -> ConfigError:
    """The error of a file without persons."""
    return ConfigError(f"{path} has no person with a visible joint; give at least one")


def check_skeleton(file: CocoFile, skeleton: Skeleton, other: str) -> None:
    """Refuse joints that differ from another file's, or a setting's."""
    if (joints := file.skeleton.joints) != skeleton.joints:
        raise ConfigError(
            f"{file.path} has other joints than {other} ({len(joints)}, {', '.join(joints[:4])}, …); give files of one "
            "data set"
        )


def album_of(rows: Sequence[Mapping[str, Any]], source: str, clients: Sequence[str] | None = None) -> Album:
    """Persons of rows of `CocoFile`s, with their clients' numbers, −1 for others.

    If two images have the same number, in files of several clients, all images are numbered anew.
    """
    owners = None if clients is None else numbered([row["client"] for row in rows], clients)
    paths, listed = [row["path"] for row in rows], [row["image_id"] for row in rows]
    if len(set(listed)) < len(set(paths)):
        numbers = {path: number for number, path in enumerate(dict.fromkeys(paths))}
        rows = [{**row, "image_id": numbers[row["path"]]} for row in rows]
    return Album(stacked(rows, source), paths, owners, listed, [row["size"] for row in rows])


def read_coco(path: Path, images: Path, padding: float, settings: str, client_key: str | None = None) -> CocoFile:
    """Read a file in COCO's format.

    Args:
        path: The file.
        images: The folder of its images.
        padding: Factor to enlarge boxes by.
        settings: The settings of the path, for errors.
        client_key: Key of an annotation, or else of its image, that names the client; None for none.
    """
    content = read_json(path, settings)
    category = _category(content, path)
    try:
        listed = {entry["id"]: (entry, str(entry["file_name"])) for entry in content["images"]}
        annotations = list(content["annotations"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_coco(path) from error
    if len(listed) < len(content["images"]):
        _refuse_shared_numbers(content["images"], path)
    skeleton, rows, known, repeated = _skeleton(category, path), list[dict[str, Any]](), set[Any](), list[Any]()
    for annotation in annotations:
        if annotation.get("category_id") != category["id"] or annotation.get("iscrowd"):
            continue
        what = f"{path}: annotation {annotation.get('id')}"
        try:
            row = _person(annotation, len(skeleton.joints), padding, what)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what} holds something else than numbers ({error}); correct or remove it") from error
        if row is None:
            continue
        if row["image_id"] not in listed:
            raise ConfigError(f"{what} names an unlisted image; list it or remove it")
        image, name = listed[row["image_id"]]
        sides = stated_size(image, path)
        _check_box(annotation["bbox"], sides, what, name)
        row["path"], row["size"] = images / name, sides
        if client_key is not None:
            row["client"] = annotation.get(client_key, image.get(client_key))
            if row["client"] is None:
                raise ConfigError(
                    f"{what} and its image {name} have no key {client_key!r}; name the client there, or correct "
                    "data.client_key"
                )
        arrays = (row[name].tobytes() for name in ("keypoints", "visible"))
        person = row["image_id"], row["centre"], row["extent"], row.get("client"), *arrays
        if person in known:
            repeated.append(annotation.get("id"))
            continue
        known.add(person)
        rows.append(row)
    if repeated:
        remark(
            f"{path}: {len(repeated)} annotations, such as {repeated[0]}, repeat the image, box and joints of another; "
            "each person counts once"
        )
    return CocoFile(path, skeleton, rows)


def read_skeleton(path: Path, settings: str) -> Skeleton:
    """The joints of a file in COCO's format, see `read_coco`."""
    return _skeleton(_category(read_json(path, settings), path), path)


def _category(content: Any, path: Path) -> Mapping[str, Any]:
    """The category with key points."""
    try:
        found: Mapping[str, Any] = next(entry for entry in content["categories"] if entry.get("keypoints"))
    except (StopIteration, KeyError, TypeError, AttributeError) as error:
        raise _no_coco(path) from error
    return found


def _no_coco(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is not a file of COCO key points; it needs images, annotations, and a category with keypoints"
    )


def _refuse_shared_numbers(images: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse two files with the same image number."""
    names = dict[Any, str]()
    for entry in images:
        if (known := names.setdefault(entry["id"], entry["file_name"])) != entry["file_name"]:
            raise ConfigError(
                f"{path} lists image {entry['id']} as {known} and as {entry['file_name']}; give each its own id"
            )


def _skeleton(category: Mapping[str, Any], path: Path) -> Skeleton:
    """The joints of a category."""
    joints = tuple(str(name) for name in category["keypoints"])
    pairs = tuple((int(a), int(b)) for a, b in category.get("flip_pairs", pairs_by_name(joints)))
    bones = category.get("skeleton", ())
    for bone in bones:
        if len(bone) != 2 or not all(1 <= joint <= len(joints) for joint in bone):
            raise ConfigError(f"{path}: skeleton {bone} is out of range; give two of the joints 1 … {len(joints)}")
    edges = tuple((int(a) - 1, int(b) - 1) for a, b in bones)
    unscored = tuple(int(joint) for joint in category.get("unscored", ()))
    return Skeleton(joints, pairs, edges, unscored, int(category["id"]), str(path))


def _check_box(box: Sequence[float], size: tuple[float, float], what: str, name: str) -> None:
    """Refuse a box [x, y, width, height] that lies wholly outside of its image, if the file states the image's size."""
    left, top, wide, high = map(float, box)
    width, height = (side or math.inf for side in size)
    if left + wide <= 0 or top + high <= 0 or left >= width or top >= height:
        raise ConfigError(
            f"{what} has the box {[left, top, wide, high]} outside of its image {name}, {width:g}×{height:g}; correct "
            "it in pixels [x, y, width, height], or remove it"
        )


def _person(annotation: Mapping[str, Any], num_joints: int, padding: float, what: str) -> dict[str, Any] | None:
    """One annotation as arrays; None without a visible joint or a box of positive size."""
    values = annotation.get("keypoints", ())
    if len(values) != 3 * num_joints:
        raise ConfigError(
            f"{what} has {len(values)} numbers for its joints, and {num_joints} "
            f"joints take {3 * num_joints} (x, y and visibility each); correct or remove it"
        )
    if len(annotation.get("bbox", ())) != 4:
        raise ConfigError(f"{what} has no bbox [x, y, width, height]; add it")
    table = np.asarray(values, dtype=np.float32).reshape(num_joints, 3)
    width, height = (float(value) for value in annotation["bbox"][2:])
    visible = table[:, 2] > 0
    if not visible.any() or width <= 0 or height <= 0:
        return None
    head_size, area = float(annotation.get("head_size") or 0), annotation.get("area", width * height)
    image_id = annotation.get("image_id")
    if type(image_id) is not int or not -(2**63) <= image_id < 2**63:
        raise ConfigError(f"{what} has image_id {image_id!r}; it must be a whole number")
    return {
        "keypoints": table[:, :2],
        "visible": visible,
        "head_size": head_size if head_size > 0 else np.nan,
        **box_row(annotation["bbox"], padding),
        "area": np.nan if area is None else float(area),
        "image_id": image_id,
    }
