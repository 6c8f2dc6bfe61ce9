"""A node's contributions to secure sums, recorded on disk, so that a restart forgets none."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lit_fed.engine.storage.files import cannot_write, in_place_of
from lit_fed.errors import ConfigError
from lit_fed.federation.secure.masks import Words
from lit_fed.tensors import check_bytes


@dataclass
class LoggedRound:
    """A node's memory of a round.

    Args:
        attempt: The last attempt; forgotten with the process.
        request: Digest of the request that its vector answers; None before it gave one.
        survivors: Digest of the nodes over which it consented to a sum; empty before.
    """

    attempt: int = -1
    request: bytes | None = None
    survivors: bytes = b""


class SumLog:
    """The rounds to which a node gave a vector, by run and number, and the last vector of each kind of sum.

    Args:
        folder: Beside the node's states; None remembers in memory.

    Raises:
        ConfigError: If the record in it cannot be read.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._record = None if folder is None else folder / "sums" / "given.jsonl"
        self._last: dict[str, tuple[int, bytes, Words]] = {}
        self.rounds: dict[tuple[str, int], LoggedRound] = {}
        if self._record is not None and self._record.exists():
            self._read(self._record)

    def note(self, run: str, round_idx: int, request: bytes, survivors: bytes, words: Words) -> None:
        """Remember a round and its vector; the round is on the disk on return."""
        one = self.rounds.setdefault((run, round_idx), LoggedRound())
        if self._record is None:
            self._last[run] = round_idx, request, words
        else:
            if one.request is None:
                for other in self._record.parent.glob("*.words"):
                    if not other.name.startswith(_short(run.partition("/")[0])):  # of an earlier run
                        other.unlink(missing_ok=True)
                with in_place_of(self._record.with_name(_name_of(run))) as temporary:
                    torch.save((round_idx, request.hex(), torch.from_numpy(words.view(np.int64))), temporary)
            with cannot_write(self._record), open(self._record, "a", encoding="ascii") as file:
                file.write(json.dumps([run, round_idx, request.hex(), survivors.hex()]) + "\n")
                file.flush()
                os.fsync(file.fileno())
        one.request, one.survivors = request, survivors

    def _read(self, record: Path) -> None:
        try:
            content = record.read_text("ascii")
            whole, _, cut = content.rpartition("\n")
            for run, round_idx, request, survivors in map(json.loads, whole.splitlines()):
                self.rounds[run, round_idx] = LoggedRound(-1, bytes.fromhex(request), bytes.fromhex(survivors))
            if cut:  # by a kill, before anything of that round left
                os.truncate(record, len(content) - len(cut))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{record}, the node's record of secure sums, cannot be read ({type(error).__name__}); restore "
                "it, or begin a new run with a new --state_dir"
            ) from error

    def words(self, run: str, round_idx: int, request: bytes) -> Words | None:
        """The vector of a request; None if it is not here, or another one took its place."""
        if self._record is None:
            at, of, words = self._last.get(run, (-1, b"", None))
            return words if (at, of) == (round_idx, request) else None
        try:
            check_bytes(path := self._record.with_name(_name_of(run)))
            at, of, vector = torch.load(path, weights_only=True)
        except Exception:  # a missing file, or damaged bytes, which raise many exceptions
            return None
        return vector.numpy().view(np.uint64) if (at, of) == (round_idx, request.hex()) else None


def _name_of(run: str) -> str:
    """The file of a sum's last vector; it begins with the run, of which ``run`` names a kind of sum."""
    return f"{_short(run.partition('/')[0])}-{_short(run)}.words"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
