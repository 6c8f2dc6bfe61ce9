"""The current version of every client's state, also as a table that a checkpoint holds.

A round changes the rows of its cohort, and a checkpoint copies the table: 16 bytes a client, and no loop over clients.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.storage.packs import Version

_LATE = "late-"
_CHECKSUM_BITS = 32


class VersionIndex:
    """Versions by name: a client's number, or ``late-<number>`` for its late update.

    Args:
        versions: The first content.
    """

    def __init__(self, versions: Mapping[str, Version]) -> None:
        self.versions = dict(versions)
        self._rows = {name: row for row, name in enumerate(self.versions)}
        self._table = np.empty((max(16, len(self._rows)), 2), np.int64)
        for row, (name, version) in enumerate(self.versions.items()):
            self._table[row] = _packed(name, version)

    def set(self, name: str, version: Version) -> None:
        """Add or replace a version."""
        row = self._rows.setdefault(name, len(self._rows))
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._table[row] = _packed(name, version)
        self.versions[name] = version

    def drop(self, name: str) -> None:
        """Remove a version; the last row takes the place of its row."""
        if self.versions.pop(name, None) is None:
            return
        row, last = self._rows.pop(name), len(self._rows)
        if row != last:
            self._table[row] = self._table[last]
            self._rows[_name(int(self._table[last, 0]))] = row

    def table(self) -> Tensor:
        """A copy of the table, int64 of shape (names, 2).

        A row holds the client's number n (−n − 1 for a late update), and 2³² times the round plus the checksum.
        """
        return torch.from_numpy(self._table[: len(self._rows)].copy())


def read_table(table: Tensor) -> dict[str, Version]:
    """The versions in a table.

    Raises:
        ValueError: If no `VersionIndex` made it.
    """
    if table.dtype != torch.int64 or table.ndim != 2 or table.shape[1] != 2:
        raise ValueError(f"a tensor of {str(table.dtype).removeprefix('torch.')} {tuple(table.shape)}")
    numbers, packed = table[:, 0].tolist(), table[:, 1]
    if len(packed) and int(packed.min()) < 0:
        raise ValueError(f"a negative version, {int(packed.min())}")
    rounds, checksums = (packed >> _CHECKSUM_BITS).tolist(), (packed & (2**_CHECKSUM_BITS - 1)).tolist()
    versions = dict(zip(map(_name, numbers), zip(rounds, checksums, strict=True), strict=True))
    if len(versions) < len(numbers):
        raise ValueError("a client with two versions")
    return versions


def _packed(name: str, version: Version) -> tuple[int, int]:
    number = -int(name.removeprefix(_LATE)) - 1 if name.startswith(_LATE) else int(name)
    return number, version[0] << _CHECKSUM_BITS | version[1]


def _name(number: int) -> str:
    return str(number) if number >= 0 else f"{_LATE}{-number - 1}"
