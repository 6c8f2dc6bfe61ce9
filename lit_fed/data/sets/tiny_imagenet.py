"""Tiny-ImageNet in its published folders."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.population.dataset_module import DecodedImages
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError

_NAME = "tiny-imagenet-200"


class TinyImageNet(DecodedImages):
    """Tiny-ImageNet: 100,000 training and 10,000 test photographs, 64×64 RGB, 200 classes.

    Files as published: ``<root>/tiny-imagenet-200/`` with ``wnids.txt`` (the classes, in this order), ``words.txt``
    (their names), ``train/<wnid>/images/*.JPEG``, ``val/images/*.JPEG`` and ``val/val_annotations.txt``. ``val`` is the
    test set, as usual: the published test images have no labels. `num_workers` processes decode images on demand.

    Le, Yang: "Tiny ImageNet Visual Recognition Challenge", CS231N, 2015.

    Args:
        image_size: Pixels per side to resize images to.
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        mean: Per channel, of pixels scaled to [0, 1]; ImageNet's by default.
        std: Per channel.
        normalize: File of ``lit-fed statistics``, whose figures take the place of `mean` and `std`.
        kwargs: The population's settings, see `FederatedDataModule`, and `num_workers`, see `DatasetModule`.

    Raises:
        ConfigError: Files are missing, or an annotation names an unknown class.
    """

    def __init__(
        self,
        image_size: int = 64,
        crop_padding: int = 8,
        horizontal_flip: bool = True,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        normalize: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            image_size=image_size,
            grayscale=False,
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            mean=mean if normalize is None else None,
            std=std if normalize is None else None,
            normalize=normalize,
            **kwargs,
        )

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return Path(self.root) / _NAME

    @property
    @override
    def num_classes(self) -> int:
        return len(self._wnids)

    @property
    @override
    def class_names(self) -> list[str]:
        """The first word of words.txt for each class, or its WordNet number."""
        words = self.folder / "words.txt"
        lines = words.read_text("utf-8").splitlines() if words.is_file() else []
        names = {number: name.split(",")[0] for number, _, name in (line.partition("\t") for line in lines)}
        return [names.get(wnid, wnid) for wnid in self._wnids]

    @override
    def build_datasets(self) -> Parts:
        number = {wnid: label for label, wnid in enumerate(self._wnids)}
        train: list[tuple[str, int]] = []
        left_out: list[Path] = []
        for wnid, label in number.items():
            folder = self.folder / "train" / wnid / "images"
            images = sorted(str(file) for file in folder.glob("*.JPEG"))
            if not images:
                raise ConfigError(f"{folder} holds no .JPEG files; {self._advice}")
            train += [(file, label) for file in images]
            left_out += sorted(file for file in folder.iterdir() if file.suffix != ".JPEG" and not is_hidden(file))
        remark_left_out(self.folder / "train", left_out, len(train), [".JPEG"])
        test: list[tuple[str, int]] = []
        for line in self._lines("val/val_annotations.txt"):
            name, wnid = [*line.split("\t"), ""][:2]
            if wnid not in number:
                raise ConfigError(
                    f"{self.folder / 'val' / 'val_annotations.txt'} names {wnid!r} for {name}, which is not in "
                    f"wnids.txt; {self._advice}"
                )
            test.append((str(self.folder / "val" / "images" / name), number[wnid]))
        parts = [Part(*map(np.array, zip(*part, strict=True))) for part in (train, test)]
        return self.decoded_parts(Parts(parts[0], parts[1], source=str(self.folder)))

    @cached_property
    def _wnids(self) -> list[str]:
        return self._lines("wnids.txt")

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; {self._advice}")
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        if not lines:
            raise ConfigError(f"{path} is empty; {self._advice}")
        return lines

    @property
    def _advice(self) -> str:
        return f"TinyImageNet reads {_NAME} as published; set data.root to the folder that holds it"
