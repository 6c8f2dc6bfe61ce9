"""Errors a user can act on: one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from traceback import StackSummary


class LitFedError(Exception):
    """Base of the errors that the command line prints as a single line, without a traceback.

    Attributes:
        details: The traceback, where the cause lies in code that is neither ours nor installed; else empty.
        status: What the command line exits with: 2 for what a user gave, 1 for a run that failed.
    """

    details: str = ""
    status: int = 2


class ConfigError(LitFedError, ValueError):
    """A setting, file or data set that cannot work; raised before any training."""


class CheckpointError(LitFedError):
    """A checkpoint that cannot be written or read; whatever was saved before is still there."""


class UnreadableFile(CheckpointError):
    """A file that the system does not let us read now: nothing is known of what it holds."""


class NonFiniteUpdate(LitFedError, ArithmeticError):
    """A client's loss or update holds NaN or infinity; such an update is never aggregated."""


class NonFiniteServer(LitFedError, ArithmeticError):
    """A method's step left NaN or infinity in what the server holds, or would send it; nothing of it is kept."""

    status = 1


class ClientTimeout(LitFedError):
    """A client was not done in time."""


class NobodyLeft(LitFedError):
    """So many clients failed one after the other that there is nothing to wait for."""


class WireError(LitFedError):
    """A message from another machine that is not what it should be; nothing of it is used."""


class ProcessLost(LitFedError):
    """Another process of the run has ended; nothing can be shared with it any more."""


class ClientFailure(LitFedError):
    """A client could not finish its local work.

    Args:
        client_id: The client that failed.
        round_idx: The round in which it failed, counted from 0.
        cause: What went wrong, in one line.
        details: The traceback, where the cause is an unexpected error; empty otherwise.
    """

    status = 1

    def __init__(self, client_id: int, round_idx: int, cause: str, details: str = "") -> None:
        super().__init__(f"client {client_id} failed in round {round_idx}: {cause}")
        self.client_id = client_id
        self.round_idx = round_idx
        self.cause = cause
        self.details = details


def place_of(stack: StackSummary) -> str:
    """Where a program stood, as ``file.py, line 7``: the innermost place that belongs to no installed package."""
    own = [entry for entry in stack if not entry.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    entry = (own or list(stack))[-1]
    path = Path(entry.filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}, line {entry.lineno}"


_OURS = (
    str(Path(__file__).parent),
    *dict.fromkeys([sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()]),
    "<",  # frozen and generated code
)


def reason(error: BaseException) -> str:
    """What an error of another package says, in a line."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError) and (
        missing := re.search(r"Requirement '([^']+)' not met|named '([^']+)'", text)
    ):
        package = missing.group(1) or missing.group(2).partition(".")[0]
        return f"it needs {package}, which is not installed; pip install '{package}'"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        wanted = re.search(r"allocate (\d+ bytes|[\d.]+ \w?i?B)", text)
        return "there is not enough memory" + (f" for {wanted.group(1)}" if wanted else "") + "; make it smaller"
    name = type(error).__name__
    return f"{name}: {text[:300]}{'…' if len(text) > 300 else ''}" if text else name


def own_traceback(error: BaseException) -> str:
    """The traceback of an error that passed through code which is neither ours nor installed; else empty."""
    frames = traceback.extract_tb(error.__traceback__)
    if all(frame.filename.startswith(_OURS) for frame in frames):
        return ""
    return "".join(traceback.format_exception(error)).rstrip()
