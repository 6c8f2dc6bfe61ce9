"""With which probability a client's update comes out of a round: by counting cohorts, and over many rounds."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lit_fed.engine.method.reducers import Gather
from lit_fed.engine.wire.workers import ClientParallelStrategy
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.participation import (
    PROBABILITY_DRAWS,
    AvailabilityParticipation,
    Fate,
    FullParticipation,
    Participation,
    Stragglers,
    UniformParticipation,
    WeightedParticipation,
)
from tests.support import Points, fit, rows

# The stated relative standard error, five times: a deviation as large comes once in two million.
FIVE_ERRORS = 5 / math.sqrt(PROBABILITY_DRAWS)


def ready(sampler: Participation, sizes: list[int], seed: int = 0) -> Any:
    sampler.setup(len(sizes), sizes.__getitem__, seed)
    return sampler


def probabilities(sampler: Participation) -> list[float | None]:
    return [sampler.probability(client_id) for client_id in range(sampler.num_clients)]


def one_after_another(sizes: list[int], count: int) -> list[float]:
    """The probability of being in a cohort drawn in proportion to size: every order in which it can be drawn."""
    found = [Fraction(0)] * len(sizes)
    for order in permutations([client for client, size in enumerate(sizes) if size], count):
        chance, left = Fraction(1), sum(sizes)
        for client in order:
            chance, left = chance * Fraction(sizes[client], left), left - sizes[client]
        for client in order:
            found[client] += chance
    return [float(share) for share in found]


def of_the_available(given: list[float], count: int) -> list[float]:
    """The probability of a place among `count`: every set of clients that can be available."""
    found = [0.0] * len(given)
    for available in product((False, True), repeat=len(given)):
        chance = math.prod(p if here else 1 - p for p, here in zip(given, available, strict=True))
        for client in np.flatnonzero(available):
            found[client] += chance * min(1, count / sum(available))
    return found


# ---------------------------------------------------------------------- by counting cohorts


@given(num_clients=st.integers(1, 7), data=st.data())
def test_full_and_uniform_are_exact(num_clients: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_clients))
    uniform = ready(UniformParticipation(count=count), [1] * num_clients)
    cohorts = list(combinations(range(num_clients), count))
    share = sum(0 in cohort for cohort in cohorts) / len(cohorts)
    assert probabilities(uniform) == pytest.approx([share] * num_clients, rel=1e-15)
    full = ready(FullParticipation(), [1] * num_clients)
    assert probabilities(full) == [1.0] * num_clients
    assert uniform.probability_is == full.probability_is == "exact"


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(lambda sizes: sum(map(bool, sizes)) > 1))
def test_weighted_agrees_with_every_order_of_drawing(sizes: list[int]) -> None:
    drawable = sum(map(bool, sizes))
    for count in range(1, drawable + 1):
        sampler = ready(WeightedParticipation(count=count), sizes)
        exact = count in (1, drawable) or len(set(sizes) - {0}) == 1
        assert sampler.probability_is == ("exact" if exact else "estimated")
        expected = one_after_another(sizes, count)
        assert probabilities(sampler) == pytest.approx(expected, rel=1e-12 if exact else FIVE_ERRORS)


def test_weighted_of_two_by_hand() -> None:
    # P(client 0 in) = 1/4 + 1/4 * 1/3 + 2/4 * 1/2 = 7/12, client 1 the same; P(client 2 in) = 2 - 14/12 = 10/12.
    assert one_after_another([1, 1, 2], 2) == pytest.approx([7 / 12, 7 / 12, 10 / 12])
    sampler = ready(WeightedParticipation(count=2), [1, 1, 2])
    assert probabilities(sampler) == pytest.approx([7 / 12, 7 / 12, 10 / 12], rel=FIVE_ERRORS)


def test_small_probabilities_are_as_precise_as_large_ones() -> None:
    # Of 1,000 draws of cohorts a client in a thousandth of them would be in one or none.
    sizes = [1, 1000, 1000, 1000]
    sampler = ready(WeightedParticipation(count=2), sizes)
    assert one_after_another(sizes, 2)[0] < 0.001
    assert sampler.probability(0) == pytest.approx(one_after_another(sizes, 2)[0], rel=FIVE_ERRORS)


@settings(deadline=None, max_examples=30)
@given(probability=st.floats(0, 1), num_clients=st.integers(1, 8), data=st.data())
def test_one_availability_for_all_is_exact(probability: float, num_clients: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_clients))
    sampler = ready(AvailabilityParticipation(count=count, availability=probability), [1] * num_clients)
    assert sampler.probability_is == "exact"
    expected = of_the_available([probability] * num_clients, count)
    assert probabilities(sampler) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@settings(deadline=None, max_examples=30)
@given(given=st.lists(st.floats(0, 1), min_size=2, max_size=7, unique=True))
def test_availabilities_agree_with_every_set_of_available_clients(given: list[float]) -> None:
    for count in range(1, len(given) + 1):
        sampler = ready(AvailabilityParticipation(count=count, availability=given), [1] * len(given))
        assert sampler.probability_is == ("exact" if count == len(given) else "estimated")
        assert probabilities(sampler) == pytest.approx(of_the_available(given, count), rel=FIVE_ERRORS, abs=1e-300)


# ---------------------------------------------------------------------- over many rounds


def arrivals(sampler: Participation, num_rounds: int) -> NDArray[np.float64]:
    """How often an update of each client comes out of a round, as a share."""
    arriving = (Fate.ON_TIME, Fate.LATE)  # the late ones are called so only where they arrive a round later
    plans = [sampler.plan(round_idx) for round_idx in range(num_rounds)]
    ids = [one.client_id for plan in plans for one in plan if one.fate in arriving]
    return np.bincount(ids, minlength=sampler.num_clients) / num_rounds


SIZES = [1 + client % 7 for client in range(20)]
SAMPLERS: dict[str, Any] = {
    "full": FullParticipation,
    "uniform": lambda **kw: UniformParticipation(count=4, **kw),
    "weighted": lambda **kw: WeightedParticipation(fraction=0.3, **kw),
    "available": lambda **kw: AvailabilityParticipation(count=4, availability=0.4, **kw),
    "availabilities": lambda **kw: AvailabilityParticipation(count=4, availability_beta=(2.0, 2.0), **kw),
}


@pytest.mark.parametrize("name", SAMPLERS)
@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 2**32),
    unseen=st.sampled_from([0.0, 0.3]),
    before=st.sampled_from([0.0, 0.2, 1.0]),
    after=st.sampled_from([0.0, 0.5]),
    late=st.sampled_from(["lost", "next_round", None]),
)
def test_frequencies_agree(name: str, seed: int, unseen: float, before: float, after: float, late: Any) -> None:
    stragglers = None if late is None else Stragglers(deadline=0.05, late=late)
    options = {"unseen_fraction": unseen, "dropout_before": before, "dropout_after": after, "stragglers": stragglers}
    sampler = ready(SAMPLERS[name](**options), SIZES, seed)
    told = np.array(probabilities(sampler), dtype=np.float64)
    num_rounds = 400
    error = np.sqrt(told * (1 - told) / num_rounds) + told / math.sqrt(PROBABILITY_DRAWS)
    assert (np.abs(arrivals(sampler, num_rounds) - told) <= 5 * error + 1e-12).all()
    assert (told[sampler.unseen_clients] == 0).all()


def test_losses_are_factors() -> None:
    # 5 of 20, of whom 1 - .2 begin and 1 - .5 of those deliver.
    sampler = ready(UniformParticipation(count=5, dropout_before=0.2, dropout_after=0.5), [1] * 20)
    assert sampler.probability(3) == pytest.approx(0.25 * 0.8 * 0.5)
    # A client of n samples takes n/2 s: 20 of them are in time, 21 are not.
    lost = Stragglers(deadline=10.0, speed_sigma=0.0, seconds_per_sample=0.5)
    assert probabilities(ready(FullParticipation(stragglers=lost), [19, 20, 21])) == [1.0, 1.0, 0.0]
    later = Stragglers(deadline=10.0, speed_sigma=0.0, seconds_per_sample=0.5, late="next_round")
    assert probabilities(ready(FullParticipation(stragglers=later), [19, 20, 21])) == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------- what it promises


def test_estimates_are_a_function_of_the_seed() -> None:
    def made(seed: int) -> Any:
        return ready(WeightedParticipation(count=4), SIZES, seed)

    one, other = made(0), made(0)
    backwards = [other.probability(client_id) for client_id in reversed(range(20))]
    assert probabilities(one) == backwards[::-1]
    assert probabilities(one) != probabilities(made(1))
    other.select(0)
    assert probabilities(one) == probabilities(other)


def test_set_up_again_it_is_estimated_again() -> None:
    sampler = ready(WeightedParticipation(count=2), [1, 1, 2])
    sampler.probability(0)
    assert probabilities(ready(sampler, [1, 2, 1])) == probabilities(ready(WeightedParticipation(count=2), [1, 2, 1]))


def test_a_daily_rhythm_has_no_single_probability() -> None:
    rhythm = AvailabilityParticipation(count=2, availability=0.5, period=4, unseen_fraction=0.2)
    sampler = ready(rhythm, [1] * 10)
    assert sampler.probability_is == "unknown"
    assert [sampler.probability(client_id) for client_id in sampler.seen_clients.tolist()] == [None] * 8
    assert [sampler.probability(client_id) for client_id in sampler.unseen_clients.tolist()] == [0.0] * 2


def test_a_sampler_that_does_not_say_is_unknown() -> None:
    class EverySecond(Participation):
        @property
        def nominal_cohort_size(self) -> int:
            return self.num_seen // 2

        def draw(self, round_idx: int) -> NDArray[np.int64]:
            return np.arange(round_idx % 2, self.num_seen, 2)

    sampler = ready(EverySecond(), [1] * 10)
    assert (sampler.probability(0), sampler.probability_is) == (None, "unknown")


def test_a_sampler_of_ones_own_says_its_probability() -> None:
    class OneOfTwo(Participation):
        """The even or the odd clients, by a fair coin of each round."""

        nominal_cohort_size = 5
        probability_is = "exact"

        def draw(self, round_idx: int) -> NDArray[np.int64]:
            return np.arange(self.generator(round_idx).integers(2), self.num_seen, 2)

        def chance(self, position: int) -> float:
            return 0.5

    sampler, again = (ready(OneOfTwo(dropout_after=0.5), [1] * 10) for _ in range(2))
    assert sampler.probability(3) == 0.25  # 1/2 drawn, of which 1/2 arrives
    rounds = [sampler.select(round_idx) for round_idx in range(40)]
    assert {tuple(cohort) for cohort in rounds} == {(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)}
    assert [again.select(round_idx) for round_idx in reversed(range(40))] == rounds[::-1]


def test_uniform_does_not_touch_the_population() -> None:
    asked: list[int] = []
    sampler = UniformParticipation(count=10)
    # O(population) memory or time would need 8 * 10**15 bytes here.
    sampler.setup(10**15, lambda client_id: asked.append(client_id) or 1, seed=0)
    assert sampler.probability(10**14) == 10 / 10**15
    assert asked == []


def test_before_setup_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="before setup"):
        FullParticipation().probability(0)


# ---------------------------------------------------------------------- in a run


class Told(FedAvg):
    """Logs the probability that came with every update."""

    needs = frozenset({"probability"})

    def reducer(self, server: Any) -> Any:
        return Gather()

    def step(self, server: Any, aggregate: Any, cohort: Any) -> dict[str, float]:
        return {f"server/{one.client_id}": -1.0 if one.probability is None else one.probability for one in aggregate}


def told(folder: Path, num_clients: int, participation: Participation, **kwargs: Any) -> list[dict[str, float]]:
    fit(folder, data=Points(num_clients), algorithm=Told(), participation=participation, **kwargs)
    table = rows(folder / "lightning_logs" / "version_0" / "metrics.csv")
    return [{k[7:]: float(v) for k, v in row.items() if k.startswith("server/") and v} for row in table]


def two_processes() -> dict[str, Any]:
    return {"devices": 2, "strategy": ClientParallelStrategy(start_method="fork")}


@pytest.mark.parametrize("processes", [dict, two_processes])
def test_it_comes_with_every_update_also_with_a_late_one(tmp_path: Path, processes: Any) -> None:
    # Clients 0 and 2 have 1 sample, 1 and 3 have 3, which take 3 s where 2 are allowed; a quarter drops out.
    stragglers = Stragglers(deadline=2.0, speed_sigma=0.0, seconds_per_sample=1.0, late="next_round")
    participation = UniformParticipation(count=4, dropout_before=0.25, stragglers=stragglers)
    found = told(tmp_path, 4, participation, max_rounds=6, **processes())
    assert {value for row in found for value in row.values()} == {0.75}
    ready(participation, [1, 3, 1, 3])
    for round_idx, row in enumerate(found):
        on_time = {one.client_id for one in participation.plan(round_idx) if one.fate is Fate.ON_TIME}
        assert {int(name) for name in row} == on_time | set(participation.late(round_idx))
    assert any("1" in row or "3" in row for row in found)


@pytest.mark.parametrize("processes", [dict, two_processes])
def test_an_estimate_is_the_same_on_every_process(tmp_path: Path, processes: Any) -> None:
    sampler = ready(WeightedParticipation(count=3), [1, 3, 1, 3])
    expected = {str(client_id): sampler.probability(client_id) for client_id in range(4)}
    found = told(tmp_path, 4, WeightedParticipation(count=3), max_rounds=8, **processes())
    assert {name: value for row in found for name, value in row.items()} == expected
    assert all(row.items() <= expected.items() for row in found)


def test_a_method_that_needs_it_is_refused_where_it_is_unknown(tmp_path: Path) -> None:
    message = "algorithm Told needs the probability with which clients take part, .* another than Availability"
    with pytest.raises(ConfigError, match=message):
        told(tmp_path, 4, AvailabilityParticipation(count=4, availability=0.9, period=4))


def test_nothing_is_estimated_for_a_method_that_does_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: Participation, client_id: int) -> float:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr(Participation, "probability", asked)
    assert fit(tmp_path, participation=WeightedParticipation(count=2)).metrics["participation/count"] == 2
