"""Errors a user can act on: one line that says what is wrong, where, and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, file or data set that cannot work; raised before any training.

    The command line prints the message as a single line, without a traceback.
    """


class ClientFailure(RuntimeError):
    """A client could not finish its local work.

    Args:
        client_id: The client that failed.
        round_idx: The round in which it failed, counted from 0.
        cause: What went wrong, in one line.
    """

    def __init__(self, client_id: int, round_idx: int, cause: str) -> None:
        super().__init__(f"client {client_id} failed in round {round_idx}: {cause}")
        self.client_id = client_id
        self.round_idx = round_idx
        self.cause = cause


class NonFiniteUpdate(ArithmeticError):
    """A client's loss or update holds NaN or infinity; such an update is never aggregated."""
