r"""Shares of players in the value of a game: of clients in what a round's step gains.

A game gives every coalition :math:`S` of the players :math:`N` a value :math:`v(S)`. A function that gives it is asked
for one coalition again and again, and so remembers it (``functools.cache``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

Value = Callable[[frozenset[int]], float]
"""The value of a coalition."""

_LEAST, _LAST, _CLOSE = 30, 10, 0.05  # of convergence: permutations, means that are compared, relative change


def leave_one_out(players: Sequence[int], value: Value) -> dict[int, float]:
    r"""What is lost without a player, :math:`v(N) - v(N \setminus \{i\})`."""
    everyone = frozenset(players)
    return {player: value(everyone) - value(everyone - {player}) for player in players}


def shapley(players: Sequence[int], value: Value) -> dict[int, float]:
    r"""Shapley's values, from all coalitions.

    .. math::
        \varphi_i = \frac{1}{n} \sum_{S \subseteq N \setminus \{i\}}
        \binom{n - 1}{|S|}^{-1} (v(S \cup \{i\}) - v(S))

    Shapley: "A Value for n-Person Games", Contributions to the Theory of Games II, 1953.
    """
    shares, count = {}, len(players)
    for player in players:
        rest = [other for other in players if other != player]
        before = (frozenset(one) for size in range(count) for one in combinations(rest, size))
        gains = ((value(one | {player}) - value(one)) / math.comb(count - 1, len(one)) for one in before)
        shares[player] = sum(gains) / count
    return shares


def gtg(
    players: Sequence[int], value: Value, generator: np.random.Generator, samples: int, between: float, within: float
) -> dict[int, float]:
    r"""Shapley's values by guided truncated sampling: means of :math:`v(S \cup \{i\}) - v(S)` over permutations.

    Liu, Chen, Yu, Liu, Cui: "GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation in Federated
    Learning", ACM Transactions on Intelligent Systems and Technology 13(4), 2022, Algorithm 1.

    Of a permutation, S is what comes before i. Permutations are drawn in sweeps in which every player is first once.

    Args:
        players: The players.
        value: The value of a coalition.
        generator: Draws the permutations.
        samples: The most permutations; at least one sweep is drawn.
        between: ε_b: all shares are 0 where :math:`|v(N) - v(\emptyset)|` is below it.
        within: ε_i: in a permutation, the shares of the players after S are 0 where :math:`|v(N) - v(S)|` is
            below it, and nothing is evaluated for them; 0 makes the sum of the shares exact.

    Note:
        The end of sampling is that of the authors' program: after 30 permutations, when each of the last ten means
        differs from the newest by 5 % or less of it, on average over the players. It is looked at after whole sweeps,
        and a value that was left out for one permutation is not taken for that of its coalition in another.
    """
    count, whole, nobody = len(players), value(frozenset(players)), value(frozenset())
    total, means, change = np.zeros(count), list[np.ndarray](), math.inf
    if abs(whole - nobody) < between:
        return dict.fromkeys(players, 0.0)
    while not means or (len(means) + count <= samples and change > _CLOSE):
        for first in range(count):
            rest = generator.permutation([place for place in range(count) if place != first]).tolist()
            before, coalition = nobody, frozenset[int]()
            for place in [first, *rest]:
                coalition |= {players[place]}
                after = before if abs(whole - before) < within else value(coalition)
                total[place] += after - before
                before = after
            means.append(total / (len(means) + 1))
        if len(means) > _LEAST:
            last, newest = np.stack(means[-_LAST:]), means[-1]
            change = (np.abs(last - newest) / (np.abs(newest) + 1e-12)).mean(1).max()
    return dict(zip(players, means[-1].tolist(), strict=True))
