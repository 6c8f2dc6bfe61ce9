"""Randomness as a function of (seed, round, client, purpose).

Checkpoints hold no generator state: each use of random numbers derives a seed from the run's seed and its purpose.
Results do not depend on the number of processes or workers, the order of clients, or interruptions.

A seed of 2**63 or more is a secret: `numpy_generator` draws from the key stream of ChaCha20 under it.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_PLAIN = {int, str}
SECRET = 2**63
"""The smallest secret seed."""


def derive_seed(seed: int, *keys: int | str) -> int:
    """Hash a seed and the purpose of the random numbers into a new 63-bit seed.

    Args:
        seed: The seed of the run.
        keys: The purpose, such as ``("cohort", round_idx)``.

    Returns:
        A non-negative integer below 2**63, the same on every platform.
    """
    # `index`, because the repr of NumPy's integers differs between versions.
    plain = (seed, *keys)
    if not _PLAIN.issuperset(map(type, plain)):
        plain = tuple(key if isinstance(key, str) else index(key) for key in plain)
    return _hashed(repr(plain))


def derive_seeds(seed: int, stage: str, round_idx: int, client_ids: Iterable[int], purpose: str) -> list[int]:
    """`derive_seed` for one purpose of each of many clients."""
    before, after = repr((index(seed), stage, index(round_idx)))[:-1], repr((purpose,))[1:-2]
    return [_hashed(f"{before}, {client_id}, {after})") for client_id in client_ids]


def _hashed(purpose: str) -> int:
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_generator(seed: int, *keys: int | str) -> np.random.Generator:
    """A NumPy generator for one purpose, see `derive_seed`; of ChaCha20 for a secret seed."""
    if seed >= SECRET:
        drawing: Any = _KeyStream(hashlib.sha256(repr((seed, *keys)).encode()).digest())
        return np.random.Generator(drawing)
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *keys)))


def key_stream(key: bytes) -> Callable[[int], NDArray[np.uint64]]:
    """Return the key stream of ChaCha20 (RFC 8439) from block 0, as a function that gives the next words of 64 bits.

    The nonce is 0: no key is used twice.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda count: np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


class _KeyStream:
    """The key stream of ChaCha20 as a bit generator of NumPy's, by the struct ``bitgen_t`` of its documentation."""

    def __init__(self, key: bytes) -> None:
        words = chain.from_iterable(stream(64).tolist() for stream in repeat(key_stream(key)))
        whole, half, fraction = (ctypes.CFUNCTYPE(kind, ctypes.c_void_p) for kind in _KINDS)
        self._calls = (  # kept, as the struct points to them
            whole(lambda _: next(words)), half(lambda _: next(words) >> 32),
            fraction(lambda _: (next(words) >> 11) * 2.0**-53),
        )  # fmt: skip
        places = [None, *(ctypes.cast(self._calls[kind], ctypes.c_void_p) for kind in (0, 1, 2, 0))]
        self._struct = (ctypes.c_void_p * 5)(*places)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule, self.lock = make(ctypes.addressof(self._struct), b"BitGenerator", None), threading.Lock()


_KINDS = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_double)


def torch_generator(seed: int, *keys: int | str) -> torch.Generator:
    """A CPU torch generator for one purpose, see `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *keys))


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout and random layers draw from.

    ``torch.manual_seed`` seeds every backend in about 200 µs, which is noticeable for a client of five samples.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
