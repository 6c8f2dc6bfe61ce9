"""The process of a cell: the command line, forked from a process with all imports done.

multiprocessing's fork server is this process. It starts with the first cell, forks a process for every cell and reports
exit codes. It only imports modules, because threads do not survive a fork, and CUDA does not work after one.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any


class CellProcess:
    """A running cell in a separate process group, with its output in a file.

    Args:
        command: Arguments of the command line.
        log: The file to which the output is appended.
        env: Changes of the environment.
        locks: Descriptors that the cell inherits, so that folders stay locked while a cell of a killed study runs.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], locks: Sequence[int] = ()) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":  # on other systems, system libraries do not survive a fork
            _start_server(context, env)
        held = [_Held(lock) for lock in locks]
        here = (str(log.absolute()), str(Path.cwd()), dict(env), held)
        self._cpu_seconds = 0.0
        self._used, used = context.Pipe(duplex=False)
        self._process = context.Process(target=_begin, args=(list(command), *here, used))
        self._process.start()
        used.close()

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return int(self._process.pid)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process and its children, once it has ended; 0 if it was killed."""
        with suppress(EOFError):
            if self._used.poll():
                self._cpu_seconds = float(self._used.recv())
        return self._cpu_seconds

    def poll(self) -> int | None:
        """The exit status, below zero for a signal; None while it runs."""
        status: int | None = self._process.exitcode
        if status is not None:  # its children may still run
            self._signal(signal.SIGKILL)
        return status

    def stop(self, signum: int) -> None:
        """Send a signal to the process group."""
        if self._process.exitcode is None:
            self._signal(signum)

    def close(self) -> None:
        """Kill the process group, and wait for its end."""
        self._signal(signal.SIGKILL)
        self._process.join()

    def _signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:  # the process has not created its group yet
                if self._process.exitcode is None:
                    os.kill(self.pid, signum)


class _Held:
    """A descriptor that a new process inherits."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self.descriptor)

    def __setstate__(self, twin: Any) -> None:
        self.descriptor = twin.detach()


def _start_server(context: Any, env: Mapping[str, str]) -> None:
    """Start the fork server, unless it runs, in the cells' environment, some of which is read on import."""
    context.set_forkserver_preload(["lit_fed.studies.running.warm"])
    before = dict(os.environ)
    os.environ.update(env)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---------------------------------------------------------------------- in the new process


def _begin(
    command: list[str], log: str, folder: str, env: Mapping[str, str], held: list[_Held], used: Connection
) -> None:
    """Turn the new process into the cell."""
    atexit.unregister(os._exit)  # see lit_fed.studies.running.warm
    os.setpgid(0, 0)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ.update(env)
    # A cell with several processes starts the others with its own command: python -m lit_fed fit …
    sys.modules["__main__"] = importlib.import_module("lit_fed.__main__")
    sys.argv[1:] = command
    _end_with_study()
    status = _run(command)
    used.send(sum(os.times()[:4]))
    os._exit(status)


def _end_with_study() -> None:
    """Kill this process group when the study ends, so that two runs never write into one folder."""
    study = multiprocessing.parent_process()
    assert study is not None

    def watch() -> None:
        wait([study.sentinel])
        os.killpg(0, signal.SIGKILL)  # checkpoints survive SIGKILL

    threading.Thread(target=watch, daemon=True).start()


def _run(command: list[str]) -> int:
    """Run a cell; skip the interpreter's finalisation, which takes longer than some cells."""
    from lit_fed.command.cli import main

    status = 0
    try:
        main(command)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # the first step of finalisation
    sys.stdout.flush()
    sys.stderr.flush()
    return status
