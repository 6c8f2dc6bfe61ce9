"""Published formats of key points: COCO and MPII Human Pose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.partition import Natural
from lit_fed.data.population.naming import in_order, numbered
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.poses.data.files import PhotoPose
from lit_fed.poses.data.people import MPII, Album, Skeleton, box_row, pairs_by_name, read_json, stacked, stated_size


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
        category: Mapping[str, Any] = next(entry for entry in content["categories"] if entry.get("keypoints"))
    except (StopIteration, KeyError, TypeError, AttributeError) as error:
        raise _no_coco(path) from error
    return category


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


_PERSON = 200.0  # pixels of height at MPII's scale 1
_HEAD_FACTOR = 0.6  # of the head box's diagonal: PCKh's length
_HEAD_OF_SCALE = 25.0  # PCKh's length at MPII's scale 1


class Mpii(PhotoPose):
    """Persons from MPII Human Pose, 16 joints, one picture per person.

    Files are ``.json`` in HRNet's common form, a list of ``image``, ``center``, ``scale``, ``joints`` and
    ``joints_vis``; or the data set's own ``mpii_human_pose_v1_u12_1.mat``, whose published test part has no joints:
    every tenth image of its training part is a test image. Coordinates count from 1 in both. A box is 200·scale·1.25
    pixels high, its middle 15·scale below the person's.

    PCKh divides by .6 of the diagonal of the head's box, which ``.mat`` files hold. For ``.json`` files it is 25·scale:
    MPII's scales are from the same boxes, and in all of the validation part the two are equal.

    Andriluka, Pishchulin, Gehler, Schiele: "2D Human Pose Estimation: New Benchmark and State of the Art Analysis",
    CVPR 2014.

    Args:
        root: The folder of all files.
        train_file: Annotations to train on, below `root`.
        test_file: Annotations to test on, below `root`; may be the same ``.mat`` file.
        images: Folder of the images, below `root`.
        kwargs: See `PoseDataModule`, and `PhotoPose` and `DatasetModule` for `remember` and `num_workers`.

    Raises:
        ConfigError: A file or an image is missing, or a person has a wrong number of joints.

    Note:
        RAF's code squeezes a square of 200·scale·1.25 pixels into 3:4. Here its middle three quarters are shown,
        undistorted; in the validation part .75 % of the joints lie outside, and .52 % lie outside of the square.
    """

    skeleton = MPII

    def __init__(
        self,
        root: str = "data/mpii",
        train_file: str = "annot/train.json",
        test_file: str = "annot/valid.json",
        images: str = "images",
        **kwargs: Any,
    ) -> None:
        super().__init__(root=root, **kwargs)
        self.train_file, self.test_file, self.images = train_file, test_file, images

    @override
    def read_albums(self) -> tuple[Album, Album]:
        train = self._album(Path(self.root) / self.train_file, testing=False)
        return train, self._album(Path(self.root) / self.test_file, testing=True)

    def _album(self, path: Path, testing: bool) -> Album:
        persons = list(_mat_rows(path, testing) if path.suffix == ".mat" else _json_rows(path))
        if not persons:
            raise nobody(path)
        ids = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in persons))}
        rows = [row | {"image_id": ids[name]} for name, row in persons]
        paths = [Path(self.root) / self.images / name for name, _ in persons]
        return Album(stacked(rows, str(path)), paths)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The image and the arrays of each person with a visible joint."""
    content = read_json(path, "data.root, data.train_file and data.test_file")
    for number, entry in enumerate(content if isinstance(content, list) else [content]):
        try:
            name, joints, visible = str(entry["image"]), entry["joints"], np.asarray(entry["joints_vis"]) > 0
            centre, scale = np.asarray(entry["center"], dtype=np.float64), float(entry["scale"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: person {number} needs image, center, scale, joints and joints_vis; correct or remove it"
            ) from error
        count = len(MPII.joints)
        if np.shape(joints) != (count, 2) or visible.shape != (count,):
            raise ConfigError(
                f"{path}: person {number} has joints of shape {np.shape(joints)} and joints_vis "
                f"of shape {visible.shape}, and MPII has {count} joints; correct or remove it"
            )
        if visible.any():
            points = np.asarray(joints, dtype=np.float64)
            yield name, _row(points, visible, centre, scale, _HEAD_OF_SCALE * scale)


def _mat_rows(path: Path, testing: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The image and the arrays of each annotated person, of the test images or of the others."""
    from scipy.io import loadmat

    if not path.is_file():
        raise ConfigError(f"{path} does not exist; put it there, or set data.root, data.train_file and data.test_file")
    try:
        release = loadmat(path, squeeze_me=True, struct_as_record=False)["RELEASE"]
        annotated = np.flatnonzero(np.atleast_1d(release.img_train) == 1)
        images = np.atleast_1d(release.annolist)
    except (KeyError, AttributeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{path} is not MPII's file; it needs RELEASE.annolist and img_train") from error
    for number, index in enumerate(annotated.tolist()):
        if (number % 10 == 9) == testing:
            for person in np.atleast_1d(getattr(images[index], "annorect", [])):
                row = _mat_person(person)
                if row is not None:
                    yield str(images[index].image.name), row


def _mat_person(person: Any) -> dict[str, Any] | None:
    """One person's arrays; None without joints, scale or place, as is frequent in MPII."""
    marked, place, scale = (vars(person).get(name, np.array([])) for name in ("annopoints", "objpos", "scale"))
    if not hasattr(marked, "point") or not hasattr(place, "x") or np.size(scale) != 1:
        return None
    points, visible = np.zeros((len(MPII.joints), 2)), np.zeros(len(MPII.joints), dtype=bool)
    for point in np.atleast_1d(marked.point):
        points[int(point.id)], visible[int(point.id)] = (point.x, point.y), True
    head = _HEAD_FACTOR * float(np.hypot(float(person.x2) - float(person.x1), float(person.y2) - float(person.y1)))
    return _row(points, visible, np.array([place.x, place.y], dtype=np.float64), float(scale), head)


def _row(
    points: NDArray[np.float64], visible: NDArray[np.bool_], centre: NDArray[np.float64], scale: float, head: float
) -> dict[str, Any]:
    """A person's arrays, counted from 0 instead of MATLAB's 1."""
    height = 1.25 * _PERSON * scale
    return {
        "keypoints": np.where(visible[:, None], points - 1, 0.0),
        "visible": visible,
        "head_size": head if head > 0 else np.nan,
        "centre": centre + np.array([0.0, 15 * scale]) - 1,
        "extent": height,
        "area": np.nan,
        "image_id": 0,
    }
