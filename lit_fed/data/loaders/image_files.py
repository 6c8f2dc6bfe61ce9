"""Images in files."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms.v2 import functional

from lit_fed.data.loaders.transforms import Augmentation
from lit_fed.errors import ConfigError

_WHITE = 255.0
_BITS_PER_SAMPLE, _PHOTOMETRIC, _ORIENTATION, _SAMPLE_FORMAT = 258, 262, 274, 339  # TIFF's tags
_SIGNED = 2  # as TIFF's sample format
_DARKEST_WHITE = 2**16  # of 32 bits: a smaller maximum fits 16 bits, and the image would be black


class ImageFiles(Dataset[Any]):
    """Images in files, decoded to (channels, side, side) as `read_image` does, alone or with their labels.

    Args:
        paths: The files.
        side: Pixels per side to resize them to.
        grayscale: Decode to one channel instead of three.
        labels: Their classes; None for none.
        augmentation: Random transform; None for none.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        side: int,
        grayscale: bool,
        labels: Sequence[int] | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._paths, self._side, self._grayscale = paths, side, grayscale
        self._labels, self._augmentation = labels, augmentation

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        image = torch.from_numpy(self.pixels(index)).permute(2, 0, 1)
        image = functional.resize(image, [self._side, self._side], antialias=True)
        if self._augmentation is not None:
            draws = self._augmentation.draw(1, torch.default_generator)  # seeded per sample
            image = self._augmentation.apply(image.unsqueeze(0), draws).squeeze(0)
        return image if self._labels is None else (image, self._labels[index])

    def pixels(self, index: int) -> NDArray[Any]:
        """An image as `read_image` returns it."""
        return read_image(self._paths[index], self._grayscale)

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Heights and widths (n, 2) of some files' images, from their headers."""
        return np.array([image_size(Path(self._paths[index]))[::-1] for index in indices.tolist()], dtype=np.int64)


def collate_images(samples: list[Any]) -> Any:
    """PyTorch's default batch of images x or pairs (x, y); bytes become float32 beside deeper images."""
    images = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    if len({image.dtype for image in images}) > 1:
        images = [image.float() for image in images]
        samples = [
            (image, *sample[1:]) if isinstance(sample, tuple) else image
            for image, sample in zip(images, samples, strict=True)
        ]
    return default_collate(samples)


def read_image(
    path: str | Path, grayscale: bool, remedy: str = "remove or replace it", content: bytes | None = None
) -> NDArray[Any]:
    """An image of any mode that Pillow reads, upright as its EXIF orientation says, scaled so that white is 255.

    Integers are scaled by their bits; floating-point values are in [0, 1]. An opaque alpha channel is dropped.

    Args:
        path: The file.
        grayscale: Decode to one channel instead of three.
        remedy: For errors, what to do with a file that cannot be decoded.
        content: The file's bytes; null reads `path`, which is otherwise for errors alone.

    Returns:
        Shape (height, width, channels): bytes, or float32 of an image of one channel with more than 8 bits. Of several
        channels, Pillow gives the upper 8 bits.
    """
    try:
        # From a stream: by its name, Pillow 13 maps a TIFF file that lies on its side into memory in the wrong shape.
        with open(path, "rb") if content is None else BytesIO(content) as stream, Image.open(stream) as file:
            frames = 1 if file.format == "MPO" else getattr(file, "n_frames", 1)  # a photograph and its previews
            if frames > 1:
                raise ConfigError(f"{path} holds {frames} pictures; save each as a separate file")
            if file.mode[0] in "IF":
                array = np.repeat(_deep(file, path)[..., None], 1 if grayscale else 3, axis=2)
            else:
                array = np.array(_opaque(file, path).convert("L" if grayscale else "RGB"))
                array = array[..., None] if grayscale else array
            return _upright(array, _orientation(file))
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # any error of Pillow's readers
        raise ConfigError(f"{path} cannot be decoded; {remedy}") from error


def read_photograph(path: str | Path, remedy: str = "remove or replace it") -> NDArray[np.uint8]:
    """An image of three channels in bytes (height, width, 3), see `read_image`."""
    image = read_image(path, grayscale=False, remedy=remedy)
    return image if image.dtype == np.uint8 else image.round().astype(np.uint8)


def image_size(path: Path) -> tuple[int, int]:
    """Width and height of an image as `read_image` returns it, from the file's header."""
    try:
        with open(path, "rb") as stream, Image.open(stream) as file:
            if file.format == "TIFF":
                file.load()  # Pillow applies a TIFF's orientation, some versions only now
            width, height = file.size
            return (height, width) if _orientation(file) in _SIDEWAYS else (width, height)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; put it there, or correct its name") from error
    except Exception as error:  # any error of Pillow's readers
        raise ConfigError(f"{path} cannot be decoded; remove or replace it") from error


_SIDEWAYS = (5, 6, 7, 8)


def _orientation(file: Image.Image) -> int:
    """EXIF's orientation that Pillow has not applied yet, 1 to 8; 1 without it, or with a damaged EXIF block."""
    try:
        return int(file.getexif().get(_ORIENTATION, 1))
    except Exception:  # a photograph with damaged EXIF data is shown as it is stored, as by other programs
        return 1


def _upright(image: NDArray[Any], orientation: int) -> NDArray[Any]:
    """A stored image (height, width, channels) as EXIF's orientation shows it."""
    if orientation in _SIDEWAYS:
        image = image.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


def _opaque(file: Image.Image, path: str | Path) -> Image.Image:
    """The image without its alpha channel."""
    if "transparency" not in file.info and file.mode not in ("LA", "PA", "RGBA", "RGBa"):
        return file
    image = file.convert("RGBA")
    if image.getchannel("A").getextrema() != (255, 255):
        raise _transparent(path)
    return image


def _transparent(path: str | Path) -> ConfigError:
    return ConfigError(f"{path} is transparent in places; save it on a background")


def _deep(file: Image.Image, path: str | Path) -> NDArray[np.float32]:
    """Grey values of more than 8 bits, white 255, shape (height, width)."""
    tags = getattr(file, "tag_v2", {})
    stored = np.asarray(file)
    if (key := file.info.get("transparency")) is not None and (stored == key).any():
        raise _transparent(path)
    if file.mode == "F":
        if not np.isfinite(stored).all() or stored.min() < 0 or stored.max() > 1:
            raise ConfigError(
                f"{path} holds floating-point values from {stored.min():g} to {stored.max():g}; scale them to 0 to 1"
            )
        values, white = stored.astype(np.float64), 1
    else:
        bits, signed = _depth(file, tags, path)
        if bits == 32 and not signed:
            stored = stored.view(np.uint32)  # Pillow has them as int32
        white = 2 ** (bits - signed) - 1
        low, high = int(stored.min()), int(stored.max())
        if low < 0:
            raise ConfigError(f"{path} holds values from {low} to {high}; save them from 0 on")
        if bits == 32 and 0 < high < _DARKEST_WHITE:
            raise ConfigError(f"{path} holds 32-bit integers up to {high} only; save it with 8 or 16 bits")
        values = stored.astype(np.float64)
    if tags.get(_PHOTOMETRIC) == 0:  # white is zero, which Pillow corrects up to 8 bits only
        values = white - values
    return (values * (_WHITE / white)).astype(np.float32)


def _depth(file: Image.Image, tags: Any, path: str | Path) -> tuple[int, bool]:
    """Bits of a whole number, and whether one bit is its sign."""
    if file.format == "TIFF":
        return int(tags[_BITS_PER_SAMPLE][0]), tags.get(_SAMPLE_FORMAT, (1,))[0] == _SIGNED
    if file.mode.startswith("I;16") or file.format in ("PNG", "PPM"):  # read as I, these are of 16 bits too
        return 16, False
    raise ConfigError(f"{path} is a {file.format} of unknown depth; save it as PNG with 8 or 16 bits")
