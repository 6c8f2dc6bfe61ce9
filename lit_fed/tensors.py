"""Nested tensors, and files of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor

ALIGNED = 64
"""Bytes, at multiples of which PyTorch allocates a tensor on a CPU."""


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, without waiting for it."""
    tensor = torch.tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and begins at a multiple of `ALIGNED` bytes, as PyTorch allocates one."""
    return tensor.data_ptr() % ALIGNED == 0 and tensor.is_contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a view that is not `is_aligned`.

    Matrices and vectors of other addresses or strides are multiplied in another order, so that last digits differ: MKL
    promises the same results for the same alignment alone. Hence tensors that arrive or are read pass through here.
    """
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def check_bytes(path: Path) -> None:
    """Raise an error if a file of ``torch.save`` differs from its CRC-32s, which ``torch.load`` does not read."""
    if is_zipfile(path):
        with ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} differs from its checksum")


def hash_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    if plain.numel():
        digest.update(plain.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    return digest.hexdigest()


def hash_of_groups(groups: Mapping[str, Mapping[str, Tensor]]) -> str:
    """SHA-256 of named tensors by group: of names, dtypes, shapes and bytes; a model and what is frozen in it, say."""
    found = [[group, name, hash_of(tensor)] for group, named in groups.items() for name, tensor in named.items()]
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def hash_of_named(tensors: Mapping[str, Tensor], known: Mapping[str, str] | None = None) -> str:
    """SHA-256 of a JSON list, sorted by name, of names and tensors' hashes, of which some are known."""
    hashes = {name: hash_of(tensor) for name, tensor in tensors.items()} | dict(known or {})
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a nested value."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all that nested dicts, tuples and lists hold."""
    if isinstance(value, dict):
        return {key: map_leaves(entry, function) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(entry, function) for entry in value))
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(map_leaves(entry, function) for entry in value)
    return function(value)
