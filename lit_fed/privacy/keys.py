"""The key of a private run: where its noise and its cohorts come from, and which releases it has made.

A release's noise is a keyed function of its round, of the clients that were delivered and of the settings. A round that
is run again after a kill then releases the very same model, which costs nothing; one that comes out differently draws
other noise and is a release of its own. With noise of the round alone, the difference of two such releases would hold
none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

_BYTES = 32
_DIGEST = 32  # letters of a release's name


class RunKey:
    """The key of one run, and the names of the releases that were made with it.

    Args:
        key: 32 bytes.
        path: The file that holds them; None for a simulation, whose key follows from the seed.
        releases: Names of the releases made so far.
    """

    def __init__(self, key: bytes, path: Path | None = None, releases: Iterable[str] = ()) -> None:
        self._key = key
        self.path = path
        self.releases = dict.fromkeys(releases)

    @classmethod
    def of_seed(cls, seed: int) -> RunKey:
        """The key of a simulation: whoever knows the seed knows the noise."""
        return cls(hashlib.sha256(f"lit_fed privacy {seed}".encode()).digest())

    @classmethod
    def of_file(cls, path: Path) -> RunKey:
        """The key of a file, made where there is none, readable by its owner alone.

        Raises:
            ConfigError: If others can read the file, or it holds no key.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as error:
                raise ConfigError(f"trainer.privacy.key_file {path} cannot be made: {error.strerror}") from error
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(json.dumps({"key": secrets.token_hex(_BYTES)}) + "\n")
                file.flush()
                os.fsync(handle)
        return cls(*_read(path))

    def seed(self, *purpose: int | str) -> int:
        """A seed below 2**63 for a purpose, such as a round's cohort."""
        return int.from_bytes(self._digest("seed", *purpose)[:8], "little") >> 1

    def name(self, round_idx: int, delivered: Iterable[int], settings: str) -> str:
        """The name of a release, which tells nothing of the key: the same for the same round, clients and settings."""
        return self._digest("release", round_idx, ",".join(map(str, delivered)), settings).hex()[:_DIGEST]

    def noise(self, release: str, count: int) -> NDArray[np.float64]:
        """Standard normal numbers of a release, (count,), the same on every process and at every repetition.

        Note:
            From Philox, keyed, and in floating point: what is known of attacks on the low bits of floating-point noise
            (Mironov 2012) is made hard here by sums on a grid, but not proven impossible.
        """
        key = int.from_bytes(self._digest("noise", release)[:16], "little")
        return np.random.Generator(np.random.Philox(key=key)).standard_normal(count)

    def record(self, release: str, write: bool = True) -> None:
        """Write down a release before it is made; one that was made before is the same again.

        Args:
            release: Its name.
            write: Whether this process writes the file.
        """
        if release in self.releases:
            return
        self.releases[release] = None
        if self.path is not None and write:
            with open(self.path, "a", encoding="ascii") as file:
                file.write(release + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _digest(self, *words: int | str) -> bytes:
        return hmac.new(self._key, json.dumps(words).encode(), hashlib.sha256).digest()


def _read(path: Path) -> tuple[bytes, Path, list[str]]:
    where = f"trainer.privacy.key_file {path}"
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{where} is not a file; name a file, or one to be made")
        if found.st_mode & 0o077:
            raise ConfigError(f"{where} can be read by others; chmod 600 it, or name a new file")
        text = path.read_text("ascii")
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} holds no key; name a new file") from error
    first, *lines = text.split("\n")
    try:
        key = bytes.fromhex(json.loads(first)["key"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where} holds no key; name a new file") from error
    if len(key) != _BYTES or text.count("\n") == 0:
        raise ConfigError(f"{where} holds no key; name a new file")
    releases = lines[:-1]  # what follows the last line break was cut off before its release
    if any(len(line) != _DIGEST or set(line) - set("0123456789abcdef") for line in releases):
        raise ConfigError(f"{where} holds a damaged record of releases; restore it, or begin a new run with a new file")
    if lines[-1]:
        _cut(path, len(text) - len(lines[-1]))
    return key, path, releases


def _cut(path: Path, length: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(length)
