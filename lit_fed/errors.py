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

    def told(self) -> str:
        """What another machine may be told of it: nothing of the data, and no path. Empty for its type alone."""
        return ""


class ConfigError(LitFedError, ValueError):
    """A setting, file or data set that cannot work; raised before any training."""


class CheckpointError(LitFedError):
    """A checkpoint that cannot be written or read; whatever was saved before is still there."""


class NonFiniteUpdate(LitFedError, ArithmeticError):
    """A client's loss or update holds NaN or infinity; such an update is never aggregated."""

    def told(self) -> str:
        """All of it: the names of metrics."""
        return str(self)


class ClientTimeout(LitFedError):
    """A client was not done in time.

    Args:
        limit: The time, in words.
        place: Where it was.
    """

    def __init__(self, limit: str, place: str) -> None:
        super().__init__(f"{limit}; it was at {place}")
        self.limit = limit

    def told(self) -> str:
        """The time."""
        return self.limit


class NothingToAverage(LitFedError, ValueError):
    """All updates of a round have the weight 0."""


class NobodyLeft(LitFedError):
    """So many clients failed one after the other that there is nothing to wait for."""


class WireError(LitFedError):
    """A message from another machine that is not what it should be; nothing of it is used."""

    def told(self) -> str:
        """All of it: it is about what the other machine has said."""
        return str(self)


class ProcessLost(LitFedError):
    """Another process of the run has ended; nothing can be shared with it any more."""


class ClientFailure(LitFedError):
    """A client could not finish its local work.

    Args:
        client_id: The client that failed.
        round_idx: The round in which it failed, counted from 0.
        cause: What went wrong, in one line.
        details: The traceback, where the cause is an unexpected error; empty otherwise.
        outline: What another machine may be told of the cause, see `outline`.
    """

    status = 1

    def __init__(self, client_id: int, round_idx: int, cause: str, details: str = "", outline: str = "") -> None:
        super().__init__(f"client {client_id} failed in round {round_idx}: {cause}")
        self.client_id = client_id
        self.round_idx = round_idx
        self.cause = cause
        self.details = details
        self.outline = outline


def place_of(stack: StackSummary) -> str:
    """Where a program stood, as ``file.py, line 7``: the innermost place that belongs to no installed package."""
    own = [entry for entry in stack if not entry.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
    entry = (own or list(stack))[-1]
    path = Path(entry.filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}, line {entry.lineno}"


def outline(error: BaseException) -> str:
    """What another machine may be told of an error, which may quote anybody's data.

    Errors of ours that hold none say so, and are told as they are. Of all others it is the type, and the place in
    lit_fed that they came through.
    """
    if isinstance(error, LitFedError) and (told := error.told()):
        return told
    package, place = Path(__file__).parent, "code that is not of lit_fed"
    for frame in traceback.extract_tb(error.__traceback__):
        if (path := Path(frame.filename)).is_relative_to(package):
            place = f"{path.relative_to(package.parent).as_posix()}, line {frame.lineno}"
    return f"{type(error).__name__} in {place}"


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
