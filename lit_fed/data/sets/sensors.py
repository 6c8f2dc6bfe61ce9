"""Windows of body-worn sensors in their published files: UCI-HAR, PAMAP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.transforms import Normalize
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts, joined
from lit_fed.data.population.in_memory import TensorDataModule
from lit_fed.data.population.naming import ranked
from lit_fed.errors import ConfigError, reason
from lit_fed.seeding import derive_seed

_GRAVITY = 9.81  # m/s²
_EARTHS_FIELD = 50.0  # µT, about


class UCIHAR(TensorDataModule):
    """UCI-HAR: 10,299 windows of a smartphone at the waist, 9 signals of 128 samples at 50 Hz, 30 people, 6 activities.

    Signals, in this order: body acceleration x y z in g, angular velocity x y z in rad/s, total acceleration x y z in
    g, unscaled. Files as published, ``<root>/UCI HAR Dataset/train/Inertial Signals/`` with ``body_acc_x_train.txt``
    and so on, ``y_train.txt`` and ``subject_train.txt`` beside that folder, the same for ``test``. People are the data
    set's own clients, in the order of their numbers.

    Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones", ESANN 2013.

    Args:
        test_fraction: Join both splits and hold out this share of each person's windows to test on; null keeps the
            published split of 21 people to train on and 9 others to test on.
        kwargs: The population's settings, see `FederatedDataModule`.

    Raises:
        ConfigError: Files are missing or damaged, or do not fit together.

    Note:
        Published windows overlap by half, so with `test_fraction` a person's test windows share samples with training
        windows, as in every random split of this data set.
    """

    num_classes = 6
    input_shape = (9, 128)
    class_names = [  # noqa: RUF012  # a property of the base, as num_classes is
        "walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying",
    ]  # fmt: skip
    signals = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")

    def __init__(self, test_fraction: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("data.test_fraction", test_fraction, above=0, below=1, null="for the published split")
        self.test_fraction = test_fraction

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return Path(self.root) / "UCI HAR Dataset"

    @override
    def own_clients(self) -> int:
        """The people with training windows."""
        splits = ("train",) if self.test_fraction is None else ("train", "test")
        return len(np.unique(np.concatenate([self._subjects(split) for split in splits])))

    @override
    def load_arrays(self) -> Parts:
        train, test = self._read("train"), self._read("test")
        if self.test_fraction is not None:
            whole, seed = joined([train, test]), derive_seed(self.seed, "uci-har", "test")
            train, test = whole.hold_out(np.asarray(whole.clients), self.test_fraction, seed)
        return _of_people(ranked(train, test, str(self.folder)), self)

    def _read(self, split: str) -> Part:
        """Windows (n, 9, 128), activities from 0 and people of a split."""
        inside = self.folder / split / "Inertial Signals"
        windows = [self._numbers(inside / f"{name}_{split}.txt", self.float_dtype) for name in self.signals]
        labels = self._numbers(self.folder / split / f"y_{split}.txt", np.int64).ravel() - 1
        people = self._subjects(split)
        for name, values in zip(self.signals, windows, strict=True):
            if values.shape != (len(labels), self.input_shape[1]):
                raise ConfigError(
                    f"{inside / f'{name}_{split}.txt'} holds {values.shape[0]} rows of {values.shape[1]} numbers, and "
                    f"y_{split}.txt {len(labels)} labels; it must have a row of {self.input_shape[1]} for each"
                )
        if len(people) != len(labels):
            raise ConfigError(f"{self.folder / split}: {len(labels)} labels but {len(people)} subjects; give one each")
        return Part(np.stack(windows, axis=1), labels, people)

    def _subjects(self, split: str) -> IntArray:
        return self._numbers(self.folder / split / f"subject_{split}.txt", np.int64).ravel()

    def _numbers(self, path: Path, dtype: type[Any]) -> NDArray[Any]:
        return _table(path, dtype, f"set data.root to the folder above {self.folder.name}")


class PAMAP2(TensorDataModule):
    """PAMAP2: nine people with three inertial units at 100 Hz, twelve activities, cut into windows.

    Files as published: ``<root>/PAMAP2_Dataset/Protocol/subject101.dat`` to ``subject109.dat``, 54 columns a line. 27
    are used: of the units on hand, chest and ankle, in this order, acceleration (±16 g), angular velocity and
    magnetic field along x y z, which are columns 5–7, 11–16, then the same 17 and 34 columns on (from 1). They are
    divided by 9.81 m/s², 1 rad/s and 50 µT, to the order of 1. People are the data set's own clients.

    Reiss, Stricker: "Introducing a New Benchmarked Dataset for Activity Monitoring", ISWC 2012.

    Args:
        window: Samples of a window, all within one stretch of one activity.
        stride: Samples between the starts of successive windows; null for `window`.
        test_fraction: The last share of every stretch, to test on; training and test windows share no sample.
        kwargs: The population's settings, see `FederatedDataModule`.

    Raises:
        ConfigError: Files are missing or damaged, or a person has no window.

    Note:
        The paper of HFedCKD does not say how it cuts PAMAP2; all of this is ours. Left out are transient activities
        (label 0), the six optional ones, heart rate (at 9 Hz), temperature, the ±6 g acceleration, which saturates, and
        the orientation, which the authors call invalid. Values lost by the wireless link are interpolated in time.
    """

    activities = (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 24)
    """The activities' numbers in the files, in the order of the classes."""
    class_names = [  # noqa: RUF012  # a property of the base, as num_classes is
        "lying", "sitting", "standing", "walking", "running", "cycling", "Nordic walking", "ascending stairs",
        "descending stairs", "vacuum cleaning", "ironing", "rope jumping",
    ]  # fmt: skip
    num_classes = len(activities)
    columns = tuple(unit + column for unit in (3, 20, 37) for column in (1, 2, 3, 7, 8, 9, 10, 11, 12))
    """The columns in use, counted from 0; a unit's first is its temperature."""

    def __init__(self, window: int = 256, stride: int | None = None, test_fraction: float = 0.2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("data.window", window, least=1, why=" samples")
        check_range("data.stride", stride, least=1, why=" samples", null="for the window")
        check_range("data.test_fraction", test_fraction, above=0, below=1)
        self.window = window
        self.stride = window if stride is None else stride
        self.test_fraction = test_fraction

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return Path(self.root) / "PAMAP2_Dataset" / "Protocol"

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """(27, window)."""
        return (len(self.columns), self.window)

    @override
    def own_clients(self) -> int:
        """The number of files."""
        return len(self._files())

    @override
    def normalization(self) -> Callable[[Tensor], Tensor]:
        """Divide each column by its usual magnitude."""
        units = [_GRAVITY] * 3 + [1.0] * 3 + [_EARTHS_FIELD] * 3
        return Normalize([0.0] * len(self.columns), units * 3, max_value=1.0)

    @override
    def load_arrays(self) -> Parts:
        parts: dict[bool, list[tuple[NDArray[Any], int, int]]] = {False: [], True: []}
        for client, path in enumerate(self._files()):
            windows = list(self._windows(path))
            if not any(not is_test for _, _, is_test in windows):
                raise ConfigError(
                    f"{path} holds no window of {self.window} samples of one activity to train on; lower data.window"
                )
            for window, label, is_test in windows:
                parts[is_test].append((window, label, client))
        if not parts[True]:
            raise ConfigError(
                f"{self.folder} holds no window to test on; lower data.window or raise data.test_fraction"
            )
        train, test = (
            Part(np.stack([x for x, _, _ in part]), *np.array([numbers for _, *numbers in part], dtype=np.int64).T)
            for part in (parts[False], parts[True])
        )
        return _of_people(Parts(train, test, source=str(self.folder)), self)

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("subject*.dat"))
        if not files:
            raise ConfigError(
                f"{self.folder} holds no subject101.dat and so on; set data.root to the folder of PAMAP2_Dataset"
            )
        return files

    def _windows(self, path: Path) -> Iterator[tuple[NDArray[Any], int, bool]]:
        """A person's windows (27, window), each with its class and whether it is a test window."""
        rows = _table(path, np.float64, "download the file anew", usecols=(1, *self.columns))
        labels, values = rows[:, 0].astype(np.int64), rows[:, 1:]
        for sensor in values.T:
            known = np.flatnonzero(~np.isnan(sensor))
            if not len(known):
                raise ConfigError(f"{path} lacks all values of a sensor; download the file anew")
            sensor[:] = np.interp(np.arange(len(sensor)), known, sensor[known])
        ends = np.flatnonzero(np.diff(labels)) + 1
        for start, stop in zip([0, *ends], [*ends, len(labels)], strict=True):
            if labels[start] in self.activities:
                label = self.activities.index(labels[start])
                middle = stop - int(self.test_fraction * (stop - start) + 1e-9)  # so that 0.29·100 = 28.999… gives 29
                for begin, end, is_test in ((start, middle, False), (middle, stop, True)):
                    for at in range(begin, end - self.window + 1, self.stride):
                        yield values[at : at + self.window].T.astype(self.float_dtype), label, is_test


def _table(path: Path, dtype: type[Any], advice: str, usecols: tuple[int, ...] | None = None) -> NDArray[Any]:
    """The numbers of a text file (rows, columns)."""
    try:
        numbers: NDArray[Any] = np.loadtxt(path, dtype=dtype, usecols=usecols, ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing or damaged ({reason(error)}); {advice}") from error
    if not numbers.size:
        raise ConfigError(f"{path} is empty; {advice}")
    return numbers


def _of_people(parts: Parts, data: UCIHAR | PAMAP2) -> Parts:
    """Parts with their people, if the partition keeps clients; published experiments also mix people."""
    if data.partition.keeps_clients:
        return parts
    return replace(parts, train=replace(parts.train, clients=None), test=replace(parts.test, clients=None))
