"""Persons on photographs in a folder per client, and other pose data written as such folders.

A node of a federation holds only its own clients' folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.formats.folders import FolderForm, folder_form
from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.partitions.csr import IntArray, held_out
from lit_fed.data.partitions.cut import Cut, Part, Parts, check_held_out, clients_here, cut_of_parts
from lit_fed.data.partitions.partition import Natural
from lit_fed.data.population.hooks import Batches, Subset
from lit_fed.data.population.naming import in_order
from lit_fed.data.population.views import viewed
from lit_fed.data.remarks import is_hidden, remark
from lit_fed.errors import ConfigError
from lit_fed.poses.data.annotated import album_of, check_skeleton, nobody, read_coco, read_skeleton
from lit_fed.poses.data.files import PhotoPose
from lit_fed.poses.data.module import PoseDataModule
from lit_fed.poses.data.people import Album, People, Skeleton
from lit_fed.seeding import derive_seed
from lit_fed.tracking import tracked

_NO_CLIENTS = ("server", "public")
_NAMED = 10  # clients in a remark
_SETTINGS = "data.root and data.client_folders"
Rows = list[dict[str, Any]]


class ClientPoses(PhotoPose):
    """A folder per client with its photographs and annotations; a node needs only the folders of its own clients.

    ``<root>/<client>/train.json`` is a key point file in COCO's format, see `CocoKeypoints`, and its images are in
    ``<root>/<client>/images/``. Beside it may be ``test.json``, ``val.json`` and ``calibration.json``; without them,
    `test_fraction`, `val_fraction` and a method's calibration fraction of the client's images are held out.
    ``<root>/server/test.json`` holds the shared test set; without it this is the test data of all clients, and on a
    node or a server of a federation nothing. ``<root>/public/train.json`` holds a method's public set.

    Clients are `Natural`; their levels follow from their boxes or from ``input_sizes``, see `PoseDataModule`.
    ``lit-fed split`` writes such folders of other pose data.

    Args:
        root: The folder that holds the clients' folders.
        client_folders: The clients' folders in their order, the same on all nodes; null for all folders below `root`
            except ``server`` and ``public``.
        skeleton: The joints, needed on a server without a file; null for the first file's.
        test_fraction: Share of a client's images to test on, rounded down, without its ``test.json``.
        padding: Factor to enlarge boxes by.
        box_heights: Least and median height of a box in the population, by which `antialias` shrinks images; null for
            the heights here.
        kwargs: See `PoseDataModule`, and `PhotoPose` and `DatasetModule` for `remember` and `num_workers`.

    Raises:
        ConfigError: A file is missing or malformed, a client has no person, or files differ in their joints.
    """

    coco_ap = True

    def __init__(
        self,
        root: str = "data/clients",
        client_folders: list[str] | None = None,
        skeleton: Skeleton | None = None,
        test_fraction: float = 0.2,
        padding: float = 1.25,
        box_heights: tuple[float, float] | None = None,
        **kwargs: Any,
    ) -> None:
        partition = kwargs.pop("partition", None) or Natural()
        if not isinstance(partition, Natural):
            raise ConfigError(
                f"data.partition is {type(partition).__name__}, and ClientPoses has a folder per client; leave it out"
            )
        super().__init__(root=root, partition=partition, **kwargs)
        check_range("data.test_fraction", test_fraction, least=0, below=1)
        check_range("data.padding", padding, above=0, why=", such as 1.25")
        if self.max_train_samples is not None or self.max_test_samples is not None:
            raise ConfigError("ClientPoses takes no data.max_train_samples or data.max_test_samples; leave them out")
        if client_folders is not None and len(set(client_folders)) < max(1, len(client_folders)):
            raise ConfigError(f"data.client_folders is {client_folders}; it must name at least one folder, each once")
        for height in box_heights or ():
            check_range("data.box_heights", height, above=0, why=" pixels each")
        self._folders, self._skeleton, self._box_heights = client_folders, skeleton, box_heights
        self.test_fraction, self.padding = test_fraction, padding
        self._here: list[int] = []
        self._sizes: dict[str, list[int]] = {}
        self._people: dict[str, People] = {}

    @override
    def own_client_names(self) -> list[str]:
        return self._names

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.root {self.root}, with a folder per client,", "put all persons into one client's folder"

    @override
    def pooled(self) -> str | None:
        if self._skeleton is None:
            return "data.skeleton is that of the first client's file; give it"
        if self.antialias and self._box_heights is None:
            return "data.box_heights are measured on all clients' boxes; give them, or set data.antialias to false"
        return None

    @cached_property
    def _names(self) -> list[str]:
        if self._folders is not None:
            return self._folders
        root = Path(self.root)
        if not root.is_dir():
            raise ConfigError(f"{root} is not a folder; set data.root to the folder that holds one folder per client")
        names_there = [path.name for path in root.iterdir() if path.is_dir() and not is_hidden(path)]
        if not (names := in_order(set(names_there) - set(_NO_CLIENTS))):
            raise ConfigError(f"{root} holds no client folders; put {root}/<client>/train.json there")
        return names

    @cached_property
    @override
    def skeleton(self) -> Skeleton:
        """The joints of the setting, or of the first file."""
        if self._skeleton is not None:
            return self._skeleton
        files = [Path(self.root) / name / "train.json" for name in self._names]
        there = [path for path in (*files, Path(self.root) / "server" / "test.json") if path.is_file()]
        return read_skeleton(there[0] if there else files[0], _SETTINGS)

    @override
    def make_cut(self, wanted: frozenset[int] | None) -> Cut:
        count, names = self.num_clients, self._names
        if count > len(names):
            raise ConfigError(f"data.num_clients is {count}, and {self.root} has {len(names)} client folders; lower it")
        if count < len(names):
            remark(f"data.num_clients is {count}; {names[count]} and later folders in {self.root} take no part")
        self._here = clients_here(wanted, count)
        parts = self.read_parts()
        self._remark_held_out(wanted is None)
        return cut_of_parts(self._sizes, self._here, count, parts, wanted)

    @override
    def read_albums(self) -> tuple[Album, Album]:
        parts: dict[str, list[Rows]] = {part: [] for part in ("train", "val", "calibration", "test")}
        for client in self._here:
            for part, rows in self._parts_of(client).items():
                parts[part].append(rows)
        sizes = {
            part: np.array([len(rows) for rows in rows_of_part], dtype=np.int64) for part, rows_of_part in parts.items()
        }
        whole = sizes["train"] + sizes["val"] + sizes["calibration"]
        check_held_out(whole, sizes["train"], self.val_fraction, self.calibration_fraction, self._here)
        shared, public = Path(self.root) / "server" / "test.json", Path(self.root) / "public" / "train.json"
        parts["public"] = [self._rows(public)] if self.has_public else []
        if self.has_public and len(parts["public"][0]) != self.public_size:
            raise ConfigError(
                f"{public} holds {len(parts['public'][0])} persons and algorithm.public_size is {self.public_size}; "
                "split the data anew, or correct the setting"
            )
        parts["shared_test"] = [self._rows(shared)] if shared.is_file() else []
        self._sizes = {part: [len(rows) for rows in rows_of_part] for part, rows_of_part in parts.items()}
        albums = []
        for halves in (("train", "val", "calibration", "public"), ("shared_test", "test")):
            rows = [row for part in halves for rows_of_part in parts[part] for row in rows_of_part]
            albums.append(album_of(rows, self.root, self._names))
        train, test = albums
        self._people = {"train": train.people, "test": test.people}
        return train, test

    def _remark_held_out(self, is_simulated: bool) -> None:
        """Count the persons that `test_fraction` holds out, as it is rounded down to whole images of a client."""
        named = [
            (self._names[client_id], size) for client_id, size in zip(self._here, self._sizes["test"], strict=True)
        ]
        held = [(name, size) for name, size in named if not (Path(self.root) / name / "test.json").is_file()]
        if self.test_fraction and held:
            counts = ", ".join(f"{size} of {name}" for name, size in held[:_NAMED]) + ", …" * (len(held) > _NAMED)
            images = len(np.unique(self._people["test"].image_id))
            shared = f"; the shared test set is the clients' {images} test images"
            is_shared = is_simulated and not self._sizes["shared_test"]
            remark(
                f"data.test_fraction {self.test_fraction:g} holds out persons to test on: {counts}{shared * is_shared}"
            )

    @override
    def _measured(self, train: People, test: People) -> Parts:
        """As of other data, but a node may hold no person at all."""
        every = [people.checked(self.num_joints).extent for people in (train, test) if len(people)]
        if self._box_heights is None and every:
            self._learn_boxes(np.concatenate(every))
        elif self._box_heights is not None:
            self.box_heights = self._box_heights
        return Parts(Part(train), Part(test), source=self.root)

    def _parts_of(self, client: int) -> dict[str, Rows]:
        """A client's persons by part; parts without a file are held out of its training persons."""
        name = self._names[client]
        folder = Path(self.root) / name
        rows_by_part = {"train": self._rows(folder / "train.json", name)}
        if not rows_by_part["train"]:
            raise nobody(folder / "train.json")
        fractions = {"test": self.test_fraction, "val": self.val_fraction, "calibration": self.calibration_fraction}
        for part, fraction in fractions.items():
            if (file := folder / f"{part}.json").is_file():
                rows_by_part[part] = self._rows(file, name)
            else:
                seed = derive_seed(self.seed, "client-poses", "hold-out", name, part)
                rows_by_part[part], rows_by_part["train"] = _held_out(rows_by_part["train"], fraction, seed)
        if not rows_by_part["train"]:
            raise ConfigError(f"data.test_fraction {self.test_fraction:g} leaves client {name} no person; lower it")
        return rows_by_part

    def _rows(self, path: Path, client: str | None = None) -> Rows:
        """The persons of a file, with the client's name."""
        file = read_coco(path, path.parent / "images", self.padding, _SETTINGS)
        check_skeleton(file, self.skeleton, self.skeleton.source)
        return [row | {"client": client} for row in file.rows]

    @override
    def test_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """One client's test batches, or the shared test set."""
        if client_id is not None or (self._ready.clients is None and not self._sizes["shared_test"]):
            return super().test_loader(client_id, view)
        indices = np.arange(sum(self._sizes["shared_test"]), dtype=np.int64)
        return viewed(self.make_loader(Batches("test", indices, self.shared_batch_size)), self.seen(None, view))

    @override
    def read_contents(self) -> Iterator[NDArray[Any]]:
        """All joints here."""
        yield from (self._people[subset].keypoints for subset in ("train", "test"))

    @override
    def fingerprint_of(self, client_id: int) -> str:
        """The SHA-256 of one client's annotations to train, validate and calibrate with."""
        cut, digest = self._ready.of_client(client_id), hashlib.sha256()
        for rows in (cut.train[client_id], cut.val[client_id], cut.calibration[client_id]):
            for name, array in self._people["train"].arrays().items():
                if name != "image_id":
                    digest.update(f"{name} {array[rows].shape}".encode() + np.ascontiguousarray(array[rows]).tobytes())
        return digest.hexdigest()


def _held_out(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Persons on a share of the images, rounded, and the other persons."""
    images = list(dict.fromkeys(row["path"] for row in rows))
    mask = held_out(np.zeros(len(images), dtype=np.int64), 1, fraction, seed)
    held = {image for image, is_held in zip(images, mask, strict=True) if is_held}
    return [row for row in rows if row["path"] in held], [row for row in rows if row["path"] not in held]


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
        "input_sizes": {name: list(data.resolutions[data.level(client_id)]) for client_id, name in enumerate(folders)},
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
    for client in tracked(range(data.num_clients), "writing clients", data.num_clients):
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


@folder_form.register
def _(data: PoseDataModule) -> FolderForm:
    written = "`images` and the `.json` files hold"
    return FolderForm("ClientPoses", pose_settings_of, write_pose_folders, written, "client_{}")


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
        "skeleton": [[joint + 1, other + 1] for joint, other in skeleton.edges],
        "flip_pairs": [list(pair) for pair in skeleton.flip_pairs],
        "unscored": list(skeleton.unscored),
    }
