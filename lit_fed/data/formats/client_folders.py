"""Images in a folder per client."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import held_out
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.dataset_module import DecodedImages
from lit_fed.data.population.files import IMAGES, split_images
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

_WANTED = ", ".join(IMAGES)
_Scan = tuple[list[str], list[str], Part, NDArray[np.bool_] | None]
"""Clients, classes, the images, and whether each is a test image, if the folders tell."""


class ClientFolders(DecodedImages):
    """Images in ``<root>/<client>/<class>/*.png``, or split in ``<root>/<client>/{train,test}/<class>/*.png``.

    Clients and classes are numbered in the alphabetical order of their folders; the classes of all clients together
    count. A line counts the files of other types and in other places, except hidden ones such as ``.DS_Store``.

    Args:
        root: The folder that holds the clients' folders.
        partition: Cuts the images into clients; null for the folders, `Natural`.
        test_fraction: Share of each client's images to test on, if the folders are not split.
        class_names: Names of the classes' folders, in the classes' order; null for the folders that there are.
        kwargs: The images' settings, see `DecodedImages`, and the population's, see `FederatedDataModule`.

    Raises:
        ConfigError: The folders are missing, or that of a client or a class has no images.
    """

    def __init__(
        self,
        root: str = "data",
        partition: Partition | None = None,
        test_fraction: float = 0.2,
        class_names: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root=root, partition=Natural() if partition is None else partition, **kwargs)
        check_range("data.test_fraction", test_fraction, above=0, below=1)
        self.test_fraction, self._names = test_fraction, class_names

    @property
    @override
    def num_classes(self) -> int:
        return len(self._scan[1])

    @override
    def own_client_names(self) -> list[str]:
        return self._scan[0]

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.root {self.root}, with a folder per client,", "put all images into one client's folder"

    @override
    def pooled(self) -> str | None:
        return None if self._names else "data.class_names are the folders of all clients; give them"

    @property
    @override
    def class_names(self) -> list[str]:
        return self._scan[1]

    @override
    def build_datasets(self) -> Parts:
        clients, _, images, is_test = self._scan
        if is_test is None:
            seed = derive_seed(self.seed, "client-folders", "test")
            is_test = held_out(np.asarray(images.clients), len(clients), self.test_fraction, seed)
        train, test = images.take(~is_test), images.take(is_test)
        for name, part, remedy in (("training", train, "lower"), ("test", test, "raise")):
            if not len(part):
                raise ConfigError(f"{self.root} has no {name} images; add some or {remedy} data.test_fraction")
        augmented, plain, tested = (
            self.images(part.x.tolist(), np.asarray(part.strata).tolist(), random)
            for part, random in ((train, True), (train, False), (test, False))
        )
        return Parts(replace(train, x=augmented, plain=plain), replace(test, x=tested), source=self.root)

    @cached_property
    def _scan(self) -> _Scan:
        return _scan(Path(self.root), self._names)


def _scan(root: Path, classes: list[str] | None) -> _Scan:
    """List the images in an order independent of the file system."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder; set data.root to the folder that holds one folder per client")
    clients = _folders(root)
    if not clients:
        raise ConfigError(f"{root} holds no client folders; put images in {root}/<client>/<class>/")
    layouts = {client.name: _is_split(client) for client in clients}
    if len(set(layouts.values())) > 1:
        odd = min(layouts, key=lambda name: layouts[name])
        raise ConfigError(f"{root / odd} has no train and test folders, and others have; use one layout for all")
    is_split = next(iter(layouts.values()))
    images_found: list[tuple[str, int, str, bool]] = []
    names = set[str]()
    left_out = _files(root)
    for owner, client in enumerate(clients):
        left_out += _files(client)
        before = len(images_found)
        parts = [(client / name, name == "test") for name in ("train", "test")] if is_split else [(client, False)]
        for folder, is_test in parts:
            if not folder.is_dir():
                continue
            left_out += _files(folder) if is_split else []
            for class_folder in _folders(folder):
                images, others = _class_images(class_folder)
                images_found += [(str(image), owner, class_folder.name, is_test) for image in images]
                left_out += others
                names.add(class_folder.name)
        if len(images_found) == before and len(clients) > 1:
            raise ConfigError(f"{client} holds no images in class folders; add {_WANTED} files, or remove the folder")
    if not images_found:
        raise ConfigError(f"{root} holds no images; put {_WANTED} files in {root}/<client>/<class>/")
    if lost := names - {name for _, _, name, _ in images_found}:
        raise ConfigError(f"{root}: every folder of class {min(lost)} is empty; add images, or remove the folders")
    remark_left_out(root, left_out, len(images_found), IMAGES)
    there = sorted({name for _, _, name, _ in images_found})
    classes = there if classes is None else classes
    if strange := set(there).difference(classes):
        raise ConfigError(f"{root} has a class folder {min(strange)}, which data.class_names does not name; add it")
    number = {name: label for label, name in enumerate(classes)}
    paths, owners, kinds, tests = zip(*images_found, strict=True)
    labels, clients_of = np.array([number[name] for name in kinds], dtype=np.int64), np.array(owners, dtype=np.int64)
    every = Part(np.array(paths, dtype=object), clients=clients_of, strata=labels)
    return [client.name for client in clients], classes, every, np.array(tests) if is_split else None


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_hidden(path))


def _files(folder: Path) -> list[Path]:
    """Files in the place of folders."""
    return sorted(path for path in folder.iterdir() if not path.is_dir() and not is_hidden(path))


def _class_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images of a client's class, and the other files in its folder."""
    images, others = split_images(folder.iterdir())
    others += [file for inner in _folders(folder) for file in inner.rglob("*") if not file.is_dir()]
    if others and not images:
        raise ConfigError(
            f"{folder} holds {len(others)} files, such as {others[0].relative_to(folder)}, and no images; put "
            f"{_WANTED} files there, or remove the folder"
        )
    return images, others


def _is_split(client: Path) -> bool:
    """Whether a client's folder has a training and a test part."""
    names = {path.name for path in _folders(client)}
    if names > {"train", "test"}:
        more = min(names - {"train", "test"})
        raise ConfigError(f"{client} has a folder {more} beside train and test; move its images there, or remove it")
    return bool(names) and names <= {"train", "test"}
