"""Run a command in a process of its own, within limits, and judge how it ended."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 60
GIGABYTES = 4  # beyond what the imports take
_LONGEST = 700  # characters of an error
_CODE = re.compile(r"Traceback \(most recent|Namespace\(|<class '|<function|object at 0x|\x1b\[")


@dataclass(frozen=True)
class Case:
    """A command that must not work.

    Args:
        name: What is wrong with it.
        args: The command line.
        prepare: Writes the files it needs into the working directory.
        status: How it may end: 2, the input is refused; 1, a run or a cell failed. (0,) is for what must work, so that
            the others are known to be refused for what is wrong with them.
    """

    name: str
    args: list[str]
    prepare: Callable[[Path], Any] | None = None
    status: tuple[int, ...] = (2,)


@dataclass
class Verdict:
    """How a case ended, and what was wrong with that."""

    case: Case
    status: int
    line: str
    seconds: float
    faults: list[str] = field(default_factory=list)


def judge(case: Case, folder: Path) -> Verdict:
    """Run a case in an empty folder."""
    folder.mkdir(parents=True)
    if case.prepare is not None:
        case.prepare(folder)
    before, began = _made(folder), time.monotonic()
    status = _run(case.args, folder)
    seconds = time.monotonic() - began
    said = (folder / "err.txt").read_text(errors="replace")
    lines = said.splitlines()
    verdict = Verdict(case, status, lines[-1] if lines else "", seconds)
    if status < 0:
        verdict.faults.append(f"killed by {signal.Signals(-status).name}")
    elif status not in case.status:
        verdict.faults.append(f"exit status {status}")
    elif status == 0:
        return verdict
    elif len(lines) != 1:
        verdict.faults.append(f"{len(lines)} lines")
    elif not lines[0].startswith("lit-fed: error: "):
        verdict.faults.append("no error of lit-fed")
    elif len(lines[0]) > _LONGEST:
        verdict.faults.append(f"{len(lines[0])} characters")
    if found := _CODE.search(said):
        verdict.faults.append(f"shows code: {found.group()}")
    if case.status == (2,) and (new := _made(folder) - before):
        verdict.faults.append(f"left {sorted(new)[0]}")
    if verdict.faults and len(lines) > 1:
        verdict.line = " ⏎ ".join(lines[-4:])
    return verdict


def _made(folder: Path) -> set[str]:
    """All files and folders but those of this program."""
    ours = {"out.txt", "err.txt"}
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in ours}


def _run(args: list[str], folder: Path) -> int:
    """The exit status, negative for a signal; a process that takes too long is killed."""
    child = os.fork()
    if child == 0:
        _be_the_command(args, folder)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)


def _be_the_command(args: list[str], folder: Path) -> None:
    """What the interpreter does with ``cli.py``, in a forked process that has its imports done."""
    os.setsid()
    os.chdir(folder)
    for name, descriptor in (("out.txt", 1), ("err.txt", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115  # pytest has its own
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + GIGABYTES * 2**30,) * 2)
    status = 0
    try:
        from lit_fed.command.cli import main

        main(args)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
