"""Data sets in NumPy archives: one file, or a file per client; and data in memory written as the latter.

With a file per client a node of a federation holds its own clients' data only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.loaders.transforms import Augmentation, RandomCrop, RandomHorizontalFlip, rebuild
from lit_fed.data.partitions.csr import IntArray, held_out
from lit_fed.data.partitions.cut import Cut, Part, Parts, check_held_out, clients_here, cut_of_parts, joined
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.census import BYTES, Scale, common_scale, on_scale, scale_of
from lit_fed.data.population.files import Archive, check_inputs, write_archive
from lit_fed.data.population.hooks import Batches, Subset
from lit_fed.data.population.in_memory import ImageDataModule, TensorDataModule, channels_first
from lit_fed.data.population.naming import ranked
from lit_fed.data.population.targets import checked_targets, count_classes
from lit_fed.data.population.views import viewed
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed
from lit_fed.tracking import tracked

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
        self._max_value_given, self._num_classes_given = max_value, num_classes

    @override
    def pooled(self) -> str | None:
        if self._num_classes_given is None and self.num_classes is not None:
            return "data.num_classes is counted over all clients' labels; give it"
        return super().pooled()

    @cached_property
    @override
    def num_classes(self) -> int | None:
        if self._num_classes_given is not None or self._archive.header("y_train")[1].kind == "f":
            return self._num_classes_given
        labels = self._archive.read("y_train")["y_train"]
        return count_classes(labels, str(self._path)) if labels.dtype.kind in "iu" else 1

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
        self.check_images(shape, f"{self._path} holds no images (one input has shape {shape})")
        clients = [key for key in ("client_train", "client_test") if key in self._archive.keys]
        arrays = self._archive.read(*_KEYS, *clients)
        scales = dict[str, Scale]()
        for key in ("x_train", "x_test"):
            what = f"{self._path}: {key}"
            check_inputs(arrays[key], what)
            if arrays[key].shape[1:] != arrays["x_train"].shape[1:]:
                raise ConfigError(f"{self._path}: inputs of x_test and x_train differ in shape; they must match")
            scales |= scale_of(arrays[key], what, len(shape) == 3, self._max_value_given, self._mean_given)
        for split in ("train", "test"):
            key = f"client_{split}"
            if key in arrays and arrays[key].shape != arrays[f"y_{split}"].shape[:1]:
                raise ConfigError(f"{self._path}: {key} and y_{split} differ in length; give one client per sample")
            if key in arrays and arrays[key].dtype.kind not in "iuSU":
                raise ConfigError(f"{self._path}: {key} holds {arrays[key].dtype}; it must hold integers")
        arrays |= {key: on_scale(arrays[key], common_scale(scales)) for key in ("x_train", "x_test")}
        train, test = (
            Part(channels_first(x) if len(shape) == 3 else x, arrays[f"y_{split}"], arrays.get(f"client_{split}"))
            for split, x in (("train", arrays["x_train"]), ("test", arrays["x_test"]))
        )
        if self.test_fraction is not None:
            train, test = self._split_anew(train, test)
        return ranked(train, test, str(self._path))

    def _split_anew(self, train: Part, test: Part) -> tuple[Part, Part]:
        """Join both splits, and hold out the same share of every client, or of every class without clients."""
        if (train.clients is None) != (test.clients is None):
            raise ConfigError(
                f"{self._path} names clients for one split only; data.test_fraction needs client_train and client_test"
            )
        whole = joined([train, test])
        together = np.zeros(len(whole)) if self.num_classes is None else np.asarray(whole.y)  # one group of all
        seed = derive_seed(self.seed, "array-file", "test")
        return whole.hold_out(together if whole.clients is None else whole.clients, self.test_fraction or 0.0, seed)

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

    num_classes: int | None = None
    class_names: list[str] | None = None
    stored_shape: tuple[int, ...] = ()

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
        self.check_images(stored_shape, f"data.stored_shape {stored_shape} is not that of images")
        self.stored_shape, self.num_classes = tuple(stored_shape), num_classes
        self._target_shape, self.class_names = tuple(target_shape or ()), class_names
        self._max_value_given = max_value
        self._scales: dict[str, dict[str, Scale]] = {}  # by owner and array
        self._scale: Scale | None = None
        self._wanted: list[int] = []
        self._sizes: dict[str, list[int]] = {}
        self._shared_test = 0

    @property
    @override
    def output_shape(self) -> tuple[int, ...]:
        return self._target_shape if self.num_classes is None else (self.num_classes,)

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
        return super().pooled()

    @override
    def input_scale(self, client_id: int) -> Scale | None:
        return common_scale(self._scales.get(f"client_{client_id}", {}))

    @property
    def _scales_here(self) -> dict[str, Scale | None]:
        return {what: scale for scales in self._scales.values() for what, scale in scales.items()}

    @override
    def agree(self, scales: Mapping[str, Scale | None]) -> None:
        """Also convert the samples here to the scale."""
        self._scale = common_scale(self._scales_here | dict(scales))
        for subset, x in self._x.items():
            self._x[subset] = torch.from_numpy(on_scale(x.cpu().numpy(), self._scale)).to(x.device)
        self._transforms = None

    @override
    def make_cut(self, wanted: frozenset[int] | None) -> Cut:
        self._wanted = clients_here(wanted, self.num_clients)
        if wanted is None:
            self._remark_others()
        parts = self.read_parts()
        sizes = self._sizes | {"shared_test": [self._shared_test]}
        return cut_of_parts(sizes, self._wanted, self.num_clients, parts, wanted)

    def _remark_others(self) -> None:
        """Name the clients' folders that take no part."""
        names = {f"client_{client_id}" for client_id in self._wanted}
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
        by_part: dict[str, list[Part]] = {part: [] for part in PARTS}
        whole = []
        for client_id in self._wanted:
            of_client = self._read(f"client_{client_id}", ("train", "test"), ("val", "calibration"))
            whole.append(len(of_client["train"]))
            of_client = self._hold_out(client_id, of_client)
            for part in ("train", "val", "calibration", "test"):
                by_part[part].append(of_client[part])
        before, left = (np.array(sizes, dtype=np.int64) for sizes in (whole, [len(kept) for kept in by_part["train"]]))
        check_held_out(before, left, self.val_fraction, self.calibration_fraction, self._wanted)
        if self.has_public:
            public = self._read("public", ("public",))["public"]
            if len(public.x) != self.public_size:
                raise ConfigError(
                    f"{self._path('public')} holds {len(public.x)} samples and algorithm.public_size is "
                    f"{self.public_size}; split the data anew, or correct the setting"
                )
            by_part["public"].append(public)
        shared = self._read("server", ("test",))["test"] if self._path("server").is_file() else self._nothing()
        self._shared_test = len(shared)
        self._scale = common_scale(self._scales_here)
        self._sizes = {part: [len(held) for held in samples] for part, samples in by_part.items()}
        train = self._joined([held for part in PARTS[:-1] for held in by_part[part]])
        test = self._joined([shared, *by_part["test"]])
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
        cut, digest = self._ready.of_client(client_id), hashlib.sha256()
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
                seed = derive_seed(self.seed, "client-arrays", "hold-out", client_id, part)
                chosen = held_out(np.zeros(len(indices), dtype=np.int64), 1, fraction, seed)
                own[part], indices = everything.take(indices[chosen]), indices[~chosen]
        own["train"] = everything.take(indices)
        return own

    def _joined(self, parts: list[Part]) -> Part:
        """Parts on the common scale; the strata are the classes."""
        there = [part for part in parts if len(part)] or [self._nothing()]
        whole = joined([replace(part, x=on_scale(part.x, self._scale)) for part in there])
        return whole if self.num_classes is None else replace(whole, strata=whole.y)

    def _nothing(self) -> Part:
        kind = np.uint8 if self._scale == "bytes" else np.float32
        x, y_shape = np.zeros((0, *self.stored_shape), dtype=kind), (0, *self._target_shape)
        return Part(x, np.zeros(y_shape, dtype=np.int64 if self.num_classes is not None else np.float32))

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
        return {part: self._checked(samples_of_part, part, owner) for part, samples_of_part in samples.items()}

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
        if self.num_classes is None:
            return Part(x, checked_targets(y, self._target_shape, f"{path}: y_{part}"))
        return Part(x, Part(x, y).checked(self.num_classes, "training labels", f"{path}: y_{part}").strata)


def settings_of(data: FederatedDataModule) -> dict[str, Any]:
    """The settings of a `ClientArrays` with the same batches; each node sets its own ``root``."""
    name = type(data).__name__
    if not isinstance(data, TensorDataModule):
        raise ConfigError(
            f"lit-fed split writes data in memory, and {name} reads samples one by one; give each node the files of "
            "its clients, or write their samples to client_0/data.npz and so on for ClientArrays"
        )
    if data.views() or any(data.seen(client_id) is not None for client_id in range(data.num_clients)):
        raise ConfigError(f"{name} has views or a skew, which lit-fed split cannot write; split data without them")
    settings: dict[str, Any] = {
        "num_clients": data.num_clients,
        "stored_shape": list(_stored(data, "train", np.zeros(1, dtype=np.int64))[0].shape[1:]),
        "num_classes": data.num_classes,
        "target_shape": list(data.output_shape) if data.num_classes is None else None,
        "class_names": data.class_names,
    }
    kept_keys = ("batch_size", "test_batch_size", "seed", "val_fraction", "drop_last", "fresh_batches")
    settings |= {key: getattr(data, key) for key in kept_keys}
    return settings | _preprocessing(data, name) | _augmentation(data, name)


def _preprocessing(data: TensorDataModule, name: str) -> dict[str, Any]:
    match data.preprocessing():
        case [] if data.stored("train", np.zeros(1, dtype=np.int64))[0].dtype.kind == "f":
            return {"max_value": 1.0}
        case [{"step": "normalize", **normalize}] | [{"step": "encode"}, {"step": "normalize", **normalize}]:
            return dict(normalize)
        case [{"step": "normalize", **normalize}, {"step": "resize", "size": size}]:
            return {**normalize, "image_size": size}
    raise ConfigError(f"{name} has a custom normalization, which lit-fed split cannot write; use Normalize")


def _augmentation(data: TensorDataModule, name: str) -> dict[str, Any]:
    settings, augmentation = dict[str, Any](), data.augmentation()
    for transform in augmentation.transforms if isinstance(augmentation, Augmentation) else [augmentation]:
        match transform:
            case RandomCrop():
                settings["crop_padding"] = transform.padding
            case RandomHorizontalFlip():
                settings["horizontal_flip"] = True
            case None:
                pass
            case _:
                raise ConfigError(f"{name} has a custom augmentation, which lit-fed split cannot write; leave it out")
    return settings


def _stored(data: TensorDataModule, subset: Subset, rows: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
    """Stored samples, of tables with missing numbers and levels as inputs."""
    x, y = data.stored(subset, rows)
    encode = [step for step in data.preprocessing() or [] if step["step"] == "encode"]
    return (rebuild(encode)(torch.from_numpy(x)).numpy() if encode else x), y


def write_folders(data: TensorDataModule, folder: Path) -> None:
    """Write a folder per client, ``client_<id>/data.npz``, ``server`` and, for a public set, ``public``."""
    cut = data._ready
    for client_id in tracked(range(data.num_clients), "writing clients", data.num_clients):
        parts = {"train": _stored(data, "train", cut.train[client_id])}
        if data.has_val:
            parts["val"] = _stored(data, "train", cut.val[client_id])
        if data.has_calibration:
            parts["calibration"] = _stored(data, "train", cut.calibration[client_id])
        parts["test"] = _stored(data, "test", cut.shared_test[cut.test[client_id]])
        _write(folder / f"client_{client_id}", parts)
    _write(folder / "server", {"test": _stored(data, "test", cut.shared_test)})
    if data.has_public:
        _write(folder / "public", {"public": _stored(data, "train", cut.public)})


def _write(folder: Path, parts: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> None:
    folder.mkdir(parents=True)
    arrays = {f"x_{part}": _channels_last(x) for part, (x, _) in parts.items()}
    arrays |= {f"y_{part}": y for part, (_, y) in parts.items()}
    write_archive(folder / "data.npz", arrays)


def _channels_last(x: NDArray[Any]) -> NDArray[Any]:
    """Images in the layout of `ArrayFile` and `ClientArrays`."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x
