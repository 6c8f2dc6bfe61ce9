"""Images in a folder per client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import IntArray, held_out
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.dataset_module import Datasets, DecodedImages
from lit_fed.data.population.new_inputs import IMAGES, split_images
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

_WANTED = ", ".join(IMAGES)


class _Scan(NamedTuple):
    """The images in the folders."""

    clients: list[str]
    classes: list[str]
    paths: list[str]
    labels: IntArray
    owners: IntArray
    is_test: IntArray | None


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
        self._scan_result: _Scan | None = None

    @property
    @override
    def num_classes(self) -> int:
        return len(self._scan.classes)

    @override
    def own_clients(self) -> int:
        return len(self._scan.clients)

    @override
    def own_client_names(self) -> list[str]:
        return self._scan.clients

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.root {self.root}, with a folder per client,", "put all images into one client's folder"

    @override
    def pooled(self) -> str | None:
        return None if self._names else "data.class_names are the folders of all clients; give them"

    @property
    @override
    def class_names(self) -> list[str]:
        return self._scan.classes

    @override
    def build_datasets(self) -> Datasets:
        scan = self._scan
        is_test = self._draw_test(scan) if scan.is_test is None else scan.is_test.astype(bool)
        parts = {}
        for name, chosen, augmented in (
            ("train", ~is_test, True),
            ("plain", ~is_test, False),
            ("test", is_test, False),
        ):
            positions = np.flatnonzero(chosen).tolist()
            paths, labels = [scan.paths[i] for i in positions], scan.labels[chosen].tolist()
            parts[name] = self.images(paths, labels, augmented)
        for name, chosen, remedy in (
            ("training", ~is_test, "lower data.test_fraction"),
            ("test", is_test, "raise data.test_fraction"),
        ):
            if not chosen.any():
                raise ConfigError(f"{self.root} has no {name} images; add some or {remedy}")
        return Datasets(
            parts["train"],
            scan.labels[~is_test],
            parts["test"],
            scan.labels[is_test],
            parts["plain"],
            scan.owners[~is_test],
            scan.owners[is_test],
            source=self.root,
        )

    @property
    def _scan(self) -> _Scan:
        if self._scan_result is None:
            self._scan_result = _scan(Path(self.root), self._names)
        return self._scan_result

    def _draw_test(self, scan: _Scan) -> Any:
        seed = derive_seed(self.seed, "client-folders", "test")
        return held_out(scan.owners, len(scan.clients), self.test_fraction, seed)


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
    found: list[tuple[str, int, str, bool]] = []
    names = set[str]()
    left_out = _files(root)
    for owner, client in enumerate(clients):
        left_out += _files(client)
        before = len(found)
        parts = [(client / name, name == "test") for name in ("train", "test")] if is_split else [(client, False)]
        for folder, is_test in parts:
            if not folder.is_dir():
                continue
            left_out += _files(folder) if is_split else []
            for class_folder in _folders(folder):
                images, others = _class_images(class_folder)
                found += [(str(image), owner, class_folder.name, is_test) for image in images]
                left_out += others
                names.add(class_folder.name)
        if len(found) == before and len(clients) > 1:
            raise ConfigError(f"{client} holds no images in class folders; add {_WANTED} files, or remove the folder")
    if not found:
        raise ConfigError(f"{root} holds no images; put {_WANTED} files in {root}/<client>/<class>/")
    if lost := names - {name for _, _, name, _ in found}:
        raise ConfigError(f"{root}: every folder of class {min(lost)} is empty; add images, or remove the folders")
    remark_left_out(root, left_out, len(found), IMAGES)
    there = sorted({name for _, _, name, _ in found})
    classes = there if classes is None else classes
    if strange := set(there).difference(classes):
        raise ConfigError(f"{root} has a class folder {min(strange)}, which data.class_names does not name; add it")
    number = {name: label for label, name in enumerate(classes)}
    return _Scan(
        [client.name for client in clients],
        classes,
        [path for path, _, _, _ in found],
        np.array([number[name] for _, _, name, _ in found], dtype=np.int64),
        np.array([owner for _, owner, _, _ in found], dtype=np.int64),
        np.array([is_test for _, _, _, is_test in found], dtype=np.int64) if is_split else None,
    )


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
