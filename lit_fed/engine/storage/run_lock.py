"""One writer per run: the process that writes into a run's folder holds its lock."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from weakref import WeakKeyDictionary

from filelock import FileLock, Timeout
from lightning import Fabric

from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import ConfigError

_held = WeakKeyDictionary[Fabric, Path]()  # the folder that a trainer's process holds


@contextmanager
def sole_writer(fabric: Fabric, folder: Path) -> Iterator[None]:
    """Lock a run's folder; called on every process, held by the first, and once more by the same trainer as a no-op.

    The system frees the lock when its holder ends in any way; the file ``.lock`` stays, unless it is the only one.
    ``.writer`` names the holder.
    """
    if _held.get(fabric) == folder.resolve():
        yield
        return
    lock = FileLock(folder / ".lock", timeout=0)
    writer = folder / ".writer"

    def take() -> None:
        try:
            lock.acquire()
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            writer.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}", encoding="utf-8")
        except Timeout:
            raise ConfigError(
                f"{folder} is being written by {_holder(writer)}; wait until that run ends or stop it, or start another"
                " run without --ckpt_path"
            ) from None
        except OSError as error:
            raise ConfigError(f"the run's folder {folder} cannot be written to: {error.strerror}") from error

    try:
        on_first_process(fabric, take)
        _held[fabric] = folder.resolve()
        yield
    finally:
        _held.pop(fabric, None)
        if lock.is_locked:
            writer.unlink(missing_ok=True)
            lock.release()
            if [path.name for path in folder.iterdir()] == [".lock"]:  # a refused run leaves nothing
                (folder / ".lock").unlink()
                folder.rmdir()


def _holder(writer: Path) -> str:
    try:
        return writer.read_text(encoding="utf-8") or "another process"
    except (OSError, UnicodeDecodeError):  # the lock was taken this moment
        return "another process"
