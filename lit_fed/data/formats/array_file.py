"""A data set in one NumPy archive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import held_out
from lit_fed.data.partitions.cut import Part, Parts, joined
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.archive import Archive, check_inputs
from lit_fed.data.population.census import BYTES, Scale, common_scale, on_scale, scale_of
from lit_fed.data.population.in_memory import ImageDataModule, channels_first
from lit_fed.data.population.naming import client_ranks
from lit_fed.data.population.targets import count_classes
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 10_000_000
_MOST_COLOURS = 4


class ArrayFile(ImageDataModule):
    """One ``.npz`` file with ``x_train y_train x_test y_test`` and, for natural clients, ``client_train client_test``.

    Inputs are images, N×H×W or N×H×W×C, windows N×C×L or feature vectors N×F; three-dimensional arrays are images if
    one of them holds bytes, else windows. Labels are integers from 0; floating-point ``y_*`` of shape N or N×K are the
    targets of a regression. ``client_train`` and ``client_test`` are any integers, and clients are numbered in their
    order. Nothing is unpickled. Bytes are scaled to [0, 1]; floating-point values are not, and must be in [0, 1] beside
    an array of bytes.

    Args:
        path: The file; null for ``<root>/<name>.npz``.
        name: The file's name in `root`, without ending.
        test_fraction: Join training and test samples and hold out this share of every client's (of every class's
            without clients) to test on; null keeps the file's split.
        num_classes: Number of classes; null for the largest training label + 1, or a regression if ``y_train`` holds
            floating-point numbers.
        max_value: Stored value that stands for 1; null for 255 of bytes and 1 of other numbers.
        partition: Cuts the samples into clients; null for the file's own, `Natural`, if it has ``client_train``, else
            `IID`.
        kwargs: The other settings of `ImageDataModule`, and the population's, see `FederatedDataModule`.

    Raises:
        ConfigError: The file is missing or damaged, or its arrays do not fit together.
    """

    def __init__(
        self,
        path: str | None = None,
        name: str | None = None,
        test_fraction: float | None = None,
        num_classes: int | None = None,
        max_value: float | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_value=1.0 if max_value is None else max_value, partition=partition, **kwargs)
        if (path is None) == (name is None):
            raise ConfigError(
                "ArrayFile needs either data.path, the .npz file, or data.name, a file's name in data.root"
            )
        check_range("data.test_fraction", test_fraction, above=0, below=1, null="for the file's split")
        check_range("data.num_classes", num_classes, least=1, most=_MOST_CLASSES, null="for the file's")
        self._path = Path(path) if path is not None else Path(self.root) / f"{name}.npz"
        advice = f"set data.path, or data.root and data.name, to an .npz file with the keys {', '.join(_KEYS)}"
        self._archive = Archive(self._path, _KEYS, advice)
        if partition is None and self._path.is_file() and "client_train" in self._archive.keys:
            self.partition = Natural()
        self.test_fraction = test_fraction
        self._max_value_given, self._num_classes = max_value, num_classes
        self._num_classes_given = num_classes

    @override
    def pooled(self) -> str | None:
        if self._num_classes_given is None and self.num_classes is not None:
            return "data.num_classes is counted over all clients' labels; give it"
        return None

    @property
    @override
    def num_classes(self) -> int | None:
        if self._num_classes is None:
            if self._archive.header("y_train")[1].kind == "f":
                return None
            labels = self._archive.read("y_train")["y_train"]
            self._num_classes = count_classes(labels, str(self._path)) if labels.dtype.kind in "iu" else 1
        return self._num_classes

    @property
    @override
    def output_shape(self) -> tuple[int, ...]:
        """(num_classes,), or the shape of one target, from the file's header alone."""
        return self._archive.header("y_train")[0][1:] if self.num_classes is None else (self.num_classes,)

    @property
    @override
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one input, from the file's header alone."""
        shape, _ = self._archive.header("x_train")
        if len(shape) == 4:
            if shape[1] in (1, 3) and min(shape[2:]) > _MOST_COLOURS:
                raise ConfigError(
                    f"{self._path}: x_train has shape {shape}, images of {shape[1]}×{shape[2]} pixels and {shape[3]} "
                    "channels; store N×H×W×C, such as x.transpose(0, 2, 3, 1)"
                )
            return (shape[3], shape[1], shape[2])
        if len(shape) == 3 and BYTES in self._types():
            return (1, *shape[1:])
        if len(shape) in (2, 3):
            return shape[1:]
        raise ConfigError(
            f"{self._path}: x_train has shape {shape}; it must be N×H×W or N×H×W×C (images), N×C×L (windows) or N×F"
        )

    @override
    def own_clients(self) -> int | None:
        """Clients in ``client_train``, and in ``client_test`` if `test_fraction` joins the two."""
        keys = ["client_train"] if self.test_fraction is None else ["client_train", "client_test"]
        if not set(keys) <= set(self._archive.keys):
            return None
        return len(np.unique(np.concatenate(list(self._archive.read(*keys).values()))))

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"client_train of {self._path}", "leave client_train out of the file"

    @override
    def load_arrays(self) -> Parts:
        shape = self.stored_shape
        if len(shape) != 3 and (self._augmentation is not None or self._resize is not None):
            raise ConfigError(
                f"{self._path} holds no images (one input has shape {shape}); leave out data.crop_padding, "
                "data.horizontal_flip and data.image_size"
            )
        clients = [key for key in ("client_train", "client_test") if key in self._archive.keys]
        arrays = self._archive.read(*_KEYS, *clients)
        for key in ("x_train", "x_test"):
            check_inputs(arrays[key], f"{self._path}: {key}")
            if arrays[key].shape[1:] != arrays["x_train"].shape[1:]:
                raise ConfigError(f"{self._path}: inputs of x_test and x_train differ in shape; they must match")
        for split in ("train", "test"):
            key = f"client_{split}"
            if key in arrays and arrays[key].shape != arrays[f"y_{split}"].shape[:1]:
                raise ConfigError(f"{self._path}: {key} and y_{split} differ in length; give one client per sample")
            if key in arrays and arrays[key].dtype.kind not in "iuSU":
                raise ConfigError(f"{self._path}: {key} holds {arrays[key].dtype}; it must hold integers")
        scales = dict[str, Scale]()
        for key in ("x_train", "x_test"):
            what = f"{self._path}: {key}"
            scales |= scale_of(arrays[key], what, len(shape) == 3, self._max_value_given, self._mean_given)
        arrays |= {key: on_scale(arrays[key], common_scale(scales)) for key in ("x_train", "x_test")}
        train, test = (
            Part(channels_first(x) if len(shape) == 3 else x, arrays[f"y_{split}"], arrays.get(f"client_{split}"))
            for split, x in (("train", arrays["x_train"]), ("test", arrays["x_test"]))
        )
        if self.test_fraction is not None:
            train, test = self._split_anew(train, test)
        ranks = client_ranks(train.clients, test.clients)
        return Parts(replace(train, clients=ranks[0]), replace(test, clients=ranks[1]), source=str(self._path))

    def _split_anew(self, train: Part, test: Part) -> tuple[Part, Part]:
        """Join both splits, and hold out the same share of every client, or of every class without clients."""
        if (train.clients is None) != (test.clients is None):
            raise ConfigError(
                f"{self._path} names clients for one split only; data.test_fraction needs client_train and client_test"
            )
        whole = joined([train, test])
        together = np.zeros(len(whole)) if self.num_classes is None else np.asarray(whole.y)  # one group of all
        _, groups = np.unique(together if whole.clients is None else whole.clients, return_inverse=True)
        seed = derive_seed(self.seed, "array-file", "test")
        chosen = held_out(groups, int(groups.max()) + 1, self.test_fraction or 0.0, seed)
        return whole.take(~chosen), whole.take(chosen)

    @property
    @override
    def max_value(self) -> float:
        """The setting, or 255 if all inputs are bytes, else 1."""
        if self._max_value_given is not None:
            return self._max_value_given
        return 255.0 if self._types() == {BYTES} else 1.0

    def _types(self) -> set[np.dtype[Any]]:
        """The dtypes of training and test inputs that are not empty."""
        headers = [self._archive.header(key) for key in ("x_train", "x_test")]
        return {dtype for shape, dtype in headers if shape and shape[0]}
