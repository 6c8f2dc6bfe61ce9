r"""The noise that nodes add to their vectors: exact samples of the discrete Gaussian.

.. math:: P(y) \propto e^{-y^2 / 2 s^2}, \qquad y \in \mathbb{Z}

Canonne, Kamath, Steinke: "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Algorithms 1 to 3.

Note:
    Uniform whole numbers are the only draws, and no step is in floating point. s is whole, and the discrete Laplace
    distribution under which samples are drawn has scale s, where the paper has s + 1: the acceptance
    :math:`e^{-(|y| - s)^2 / 2 s^2}` is exact for either. The time that sampling takes is not constant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lit_fed.seeding import key_stream

IntArray = NDArray[np.int64]

_MOST_AT_ONCE = 2**18


class Draws:
    """Random decisions from the key stream of ChaCha20.

    Args:
        key: 32 bytes, secret and for one use.
    """

    def __init__(self, key: bytes) -> None:
        self._words = key_stream(key)

    def below(self, bounds: IntArray) -> IntArray:
        """A uniform whole number from 0 to below each bound; words beyond the last multiple of it are drawn again."""
        found, left = np.zeros_like(bounds), np.arange(len(bounds))
        while len(left):
            words, most = self._words(len(left)), bounds[left].astype(np.uint64)
            fits = words < np.uint64(2**64 - 1) // most * most
            found[left[fits]] = words[fits] % most[fits]
            left = left[~fits]
        return found

    def decays(self, above: IntArray, below: IntArray) -> NDArray[np.bool_]:
        """True with probability e^(-above / below), each."""
        whole, rest = np.divmod(above, below)
        found = self._decays(rest, below)
        while len(left := np.flatnonzero(found & (whole > 0))):
            found[left] = self._decays(below[left], below[left])
            whole[left] -= 1
        return found

    def _decays(self, above: IntArray, below: IntArray) -> NDArray[np.bool_]:
        """The same up to e^-1: the chance that γ, γ/2, γ/3, … first fail after an even number of successes."""
        found, left, step = np.ones(len(above), bool), np.arange(len(above)), 1
        while len(left):
            left = left[(self.below(below[left]) < above[left]) & (self.below(np.full(len(left), step)) == 0)]
            found[left] ^= True
            step += 1
        return found


def discrete_gaussian(key: bytes, deviation: int, count: int) -> IntArray:
    """Return samples, (count,), that follow from a key.

    Args:
        key: 32 bytes, secret and for one use.
        deviation: s, from 1 to 2^24.
        count: Their number.
    """
    draws, found, num_found = Draws(key), list[IntArray](), 0
    while num_found < count:
        drawn = np.full(min(2 * (count - num_found) + 64, _MOST_AT_ONCE), deviation)
        size = draws.below(drawn)
        size = size[draws.decays(size, drawn)]
        left = np.arange(len(size))
        while len(left := left[draws.decays(one := np.ones_like(left), one)]):
            size[left] += deviation
        negative = draws.below(np.full_like(size, 2)) == 1
        kept = ~(negative & (size == 0))
        kept &= draws.decays((size - deviation) ** 2, np.full_like(size, 2 * deviation**2))
        found.append(np.where(negative, -size, size)[kept])
        num_found += len(found[-1])
    return np.concatenate([*found, np.zeros(0, np.int64)])[:count]
