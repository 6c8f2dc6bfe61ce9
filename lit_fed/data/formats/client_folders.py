"""Your own images: a folder per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_fed.data.loaders.image_files import ImageFiles, collate_images
from lit_fed.data.loaders.transforms import Normalize, Step
from lit_fed.data.partitions.csr import IntArray, held_out
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.dataset_module import DatasetModule, Datasets
from lit_fed.data.population.in_memory import image_augmentation
from lit_fed.data.population.new_inputs import IMAGES, Images, split_images
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator

_WANTED = ", ".join(IMAGES)


class _Scan(NamedTuple):
    """What lies in the folders."""

    clients: list[str]
    classes: list[str]
    paths: list[str]
    labels: IntArray
    owners: IntArray
    is_test: IntArray | None


class ClientFolders(DatasetModule):
    """Images in ``<root>/<client>/<class>/*.png``, or split in ``<root>/<client>/{train,test}/<class>/*.png``.

    Clients and classes are numbered in the alphabetical order of their folders; the classes of all clients together
    are the classes. Images are decoded (`read_image`) and resized by the workers, normalised on the device. Files of
    other types, and files that lie elsewhere, are said to be left out; hidden ones, such as ``.DS_Store``, are not.

    Args:
        root: The folder that holds the clients' folders.
        partition: How clients come about; none given means the folders, `Natural`.
        test_fraction: Share of each client's images to test on, where the folders do not say.
        image_size: Images are resized to this many pixels a side.
        grayscale: Decode to one channel and not to three.
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none.
        horizontal_flip: Train on randomly mirrored images.
        mean: Per channel, of pixels scaled to [0, 1].
        std: Per channel.
        kwargs: The population's settings, see `FederatedDataModule`, and `num_workers`, see `DatasetModule`.

    Raises:
        ConfigError: There are no such folders, or one of a client or a class has no images.
    """

    def __init__(
        self,
        root: str = "data",
        partition: Partition | None = None,
        test_fraction: float = 0.2,
        image_size: int = 32,
        grayscale: bool = False,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root=root, partition=Natural() if partition is None else partition, **kwargs)
        if not 0 < test_fraction < 1:
            raise ConfigError(f"data.test_fraction is {test_fraction}: it must be above 0 and below 1")
        if image_size < 1:
            raise ConfigError(f"data.image_size is {image_size}: it must be at least 1 pixel")
        if (mean is None) != (std is None):
            raise ConfigError("data.mean and data.std belong together: give both or neither")
        self.test_fraction, self.grayscale = test_fraction, grayscale
        self._side = image_size
        self._augmentation = image_augmentation(crop_padding, horizontal_flip)
        self._normalize = Normalize(mean or (0.0,), std or (1.0,))
        if self._normalize.num_channels not in (1, self.input_shape[0]):
            raise ConfigError(f"data.mean has {self._normalize.num_channels} values: give one, or one per channel")
        self._scan_result: _Scan | None = None

    @property
    def num_classes(self) -> int:
        """The number of different class folders."""
        return len(self._scan.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(channels, image_size, image_size)."""
        return (1 if self.grayscale else 3, self._side, self._side)

    def own_clients(self) -> int:
        """The number of client folders."""
        return len(self._scan.clients)

    def own_client_names(self) -> list[str]:
        """The names of the client folders."""
        return self._scan.clients

    def own_clients_are(self) -> tuple[str, str]:
        """See `FederatedDataModule.own_clients_are`."""
        return f"data.root {self.root}, a folder with a folder a client,", "put all images into one client's folder"

    @property
    def class_names(self) -> list[str]:
        """The names of the class folders."""
        return self._scan.classes

    def collate(self, training: bool) -> Callable[[list[Any]], Any]:
        """See `DatasetModule.collate`: images of 8 bits and of more may be in a batch."""
        del training
        return collate_images

    def finish_batch(self, inputs: Any) -> Any:
        """Normalise."""
        return self._normalize(inputs)

    def preprocessing(self) -> list[Step]:
        """Normalising; stored inputs are the images that the workers have decoded and resized."""
        return self._normalize.steps

    def stored_like(self) -> tuple[tuple[int, ...], str]:
        """Those images, as bytes; of deeper ones read from files, values between bytes are kept."""
        return self.input_shape, "uint8"

    def build_datasets(self) -> Datasets:
        """See `DatasetModule.build_datasets`."""
        scan = self._scan
        is_test = self._draw_test(scan) if scan.is_test is None else scan.is_test.astype(bool)
        parts = {}
        for name, chosen, augmentation in (
            ("train", ~is_test, self._augmentation),
            ("plain", ~is_test, None),
            ("test", is_test, None),
        ):
            positions = np.flatnonzero(chosen).tolist()
            paths, labels = [scan.paths[i] for i in positions], scan.labels[chosen].tolist()
            parts[name] = ImageFiles(paths, labels, self._side, self.grayscale, augmentation)
        for name, chosen, remedy in (
            ("training", ~is_test, "lower data.test_fraction"),
            ("test", is_test, "raise data.test_fraction"),
        ):
            if not chosen.any():
                raise ConfigError(f"{self.root} has no {name} images: add some or {remedy}")
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

    def decode(self, paths: Sequence[Path]) -> Images:
        """See `DatasetModule.decode`."""
        return Images(paths, self._side, self.grayscale)

    @property
    def _scan(self) -> _Scan:
        if self._scan_result is None:
            self._scan_result = _scan(Path(self.root))
        return self._scan_result

    def _draw_test(self, scan: _Scan) -> Any:
        generator = numpy_generator(self.seed, "client-folders", "test")
        return held_out(scan.owners, len(scan.clients), self.test_fraction, generator)


def _scan(root: Path) -> _Scan:
    """List the images, in an order that does not depend on the file system."""
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder: set data.root to the folder that holds one folder per client")
    clients = _folders(root)
    if not clients:
        raise ConfigError(f"{root} holds no client folders: put images in {root}/<client>/<class>/")
    layouts = {client.name: _is_split(client) for client in clients}
    if len(set(layouts.values())) > 1:
        odd = min(layouts, key=lambda name: layouts[name])
        raise ConfigError(f"{root / odd} has no train and test folders while others have: use one layout for all")
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
            raise ConfigError(f"{client} holds no images in class folders: add {_WANTED} files, or remove the folder")
    if not found:
        raise ConfigError(f"{root} holds no images: put {_WANTED} files in {root}/<client>/<class>/")
    if lost := names - {name for _, _, name, _ in found}:
        raise ConfigError(f"{root}: every folder of class {min(lost)} is empty: add images, or remove the folders")
    remark_left_out(root, left_out, len(found), IMAGES)
    classes = sorted({name for _, _, name, _ in found})
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
    """Files that lie where folders belong."""
    return sorted(path for path in folder.iterdir() if not path.is_dir() and not is_hidden(path))


def _class_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images of a client's class, and what else lies in its folder.

    Raises:
        ConfigError: There is something, and nothing of it is an image.
    """
    images, others = split_images(folder.iterdir())
    others += [file for inner in _folders(folder) for file in inner.rglob("*") if not file.is_dir()]
    if others and not images:
        raise ConfigError(
            f"{folder} holds {len(others)} files, such as {others[0].relative_to(folder)}, and no images: put "
            f"{_WANTED} files there, or remove the folder"
        )
    return images, others


def _is_split(client: Path) -> bool:
    """Whether a client's folder has a training and a test part.

    Raises:
        ConfigError: It has these, and more.
    """
    names = {path.name for path in _folders(client)}
    if names > {"train", "test"}:
        more = min(names - {"train", "test"})
        raise ConfigError(f"{client} has a folder {more} beside train and test: move its images there, or remove it")
    return bool(names) and names <= {"train", "test"}
