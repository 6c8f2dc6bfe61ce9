"""Files written whole or not at all, and versioned files of tensors."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile
from zlib import crc32

import torch
from torch import Tensor

from lit_fed.engine.storage.state_bytes import State, StateBytes, is_not
from lit_fed.errors import CheckpointError, ConfigError, UnreadableFile
from lit_fed.file_names import is_file_name
from lit_fed.tensors import map_tensors

Version = tuple[int, int]
"""A state's round and the CRC-32 of its bytes, which detects accidents, not attacks."""
Packs = dict[int, dict[str, dict[str, tuple[int, int]]]]
"""Offset and length of each state, by round and file name."""


class VersionedFiles:
    """Clients' states, a file ``<name>.r<round>.safetensors`` each, with the client's name inside.

    Args:
        directory: Their folder, created with the first file. None refuses to write.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.bytes = StateBytes()

    def read(self, name: str, version: Version) -> State:
        """Read a version.

        Raises:
            CheckpointError: If its file is missing, damaged, another client's, or differs from the written content.
        """
        path = self.path(name, version[0])
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise unreadable(name, path, str(error.strerror)) from error
        if crc32(blob) != version[1]:
            raise unreadable(name, path, is_not(name, blob))
        return self._decoded(name, blob, path)

    def _decoded(self, name: str, blob: bytes, path: Path) -> State:
        """Decode bytes whose checksum fits; forged bytes may fit too, and raise a `CheckpointError` here."""
        try:
            return self.bytes.decode(name, blob)
        except Exception as error:  # the reader fails in a dozen ways
            raise unreadable(name, path, f"it is no state: {' '.join(str(error).split())[:100]}") from error

    def read_ahead(self, versions: Mapping[str, Version]) -> dict[str, State]:
        """Read in advance the versions, by name, that are faster to read together; skip the unreadable."""
        return {}

    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        """Write a version of contiguous tensors, at the latest with `flush`.

        Raises:
            CheckpointError: If the disk is full, the folder is not writable, or safetensors lacks a dtype.
        """
        blob = self.bytes.encode(name, state)
        with in_place_of(self.path(name, round_idx)) as temporary:
            temporary.write_bytes(blob)
        return round_idx, crc32(blob)

    def flush(self) -> Packs:
        """Write buffered states; return the packs written since the last call, for `take`."""
        return {}

    def take(self, packs: Packs) -> None:
        """Register the packs of some process, which replace these clients' states of the same round."""

    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        """Drop versions that nobody needs; one process also deletes them."""
        if delete:
            for name, round_idx in gone:
                self.delete(name, round_idx)

    def delete(self, name: str, round_idx: int) -> None:
        """Delete a version, if it exists."""
        self.path(name, round_idx).unlink(missing_ok=True)

    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        """Copy a version from another folder.

        Raises:
            CheckpointError: If it does not exist, or cannot be copied.
        """
        origin, target = source.path(name, version[0]), self.path(name, version[0])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, target)
        except OSError as error:
            raise CheckpointError(f"cannot copy {origin} to {target}: {error.strerror}") from error

    def rounds(self) -> Iterator[tuple[str, int]]:
        """Name and round of every stored version."""
        for path in self.directory.glob("*.r*.safetensors") if self.directory is not None else ():
            name, _, round_idx = path.stem.rpartition(".r")
            if round_idx.isdecimal() and not name.startswith("."):
                yield name, int(round_idx)

    def path(self, name: str, round_idx: int) -> Path:
        """The file of a version.

        Raises:
            CheckpointError: If there is no folder, or the name would leave it.
        """
        return self.folder_of(name) / f"{name}.r{round_idx}.safetensors"

    def folder_of(self, name: str) -> Path:
        """The folder, for a client's file.

        Raises:
            CheckpointError: If there is no folder, or the name would leave it.
        """
        if self.directory is None:
            raise CheckpointError(
                "the checkpoint lies outside of its run's folder, which holds the clients' states; use it where the "
                "run left it"
            )
        if not is_file_name(name):
            raise CheckpointError(f"client name {name!r} would place its state outside of the run's folder; rename it")
        return self.directory


def unreadable(name: str, path: Path, why: str) -> CheckpointError:
    """The error for a client's state that cannot be read."""
    return CheckpointError(f"the state of client {name} cannot be read from {path}: {why}")


@contextmanager
def unreadable_named(path: Path) -> Iterator[None]:
    """Raise `UnreadableFile` for the system's errors: the file cannot be read, whatever its content."""
    try:
        yield
    except OSError as error:
        raise UnreadableFile(
            f"{path} cannot be read: {error.strerror or error}; it may be intact: fix access, and delete nothing"
        ) from error


_RUN_FILES = (
    r"(?:config(?:\.until_round_[0-9]+)?\.yaml|metrics\.csv|clients\.csv|partition\.json|cell\.json"
    r"|left_out\.png|pseudo_map\.png|privacy\.md|.+\.(?:ckpt|apart|states|safetensors))"
)
"""Names of the files that a run or a study writes by `in_place_of`."""


def remove_half_written(directory: Path, names: str = _RUN_FILES) -> None:
    """Delete temporary files of `in_place_of` whose process was killed; only for the holder of the folder's lock.

    Args:
        directory: The folder.
        names: Pattern of the final files' names.
    """
    half = re.compile(rf"\.(?:{names})\.([0-9]{{1,9}})\.tmp")
    for path in directory.glob(".*.tmp"):
        found = half.fullmatch(path.name)
        if found and not _is_another(int(found[1])):
            path.unlink(missing_ok=True)


def _is_another(pid: int) -> bool:
    """Whether a process other than this one is running."""
    if pid == os.getpid() or os.name != "posix":  # elsewhere the signal would end it
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0


def write_atomically(content: Any, path: Path) -> None:
    """Save tensors and primitives to a temporary file, flush it to the disk, and rename it into place.

    Args:
        content: Readable by ``torch.load(..., weights_only=True)`` on any machine: tensors are saved as the CPU's.
        path: The final name; an existing file survives any failure.

    Raises:
        CheckpointError: If the disk is full or the folder is not writable.
    """
    with in_place_of(path) as temporary, open(temporary, "wb") as file:
        torch.save(map_tensors(content, Tensor.cpu), file)
        file.flush()
        os.fsync(file.fileno())


def check_bytes(path: Path) -> None:
    """Raise an error if a file of `write_atomically` differs from its CRC-32s, which ``torch.load`` does not read."""
    if is_zipfile(path):
        with ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} differs from its checksum")


def write_text(parts: Iterable[str], path: Path) -> None:
    """Write a text in UTF-8 to a temporary file and rename it into place.

    Args:
        parts: Its parts, possibly lazy; an error in one leaves the file as it was.
        path: The final name; an existing file survives any failure.

    Raises:
        CheckpointError: If the disk is full or the folder is not writable.
    """
    with in_place_of(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(parts)


def refuse_overwriting(paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse paths that are folders or, without ``overwrite``, exist.

    Raises:
        ConfigError: For the first of them.
    """
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name another file with --output")
        if not overwrite and os.path.lexists(path):
            raise ConfigError(f"{path} exists; name another file with --output, or replace it with --overwrite")


@contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to the path on success, and deleted on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with cannot_write(path):
            if not path.parent.is_dir():  # cheaper than `mkdir` of an existing folder
                path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder may be missing, too
            temporary.unlink()
        raise


@contextmanager
def files_in_place(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield a temporary folder whose files move to another one together, once all are written.

    Args:
        folder: The destination, created if missing; its other files stay.
        names: Files that belong together: the old ones that are not rewritten are deleted.

    Raises:
        CheckpointError: If the disk is full or the folder is not writable; existing files survive.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    temporary = folder / f".{os.getpid()}.tmp"
    try:
        with cannot_write(folder):
            temporary.mkdir(parents=True)
            yield temporary
            written = list(temporary.iterdir())
            for name in {*names} - {path.name for path in written}:
                (folder / name).unlink(missing_ok=True)
            for path in written:
                path.replace(folder / path.name)
            temporary.rmdir()
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Raise a `CheckpointError` that names the file; the system's error on a full disk does not."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        before = f"; the previous {path.name} is intact" if path.suffix == ".ckpt" and path.exists() else ""
        first: BaseException = error
        reason = error.__cause__ or error.__context__ or error
        while first.__cause__ or first.__context__:  # torch's writer fails again, twice, while it closes the file
            first = first.__cause__ or first.__context__ or first
            reason = first if isinstance(first, OSError) else reason
        raise CheckpointError(f"cannot write {path}: {' '.join(str(reason).split())}{before}") from error
