"""The order in which a federation's work arrived: ``order.csv`` of a run on machines."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.participation.base import Fate, Participant

_KEY = "participation.replay"
COLUMNS = ("round", "client_id", "version", "fate", "began", "ended")
"""Of a row: the step, the client, the step of its download, the fate of its work, and its times in seconds."""


def cells_of(round_idx: int, one: Participant) -> list[str]:
    """The cells of a row."""
    return [str(round_idx), str(one.client_id), str(one.version), one.fate.value, repr(one.began), repr(one.ended)]


def read_order(path: str, clients: Collection[int]) -> list[list[Participant]]:
    """Read the work that arrived in each step, ascending by version and client.

    Args:
        path: The file.
        clients: The clients that may take part.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            header, *table = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{_KEY} {path} cannot be read: {error}") from error
    if header != list(COLUMNS):
        raise ConfigError(f"{_KEY} {path}: line 1 is not {','.join(COLUMNS)}; use the order.csv of a run")
    steps: list[list[Participant]] = []
    free: dict[int, int] = {}  # by client, the first version from which it may start again
    for number, row in enumerate(table, start=2):
        where = f"{_KEY} {path}, line {number}"
        try:
            round_idx, client_id, version = (int(cell) for cell in row[:3])
            fate, (began, ended) = Fate(row[3]), (float(cell) for cell in row[4:])
        except (ValueError, IndexError):
            raise ConfigError(f"{where} is not a row of an order; restore the file") from None
        if round_idx not in (len(steps) - 1, len(steps)) or round_idx < 0:
            raise ConfigError(f"{where} is of step {round_idx} after step {len(steps) - 1}; restore the missing rows")
        if client_id not in clients:
            raise ConfigError(f"{where} is of client {client_id}, which does not take part; use the run's own data")
        if not (free.get(client_id, 0) <= version <= round_idx and 0 <= began <= ended < math.inf):
            raise ConfigError(f"{where}: client {client_id} cannot have started so; restore the file")
        free[client_id] = round_idx + 1
        if round_idx == len(steps):
            steps.append([])
        steps[-1].append(Participant(client_id, fate, version, began, ended))
    if not steps:
        raise ConfigError(f"{_KEY} {path} has no steps; use the order.csv of a run")
    return [sorted(plan, key=lambda one: (one.version, one.client_id)) for plan in steps]
