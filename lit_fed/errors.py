"""Errors a user can act on: one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import StackSummary


class LitFedError(Exception):
    """Base of the errors that the command line prints as a single line, without a traceback."""


class ConfigError(LitFedError, ValueError):
    """A setting, file or data set that cannot work; raised before any training."""


class CheckpointError(LitFedError):
    """A checkpoint that cannot be written or read; whatever was saved before is still there."""


class NonFiniteUpdate(LitFedError, ArithmeticError):
    """A client's loss or update holds NaN or infinity; such an update is never aggregated."""


class ClientTimeout(LitFedError):
    """A client was not done in time."""


class NobodyLeft(LitFedError):
    """So many clients failed one after the other that there is nothing to wait for."""


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
