"""The key of a private run, from which its noise and cohorts follow, and the releases made with it.

The noise of a run with a key file is a keyed function of the round, of the clients delivered and of their sum; under
`SampleLevel` also of what the server sent, so that equal sums of two broadcasts have other noise too. A round that is
run again after a kill, and comes to the very same sum, releases the very same model, at no cost; a round that comes out
differently, if only in the last bit, draws other noise and is another release. With noise of the round alone, the
difference of two such releases would hold none. Noise, batches and cohorts are drawn from the key stream of ChaCha20.

A simulation protects nobody. Its noise is a function of the seed, of the round and of the clients delivered, so that
runs can be compared which differ in rounding, or in a setting.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.seeding import SECRET, key_stream

_BYTES = 32
_DIGEST = 32  # letters of a release's name


class RunKey:
    """The key of one run, and the releases that were made with it.

    Args:
        key: 32 bytes.
        path: The file that holds them; None for a simulation.
        releases: The round of each release made so far, by its name.
        promise: The settings that the file was made for.
    """

    def __init__(
        self,
        key: bytes,
        path: Path | None = None,
        releases: dict[str, int] | None = None,
        promise: Mapping[str, Any] | None = None,
    ) -> None:
        self._key = key
        self.path = path
        self.promise = dict(promise or {})
        self.releases = dict(releases or {})

    @classmethod
    def of_seed(cls, seed: int) -> RunKey:
        """The key of a simulation: whoever knows the seed knows the noise."""
        return cls(hashlib.sha256(f"lit_fed privacy {seed}".encode()).digest())

    @classmethod
    def of_file(cls, path: Path, promise: Mapping[str, Any] | None = None) -> RunKey:
        """The key of a file, made where there is none, for a promise, readable by its owner alone."""
        if not path.exists():
            _make(path, promise or {})
        return cls(*_read(path))

    @property
    def name(self) -> str:
        """A name of the key that tells nothing of it."""
        return self._digest("name").hex()[:_DIGEST]

    def seed(self, *purpose: int | str) -> int:
        """A seed for a purpose, such as a round's cohort: below 2**63 in a simulation, else a secret of 256 bits."""
        digest = self._digest("seed", *purpose)
        return int.from_bytes(digest[:8], "little") >> 1 if self.path is None else int.from_bytes(digest) | SECRET

    def uniform(self, count: int, *purpose: int | str) -> NDArray[np.float64]:
        """Numbers from 0 to below 1 for a purpose, (count,), multiples of 2^-53."""
        if self.path is None:
            return np.random.default_rng(self.seed(*purpose)).random(count)
        return (key_stream(self._digest("uniform", *purpose))(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def release(self, round_idx: int, delivered: Iterable[int], total: NDArray[Any], asked: str = "") -> str:
        """The name of a release, which tells nothing of the key: the same for the same round, clients, sum and request.

        Args:
            round_idx: The round.
            delivered: The clients in the sum.
            total: The sum, (d,); without influence in a simulation.
            asked: Hash of what the sum was asked for with; without influence in a simulation.
        """
        of = hashlib.blake2b(asked.encode())
        of.update(np.ascontiguousarray(total).data)
        named = "" if self.path is None else of.hexdigest()
        return self._digest("release", round_idx, ",".join(map(str, delivered)), named).hex()[:_DIGEST]

    def seal(self, content: Iterable[bytes]) -> str:
        """The name of what is kept apart from a checkpoint, which nobody without the key can tell from another's."""
        made = hmac.new(self._key, b"apart", hashlib.sha256)
        for part in content:
            made.update(hashlib.sha256(part).digest())
        return made.hexdigest()[:_DIGEST]

    def noise(self, release: str, count: int) -> NDArray[np.float64]:
        """Standard normal numbers of a release, (count,), the same on every process and at every repetition.

        Note:
            A number is the quantile of a word of 64 bits, one of them its sign: tails end at 9.1 deviations, beyond
            which lie 2^-63 of a normal distribution. In a simulation from Philox. Attacks on the low bits of
            floating-point noise (Mironov 2012) are made hard here by sums on a grid, but not proven impossible.
        """
        digest = self._digest("noise", release)
        if self.path is None:
            philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
            return np.random.Generator(philox).standard_normal(count)
        words = key_stream(digest)(count)
        drawn = (words >> np.uint64(1)).astype(np.float64)
        drawn += 0.5
        drawn *= 2.0**-64
        ndtri(drawn, out=drawn)
        return np.negative(drawn, out=drawn, where=(words & np.uint64(1)) == 0)

    def secret(self, release: str) -> bytes:
        """A key of 32 bytes for the noise of a release."""
        return self._digest("nodes", release)

    def record(self, release: str, round_idx: int) -> None:
        """Write down a new release before it is made."""
        before = dict(self.releases)
        self.releases[release] = round_idx
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="ascii") as file:
                file.write(f"{round_idx} {release}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{_where(self.path)} cannot be written: {error.strerror}; nothing of round {round_idx} was released"
            ) from error
        _, _, releases, _ = _read(self.path)
        if releases != before | {release: round_idx}:
            raise ConfigError(f"{_where(self.path)} is written by another run too; give each run another file")

    def _digest(self, *words: int | str) -> bytes:
        return hmac.new(self._key, json.dumps(words).encode(), hashlib.sha256).digest()


def conceal(key: RunKey | None, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encrypt numbers (n,) of a checkpoint by the key, if it has a file, as a tag of two words and n more.

    Note:
        Key stream and tag follow from a digest of the numbers: no two lists of numbers have the same stream.
    """
    if key is None or key.path is None:
        return np.concatenate([np.zeros(2, np.int64), numbers.ravel()])
    tag = key._digest("tag", numbers.tobytes().hex())[:16]
    words = key_stream(key._digest("conceal", tag.hex()))(numbers.size).view(np.int64)
    return np.concatenate([np.frombuffer(tag, np.int64), numbers.ravel() ^ words])


def reveal(key: RunKey, concealed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Undo `conceal`."""
    tag, numbers = concealed[:2], concealed[2:]
    if tag.any():
        numbers = numbers ^ key_stream(key._digest("conceal", tag.tobytes().hex()))(numbers.size).view(np.int64)
        if key._digest("tag", numbers.tobytes().hex())[:16] != tag.tobytes():
            raise CheckpointError("the account of trainer.privacy in the checkpoint is damaged; resume from another")
    return numbers


def _where(path: Path) -> str:
    return f"trainer.privacy.key_file {path}"


def _make(path: Path, promise: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(json.dumps({"key": secrets.token_hex(_BYTES), **promise}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"{_where(path)} cannot be made: {error.strerror}; name a file in a folder of yours"
        ) from error


def _read(path: Path) -> tuple[bytes, Path, dict[str, int], dict[str, Any]]:
    where = _where(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{where} is not a file; name a file, or one to be made")
        if status.st_mode & 0o077:
            raise ConfigError(f"{where} can be read by others; chmod 600 it, or name a new file")
        text = path.read_text("ascii")
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}; name a file of yours") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} holds no key; name a new file") from error
    first, *lines = text.split("\n")
    try:
        promise = json.loads(first)
        key = bytes.fromhex(promise.pop("key"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where} holds no key; name a new file") from error
    if len(key) != _BYTES or not lines:
        raise ConfigError(f"{where} holds no key; name a new file")
    *whole, cut = lines  # what follows the last line break was cut off before its release
    releases = {}
    for line in whole:
        round_idx, _, name = line.partition(" ")
        if not round_idx.isdecimal() or len(name) != _DIGEST or set(name) - set("0123456789abcdef"):
            raise ConfigError(
                f"{where} holds a damaged record of releases; restore it, or begin a new run with a new file"
            )
        releases[name] = int(round_idx)
    if cut:
        try:
            os.truncate(path, len(text) - len(cut))
        except OSError as error:
            raise ConfigError(f"{where} cannot be written: {error.strerror}") from error
    return key, path, releases, promise
