"""Any data set in one NumPy archive."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.partitions.csr import held_out
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.in_memory import Arrays, ImageDataModule, channels_first
from lit_fed.data.population.scale import BYTES, common_scale, on_scale, scale_of
from lit_fed.data.population.targets import count_classes
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 10_000_000
_MOST_COLOURS = 4


class ArrayFile(ImageDataModule):
    """One ``.npz`` file with ``x_train y_train x_test y_test`` and, where clients are natural, ``client_*``.

    Inputs are images, N×H×W or N×H×W×C, windows N×C×L or feature vectors N×F; three-dimensional arrays are images where
    one of them holds bytes, and windows where they hold floating-point numbers. Labels are integers from 0;
    floating-point ``y_*`` of shape N or N×K are the targets of a regression and used as they are. ``client_train`` and
    ``client_test`` are any integers, and clients are numbered in their order. Nothing pickled is ever read. Bytes are
    scaled to [0, 1]; floating-point values are used as they are, and must be in [0, 1] where the other array holds
    bytes.

    Args:
        path: The file; none given means ``<root>/<name>.npz``.
        name: The file's name without ending, in `root`.
        test_fraction: Join the file's training and test samples and hold out this share of every client's to test on
            (of every class's where the file names no clients); none given keeps the file's split.
        num_classes: The number of classes; none given means the largest training label + 1, and no classes where
            ``y_train`` holds floating-point numbers.
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none. Images only.
        horizontal_flip: Train on randomly mirrored images.
        image_size: Scale images to this many pixels a side; none given keeps their size.
        mean: Per channel, subtracted after scaling; goes with `std`.
        std: Per channel, divided by.
        max_value: What stands for 1 in all stored values; none given means 255 for bytes and 1 for other numbers.
        partition: How clients come about; none given means the file's own, `Natural`, where it has ``client_train``, or
            else `IID`.
        kwargs: The population's other settings, see `FederatedDataModule`.

    Raises:
        ConfigError: The file is missing or damaged, or its arrays do not fit together.
    """

    def __init__(
        self,
        path: str | None = None,
        name: str | None = None,
        test_fraction: float | None = None,
        num_classes: int | None = None,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        max_value: float | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            image_size=image_size,
            mean=mean,
            std=std,
            max_value=1.0 if max_value is None else max_value,
            partition=partition,
            **kwargs,
        )
        if (path is None) == (name is None):
            raise ConfigError(
                "ArrayFile needs either data.path, the .npz file, or data.name, a file's name in data.root"
            )
        self._path = Path(path) if path is not None else Path(self.root) / f"{name}.npz"
        if partition is None and self._path.is_file() and "client_train" in self._members():
            self.partition = Natural()
        if test_fraction is not None and not 0 < test_fraction < 1:
            raise ConfigError(f"data.test_fraction is {test_fraction}: it must be above 0 and below 1, or null")
        self.test_fraction = test_fraction
        self._max_value_given, self._mean_given = max_value, mean is not None
        if num_classes is not None and not 1 <= num_classes <= _MOST_CLASSES:
            raise ConfigError(f"data.num_classes is {num_classes}: it must be 1 to {_MOST_CLASSES}")
        self._num_classes = num_classes
        self._headers: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._wants_images = crop_padding > 0 or horizontal_flip or image_size is not None

    @property
    def num_classes(self) -> int | None:
        """The number of classes, from the setting or the file's training labels; None for a regression."""
        if self._num_classes is None:
            if self._header("y_train")[1].kind == "f":
                return None
            labels = self._read("y_train")["y_train"]
            self._num_classes = count_classes(labels, str(self._path)) if labels.dtype.kind in "iu" else 1
        return self._num_classes

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(num_classes,), or the shape of one target, from the file's header alone."""
        return self._header("y_train")[0][1:] if self.num_classes is None else (self.num_classes,)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one input, from the file's header alone."""
        shape, _ = self._header("x_train")
        if len(shape) == 4:
            if shape[1] in (1, 3) and min(shape[2:]) > _MOST_COLOURS:
                raise ConfigError(
                    f"{self._path}: x_train has shape {shape}, which are images of {shape[1]}×{shape[2]} pixels and "
                    f"{shape[3]} channels: store N×H×W×C, such as x.transpose(0, 2, 3, 1)"
                )
            return (shape[3], shape[1], shape[2])
        if len(shape) == 3 and BYTES in self._types():
            return (1, *shape[1:])
        if len(shape) in (2, 3):
            return shape[1:]
        raise ConfigError(
            f"{self._path}: x_train has shape {shape}; it must be N×H×W or N×H×W×C (images), N×C×L (windows) or N×F"
        )

    def own_clients(self) -> int | None:
        """How many clients ``client_train`` names, and ``client_test`` where the two are joined."""
        keys = ["client_train"] if self.test_fraction is None else ["client_train", "client_test"]
        if not set(keys) <= set(self._members()):
            return None
        return len(np.unique(np.concatenate(list(self._read(*keys).values()))))

    def own_clients_are(self) -> tuple[str, str]:
        """See `FederatedDataModule.own_clients_are`."""
        return f"client_train of {self._path}", "leave it out of the file"

    def load_arrays(self) -> Arrays:
        """See `TensorDataModule.load_arrays`."""
        shape = self.stored_shape
        if self._wants_images and len(shape) != 3:
            raise ConfigError(
                f"{self._path} holds no images (one input has shape {shape}): "
                "data.crop_padding, data.horizontal_flip and data.image_size do not apply"
            )
        clients = [key for key in ("client_train", "client_test") if key in self._members()]
        arrays = self._read(*_KEYS, *clients)
        for key in ("x_train", "x_test"):
            if arrays[key].dtype.kind not in "uif" or arrays[key].dtype == np.uint16:
                raise ConfigError(f"{self._path}: {key} holds {arrays[key].dtype}; it must be uint8 or floating point")
            if arrays[key].shape[1:] != arrays["x_train"].shape[1:]:
                raise ConfigError(f"{self._path}: inputs of x_test and x_train differ in shape: they must match")
        for split in ("train", "test"):
            key = f"client_{split}"
            if key in arrays and arrays[key].shape != arrays[f"y_{split}"].shape[:1]:
                raise ConfigError(f"{self._path}: {key} and y_{split} differ in length: give one client per sample")
            if key in arrays and arrays[key].dtype.kind not in "iuSU":
                raise ConfigError(f"{self._path}: {key} holds {arrays[key].dtype}: give integers")
        scales = {
            f"{self._path}: {key}": scale_of(
                arrays[key], f"{self._path}: {key}", len(shape) == 3, self._max_value_given, self._mean_given
            )
            for key in ("x_train", "x_test")
        }
        arrays |= {key: on_scale(arrays[key], common_scale(scales)) for key in ("x_train", "x_test")}
        if self.test_fraction is not None:
            arrays = self._split_anew(arrays)
        ranks = _ranks(arrays.get("client_train"), arrays.get("client_test"))
        x_train, x_test = (
            channels_first(arrays[key]) if len(shape) == 3 else arrays[key] for key in ("x_train", "x_test")
        )
        return Arrays(x_train, arrays["y_train"], x_test, arrays["y_test"], *ranks, source=str(self._path))

    def _split_anew(self, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Join both splits, and hold out the same share of every client, or of every class where there are any."""
        if ("client_train" in arrays) != ("client_test" in arrays):
            raise ConfigError(
                f"{self._path} names clients for one split only: data.test_fraction needs client_train and client_test"
            )
        kinds = [key.removesuffix("_train") for key in arrays if key.endswith("_train")]
        joined = {kind: np.concatenate([arrays[f"{kind}_train"], arrays[f"{kind}_test"]]) for kind in kinds}
        together = joined["y"] if self.num_classes is not None else np.zeros(len(joined["y"]))  # one group of all
        _, groups = np.unique(joined.get("client", together), return_inverse=True)
        generator = numpy_generator(self.seed, "array-file", "test")
        test = held_out(groups, int(groups.max()) + 1, self.test_fraction or 0.0, generator)
        chosen = {"train": ~test, "test": test}
        return {f"{kind}_{split}": joined[kind][at] for kind in kinds for split, at in chosen.items()}

    @property
    def max_value(self) -> float:
        """What stands for 1: the setting, or 255 where all inputs are bytes, and 1 else."""
        if self._max_value_given is not None:
            return self._max_value_given
        return 255.0 if self._types() == {BYTES} else 1.0

    def _types(self) -> set[np.dtype[Any]]:
        """The types of training and test inputs, where there are some."""
        headers = [self._header(key) for key in ("x_train", "x_test")]
        return {dtype for shape, dtype in headers if shape and shape[0]}

    def _header(self, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of an array, without reading the values."""
        if key not in self._headers:
            self._members()
            try:
                with zipfile.ZipFile(self._path) as archive, archive.open(f"{key}.npy") as member:
                    self._headers[key] = _npy_header(member)
            except (KeyError, ValueError, zipfile.BadZipFile) as error:
                raise ConfigError(f"{self._path}: {key} cannot be read ({error}): write the file anew") from error
        return self._headers[key]

    def _members(self) -> list[str]:
        """The keys of the file, after checking that it can be used."""
        if not self._path.is_file():
            raise ConfigError(
                f"{self._path} does not exist: set data.path, or data.root and data.name, to an .npz file with the "
                f"keys {', '.join(_KEYS)}"
            )
        try:
            with zipfile.ZipFile(self._path) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
        except zipfile.BadZipFile as error:
            raise ConfigError(f"{self._path} is no .npz file ({error}): write it with numpy.savez") from error
        missing = [key for key in _KEYS if key not in keys]
        if missing:
            raise ConfigError(f"{self._path} lacks {', '.join(missing)}; it has {', '.join(keys) or 'nothing'}")
        return keys

    def _read(self, *keys: str) -> dict[str, NDArray[Any]]:
        self._members()
        try:
            with np.load(self._path, allow_pickle=False) as archive:
                return {key: archive[key] for key in keys}
        except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{self._path} cannot be read ({reason}): save plain number arrays with numpy.savez"
            ) from error


def _npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    return tuple(shape), dtype


def _ranks(
    train: NDArray[Any] | None, test: NDArray[Any] | None
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Number the clients from 0 in the order of their ids; test samples of other clients get −1."""
    if train is None:
        return None, None
    ids, ranks = np.unique(train, return_inverse=True)
    if test is None:
        return ranks.astype(np.int64), None
    found = np.searchsorted(ids, test).clip(max=len(ids) - 1)
    return ranks.astype(np.int64), np.where(ids[found] == test, found, -1).astype(np.int64)
