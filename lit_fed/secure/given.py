"""What a node gave to secure sums, which it remembers longer than its process lives."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lit_fed.engine.storage.files import write_atomically
from lit_fed.errors import ConfigError
from lit_fed.secure.masks import Words
from lit_fed.tensors import check_bytes


@dataclass
class Round:
    """A node's memory of a round.

    Args:
        attempt: The last attempt; forgotten with the process.
        request: Digest of the request that its vector answers; None before it gave one.
        survivors: Digest of the nodes over which it consented to a sum; empty before.
    """

    attempt: int = -1
    request: bytes | None = None
    survivors: bytes = b""


class Given:
    """The rounds to which a node gave a vector, by run and number, and the last vector of each kind of sum.

    Args:
        folder: Beside the node's states; None remembers in memory.

    Raises:
        ConfigError: If the record in it cannot be read.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = None if folder is None else folder / "sums"
        self._last: dict[str, tuple[int, bytes, Words]] = {}
        self.rounds: dict[tuple[str, int], Round] = {}
        if self._folder is not None and (path := self._folder / "given.pt").exists():
            try:
                check_bytes(path)
                for run, round_idx, request, survivors in torch.load(path, weights_only=True):
                    self.rounds[run, round_idx] = Round(-1, bytes.fromhex(request), bytes.fromhex(survivors))
            except Exception as error:  # damaged bytes raise many exceptions
                raise ConfigError(
                    f"{path}, the node's record of secure sums, cannot be read ({type(error).__name__}); restore it, "
                    "or begin a new run with a new --state_dir"
                ) from error

    def note(self, run: str, round_idx: int, request: bytes, survivors: bytes, words: Words) -> None:
        """Remember a round and its vector; both are on the disk on return."""
        if self._folder is None:
            self._last[run] = round_idx, request, words
        else:
            known = {at: (one.request, one.survivors) for at, one in self.rounds.items() if one.request is not None}
            if (run, round_idx) not in known:
                for other in self._folder.glob("*.words"):
                    if not other.name.startswith(_short(run.partition("/")[0])):  # of an earlier run
                        other.unlink(missing_ok=True)
                vector = torch.from_numpy(words.view(np.int64))
                write_atomically((round_idx, request.hex(), vector), self._path(run))
            known[run, round_idx] = request, survivors
            write_atomically([(*at, a.hex(), b.hex()) for at, (a, b) in known.items()], self._folder / "given.pt")
            if os.name == "posix":  # the renames, too
                handle = os.open(self._folder, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
        one = self.rounds.setdefault((run, round_idx), Round())
        one.request, one.survivors = request, survivors

    def words(self, run: str, round_idx: int, request: bytes) -> Words | None:
        """The vector of a request; None if it is not here, or another one took its place."""
        if self._folder is None:
            at, of, words = self._last.get(run, (-1, b"", None))
            return words if (at, of) == (round_idx, request) else None
        try:
            check_bytes(path := self._path(run))
            at, of, vector = torch.load(path, weights_only=True)
        except Exception:  # a missing file, or damaged bytes, which raise many exceptions
            return None
        return vector.numpy().view(np.uint64) if (at, of) == (round_idx, request.hex()) else None

    def _path(self, run: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{_short(run.partition('/')[0])}-{_short(run)}.words"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
