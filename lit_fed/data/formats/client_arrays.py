"""A file per client, so that a node of a federation holds its own clients' data only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.partitions.csr import CSR
from lit_fed.data.partitions.cut import Cut, Part, Parts, check_held_out, cut_of_parts, joined
from lit_fed.data.population.archive import Archive, check_inputs
from lit_fed.data.population.base import Batches
from lit_fed.data.population.census import Scale, common_scale, on_scale, scale_of
from lit_fed.data.population.in_memory import ImageDataModule, channels_first
from lit_fed.data.population.targets import checked_targets
from lit_fed.data.population.views import viewed
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

PARTS = ("train", "val", "calibration", "public", "test")
"""Parts that a file may hold as ``x_<part>`` and ``y_<part>``."""


class ClientArrays(ImageDataModule):
    """A folder per client with one file, ``<root>/client_3/data.npz``; a node needs only the files of its own clients.

    A client's file holds ``x_train y_train x_test y_test`` in the layout of `ArrayFile`, images also N×C×H×W.
    Validation and calibration samples are held out of ``x_train``, unless the file has ``x_val y_val`` or
    ``x_calibration y_calibration``. ``<root>/server/data.npz`` holds the shared test set as ``x_test y_test``; without
    it nothing is tested on it. ``<root>/public/data.npz`` holds the public set of methods that ask for one as
    ``x_public y_public``, whose labels are never learnt from; every node needs it. Nothing is unpickled.

    ``lit-fed split`` writes such folders of other data. With all folders here, it is a population like any other.

    Args:
        num_clients: Clients in the population, of which a node may hold few.
        stored_shape: Shape of one input: (channels, height, width) of images in any of their three layouts,
            (channels, length) of windows, (features,) of others.
        num_classes: Number of classes; null for a regression.
        target_shape: Shape of one target of a regression, () or (k,).
        class_names: Names of the classes, in their order.
        root: The folder that holds the clients' folders.
        max_value: Stored value that stands for 1; null for 255 of bytes and 1 of other numbers, which must be in [0, 1]
            if other clients, here or elsewhere, have bytes. Null refuses images below 0 beside images in [0, 1].
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
            raise ConfigError(f"data.stored_shape is {stored_shape}; it must have one to three sizes, each at least 1")
        check_range("data.num_classes", num_classes, least=1, null="for a regression")
        if num_classes is not None and target_shape is not None:
            raise ConfigError(
                "data.num_classes and data.target_shape exclude each other; give the first for classes, else the second"
            )
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigError(f"data.class_names has {len(class_names)} names for {num_classes} classes; give one each")
        if self.max_train_samples is not None or self.max_test_samples is not None:
            raise ConfigError("ClientArrays takes no data.max_train_samples or data.max_test_samples; leave them out")
        if len(stored_shape) != 3 and (self._augmentation is not None or self._resize is not None):
            raise ConfigError(
                f"data.stored_shape {stored_shape} is not that of images; leave out data.crop_padding, "
                "data.horizontal_flip and data.image_size"
            )
        self._stored_shape, self._classes = tuple(stored_shape), num_classes
        self._target_shape, self._names = tuple(target_shape or ()), class_names
        self._max_value_given = max_value
        self._scales: dict[str, dict[str, Scale]] = {}  # by owner and array
        self._scale: Scale | None = None
        self._wanted: list[int] = []
        self._sizes: dict[str, list[int]] = {}
        self._shared_test = 0

    @property
    @override
    def num_classes(self) -> int | None:
        return self._classes

    @property
    @override
    def class_names(self) -> list[str] | None:
        return self._names

    @property
    @override
    def output_shape(self) -> tuple[int, ...]:
        return self._target_shape if self._classes is None else (self._classes,)

    @property
    @override
    def stored_shape(self) -> tuple[int, ...]:
        return self._stored_shape

    @property
    @override
    def max_value(self) -> float:
        """The setting, or 255 for bytes and 1 for other numbers; known after `setup`."""
        if self._max_value_given is not None:
            return self._max_value_given
        return 255.0 if self._scale == "bytes" else 1.0

    @override
    def pooled(self) -> str | None:
        if self._max_value_given is None:
            return "data.max_value is taken from all clients' inputs; set it, to 255 for bytes and 1 for others"
        return None

    @override
    def input_scale(self, client_id: int) -> Scale | None:
        return common_scale(self._scales.get(f"client_{client_id}", {}))

    @override
    def agree(self, scales: Mapping[str, Scale | None]) -> None:
        """Also convert the samples here to the scale."""
        here = {what: scale for own in self._scales.values() for what, scale in own.items()}
        self._scale = common_scale(here | dict(scales))
        for subset, x in self._x.items():
            self._x[subset] = torch.from_numpy(on_scale(x.cpu().numpy(), self._scale)).to(x.device)
        self._transforms = None

    @override
    def make_cut(self, wanted: frozenset[int] | None) -> Cut:
        self._wanted = list(range(self.num_clients)) if wanted is None else sorted(wanted)
        if beyond := [one for one in self._wanted if not 0 <= one < self.num_clients]:
            raise ConfigError(f"client {beyond[0]} does not exist; clients are 0 to {self.num_clients - 1}")
        if wanted is None:
            self._remark_others()
        parts = self.read_parts()
        sizes = self._sizes | {"shared_test": [self._shared_test]}
        return cut_of_parts(sizes, self._wanted, self.num_clients, parts, wanted)

    def _remark_others(self) -> None:
        """Name the clients' folders that take no part."""
        names = {f"client_{one}" for one in self._wanted}
        there = sorted(path.parent.name for path in Path(self.root).glob("client_*/data.npz"))
        if others := [name for name in there if name not in names]:
            more = f" and {len(others) - 1} other folders" if len(others) > 1 else ""
            remark(f"data.num_clients is {self.num_clients}; {others[0]}{more} in {self.root} take no part")

    @override
    def read_parts(self) -> Parts:
        """Without further checks: the checks of the files suffice, and a node may hold no sample at all."""
        parts = self.load_arrays()
        self.hold(parts)
        return parts

    @override
    def load_arrays(self) -> Parts:
        """The clients' samples here, one client after the other, and the shared sets."""
        found: dict[str, list[Part]] = {part: [] for part in PARTS}
        whole = []
        for client_id in self._wanted:
            own = self._read(f"client_{client_id}", ("train", "test"), ("val", "calibration"))
            whole.append(len(own["train"]))
            own = self._hold_out(client_id, own)
            for part in ("train", "val", "calibration", "test"):
                found[part].append(own[part])
        before, left = np.array(whole, dtype=np.int64), np.array([len(one) for one in found["train"]], dtype=np.int64)
        check_held_out(before, left, self.val_fraction, self.calibration_fraction, self._wanted)
        if self.has_public:
            public = self._read("public", ("public",))["public"]
            if len(public.x) != self.public_size:
                raise ConfigError(
                    f"{self._path('public')} holds {len(public.x)} samples and algorithm.public_size is "
                    f"{self.public_size}; split the data anew, or correct the setting"
                )
            found["public"].append(public)
        shared = self._read("server", ("test",))["test"] if self._path("server").is_file() else self._nothing()
        self._shared_test = len(shared)
        self._scale = common_scale({what: scale for own in self._scales.values() for what, scale in own.items()})
        self._sizes = {part: [len(one) for one in samples] for part, samples in found.items()}
        train = self._joined([one for part in PARTS[:-1] for one in found[part]])
        test = self._joined([shared, *found["test"]])
        return Parts(train, test, source=self.root)

    @override
    def test_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """One client's test batches, or the shared test set, which is empty without its file."""
        if client_id is not None:
            return super().test_loader(client_id, view)
        indices = np.arange(self._shared_test, dtype=np.int64)
        return viewed(self.make_loader(Batches("test", indices, self.test_batch_size)), self.seen(None, view))

    @override
    def fingerprint_of(self, client_id: int) -> str:
        """The SHA-256 of one client's training, validation and calibration samples."""
        cut, digest = self._ready.of(client_id), hashlib.sha256()
        for rows in (cut.train[client_id], cut.val[client_id], cut.calibration[client_id]):
            for array in self.stored("train", rows):
                digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _hold_out(self, client_id: int, own: dict[str, Part]) -> dict[str, Part]:
        """A client's parts; those missing in its file are held out of its training samples."""
        fractions = {"val": self.val_fraction, "calibration": self.calibration_fraction}
        everything = own["train"]
        indices = np.arange(len(everything), dtype=np.int64)
        for part, fraction in fractions.items():
            if part not in own:
                whole = CSR.from_sizes(indices, np.array([len(indices)]))
                seed = derive_seed(self.seed, "client-arrays", "hold-out", client_id, part)
                chosen, left = whole.hold_out([fraction], seed)
                own[part] = everything.take(chosen.indices)
                indices = left.indices
        own["train"] = everything.take(indices)
        return own

    def _joined(self, parts: list[Part]) -> Part:
        """Parts on the common scale; the strata are the classes."""
        there = [part for part in parts if len(part)] or [self._nothing()]
        whole = joined([replace(part, x=on_scale(part.x, self._scale)) for part in there])
        return whole if self._classes is None else replace(whole, strata=whole.y)

    def _nothing(self) -> Part:
        kind = np.uint8 if self._scale == "bytes" else np.float32
        x, y_shape = np.zeros((0, *self.stored_shape), dtype=kind), (0, *self._target_shape)
        return Part(x, np.zeros(y_shape, dtype=np.int64 if self._classes is not None else np.float32))

    def _path(self, owner: str) -> Path:
        return Path(self.root) / owner / "data.npz"

    def _read(self, owner: str, parts: Iterable[str], maybe: Iterable[str] = ()) -> dict[str, Part]:
        """Parts of a file, inputs channels first."""
        needed = [f"{axis}_{part}" for part in parts for axis in "xy"]
        advice = f"set data.root to the folder that holds {owner}, or write it with lit-fed split"
        archive = Archive(self._path(owner), needed, advice)
        keys = set(archive.keys)
        named = [*parts, *(part for part in maybe if {f"x_{part}", f"y_{part}"} <= keys)]
        arrays = archive.read(*(f"{axis}_{part}" for part in named for axis in "xy"))
        samples = {part: Part(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in named}
        return {part: self._checked(own, part, owner) for part, own in samples.items()}

    def _checked(self, samples: Part, part: str, owner: str) -> Part:
        path, x, y = self._path(owner), samples.x, samples.y
        if len(self.stored_shape) == 3 and x.ndim in (3, 4):
            turned = channels_first(x)  # as `ArrayFile` has them; preferred if the shape fits both layouts
            x = x if x.shape[1:] == self.stored_shape != turned.shape[1:] else turned
        if y is None or not x.ndim or not y.ndim or len(x) != len(y):
            raise ConfigError(f"{path}: x_{part} and y_{part} differ in length; give one target per sample")
        if x.shape[1:] != self.stored_shape:
            raise ConfigError(
                f"{path}: one input of x_{part} has shape {x.shape[1:]}; it must be data.stored_shape, "
                f"{self.stored_shape}"
            )
        what = f"{path}: x_{part}"
        check_inputs(x, what)
        if not len(y):
            return self._nothing()
        are_images = len(self.stored_shape) == 3
        scale = scale_of(x, what, are_images, self._max_value_given, self._mean_given)
        self._scales.setdefault(owner, {}).update(scale)
        if self._classes is None:
            return Part(x, checked_targets(y, self._target_shape, f"{path}: y_{part}"))
        return Part(x, Part(x, y).checked(self._classes, "training labels", f"{path}: y_{part}").strata)
