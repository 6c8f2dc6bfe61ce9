"""Data in memory written as one folder per client, for `ClientArrays`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.loaders.transforms import Augmentation, RandomCrop, RandomHorizontalFlip
from lit_fed.data.population.archive import write_archive
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.in_memory import TensorDataModule
from lit_fed.errors import ConfigError


def settings_of(data: FederatedDataModule) -> dict[str, Any]:
    """The settings of a `ClientArrays` with the same batches; each node sets its own ``root``."""
    name = type(data).__name__
    if not isinstance(data, TensorDataModule):
        raise ConfigError(f"lit-fed split writes data in memory, and {name} reads files one by one; split its files")
    if data.views() or any(data.seen(one) is not None for one in range(data.num_clients)):
        raise ConfigError(f"{name} has views or a skew, which lit-fed split cannot write; split data without them")
    found: dict[str, Any] = {
        "num_clients": data.num_clients,
        "stored_shape": list(data.stored("train", np.zeros(1, dtype=np.int64))[0].shape[1:]),
        "num_classes": data.num_classes,
        "target_shape": list(data.output_shape) if data.num_classes is None else None,
        "class_names": data.class_names,
    }
    own = ("batch_size", "test_batch_size", "seed", "val_fraction", "drop_last", "fresh_batches")
    found |= {key: getattr(data, key) for key in own}
    return found | _preprocessing(data, name) | _augmentation(data, name)


def _preprocessing(data: TensorDataModule, name: str) -> dict[str, Any]:
    match data.preprocessing():
        case [] if data.stored("train", np.zeros(1, dtype=np.int64))[0].dtype.kind == "f":
            return {"max_value": 1.0}
        case [{"step": "normalize", **normalize}]:
            return dict(normalize)
        case [{"step": "normalize", **normalize}, {"step": "resize", "size": size}]:
            return {**normalize, "image_size": size}
    raise ConfigError(f"{name} has a custom normalization, which lit-fed split cannot write; use Normalize")


def _augmentation(data: TensorDataModule, name: str) -> dict[str, Any]:
    found, augmentation = dict[str, Any](), data.augmentation()
    for transform in augmentation.transforms if isinstance(augmentation, Augmentation) else [augmentation]:
        match transform:
            case RandomCrop():
                found["crop_padding"] = transform.padding
            case RandomHorizontalFlip():
                found["horizontal_flip"] = True
            case None:
                pass
            case _:
                raise ConfigError(f"{name} has a custom augmentation, which lit-fed split cannot write; leave it out")
    return found


def write_folders(data: TensorDataModule, folder: Path) -> None:
    """Write a folder per client, ``client_<id>/data.npz``, ``server`` and, for a public set, ``public``."""
    cut = data._ready
    for client_id in range(data.num_clients):
        parts = {"train": data.stored("train", cut.train[client_id])}
        if data.has_val:
            parts["val"] = data.stored("train", cut.val[client_id])
        if data.has_calibration:
            parts["calibration"] = data.stored("train", cut.calibration[client_id])
        parts["test"] = data.stored("test", cut.shared_test[cut.test[client_id]])
        _write(folder / f"client_{client_id}", parts)
    _write(folder / "server", {"test": data.stored("test", cut.shared_test)})
    if data.has_public:
        _write(folder / "public", {"public": data.stored("train", cut.public)})


def _write(folder: Path, parts: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> None:
    folder.mkdir(parents=True)
    arrays = {f"x_{part}": _channels_last(x) for part, (x, _) in parts.items()}
    arrays |= {f"y_{part}": y for part, (_, y) in parts.items()}
    write_archive(folder / "data.npz", arrays)


def _channels_last(x: NDArray[Any]) -> NDArray[Any]:
    """Images in the layout of `ArrayFile` and `ClientArrays`."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x
