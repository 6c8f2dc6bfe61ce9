"""A queue of runs: folders within a folder, whose runs a server starts one after the other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO, NamedTuple

from filelock import FileLock

from lit_fed.command.endings import JUDGED
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import Alert, log_line, sole_user

_LOOK_S = 0.5  # interval of looking for runs that are submitted or stopped
_WAITING = ("queued", "running")


class QueuedRun(NamedTuple):
    """A run of a queue.

    Args:
        folder: Its folder, with its ``config.yaml`` and ``log``, and with what the run writes.
    """

    folder: Path

    @property
    def number(self) -> int:
        """Its number, by which runs follow each other."""
        return int(self.folder.name.partition("-")[0])

    @property
    def state(self) -> tuple[str, str]:
        """The word for its state, and the reason; the server alone writes it."""
        path = self.folder / "state"
        word, _, why = path.read_text(encoding="utf-8").partition(" ") if path.exists() else ("queued", "", "")
        return word, why

    def put(self, word: str, why: str = "") -> None:
        """Replace its state."""
        (self.folder / "state.tmp").write_text(f"{word} {datetime.now():%Y-%m-%d %H:%M:%S} {why}", encoding="utf-8")
        os.replace(self.folder / "state.tmp", self.folder / "state")

    @property
    def hash(self) -> str:
        """SHA-256 of its configuration, by which nodes that stand know it."""
        return sha256((self.folder / "config.yaml").read_bytes()).hexdigest()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has asked to stop it."""
        return (self.folder / "stop").exists()

    def stop(self) -> None:
        """Ask the server to stop it; raise `ConfigError` if it is over."""
        if (word := self.state[0]) not in _WAITING:
            raise ConfigError(f"run {self.folder.name} is {word}; stop a run that is queued or running")
        (self.folder / "stop").touch()


def runs(folder: Path) -> list[QueuedRun]:
    """Return all runs of a queue, in order; a folder without a configuration is none."""
    return [run for run in _numbered(folder) if (run.folder / "config.yaml").is_file()]


def _numbered(folder: Path) -> list[QueuedRun]:
    found = [QueuedRun(path) for path in folder.glob("*-*") if path.name.partition("-")[0].isdecimal()]
    return sorted(found, key=lambda run: run.number)


def submit(folder: Path, config: Path) -> QueuedRun:
    """Append a run to a queue."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = Path(mkdtemp(prefix=".", dir=folder))  # it gets a name of a run as a whole
    shutil.copyfile(config, fresh / "config.yaml")
    with FileLock(folder / ".submit", mode=0o600):
        number = 1 + max((run.number for run in _numbered(folder)), default=0)
        return QueuedRun(fresh.rename(folder / f"{number:04}-{re.sub(r'[^A-Za-z0-9_]', '_', config.stem)[:60]}"))


def work(folder: Path, command: Callable[[QueuedRun], Sequence[str]]) -> None:
    """Start the runs of a queue one after the other, until a signal; a run that was at hand before is resumed.

    Args:
        folder: The queue's folder.
        command: The command of a run, which resumes what has begun.
    """
    with sole_user(folder, "--queue"):
        log_line(f"waiting for runs in {folder}; Ctrl-C ends it")
        while True:
            waiting = [run for run in runs(folder) if run.state[0] in _WAITING]
            waiting.sort(key=lambda run: run.state[0] == "queued")  # what was at hand first
            if not waiting:
                time.sleep(_LOOK_S)
            elif waiting[0].is_stopped:
                waiting[0].put("stopped")
            else:
                _start(waiting[0], command(waiting[0]))


def _start(run: QueuedRun, command: Sequence[str]) -> None:
    with open(run.folder / "log", "ab") as log:
        _lock(run, log)
        log_line(f"run {run.folder.name} begins")
        run.put("running")
        env = os.environ | {JUDGED: "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            while (status := process.poll()) is None and not run.is_stopped:
                time.sleep(_LOOK_S)
        finally:
            process.terminate()
            process.wait()
    errors = re.findall("^lit-fed: error: (.*)", (run.folder / "log").read_text("utf-8", "replace"), re.MULTILINE)
    word = "stopped" if status is None else "failed" if status else "finished"
    run.put(word, [*errors, "see its log"][max(len(errors) - 1, 0)] if word == "failed" else "")
    log_line(f"run {run.folder.name} is {' '.join(run.state)}")


def _lock(run: QueuedRun, log: BinaryIO) -> None:
    """Lock a run's log, whose file the run's process shares; wait for one that outlived a server that was killed."""
    import fcntl  # missing on Windows

    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log_line(
            Alert(f"run {run.folder.name} is still at work in a process of an earlier server; waiting for its end")
        )
        fcntl.flock(log, fcntl.LOCK_EX)
