"""MPII Human Pose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.data.pose.files import PhotoPose
from lit_fed.data.pose.people import Album, read_json, stacked
from lit_fed.data.pose.skeleton import MPII
from lit_fed.errors import ConfigError

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
        found = list(_mat_rows(path, testing) if path.suffix == ".mat" else _json_rows(path))
        if not found:
            raise ConfigError(f"{path} has no person with a visible joint; give at least one")
        ids = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in found))}
        rows = [row | {"image_id": ids[name]} for name, row in found]
        paths = [Path(self.root) / self.images / name for name, _ in found]
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
