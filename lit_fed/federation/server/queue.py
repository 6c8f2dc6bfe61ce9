"""A queue of runs: folders within a folder, whose runs a server starts one after the other.

Whoever may write the folder submits and stops there. For operators elsewhere the process that holds the server's port
does, which is a run's own while it is at work. The server notes both in the queue's audit log.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import yaml
from filelock import FileLock

from lit_fed.command.endings import JUDGED
from lit_fed.errors import ConfigError
from lit_fed.federation.audit import Audit, Copy, audit_log
from lit_fed.federation.ends import Alert, sole_user
from lit_fed.federation.messages.operating import MOST_CONFIG, QueueRequest, pack, unpack
from lit_fed.file_names import is_file_name
from lit_fed.yaml_text import read_yaml

if TYPE_CHECKING:
    from lit_fed.federation.transport.grid import Grid  # with PyTorch, which the commands do without

LOCAL = "(local)"
"""Who submits or stops by the folder; it is not a name of an operator."""
RUN_KEYS = ("trainer", "model", "data", "algorithm", "gathering", "patience")
"""Top-level keys of an operator's configuration: neither other files nor the server's own options."""
_FOLDER = "LIT_FED_QUEUE_OF_RUN"  # environment variable of a run's process: the queue's folder
_LOOK_S = 0.5  # interval of looking for runs that are submitted or stopped
_WAITING = ("queued", "running")
_MOST_LISTED = 500  # of a long queue the newest, which fit into one message


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
    def submitter(self) -> str:
        """The operator who submitted it, or `LOCAL`."""
        path = self.folder / "by"
        return path.read_text(encoding="utf-8") if path.exists() else LOCAL

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has asked to stop it."""
        return (self.folder / "stop").exists()

    def stop(self, by: str = LOCAL) -> None:
        """Ask the server to stop it; raise `ConfigError` if it is over, or somebody has asked already."""
        with FileLock(self.folder.parent / ".submit", mode=0o600):
            word = "being stopped" if self.is_stopped and self.state[0] in _WAITING else self.state[0]
            if word not in _WAITING:
                raise ConfigError(f"run {self.folder.name} is {word}; stop a run that is queued or running")
            (self.folder / "stop.tmp").write_text(by, encoding="utf-8")
            os.replace(self.folder / "stop.tmp", self.folder / "stop")


def runs(folder: Path) -> list[QueuedRun]:
    """Return all runs of a queue, in order; a folder without a configuration is none."""
    return [run for run in _numbered(folder) if (run.folder / "config.yaml").is_file()]


def _numbered(folder: Path) -> list[QueuedRun]:
    found = [QueuedRun(path) for path in folder.glob("*-*") if path.name.partition("-")[0].isdecimal()]
    return sorted(found, key=lambda run: run.number)


# ---------------------------------------------------------------------- who submits, lists and stops


def act(folder: Path, request: QueueRequest, by: str = LOCAL) -> list[str]:
    """Do what an operator, or the folder's user, asks for; return lines to print, or raise `ConfigError`."""
    if request.verb == "submit":
        made = submit(folder, request, by)
        return [f"{made.folder.name} is queued, with configuration {made.hash}"]
    known = {run.folder.name: run for run in runs(folder)}
    if request.verb == "stop":
        if request.name not in known:
            raise ConfigError(f"the queue has no run {request.name!r:.100}; see lit-fed runs")
        known[request.name].stop(by)
        return []
    rows = [f"{run.folder.name}  {run.hash[:16]}  {run.submitter}  {' '.join(run.state)}" for run in known.values()]
    return rows[-_MOST_LISTED:]


def answer(folder: Path, by: str, blob: bytes) -> bytes:
    """Answer the message of an operator, whose name the transport knows."""
    return pack(act(folder, unpack(blob, QueueRequest), by))


def submit(folder: Path, request: QueueRequest, by: str = LOCAL) -> QueuedRun:
    """Append a run to a queue."""
    check(request, by)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = Path(mkdtemp(prefix=".", dir=folder))  # it gets a name of a run as a whole
    (fresh / "config.yaml").write_bytes(request.config)
    (fresh / "by").write_text(by, encoding="utf-8")
    with FileLock(folder / ".submit", mode=0o600):
        number = 1 + max((run.number for run in _numbered(folder)), default=0)
        return QueuedRun(fresh.rename(folder / f"{number:04}-{re.sub(r'[^A-Za-z0-9_]', '_', request.name)[:60]}"))


def check(request: QueueRequest, by: str) -> None:
    """Refuse what cannot be a run's configuration, by its name, its size and its keys; nothing is imported."""
    if not is_file_name(request.name):
        raise ConfigError(f"{request.name!r:.100} cannot name a run; rename the file, such as study.yaml")
    if len(request.config) > MOST_CONFIG:
        raise ConfigError(f"the configuration has more than {MOST_CONFIG:,} bytes; shorten it")
    content = None
    with suppress(yaml.YAMLError, ValueError):
        content = read_yaml(request.config.decode())
    if not isinstance(content, dict):
        raise ConfigError("the configuration is not YAML with keys such as trainer and data; correct it")
    if by != LOCAL and (odd := [str(key) for key in content if key not in RUN_KEYS]):
        raise ConfigError(f"the configuration has {odd[0]!r:.80}; an operator's has only {', '.join(RUN_KEYS)}")


# ---------------------------------------------------------------------- the server


def at_hand() -> Path | None:
    """Return the folder of the queue for which this process runs; None without one."""
    return Path(os.environ[_FOLDER]) if _FOLDER in os.environ else None


def work(
    folder: Path,
    command: Callable[[QueuedRun], Sequence[str]],
    door: Callable[[Audit], AbstractContextManager[Grid]],
    copy: Copy | None = None,
) -> None:
    """Start the runs of a queue one after the other, until a signal; a run that was at hand before is resumed.

    Args:
        folder: The queue's folder.
        command: The command of a run, which resumes what has begun.
        door: Opens the server's port for operators and nodes while no run waits.
        copy: Where a copy of each line of the queue's log goes.
    """
    with sole_user(folder, "--queue"), audit_log(folder / "audit", copy) as audit:
        audit.say(f"waiting for runs in {folder}; Ctrl-C ends it")
        while True:
            if not (waiting := _waiting(folder, audit)):
                with door(audit) as grid:
                    while not _waiting(folder, audit):
                        grid.nodes()  # ends the streams of revoked keys
                        time.sleep(_LOOK_S)
            elif waiting[0].is_stopped:
                _stopped(waiting[0], audit)
            else:
                _start(waiting[0], command(waiting[0]), audit)


def _waiting(folder: Path, audit: Audit) -> list[QueuedRun]:
    """Take note of runs that were submitted, or stopped while they were queued; return those that wait, in order."""
    waiting = []
    for run in runs(folder):
        if not (run.folder / "state").exists():
            audit.write("submitted", run=run.folder.name, config=run.hash, by=run.submitter)
            run.put("queued")
        if run.state[0] == "queued" and run.is_stopped:
            _stopped(run, audit)
        if run.state[0] in _WAITING:
            waiting.append(run)
    return sorted(waiting, key=lambda run: run.state[0] == "queued")  # what was at hand first


def _stopped(run: QueuedRun, audit: Audit) -> None:
    audit.write("stopped", run=run.folder.name, config=run.hash, by=(run.folder / "stop").read_text("utf-8"))
    run.put("stopped")


def _start(run: QueuedRun, command: Sequence[str], audit: Audit) -> None:
    with open(run.folder / "log", "ab") as log:
        _lock(run, log, audit)
        audit.say(f"run {run.folder.name} begins")
        run.put("running")
        env = os.environ | {JUDGED: "1", _FOLDER: str(run.folder.parent)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            while (status := process.poll()) is None and not run.is_stopped:
                _waiting(run.folder.parent, audit)
                time.sleep(_LOOK_S)
        finally:
            process.terminate()
            process.wait()
    errors = re.findall("^lit-fed: error: (.*)", (run.folder / "log").read_text("utf-8", "replace"), re.MULTILINE)
    if status is None:
        _stopped(run, audit)
    else:
        run.put(*("failed", [*errors, "see its log"][max(len(errors) - 1, 0)]) if status else ("finished",))
    audit.say(f"run {run.folder.name} is {' '.join(run.state)}")


def _lock(run: QueuedRun, log: BinaryIO, audit: Audit) -> None:
    """Lock a run's log, whose file the run's process shares; wait for one that outlived a server that was killed."""
    import fcntl  # missing on Windows

    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        audit.say(
            Alert(f"run {run.folder.name} is still at work in a process of an earlier server; waiting for its end")
        )
        fcntl.flock(log, fcntl.LOCK_EX)
