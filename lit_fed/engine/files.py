"""Files that are whole or not there, and tensors kept in versions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lit_fed.errors import CheckpointError
from lit_fed.file_names import is_file_name

State = dict[str, Tensor]


def shown(path: Path) -> str:
    """A path as it can be typed here: relative where it lies below the working directory."""
    here, there = Path.cwd(), path.resolve()
    return str(there.relative_to(here)) if there.is_relative_to(here) else str(path)


Version = tuple[int, int]
"""The round in which a state was written, and the checksum of what was written."""


def checksum(state: Mapping[str, Tensor]) -> int:
    """The CRC-32 of named tensors: of names, types, shapes and values, in any order and on any device.

    It tells an accident, not an attack.
    """
    total = 0
    for name, tensor in sorted(state.items()):
        total = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return total


class VersionedFiles:
    """Tensors in files of their own, ``<name>.r<round>.pt``, each of which says whose they are.

    Args:
        directory: Their folder; it is made with the first file. None refuses to write.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory

    def read(self, name: str, version: Version) -> State:
        """One version.

        Raises:
            CheckpointError: If its file is missing, damaged, another client's, or not what was written.
        """
        path = self.path(name, version[0])
        try:
            content = torch.load(path, weights_only=True, map_location="cpu")
        except (
            Exception
        ) as error:  # damaged bytes make the reader fail in a dozen ways, TypeError and struct.error included
            raise _unreadable(name, path, " ".join(str(error).split())[:120]) from error
        state = content.get("state") if isinstance(content, dict) else None
        if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise _unreadable(name, path, "it is no client's state")
        if content.get("client") != name:
            raise _unreadable(name, path, f"it is that of client {content.get('client')}")
        if checksum(state) != version[1]:
            raise _unreadable(name, path, "it is not what the run wrote there")
        return state

    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        """Write one version."""
        write_atomically({"client": name, "state": dict(state)}, self.path(name, round_idx), durable=False)
        return round_idx, checksum(state)

    def delete(self, name: str, round_idx: int) -> None:
        """Delete one version, if it is there."""
        self.path(name, round_idx).unlink(missing_ok=True)

    def copy(self, name: str, round_idx: int, source: Path) -> None:
        """Take one version from another folder.

        Raises:
            CheckpointError: If it is not there, or cannot be copied.
        """
        target = self.path(name, round_idx)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / target.name, target)
        except OSError as error:
            raise CheckpointError(f"cannot copy {source / target.name} to {target}: {error.strerror}") from error

    def rounds(self) -> Iterator[tuple[str, int]]:
        """Every name and round that has a file."""
        for path in self.directory.glob("*.r*.pt") if self.directory is not None else ():
            name, _, round_idx = path.name.removesuffix(".pt").rpartition(".r")
            if round_idx.isdecimal() and not name.startswith("."):
                yield name, int(round_idx)

    def path(self, name: str, round_idx: int) -> Path:
        """Where a version lies.

        Raises:
            CheckpointError: If there is no folder, or the name would lead out of it.
        """
        if self.directory is None:
            raise CheckpointError(
                "what clients keep lies in the folder of their run, and this checkpoint lies in none; use it where the "
                "run left it"
            )
        if not is_file_name(name):
            raise CheckpointError(
                f"a client cannot be called {name!r}: its state would lie outside of the run's folder"
            )
        return self.directory / f"{name}.r{round_idx}.pt"


def _unreadable(name: str, path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the state of client {name} cannot be read from {path}: {why}")


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
    with _in_place_of(path) as temporary, open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_text(parts: Iterable[str], path: Path) -> None:
    """Write a text in UTF-8 to a temporary file and rename it into place.

    Args:
        parts: Its parts; what reading them raises leaves the file as it was.
        path: The final name; what was there survives any failure.

    Raises:
        CheckpointError: If the disk is full or the folder cannot be written.
    """
    with _in_place_of(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(parts)


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of another once it is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with cannot_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # a folder that could not be made holds no file either
            temporary.unlink()
        raise


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Name a file that cannot be written; the system's error does not, where the disk is full.

    Raises:
        CheckpointError: In place of such an error.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        before = f"; the previous {path.name} is intact" if path.suffix == ".ckpt" and path.exists() else ""
        reason = error.__cause__ or error.__context__ or error
        raise CheckpointError(f"cannot write {path}: {' '.join(str(reason).split())}{before}") from error
