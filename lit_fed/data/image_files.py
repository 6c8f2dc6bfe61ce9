"""Images that lie in files of their own."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional

from lit_fed.data.transforms import Augmentation
from lit_fed.errors import ConfigError


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images in files, decoded to (channels, side, side) of bytes, with their labels.

    Args:
        paths: The files.
        labels: Their classes.
        side: Pixels a side, to which they are resized.
        grayscale: Decode to one channel and not to three.
        augmentation: A random transform of each.

    Raises:
        ConfigError: When a sample is asked for, if its file cannot be decoded.
    """

    def __init__(
        self, paths: list[str], labels: list[int], side: int, grayscale: bool, augmentation: Augmentation | None
    ) -> None:
        self._paths, self._labels, self._side, self._grayscale = paths, labels, side, grayscale
        self._augmentation = augmentation

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self._paths[index]
        try:
            with Image.open(path) as file:
                image = functional.pil_to_tensor(file.convert("L" if self._grayscale else "RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise ConfigError(f"{path} cannot be decoded: remove or replace it") from error
        image = functional.resize(image, [self._side, self._side], antialias=True)
        if self._augmentation is not None:
            draws = self._augmentation.draw(1, torch.default_generator)  # seeded for this very sample
            image = self._augmentation.apply(image.unsqueeze(0), draws).squeeze(0)
        return image, self._labels[index]
