"""Randomness as a function of (seed, round, client, purpose).

Checkpoints hold no generator state: each use of random numbers derives a seed from the run's seed and its purpose.
Results do not depend on the number of processes or workers, the order of clients, or interruptions.
"""

from __future__ import annotations

import hashlib
from operator import index

import numpy as np
import torch

_PLAIN = {int, str}


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
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_generator(seed: int, *keys: int | str) -> np.random.Generator:
    """A NumPy generator for one purpose, see `derive_seed`."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *keys)))


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
