"""A file a client: what an end of a federation holds of the data, and nothing of anybody else's."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.partitions.csr import CSR
from lit_fed.data.partitions.cut import Cut, Strata, check_held_out
from lit_fed.data.population.client_report import ClientReport
from lit_fed.data.population.in_memory import Arrays, ImageDataModule, channels_first
from lit_fed.data.population.scale import Scale, common_scale, on_scale, scale_of
from lit_fed.data.population.targets import checked_targets
from lit_fed.data.population.views import viewed
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator

PARTS = ("train", "val", "calibration", "public", "test")
"""Of what a file may hold ``x_<part>`` and ``y_<part>``."""


class _Samples(NamedTuple):
    x: NDArray[Any]
    y: NDArray[Any]


class ClientArrays(ImageDataModule):
    """A folder a client with one file in it, ``<root>/client_3/data.npz``; an end needs those of its own clients only.

    A client's file holds ``x_train y_train x_test y_test`` in the layout of `ArrayFile`, images also N×C×H×W. What
    `val_fraction` and the method's calibration ask for is held out of ``x_train``, unless the file has ``x_val y_val``
    or ``x_calibration y_calibration``. ``<root>/server/data.npz`` holds the shared test set as ``x_test y_test``; where
    it is not there, nothing is tested on it. ``<root>/public/data.npz`` holds the public set as ``x_public y_public``,
    whose labels nobody learns from, for methods that ask for one; every end needs it. Nothing pickled is ever read.

    ``lit-fed split`` writes such folders of other data. Started with all of them, it is a population like others.

    Args:
        num_clients: Clients in the population, of which an end may hold few.
        stored_shape: The shape of one input: (channels, height, width) of images, in any of their three layouts,
            (channels, length) of windows, (features,) else.
        num_classes: The number of classes; none given for a regression.
        target_shape: The shape of one target of a regression, () or (k,).
        class_names: What the classes are called, in their order.
        root: The folder that holds the clients' folders.
        max_value: What stands for 1 in all stored values; none given means 255 for bytes and 1 for other numbers, which
            are in [0, 1] where others, here or elsewhere, have bytes.
        kwargs: The other settings of `ImageDataModule`, and the population's, see `FederatedDataModule`.

    Raises:
        ConfigError: A file is missing or damaged, or does not fit the settings.
    """

    def __init__(
        self,
        num_clients: int,
        stored_shape: list[int],
        num_classes: int | None = None,
        target_shape: list[int] | None = None,
        class_names: list[str] | None = None,
        root: str = "data",
        max_value: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients=num_clients, root=root, max_value=1.0 if max_value is None else max_value, **kwargs
        )
        if not 1 <= len(stored_shape) <= 3 or min(stored_shape) < 1:
            raise ConfigError(f"data.stored_shape is {stored_shape}: give one to three sizes, each of at least 1")
        if num_classes is not None and num_classes < 1:
            raise ConfigError(f"data.num_classes is {num_classes}: it must be at least 1, or null for a regression")
        if num_classes is not None and target_shape is not None:
            raise ConfigError(
                "data.num_classes and data.target_shape exclude each other: targets are classes or numbers"
            )
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigError(f"data.class_names has {len(class_names)} names for {num_classes} classes: give one each")
        if self.max_train_samples is not None or self.max_test_samples is not None:
            raise ConfigError("data.max_train_samples and data.max_test_samples are not for files of single clients")
        if len(stored_shape) != 3 and (self._augmentation is not None or self._resize is not None):
            raise ConfigError(
                f"data.stored_shape {stored_shape} is that of no images: data.crop_padding, data.horizontal_flip and "
                "data.image_size do not apply"
            )
        self._stored_shape, self._classes = tuple(stored_shape), num_classes
        self._target_shape, self._names = tuple(target_shape or ()), class_names
        self._max_value_given, self._mean_given = max_value, kwargs.get("mean") is not None
        self._scales: dict[str, dict[str, Scale | None]] = {}  # by owner and array
        self._scale: Scale | None = None
        self._wanted: list[int] = []
        self._sizes: dict[str, list[int]] = {}
        self._shared_test = 0

    @property
    def num_classes(self) -> int | None:
        """See `FederatedDataModule.num_classes`."""
        return self._classes

    @property
    def class_names(self) -> list[str] | None:
        """What the classes are called."""
        return self._names

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(num_classes,), or the shape of one target."""
        return self._target_shape if self._classes is None else (self._classes,)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one input as it is stored, channels first."""
        return self._stored_shape

    @property
    def max_value(self) -> float:
        """What stands for 1: the setting, or 255 for bytes and 1 for other numbers; known after `setup`."""
        if self._max_value_given is not None:
            return self._max_value_given
        return 255.0 if self._scale == "bytes" else 1.0

    def input_scale(self, client_id: int) -> Scale | None:
        """See `DescribedPopulation.input_scale`."""
        return common_scale(self._scales.get(f"client_{client_id}", {}))

    def learn(self, reports: Mapping[int, ClientReport]) -> None:
        """See `DescribedPopulation.learn`; what lies here takes the scale of the population.

        Raises:
            ConfigError: There is none.
        """
        super().learn(reports)
        here = {what: scale for own in self._scales.values() for what, scale in own.items()}
        self._scale = common_scale(here | {f"client {one}": report.scale for one, report in sorted(reports.items())})
        for subset, x in self._x.items():
            self._x[subset] = torch.from_numpy(on_scale(x.cpu().numpy(), self._scale)).to(x.device)
        self._transforms = None

    def setup(self, stage: str | None = None, clients: Iterable[int] | None = None) -> None:
        """Read the files of some clients, or of all; see `FederatedDataModule.setup`."""
        if self._cut is None:
            given = None if clients is None else sorted({int(one) for one in clients})
            clients = given
            self._wanted = list(range(self.num_clients)) if given is None else given
            if beyond := [one for one in self._wanted if not 0 <= one < self.num_clients]:
                raise ConfigError(f"client {beyond[0]} does not exist: clients are 0 to {self.num_clients - 1}")
            if given is None:
                self._remark_others()
            self._cut = self._cut_of(self.read_strata(), None if given is None else frozenset(given))
        super().setup(stage, clients)

    def _remark_others(self) -> None:
        """Say which folders are those of clients by their names, and take no part."""
        names = {f"client_{one}" for one in self._wanted}
        there = sorted(path.parent.name for path in Path(self.root).glob("client_*/data.npz"))
        if others := [name for name in there if name not in names]:
            more = f" and {len(others) - 1} other folders" if len(others) > 1 else ""
            remark(f"data.num_clients is {self.num_clients}: {others[0]}{more} in {self.root} take no part")

    def read_strata(self) -> Strata:
        """See `FederatedDataModule.read_strata`; every file has been checked, and an end may hold no sample at all."""
        arrays = self.load_arrays()
        self.hold(arrays)
        train, test = (arrays.y_train, arrays.y_test) if self._classes is not None else (None, None)
        return Strata(train, test, len(arrays.y_train), len(arrays.y_test), source=self.root)

    def load_arrays(self) -> Arrays:
        """What lies here: the clients' samples one after the other, and the shared sets."""
        found: dict[str, list[_Samples]] = {part: [] for part in PARTS}
        whole = []
        for client_id in self._wanted:
            own = self._read(f"client_{client_id}", ("train", "test"), ("val", "calibration"))
            whole.append(len(own["train"].y))
            own = self._hold_out(client_id, own)
            for part in ("train", "val", "calibration", "test"):
                found[part].append(own[part])
        before, left = np.array(whole, dtype=np.int64), np.array([len(one.y) for one in found["train"]], dtype=np.int64)
        check_held_out(before, left, self.val_fraction, self.calibration_fraction, self._wanted)
        if self.has_public:
            public = self._read("public", ("public",))["public"]
            if len(public.x) != self.public_size:
                raise ConfigError(
                    f"{self._path('public')} holds {len(public.x)} samples and algorithm.public_size is "
                    f"{self.public_size}: split the data anew, or correct the setting"
                )
            found["public"].append(public)
        shared = self._read("server", ("test",))["test"] if self._path("server").is_file() else self._nothing()
        self._shared_test = len(shared.y)
        self._scale = common_scale({what: scale for own in self._scales.values() for what, scale in own.items()})
        self._sizes = {part: [len(one.y) for one in samples] for part, samples in found.items()}
        train = self._joined([one for part in PARTS[:-1] for one in found[part]])
        test = self._joined([shared, *found["test"]])
        return Arrays(train.x, train.y, test.x, test.y, source=self.root)

    def test_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """One client's test batches, or the shared test set, which is empty where it is not there."""
        if client_id is not None:
            return super().test_loader(client_id, view)
        indices = np.arange(self._shared_test, dtype=np.int64)
        return viewed(self.make_loader("test", indices, batch_size=self.test_batch_size), self.seen(None, view))

    def fingerprint(self, client_id: int) -> str:
        """The SHA-256 of one client's training, validation and calibration samples."""
        if client_id in self._reports:
            return self._reports[client_id].fingerprint
        cut, digest = self._of(client_id), hashlib.sha256()
        for rows in (cut.train[client_id], cut.val[client_id], cut.calibration[client_id]):
            for array in self.stored("train", rows):
                digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------ what is here

    def _cut_of(self, strata: Strata, here: frozenset[int] | None) -> Cut:
        """Who has which of the rows that `load_arrays` has put one after the other."""
        rows, begin = dict[str, CSR](), 0
        for part in ("train", "val", "calibration"):
            rows[part], begin = self._rows(part, begin), begin + sum(self._sizes[part])
        public = np.arange(begin, begin + sum(self._sizes["public"]), dtype=np.int64)
        return Cut(
            train=rows["train"],
            val=rows["val"],
            calibration=rows["calibration"],
            test=self._rows("test", self._shared_test),
            public=public,
            shared_val=rows["val"].indices,
            shared_test=np.arange(strata.test_size, dtype=np.int64),
            strata=strata.train,
            clients=here,
        )

    def _rows(self, part: str, begin: int) -> CSR:
        sizes = np.zeros(self.num_clients, dtype=np.int64)
        sizes[self._wanted] = self._sizes[part]
        return CSR.from_sizes(np.arange(begin, begin + sizes.sum(), dtype=np.int64), sizes)

    def _hold_out(self, client_id: int, own: dict[str, _Samples]) -> dict[str, _Samples]:
        """A client's parts, those that its file does not name taken out of its training samples."""
        fractions = {"val": self.val_fraction, "calibration": self.calibration_fraction}
        everything, generator = own["train"], numpy_generator(self.seed, "client-arrays", "hold-out", client_id)
        indices = np.arange(len(everything.y), dtype=np.int64)
        for part, fraction in fractions.items():
            if part not in own:
                whole = CSR.from_sizes(indices, np.array([len(indices)]))
                chosen, left = whole.hold_out([fraction], generator)
                own[part] = _Samples(everything.x[chosen.indices], everything.y[chosen.indices])
                indices = left.indices
        own["train"] = _Samples(everything.x[indices], everything.y[indices])
        return own

    def _joined(self, samples: list[_Samples]) -> _Samples:
        samples = [one for one in samples if len(one.y)] or [self._nothing()]
        x = np.concatenate([on_scale(one.x, self._scale) for one in samples])
        return _Samples(x, np.concatenate([one.y for one in samples]))

    def _nothing(self) -> _Samples:
        kind = np.uint8 if self._scale == "bytes" else np.float32
        x, y_shape = np.zeros((0, *self.stored_shape), dtype=kind), (0, *self._target_shape)
        return _Samples(x, np.zeros(y_shape, dtype=np.int64 if self._classes is not None else np.float32))

    # ------------------------------------------------------------------ files

    def _path(self, owner: str) -> Path:
        return Path(self.root) / owner / "data.npz"

    def _read(self, owner: str, parts: Iterable[str], maybe: Iterable[str] = ()) -> dict[str, _Samples]:
        """Parts of a file, inputs channels first.

        Raises:
            ConfigError: It is missing or damaged, or does not fit the settings.
        """
        path = self._path(owner)
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist: set data.root to the folder that holds {owner}, or write it with lit-fed split"
            )
        try:
            with np.load(path, allow_pickle=False) as archive:
                needed = [f"{axis}_{part}" for part in parts for axis in "xy"]
                if missing := [key for key in needed if key not in archive]:
                    raise ConfigError(f"{path} lacks {', '.join(missing)}; it has {', '.join(archive) or 'nothing'}")
                named = [*parts, *(part for part in maybe if f"x_{part}" in archive and f"y_{part}" in archive)]
                found = {part: _Samples(archive[f"x_{part}"], archive[f"y_{part}"]) for part in named}
        except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{path} cannot be read ({why}): save plain number arrays with numpy.savez") from error
        return {part: self._checked(samples, part, owner) for part, samples in found.items()}

    def _checked(self, samples: _Samples, part: str, owner: str) -> _Samples:
        path, (x, y) = self._path(owner), samples
        if len(self.stored_shape) == 3 and x.ndim in (3, 4):
            turned = channels_first(x)  # as `ArrayFile` has them, where a shape is that of both layouts
            x = x if x.shape[1:] == self.stored_shape != turned.shape[1:] else turned
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise ConfigError(f"{path}: x_{part} and y_{part} differ in length: give one target per sample")
        if x.shape[1:] != self.stored_shape:
            raise ConfigError(
                f"{path}: one input of x_{part} has shape {x.shape[1:]}, and data.stored_shape is {self.stored_shape}"
            )
        if x.dtype.kind not in "uif" or x.dtype == np.uint16:
            raise ConfigError(f"{path}: x_{part} holds {x.dtype}; it must be uint8 or floating point")
        if not len(y):
            return self._nothing()
        what = f"{path}: x_{part}"
        self._scales.setdefault(owner, {})[what] = scale_of(
            x, what, len(self.stored_shape) == 3, self._max_value_given, self._mean_given
        )
        if self._classes is None:
            return _Samples(x, checked_targets(y, self._target_shape, f"{path}: y_{part}"))
        labels = Strata(y, None, len(y), 0, source=f"{path}: y_{part}").checked(self._classes).train
        assert labels is not None
        return _Samples(x, labels)
