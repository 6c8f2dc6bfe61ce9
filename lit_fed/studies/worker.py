"""A place where cells run one after the other, each in a process of its own that starts without importing anything."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Worker:
    """The study's side of ``lit_fed.studies.child``, which is started with the first cell.

    Args:
        env: The environment of all its cells.
        locks: Descriptors that it holds: the folders stay locked while a cell of a killed study lives.
    """

    def __init__(self, env: Mapping[str, str], locks: Sequence[int]) -> None:
        self._env, self._locks = dict(env), tuple(locks)
        self._process: subprocess.Popen[bytes] | None = None
        self._study: socket.socket | None = None
        self._heard = b""
        self._cell: int | None = None
        self._status: int | None = None

    def start(self, command: Sequence[str], log: Path) -> None:
        """Begin a cell; the one before must have ended.

        Args:
            command: Arguments of the command line.
            log: The file to which its output is appended.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._begin(log)
        assert self._study is not None
        self._heard, self._cell, self._status = b"", None, None
        with suppress(OSError):  # it has just died, which poll will find out
            self._study.sendall(json.dumps([list(command), str(log.absolute())]).encode() + b"\n")

    def _begin(self, log: Path) -> None:
        self._study, theirs = socket.socketpair()
        with theirs, open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lit_fed.studies.child", "--serve", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,  # Ctrl-C comes to the study, which passes it on
                pass_fds=(theirs.fileno(), *self._locks),
            )

    def poll(self) -> int | None:
        """The exit status of the cell, below zero for a signal; None while it runs."""
        assert self._study is not None
        assert self._process is not None
        while self._status is None and select.select([self._study], [], [], 0)[0]:
            try:
                heard = self._study.recv(4096)
            except ConnectionResetError:
                heard = b""
            if not heard:  # the child is gone, and without it nobody learns how the cell ends
                self._kill_cell(signal.SIGKILL)
                self._status = self._process.wait() or 1
            self._heard += heard
            answers = self._heard.split(b"\n")[:-1]
            if answers:
                self._cell = int(answers[0])
            if len(answers) == 2:
                self._cell, self._status = None, int(answers[1])
        return self._status

    def stop(self, signum: int) -> None:
        """Send a signal to the running cell and whatever it started."""
        assert self._process is not None
        if self._cell is None:  # not begun
            self._process.kill()
        self._kill_cell(signum)

    def _kill_cell(self, signum: int) -> None:
        if self._cell is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._cell, signum)

    def close(self) -> None:
        """End the child, and the cell if one runs."""
        self._kill_cell(signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._study is not None:
            self._study.close()
        self._process = self._study = self._cell = None
