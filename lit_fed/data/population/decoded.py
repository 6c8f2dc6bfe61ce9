"""Images in files, decoded by the workers of a `DatasetModule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.image_files import ImageFiles, collate_images
from lit_fed.data.loaders.transforms import Normalize, Step
from lit_fed.data.population.dataset_module import DatasetModule
from lit_fed.data.population.in_memory import image_augmentation
from lit_fed.errors import ConfigError


class DecodedImages(DatasetModule):
    """Image files of any size and type (`read_image`), resized by the workers and normalised on the device.

    Args:
        image_size: Pixels per side to resize images to.
        grayscale: Decode to one channel instead of three.
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        mean: Per channel, of pixels scaled to [0, 1].
        std: Per channel.
        kwargs: The population's settings, see `FederatedDataModule`, and `num_workers`, see `DatasetModule`.
    """

    def __init__(
        self,
        image_size: int = 32,
        grayscale: bool = False,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("data.image_size", image_size, least=1)
        if (mean is None) != (std is None):
            raise ConfigError("data.mean and data.std belong together; give both or neither")
        self.grayscale = grayscale
        self._side = image_size
        self._augmentation = image_augmentation(crop_padding, horizontal_flip)
        self._normalize = Normalize(mean or (0.0,), std or (1.0,))
        if self._normalize.num_channels not in (1, self.input_shape[0]):
            raise ConfigError(f"data.mean has {self._normalize.num_channels} values; give one, or one per channel")

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """(channels, image_size, image_size)."""
        return (1 if self.grayscale else 3, self._side, self._side)

    @override
    def collate(self, training: bool) -> Callable[[list[Any]], Any]:
        """Images of 8 bits and of more may be in one batch."""
        del training
        return collate_images

    @override
    def finish_batch(self, inputs: Any) -> Any:
        return self._normalize(inputs)

    @override
    def preprocessing(self) -> list[Step]:
        """Normalising; stored inputs are the decoded and resized images."""
        return self._normalize.steps

    @override
    def stored_like(self) -> tuple[tuple[int, ...], str]:
        """Decoded images as bytes; of deeper images, values between bytes are kept."""
        return self.input_shape, "uint8"

    @override
    def decode(self, paths: Sequence[Path]) -> ImageFiles:
        return ImageFiles(paths, self._side, self.grayscale)

    def images(self, paths: Sequence[str], labels: Sequence[int], augmented: bool) -> ImageFiles:
        """Images in files with their labels, as a data set."""
        return ImageFiles(paths, self._side, self.grayscale, labels, self._augmentation if augmented else None)
