"""Tiny-ImageNet in the folders that it comes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_fed.data.loaders.image_files import ImageFiles, collate_images
from lit_fed.data.loaders.transforms import Normalize, Step
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.population.dataset_module import DatasetModule, Datasets
from lit_fed.data.population.in_memory import image_augmentation
from lit_fed.data.population.new_inputs import Images
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError

_NAME = "tiny-imagenet-200"


class TinyImageNet(DatasetModule):
    """Tiny-ImageNet: 100,000 training and 10,000 test photographs, 64×64 RGB, 200 classes.

    Files as published: ``<root>/tiny-imagenet-200/`` with ``wnids.txt`` (the classes, in this order), ``words.txt``
    (their names), ``train/<wnid>/images/*.JPEG``, ``val/images/*.JPEG`` and ``val/val_annotations.txt``. What is called
    ``val`` is tested on, as usual: the published test images have no labels. Images are decoded when they are asked
    for, by `num_workers` processes.

    Le, Yang: "Tiny ImageNet Visual Recognition Challenge", CS231N, 2015.

    Args:
        image_size: Images are resized to this many pixels a side.
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none.
        horizontal_flip: Train on randomly mirrored images.
        mean: Per channel, of pixels scaled to [0, 1]; ImageNet's by default.
        std: Per channel.
        kwargs: The population's settings, see `FederatedDataModule`, and `num_workers`, see `DatasetModule`.

    Raises:
        ConfigError: Files are missing, or an annotation names none of the classes.
    """

    def __init__(
        self,
        image_size: int = 64,
        crop_padding: int = 8,
        horizontal_flip: bool = True,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if image_size < 1:
            raise ConfigError(f"data.image_size is {image_size}: it must be at least 1 pixel")
        self._side = image_size
        self._augmentation = image_augmentation(crop_padding, horizontal_flip)
        self._normalize = Normalize(mean, std)
        self._classes: list[str] | None = None

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return Path(self.root) / _NAME

    @property
    def num_classes(self) -> int:
        """The classes of wnids.txt."""
        return len(self._wnids)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(3, image_size, image_size)."""
        return (3, self._side, self._side)

    @property
    def class_names(self) -> list[str]:
        """The first word of words.txt for each class, or its number there where it has none."""
        words = self.folder / "words.txt"
        lines = words.read_text("utf-8").splitlines() if words.is_file() else []
        names = {number: name.split(",")[0] for number, _, name in (line.partition("\t") for line in lines)}
        return [names.get(wnid, wnid) for wnid in self._wnids]

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

    def decode(self, paths: Sequence[Path]) -> Images:
        """See `DatasetModule.decode`."""
        return Images(paths, self._side, grayscale=False)

    def build_datasets(self) -> Datasets:
        """See `DatasetModule.build_datasets`."""
        number = {wnid: label for label, wnid in enumerate(self._wnids)}
        train: list[tuple[str, int]] = []
        left_out: list[Path] = []
        for wnid, label in number.items():
            folder = self.folder / "train" / wnid / "images"
            found = sorted(str(file) for file in folder.glob("*.JPEG"))
            if not found:
                raise ConfigError(f"{folder} holds no .JPEG files: {self._advice}")
            train += [(file, label) for file in found]
            left_out += sorted(file for file in folder.iterdir() if file.suffix != ".JPEG" and not is_hidden(file))
        remark_left_out(self.folder / "train", left_out, len(train), [".JPEG"])
        test: list[tuple[str, int]] = []
        for line in self._lines("val/val_annotations.txt"):
            name, wnid = [*line.split("\t"), ""][:2]
            if wnid not in number:
                raise ConfigError(
                    f"{self.folder / 'val' / 'val_annotations.txt'} names {wnid!r} for {name}, which is not in "
                    f"wnids.txt: {self._advice}"
                )
            test.append((str(self.folder / "val" / "images" / name), number[wnid]))
        labels: list[IntArray] = [np.array([label for _, label in part], dtype=np.int64) for part in (train, test)]
        augmented, plain, tested = (
            ImageFiles([path for path, _ in part], [label for _, label in part], self._side, False, random)
            for part, random in ((train, self._augmentation), (train, None), (test, None))
        )
        return Datasets(augmented, labels[0], tested, labels[1], plain, source=str(self.folder))

    @property
    def _wnids(self) -> list[str]:
        if self._classes is None:
            self._classes = self._lines("wnids.txt")
        return self._classes

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: {self._advice}")
        found = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        if not found:
            raise ConfigError(f"{path} is empty: {self._advice}")
        return found

    @property
    def _advice(self) -> str:
        return f"TinyImageNet reads {_NAME} as it is published, so set data.root to the folder that it is in"
