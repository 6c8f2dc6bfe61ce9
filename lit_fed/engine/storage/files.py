"""Files that are whole or not there, and tensors kept in versions."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lit_fed.engine.storage.state_bytes import State, StateBytes, is_not
from lit_fed.errors import CheckpointError, ConfigError, UnreadableFile
from lit_fed.file_names import is_file_name
from lit_fed.tensors import map_tensors

Version = tuple[int, int]
"""The round in which a state was written, and the CRC-32 of its bytes: that tells an accident, not an attack."""
Packs = dict[int, dict[str, dict[str, tuple[int, int]]]]
"""By round and by the name of a file: where each state in it begins, and its length."""


class VersionedFiles:
    """Tensors in files of their own, ``<name>.r<round>.safetensors``, each of which says whose they are.

    Args:
        directory: Their folder; it is made with the first file. None refuses to write.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.bytes = StateBytes()

    def read(self, name: str, version: Version) -> State:
        """One version.

        Raises:
            CheckpointError: If its file is missing, damaged, another client's, or not what was written.
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
        """The state in bytes that are what was written.

        Raises:
            CheckpointError: If they are none: whoever made them up made up their checksum too.
        """
        try:
            return self.bytes.decode(name, blob)
        except Exception as error:  # the reader fails in a dozen ways
            raise unreadable(name, path, f"it is no state: {' '.join(str(error).split())[:100]}") from error

    def read_ahead(self, versions: Mapping[str, Version]) -> dict[str, State]:
        """Those of several versions, by name, that are read in less time together; without any that cannot be read."""
        return {}

    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        """Write one version.

        Args:
            name: Whose.
            round_idx: The version.
            state: Contiguous tensors.

        Raises:
            CheckpointError: If the disk is full, the folder cannot be written, or safetensors has no such tensors.
        """
        blob = self.bytes.encode(name, state)
        with in_place_of(self.path(name, round_idx)) as temporary:
            temporary.write_bytes(blob)
        return round_idx, crc32(blob)

    def flush(self) -> Packs:
        """Write what is still held back; what was written together since the last time, for `take`."""
        return {}

    def take(self, packs: Packs) -> None:
        """Learn what some process has written together."""

    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        """Let versions go that nobody needs any more.

        Args:
            gone: Them.
            delete: Also delete them; for one process.
        """
        if delete:
            for name, round_idx in gone:
                self.delete(name, round_idx)

    def delete(self, name: str, round_idx: int) -> None:
        """Delete one version, if it is there."""
        self.path(name, round_idx).unlink(missing_ok=True)

    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        """Take one version from another folder's.

        Raises:
            CheckpointError: If it is not there, or cannot be copied.
        """
        origin, target = source.path(name, version[0]), self.path(name, version[0])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, target)
        except OSError as error:
            raise CheckpointError(f"cannot copy {origin} to {target}: {error.strerror}") from error

    def rounds(self) -> Iterator[tuple[str, int]]:
        """Every name and round that has a file."""
        for path in self.directory.glob("*.r*.safetensors") if self.directory is not None else ():
            name, _, round_idx = path.stem.rpartition(".r")
            if round_idx.isdecimal() and not name.startswith("."):
                yield name, int(round_idx)

    def path(self, name: str, round_idx: int) -> Path:
        """Where a version lies.

        Raises:
            CheckpointError: If there is no folder, or the name would lead out of it.
        """
        return self.folder_of(name) / f"{name}.r{round_idx}.safetensors"

    def folder_of(self, name: str) -> Path:
        """The folder, for somebody's file.

        Raises:
            CheckpointError: If there is none, or the name would lead out of it.
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
        return self.directory


def unreadable(name: str, path: Path, why: str) -> CheckpointError:
    """That somebody's state cannot be read."""
    return CheckpointError(f"the state of client {name} cannot be read from {path}: {why}")


@contextmanager
def unreadable_named(path: Path) -> Iterator[None]:
    """Say that a file cannot be read where the system says so, which is another thing than what it holds.

    Raises:
        UnreadableFile: In place of the system's error.
    """
    try:
        yield
    except OSError as error:
        raise UnreadableFile(
            f"{path} cannot be read: {error.strerror or error}; it may be whole: mend that, and delete nothing"
        ) from error


_RUN_FILES = (
    r"(?:config(?:\.until_round_[0-9]+)?\.yaml|metrics\.csv|clients\.csv|partition\.json|cell\.json"
    r"|.+\.(?:ckpt|states|safetensors))"
)
"""Names of what a run, or a study, writes by `in_place_of`."""


def remove_half_written(directory: Path, names: str = _RUN_FILES) -> None:
    """Delete what `in_place_of` left in a folder when its process was killed; for whoever holds the folder's lock.

    Args:
        directory: The folder.
        names: Matches the files that are written there.
    """
    half = re.compile(rf"\.(?:{names})\.([0-9]{{1,9}})\.tmp")
    for path in directory.glob(".*.tmp"):
        found = half.fullmatch(path.name)
        if found and not _is_another(int(found[1])):
            path.unlink(missing_ok=True)


def _is_another(pid: int) -> bool:
    """Whether a process is at work that is not this one."""
    if pid == os.getpid() or os.name != "posix":  # elsewhere to ask is to end it
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0


def write_atomically(content: Any, path: Path) -> None:
    """Save tensors and primitives to a temporary file, wait until it is on the disk, and rename it into place.

    Args:
        content: What ``torch.load(..., weights_only=True)`` can read back, on any machine: tensors are saved as the
            CPU's.
        path: The final name; what was there survives any failure.

    Raises:
        CheckpointError: If the disk is full or the folder cannot be written.
    """
    with in_place_of(path) as temporary, open(temporary, "wb") as file:
        torch.save(map_tensors(content, Tensor.cpu), file)
        file.flush()
        os.fsync(file.fileno())


def write_text(parts: Iterable[str], path: Path) -> None:
    """Write a text in UTF-8 to a temporary file and rename it into place.

    Args:
        parts: Its parts; what reading them raises leaves the file as it was.
        path: The final name; what was there survives any failure.

    Raises:
        CheckpointError: If the disk is full or the folder cannot be written.
    """
    with in_place_of(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(parts)


def refuse_overwriting(paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse to write where a user has something already.

    Args:
        paths: What is to be written.
        overwrite: Whether files may be replaced.

    Raises:
        ConfigError: For the first path that is there, or is a folder.
    """
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name another file with --output")
        if not overwrite and os.path.lexists(path):
            raise ConfigError(f"{path} is there already; name another with --output, or replace it with --overwrite")


@contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of another once it is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with cannot_write(path):
            if not path.parent.is_dir():  # which costs less than to find it there
                path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # a folder that could not be made holds no file either
            temporary.unlink()
        raise


@contextmanager
def files_in_place(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A temporary folder whose files take their places in another one, together, once all are written.

    Args:
        folder: Where to; it is made, and other files in it stay.
        names: Files that go together: those that are not written anew are deleted then.

    Raises:
        CheckpointError: If the disk is full or the folder cannot be written; what was there before still is.
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
