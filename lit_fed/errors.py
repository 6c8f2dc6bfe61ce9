"""Errors for users: one line with the mistake, its place, and the remedy."""

from __future__ import annotations

import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary
from typing import Any

from typing_extensions import override

_LONG_WORD, _LONG_LINE = 300, 1200  # characters


def brief(text: str) -> str:
    """A message without the middles of its longest values."""
    text = re.sub(rf"\S{{{_LONG_WORD},}}", lambda match: f"{match[0][:80]}…{match[0][-40:]}", text)
    return text if len(text) <= _LONG_LINE else f"{text[:600]} … {text[-400:]}"


_spoken = ["Python"]
_NULL = re.compile(r"(?<![\w/.'\"-])null(?![\w/.'\"-])")
_ARGUMENTS = r"ckpt_path|output|overwrite|inputs|client_position|client|shape|dtype|trainer\.[\w.]+"
_OPTION = re.compile(rf"--({_ARGUMENTS})\b(?![-/])(?: (last|best)\b)?")
"""Options that are arguments in Python."""


@contextmanager
def errors_name_options() -> Iterator[None]:
    """Have errors name options and YAML's null, for the command line; they name arguments and None elsewhere."""
    _spoken.append("YAML")
    try:
        yield
    finally:
        _spoken.pop()


def _in_python(text: str) -> str:
    named = _OPTION.sub(lambda match: f"{match[1]}={match[2]!r}" if match[2] else match[1], text)
    return _NULL.sub("None", named)


class LitFedError(Exception):
    """Base class; the command line prints the error as one line, without a traceback.

    Args:
        message: The line; long values in it are shortened.
        details: The traceback of a cause in the user's own code; else empty.

    Attributes:
        status: Exit status of the command line: 2 for a user's input, 1 for a failed run.
    """

    status: int = 2

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(brief(str(message) if _spoken[-1] == "YAML" else _in_python(str(message))))
        self.details = details

    def remote_text(self) -> str:
        """The text for other machines, without data or paths; empty to send the type alone."""
        return ""


class ConfigError(LitFedError, ValueError):
    """A setting, file or data set that cannot work, found before any training."""


class CheckpointError(LitFedError):
    """A checkpoint that cannot be written or read; older checkpoints survive."""


class UnreadableFile(CheckpointError):
    """A file that the system refuses to read; its content is unknown."""


class BudgetSpent(ConfigError):
    """Samples of a client, or sums of a node, that have spent their privacy budget."""

    @override
    def remote_text(self) -> str:
        return str(self)  # the account, which the server is told anyway


class NonFiniteUpdate(LitFedError, ArithmeticError):
    """NaN or infinity in a client's loss or update, which is never aggregated."""

    @override
    def remote_text(self) -> str:
        return str(self)  # names of metrics


class NonFiniteServer(LitFedError, ArithmeticError):
    """NaN or infinity in the server's state or payload, which is not kept."""

    status = 1


class ClientTimeout(LitFedError):
    """A client exceeded its time.

    Args:
        limit: The time limit, in words.
        place: The code that was running.
    """

    def __init__(self, limit: str, place: str) -> None:
        super().__init__(f"{limit}; it was at {place}")
        self.limit = limit

    @override
    def remote_text(self) -> str:
        return self.limit


class NothingToAverage(LitFedError, ValueError):
    """All updates of a round have weight 0."""

    status = 1


class NobodyLeft(LitFedError):
    """Too many consecutive clients failed."""

    status = 1


class WireError(LitFedError):
    """An invalid message from another machine; it is discarded."""

    @override
    def remote_text(self) -> str:
        return str(self)  # about the other machine's own message


class ProcessLost(LitFedError):
    """Another process of the run has ended, so that collectives fail."""

    status = 1


class EvaluationFailure(LitFedError):
    """A protocol failed on the server."""

    status = 1


class ClientFailure(LitFedError):
    """A client's local work, or its answer to a protocol, failed.

    Args:
        client_id: The client.
        round_idx: The round, counted from 0.
        cause: The cause, in one line.
        details: The traceback of an unexpected error; else empty.
        outline: The cause for other machines, see `outline`.
        protocol: The protocol that asked; empty for local work.
    """

    status = 1

    def __init__(
        self, client_id: int, round_idx: int, cause: str, details: str = "", outline: str = "", protocol: str = ""
    ) -> None:
        asked = f", asked by protocol {protocol}" if protocol else ""
        super().__init__(f"client {client_id} failed in round {round_idx}{asked}: {cause}", details)
        self.client_id = client_id
        self.round_idx = round_idx
        self.cause = cause
        self.outline = outline


def causes(error: BaseException) -> list[BaseException]:
    """An error and its causes, outermost first."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def place_of(stack: StackSummary) -> str:
    """Return the innermost frame outside of installed packages, as ``file.py, line 7``."""
    own_frames = [
        entry for entry in stack if not entry.filename.startswith(_PYTHON) and not _is_packaged(entry.filename)
    ]
    entry = (own_frames or list(stack))[-1]
    path = Path(entry.filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}, line {entry.lineno}"


def outline(error: BaseException) -> str:
    """Describe an error, which may quote data, for another machine.

    Our errors without data are sent in full (`LitFedError.remote_text`), others by type, place in lit_fed, and the
    operating system's reason, such as a full disk.
    """
    if isinstance(error, LitFedError) and (text := error.remote_text()):
        return text
    package, place = Path(__file__).parent, "code outside of lit_fed"
    for frame in traceback.extract_tb(error.__traceback__):
        if (path := Path(frame.filename)).is_relative_to(package):
            place = f"{path.relative_to(package.parent).as_posix()}, line {frame.lineno}"
    return f"{type(error).__name__} in {place}{_of_the_system(error)}"


def _of_the_system(error: BaseException | None) -> str:
    """The operating system's words for the first of its errors among the causes; they quote no path."""
    for _ in range(10):  # causes may form a circle
        if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
            return f": {os.strerror(error.errno)}"
        if error is None:
            break
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def _is_packaged(filename: str) -> bool:
    """Whether pip put a file there: into the environment, a user's home, or a folder beside both."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


def _starts(*folders: str) -> tuple[str, ...]:
    """The starts of the names of all files in some folders, and not of those in ``folder2``; and of generated code."""
    return (*dict.fromkeys(os.path.join(folder, "") for folder in folders), "<")


_PYTHON = _starts(sys.prefix, sys.base_prefix)
_OURS = _starts(str(Path(__file__).parent), sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())


def reason(error: BaseException) -> str:
    """An error of another package in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError) and (
        missing := re.search(r"Requirement '([^']+)' not met|named '([^']+)'", text)
    ):
        package = missing.group(1) or missing.group(2).partition(".")[0]
        if missing.group(2) and package in sys.modules:
            return (
                f"it needs {missing.group(2)}, which this version of {package} lacks; pip install --upgrade '{package}'"
            )
        return f"it needs {package}, which is not installed; pip install '{package}'"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        wanted = re.search(r"allocate (\d+ bytes|[\d.]+ \w?i?B)", text)
        return "there is not enough memory" + (f" for {wanted.group(1)}" if wanted else "") + "; make it smaller"
    name = type(error).__name__
    where = _layer(error) if re.search("shape|size|dimension|channel", text) else ""
    return f"{name}{where}: {text[:300]}{'…' if len(text) > 300 else ''}" if text else name


def _layer(error: BaseException) -> str:
    """The layer that an error passed through last, and the shape of its input; else empty."""
    modules, shape, step = list[Any](), None, error.__traceback__
    while step is not None:
        local_names = step.tb_frame.f_locals
        if hasattr(local_names.get("self"), "named_modules"):
            modules.append(local_names["self"])
            shapes = (
                tuple(value.shape) for key, value in local_names.items() if key != "self" and hasattr(value, "shape")
            )
            shape = next(shapes, shape)
        step = step.tb_next
    if not modules or modules[-1] is modules[0]:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    name = names.get(id(modules[-1]), type(modules[-1]).__name__)
    return f" in the layer {name}, {' '.join(repr(modules[-1]).split())[:100]}, on an input {shape}"


def of_other_lightning(kind: type) -> str:
    """The error of a class that derives from ``pytorch_lightning``'s, which ``lightning``'s are not; else empty."""
    theirs = next((base for base in kind.__mro__ if base.__module__.partition(".")[0] == "pytorch_lightning"), None)
    if theirs is None:
        return ""
    return (
        f"{kind.__name__} derives from pytorch_lightning's {theirs.__name__}; import {theirs.__name__} from lightning"
    )


def own_traceback(error: BaseException) -> str:
    """The traceback of an error that passed through the user's own code, from there on; else empty."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [not frame.filename.startswith(_OURS) and not _is_packaged(frame.filename) for frame in frames]
    if not any(own):
        return ""
    report = traceback.TracebackException.from_exception(error)
    report.stack = StackSummary.from_list(report.stack[own.index(True) :])
    return "".join(report.format()).rstrip()
