"""Rules against published games, axioms, and sampling against all coalitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from lit_fed.record.shares import Value, gtg, leave_one_out, shapley
from lit_fed.seeding import numpy_generator

RULES: dict[str, Callable[..., dict[int, float]]] = {
    "shapley": shapley,
    "gtg": lambda players, value: gtg(players, value, numpy_generator(0, "test"), 48, 0.0, 0.0),
}
every = pytest.mark.parametrize("rule", RULES)


def table(players: int, seed: int) -> Value:
    """A game whose values are whole numbers drawn at random, exact in sums; the value of nobody is not 0."""
    drawn = numpy_generator(seed, "game").integers(-100, 100, 2**players)
    return lambda members: float(drawn[sum(2**one for one in members)])


def airport(members: Collection[int]) -> float:
    """A runway costs what its largest aeroplane needs: 1, 2, 4, …; Littlechild and Owen 1973."""
    return float(max((2**one for one in members), default=0))


def test_the_glove_game() -> None:
    """Shapley and Shubik's market: two left gloves, one right; a pair is worth 1. Shares 1/6, 1/6, 4/6."""
    shares = shapley([0, 1, 2], lambda members: float(2 in members and len(members) > 1))
    assert shares == pytest.approx({0: 1 / 6, 1: 1 / 6, 2: 4 / 6}, abs=1e-15)
    assert leave_one_out([0, 1, 2], lambda members: float(2 in members and len(members) > 1)) == {0: 0, 1: 0, 2: 1}


def test_the_airport_game() -> None:
    """Each pays an equal part of every stretch that it needs: 1/4; + 1/3; + 2/2; + 4."""
    expected = [1 / 4, 1 / 4 + 1 / 3, 1 / 4 + 1 / 3 + 2 / 2, 1 / 4 + 1 / 3 + 2 / 2 + 4]
    assert shapley(range(4), airport) == pytest.approx(dict(enumerate(expected)), abs=1e-14)


def test_all_coalitions_are_all_permutations() -> None:
    value, found = table(5, 1), np.zeros(5)
    for order in permutations(range(5)):
        for place, one in enumerate(order):
            found[one] += value(frozenset(order[: place + 1])) - value(frozenset(order[:place]))
    assert shapley(range(5), value) == pytest.approx(dict(enumerate(found / math.factorial(5))), abs=1e-11)


@every
def test_efficiency(rule: str) -> None:
    value = table(6, 2)
    expected = value(frozenset(range(6))) - value(frozenset())
    assert math.fsum(RULES[rule](range(6), value).values()) == pytest.approx(expected, abs=1e-10)


def test_every_permutation_gives_what_all_gain() -> None:
    """A sweep of one player is one permutation; of three, their sum is three times the gain, exactly."""
    for players in (1, 3):
        value = table(players, 3)
        shares = gtg(range(players), value, numpy_generator(1, "test"), 1, 0.0, 0.0)
        whole = players * (value(frozenset(range(players))) - value(frozenset()))
        assert round(sum(shares.values()) * players, 9) == whole


@every
def test_additivity(rule: str) -> None:
    one, two = table(6, 4), table(6, 5)
    parts, both = ([RULES[rule](range(6), value) for value in (one, two)], lambda members: one(members) + two(members))
    found = RULES[rule](range(6), both)
    if rule == "shapley":  # the sampling of a sum may end elsewhere
        assert found == pytest.approx({player: parts[0][player] + parts[1][player] for player in range(6)}, abs=1e-10)
    assert math.fsum(found.values()) == pytest.approx(sum(math.fsum(part.values()) for part in parts), abs=1e-10)


@every
def test_a_player_without_effect_has_nothing(rule: str) -> None:
    value = table(5, 6)
    assert RULES[rule](range(6), lambda members: value(members - {5}))[5] == 0.0


def test_equal_players_have_equal_shares() -> None:
    value = table(3, 7)  # 3 is as 2: it is worth what 2 would be, and both are worth what one is
    shares = shapley(range(4), lambda members: value(frozenset(min(one, 2) for one in members)))
    assert shares[2] == pytest.approx(shares[3], abs=1e-12)


class Counted:
    """A generator that counts its permutations."""

    def __init__(self) -> None:
        self.count, self._generator = 0, numpy_generator(2, "test")

    def permutation(self, places: Any) -> Any:
        self.count += 1
        return self._generator.permutation(places)


WORTH = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def growing(members: Collection[int]) -> float:
    """What more data give: from 0 up to 0.9, less and less."""
    return 0.9 * (1 - math.exp(-sum(WORTH[one] for one in members) / 6))


@pytest.mark.parametrize("within", [0.0, 0.001, 0.03])
def test_sampling_is_within_its_bound_of_all_coalitions(within: float) -> None:
    """Hoeffding for K permutations, whose gains lie between 0 and v({i}), and ε_i of a monotone game's ends.

    |found − φ_i| ≤ v({i}) √(ln(2 · 8 / δ) / (2 K)) + ε_i for all eight at once, but with probability δ = 1 %.
    """
    counted: Any = Counted()
    found, exact = gtg(range(8), growing, counted, 400, 0.01, within), shapley(range(8), growing)
    assert 30 < counted.count <= 400
    for player, share in exact.items():
        bound = growing([player]) * math.sqrt(math.log(2 * 8 / 0.01) / (2 * counted.count)) + within
        assert abs(found[player] - share) <= bound
    assert abs(math.fsum(found.values()) - growing(range(8))) <= within + 1e-12


def test_truncation_leaves_out_evaluations() -> None:
    evaluated = {}
    for within in (0.0, 0.03, 0.2):
        value = cache(growing)
        gtg(range(8), value, numpy_generator(3, "test"), 96, 0.01, within)
        evaluated[within] = value.cache_info().misses
    assert evaluated[0.0] > evaluated[0.03] > evaluated[0.2]


@pytest.mark.parametrize(("within", "least", "most"), [(0.5, 10, 10), (0.0, 66, 256)])
def test_what_one_client_gives_alone_ends_a_permutation(within: float, least: int, most: int) -> None:
    """Where each of eight gives all, nobody, all, and the eight alone are valued; else all that permutations pass."""
    value = cache(lambda members: float(bool(members)))
    gtg(range(8), value, numpy_generator(3, "test"), 96, 0.0, within)
    assert least <= value.cache_info().misses <= most


def test_a_round_without_a_gain_is_passed_over() -> None:
    value = cache(lambda members: 0.009 if len(members) == 8 else 5.0 * len(members))
    assert gtg(range(8), value, numpy_generator(3, "test"), 96, 0.01, 0.0) == dict.fromkeys(range(8), 0.0)
    assert value.cache_info().misses == 2


def test_everybody_is_first_equally_often() -> None:
    """In a game of the first alone, each share is one over the number of players, without an error of sampling."""
    first = {frozenset([one]) for one in range(8)}

    def value(members: frozenset[int]) -> float:
        return float(bool(members)) if members not in first else 1.0

    assert gtg(range(8), value, numpy_generator(4, "test"), 8, 0.0, 0.0) == dict.fromkeys(range(8), 1 / 8)


def test_sampling_ends_once_it_has_converged() -> None:
    """Means of an additive game are exact from the first sweep: it ends after the first whole sweep over 30."""
    counted: Any = Counted()
    shares = gtg(range(8), lambda members: float(sum(members)), counted, 10_000, 0.0, 0.0)
    assert counted.count == 32
    assert shares == pytest.approx({one: float(one) for one in range(8)})
