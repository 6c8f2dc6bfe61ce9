"""Persons on photographs in files, read by workers: those of a data set, and new ones to predict on."""

from __future__ import annotations

import csv
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate
from typing_extensions import override

from lit_fed.data.loaders.image_files import image_size, read_photograph
from lit_fed.data.loaders.worker_loader import loader_of_all
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.population.dataset_module import DatasetModule
from lit_fed.data.population.files import IMAGES, NewInputs, image_files
from lit_fed.data.population.hooks import Subset
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.poses.data.module import PoseDataModule
from lit_fed.poses.data.people import Album, People, box_row, check_size, read_json, stacked, stated_size
from lit_fed.poses.data.warp import Boxes, PoseAugmentation

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


class PhotoPose(PoseDataModule, DatasetModule):
    """Persons on photographs; to bring your own, implement `read_albums` and `skeleton`.

    Workers decode an image and crop it to a person's box; the device takes the pictures of all levels from the crop.

    Args:
        remember: Keep decoded images in memory, once per worker; for sets that fit.
        kwargs: See `PoseDataModule` and, for `num_workers`, `DatasetModule`.
    """

    def __init__(self, remember: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.remember = remember
        self._albums = dict[str, Album]()

    @abstractmethod
    def read_albums(self) -> tuple[Album, Album]:
        """Read the annotations for training and for tests; called once."""

    @override
    def build_datasets(self) -> Parts:
        train, test = self.read_albums()
        for album in (train, test):
            _check_images(album)
        if len(test.people) and np.isnan(test.people.head_size).all():
            remark(f"{test.people.source} has no head_size, the length that pck divides by: pck is not measured")
        people = self._measured(train.people, test.people)
        if train.clients is not None:
            self._learn_levels(train.people.extent, train.clients)
        self._albums = {"train": train, "test": test}
        height, width = self.resolutions[0]
        boxes = [size[1] / size[0] for size in (*self.resolutions, *self.test_resolutions)]
        reader = _Reader(self.remember)
        augmented, plain, tested = (
            _Persons(album, reader, augmentation, self.skeleton.upper, width / height, max(boxes))
            for album, augmentation in ((train, self.augmentation), (train, None), (test, None))
        )
        trained = Part(augmented, clients=train.clients, plain=plain)
        return Parts(trained, Part(tested, clients=test.clients), source=people.source)

    @override
    def stored_people(self, subset: Subset, rows: IntArray) -> People:
        people = self._albums[subset].people
        arrays: dict[str, Any] = {name: array[rows] for name, array in people.arrays().items()}
        return People(**arrays, source=people.source)

    @override
    def stored_image(self, subset: Subset, row: int) -> NDArray[np.uint8]:
        return read_photograph(self._albums[subset].paths[row])

    @override
    def image_of(self, number: int) -> tuple[int, str, Callable[[], NDArray[np.uint8]]]:
        album = self._albums["test"]
        row = int(np.flatnonzero(album.people.image_id == number)[0])
        listed = number if album.listed is None else album.listed[row]
        return listed, album.paths[row].name, partial(self.stored_image, "test", row)

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        """Photographs, whole or with boxes; see `photographs`."""
        return photograph_loader(self, path, self.num_workers, self._device)

    @override
    def write_image(self, subset: Subset, row: int, stem: Path) -> str:
        """Copy the file; it may be compressed with losses already."""
        path = self._albums[subset].paths[row]
        target = stem.with_name(f"{stem.name}{path.suffix}")
        shutil.copyfile(path, target)
        return target.name

    @override
    def collate(self, training: bool) -> Callable[[list[Any]], Any]:
        """Crops of a batch are padded to the size of the largest, black on the right and below."""
        return _collate


class _Reader:
    """Decodes images.

    Args:
        remember: Whether to keep decoded images in memory.
    """

    def __init__(self, remember: bool) -> None:
        self._remember, self._known = remember, dict[Path, NDArray[np.uint8]]()

    def __call__(self, path: Path) -> NDArray[np.uint8]:
        """An image (h, w, 3)."""
        if path in self._known:
            return self._known[path]
        image = read_photograph(path, "replace it, or remove its persons")
        if self._remember:
            self._known[path] = image
        return image


class _Persons(Dataset[tuple[dict[str, Tensor], dict[str, Tensor]]]):
    """Pairs of a person's crop and the truth, for a `PoseView`.

    Args:
        album: The persons.
        read: Decodes an image.
        augmentation: Draws boxes from torch's generator; None for the persons' own boxes.
        upper: Whether each joint belongs to the upper half, for the augmentation.
        aspect: Width of a picture divided by its height, for the augmentation.
        widest: Largest ratio of width to height of any picture.
    """

    def __init__(
        self,
        album: Album,
        read: Callable[[Path], NDArray[np.uint8]],
        augmentation: PoseAugmentation | None,
        upper: tuple[bool, ...],
        aspect: float,
        widest: float,
    ) -> None:
        self._people, self._album, self._read = album.people.tensors(), album, read
        self._augmentation, self._upper, self._aspect, self._widest = augmentation, upper, aspect, widest

    def __len__(self) -> int:
        return len(self._album.paths)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        truth = {name: array[index : index + 1] for name, array in self._people.items()}
        person = {"centre": truth.pop("centre"), "extent": truth.pop("extent")}
        if self._augmentation is not None:
            person = self._augmentation.draw(truth | person, self._upper, self._aspect)
        image = self._read(self._album.paths[index])
        if self._album.sizes is not None:
            size_read = (image.shape[1], image.shape[0])
            check_size(self._album.paths[index], size_read, self._album.sizes[index], self._album.people.source)
        left, top, right, bottom = _window(person, self._widest, image.shape[1], image.shape[0])
        origin = torch.tensor([[left, top]], dtype=torch.float32)
        person["centre"] = person["centre"] - origin
        truth["keypoints"] = truth["keypoints"] - origin
        canvas = torch.from_numpy(image[top:bottom, left:right].transpose(2, 0, 1).copy())
        if self._augmentation is None:
            person["origin"] = origin
        seen = {name: value[0] for name, value in person.items()}
        return seen | {"canvas": canvas}, {name: value[0] for name, value in truth.items()}


def _window(person: Mapping[str, Tensor], widest: float, width: int, height: int) -> tuple[int, int, int, int]:
    """The crop of an image for a person's pictures: left, top, right, bottom; at least one pixel."""
    boxes = Boxes(person["centre"], person["extent"], person.get("rotation"), person.get("flip"))
    half = 0.5 * float(person["extent"])
    corners = torch.tensor([[x * half * widest, y * half] for x in (-1, 1) for y in (-1, 1)])
    around = corners @ boxes.matrix()[0].T + boxes.centre
    # Two more pixels per side: one for the bilinear neighbour, one for rounding.
    (left, top), (right, bottom) = around.amin(0).floor().int().tolist(), around.amax(0).ceil().int().tolist()
    left, right = _within(left - 2, right + 3, width)
    top, bottom = _within(top - 2, bottom + 3, height)
    return left, top, right, bottom


def _within(low: int, high: int, length: int) -> tuple[int, int]:
    """A range clipped to 0 … length, not empty."""
    low = min(max(low, 0), length - 1)
    return low, min(max(high, low + 1), length)


def photograph_loader(data: PoseDataModule, path: Path, num_workers: int, device: torch.device) -> NewInputs:
    """Batches of persons on new photographs, for the views of a data set.

    Args:
        data: The data set.
        path: See `photographs`.
        num_workers: Processes that decode the photographs; 0 decodes in this process.
        device: The device of the batches.
    """
    album = photographs(path, data.num_joints, data.padding)
    sizes = (*data.resolutions, *data.test_resolutions)
    widest = max(size[1] / size[0] for size in sizes)
    persons = _Persons(album, _Reader(remember=False), None, data.skeleton.upper, 1.0, widest)
    size = data.test_batch_size
    loader = loader_of_all(persons, size, lambda seen: seen, device, _collate, num_workers=num_workers)
    return NewInputs(loader, [str(image_path) for image_path in album.paths])


def _collate(samples: list[Any]) -> Any:
    """Stack samples whose canvases differ in size."""
    canvases = [sample[0]["canvas"] for sample in samples]
    height, width = (max(canvas.shape[axis] for canvas in canvases) for axis in (1, 2))
    padded = [F.pad(canvas, (0, width - canvas.shape[2], 0, height - canvas.shape[1])) for canvas in canvases]
    pairs = [({**seen, "canvas": canvas}, *rest) for (seen, *rest), canvas in zip(samples, padded, strict=True)]
    collated: Any = default_collate(pairs)
    return collated


def _check_images(album: Album) -> None:
    """Refuse an album with missing images."""
    every = dict.fromkeys(album.paths)
    missing = [path for path in every if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing, the first of {len(missing)} of the {len(every)} images of "
            f"{album.people.source}; put them there, or set data.root and the folders of images"
        )
