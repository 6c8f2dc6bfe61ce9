"""Files that are whole or not there, and tensors kept in versions."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_fed.errors import CheckpointError

State = dict[str, Tensor]


def shown(path: Path) -> str:
    """A path as it can be typed here: relative where it lies below the working directory."""
    here, there = Path.cwd(), path.resolve()
    return str(there.relative_to(here)) if there.is_relative_to(here) else str(path)


class VersionedFiles:
    """Tensors in files of their own, ``<name>.r<version>.pt``.

    Args:
        directory: Their folder; it is made with the first file. None refuses to write.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory

    def read(self, name: str, version: int) -> State:
        """One version.

        Raises:
            CheckpointError: If its file is missing or damaged.
        """
        path = self.path(name, version)
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except (
            Exception
        ) as error:  # damaged bytes make the reader fail in a dozen ways, TypeError and struct.error included
            reason = " ".join(str(error).split())[:120]
            raise CheckpointError(f"the state of client {name} cannot be read from {path}: {reason}") from error
        if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise CheckpointError(f"the state of client {name} cannot be read from {path}: it is no mapping of tensors")
        return state

    def write(self, name: str, version: int, state: Mapping[str, Tensor]) -> None:
        """Write one version."""
        write_atomically(dict(state), self.path(name, version), durable=False)

    def delete(self, name: str, version: int) -> None:
        """Delete one version, if it is there."""
        self.path(name, version).unlink(missing_ok=True)

    def copy(self, name: str, version: int, source: Path) -> None:
        """Take one version from another folder."""
        target = self.path(name, version)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / target.name, target)

    def versions(self) -> Iterator[tuple[str, int]]:
        """Every name and version that has a file."""
        for path in self.directory.glob("*.r*.pt") if self.directory is not None else ():
            name, _, version = path.name.removesuffix(".pt").rpartition(".r")
            if version.isdigit() and not name.startswith("."):
                yield name, int(version)

    def path(self, name: str, version: int) -> Path:
        """Where a version lies.

        Raises:
            CheckpointError: If there is no folder.
        """
        if self.directory is None:
            raise CheckpointError(
                "what clients keep lies in the folder of their run, and this checkpoint lies in none; use it where the "
                "run left it"
            )
        return self.directory / f"{name}.r{version}.pt"


def remove_half_written(directory: Path) -> None:
    """Delete what `write_atomically` left in a folder when its process was killed."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_atomically(content: Any, path: Path, durable: bool = True) -> None:
    """Save tensors and primitives to a temporary file and rename it into place.

    Args:
        content: What ``torch.load(..., weights_only=True)`` can read back.
        path: The final name; what was there survives any failure.
        durable: Also wait until the bytes are on the disk, so that a power cut loses nothing.

    Raises:
        CheckpointError: If the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # a folder that could not be made holds no file either
            temporary.unlink()
        before = f"; the previous {path.name} is intact" if path.exists() else ""
        reason = error.__cause__ or error.__context__ or error
        raise CheckpointError(f"cannot write {path}: {' '.join(str(reason).split())}{before}") from error
