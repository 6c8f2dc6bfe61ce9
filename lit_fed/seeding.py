"""Randomness as a function of (seed, round, client, purpose).

No generator state is ever stored in a checkpoint: whatever needs random numbers derives a seed of its own from the
run's seed and from what the numbers are for. Results therefore do not depend on the number of processes or workers,
on the order of the clients, or on whether a run was interrupted.
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
        keys: What the numbers are for, such as ``("cohort", round_idx)``.

    Returns:
        A non-negative integer below 2**63, the same on every platform.
    """
    # `index`, because NumPy writes its own integers in another way, and in another one from version to version.
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

    ``torch.manual_seed`` does this for every backend and costs about 200 µs, which a client of five samples would
    notice.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
