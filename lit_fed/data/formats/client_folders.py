"""Images in a folder per client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.data.partitions.cut import Parts
from lit_fed.data.partitions.partition import Partition
from lit_fed.data.population.dataset_module import DecodedImages
from lit_fed.data.population.files import IMAGES, split_images
from lit_fed.data.population.naming import numbered
from lit_fed.data.population.source import Categorical, Columns, Source
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError

_WANTED = ", ".join(IMAGES)


class ClientFolders(Source, DecodedImages):
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

    names_clients = True
    drawn_as = "client-folders"

    def __init__(
        self,
        root: str = "data",
        partition: Partition | None = None,
        test_fraction: float = 0.2,
        class_names: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(test_fraction=test_fraction, class_names=class_names, partition=partition, root=root, **kwargs)

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.root {self.root}, with a folder per client,", "put all images into one client's folder"

    @override
    def build_datasets(self) -> Parts:
        return self.decoded_parts(self.numbered())

    @override
    def read(self) -> Columns:
        """List the images in an order independent of the file system."""
        root = Path(self.root)
        if not root.is_dir():
            raise ConfigError(f"{root} is not a folder; set data.root to the folder that holds one folder per client")
        clients = _folders(root) if self.names_clients else [root]
        if not clients:
            raise ConfigError(f"{root} holds no client folders; put images in {root}/<client>/<class>/")
        layouts = {client.name: _is_split(client) for client in clients}
        if len(set(layouts.values())) > 1:
            odd = min(layouts, key=lambda name: layouts[name])
            raise ConfigError(f"{root / odd} has no train and test folders, and others have; use one layout for all")
        is_split = next(iter(layouts.values()))
        found: dict[str, list[tuple[str, str, int]]] = {"train": [], "test": []}
        names = set[str]()
        left_out = _files(root) if self.names_clients else []
        for owner, client in enumerate(clients):
            left_out += _files(client)
            before = sum(map(len, found.values()))
            for part, folder in [(part, client / part) for part in found] if is_split else [("train", client)]:
                if not folder.is_dir():
                    continue
                left_out += _files(folder) if is_split else []
                for class_folder in _folders(folder):
                    images, others = _class_images(class_folder)
                    found[part] += [(str(image), class_folder.name, owner) for image in images]
                    left_out += others
                    names.add(class_folder.name)
            if sum(map(len, found.values())) == before and len(clients) > 1:
                raise ConfigError(
                    f"{client} holds no images in class folders; add {_WANTED} files, or remove the folder"
                )
        if not (count := sum(map(len, found.values()))):
            raise ConfigError(f"{root} holds no images; put {_WANTED} files in {root}/<client>/<class>/")
        there = sorted({name for part in found.values() for _, name, _ in part})
        if lost := names.difference(there):
            raise ConfigError(f"{root}: every folder of class {min(lost)} is empty; add images, or remove the folders")
        remark_left_out(root, left_out, count, IMAGES)
        if strange := set(there).difference(self._names_given or there):
            raise ConfigError(f"{root} has a class folder {min(strange)}, which data.class_names does not name; add it")
        owners = [client.name for client in clients if self.names_clients]
        train, test = (_columns(part, there, owners, root) for part in found.values())
        return replace(train, test=test) if is_split else train


class ClassFolders(ClientFolders):
    """Images without clients in ``<root>/<class>/*.png``, or split in ``<root>/{train,test}/<class>/*.png``.

    A `partition` cuts them into clients, by default `IID`. All else is as in `ClientFolders`.
    """

    names_clients = False


def _columns(images: list[tuple[str, str, int]], classes: list[str], clients: list[str], root: Path) -> Columns:
    """Images, each with its class and the position of its client."""
    paths, labels, owners = ([image[place] for image in images] for place in range(3))
    y, named = Categorical(classes, numbered(labels, classes)), Categorical(clients, np.array(owners, dtype=np.int64))
    return Columns(np.array(paths, dtype=object), y, named if clients else None, source=str(root))


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
