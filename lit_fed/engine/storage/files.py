"""Files written whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fed.errors import CheckpointError, ConfigError, UnreadableFile


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
    r"(?:config(?:\.until_round_[0-9]+)?\.yaml|metrics\.csv|clients\.csv|partition\.json|cell\.json|record\.jsonl"
    r"|left_out\.png|contribution\.png|pseudo_map\.png|privacy\.md|card\.md|.+\.(?:ckpt|apart|states))"
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
        match = half.fullmatch(path.name)
        if match and not _is_another(int(match[1])):
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
    import torch  # not at the top: `lit-fed copy` writes without it

    from lit_fed.tensors import map_tensors

    with in_place_of(path) as temporary, open(temporary, "wb") as file:
        torch.save(map_tensors(content, torch.Tensor.cpu), file)
        file.flush()
        os.fsync(file.fileno())


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
    """Refuse paths that are folders or, without ``overwrite``, exist."""
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
