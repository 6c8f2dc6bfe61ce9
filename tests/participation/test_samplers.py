"""Cohorts and fates: pure functions of (seed, round, client), with expected numbers from closed forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lit_fed.errors import ConfigError
from lit_fed.participation import (
    AvailabilityParticipation,
    Fate,
    FullParticipation,
    Participation,
    Stragglers,
    UniformParticipation,
    WeightedParticipation,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "participation"


def ready(participation: Participation, num_clients: int = 20, seed: int = 0, size: int = 10) -> Any:
    participation.setup(num_clients, lambda client_id: size, seed)
    return participation


def counts(participation: Participation, num_rounds: int, num_clients: int) -> np.ndarray:
    drawn = [client_id for round_idx in range(num_rounds) for client_id in participation.select(round_idx)]
    return np.bincount(drawn, minlength=num_clients)


SAMPLERS = [
    lambda **kw: FullParticipation(**kw),
    lambda **kw: UniformParticipation(count=4, **kw),
    lambda **kw: WeightedParticipation(count=4, **kw),
    lambda **kw: AvailabilityParticipation(count=4, availability_beta=(2.0, 2.0), period=5, **kw),
]
SAMPLER_IDS = ["full", "uniform", "weighted", "availability"]


# --- what every sampler keeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SAMPLERS, ids=SAMPLER_IDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rounds=st.permutations(range(6)), unseen=st.sampled_from([0.0, 0.1, 0.5]))
def test_plans_are_pure_functions_of_seed_and_round(make: Any, seed: int, rounds: list[int], unseen: float) -> None:
    options = {
        "unseen_fraction": unseen,
        "dropout_before": 0.2,
        "dropout_after": 0.2,
        "stragglers": Stragglers(deadline=0.1, late="next_round"),
    }
    one, other = ready(make(**options), seed=seed), ready(make(**options), seed=seed)
    in_order = {round_idx: (one.plan(round_idx), one.late(round_idx)) for round_idx in range(6)}
    for round_idx in rounds:  # another object, another order of questions, each question twice
        for _ in range(2):
            assert (other.plan(round_idx), other.late(round_idx)) == in_order[round_idx]
        cohort = other.select(round_idx)
        assert cohort == [one.client_id for one in in_order[round_idx][0]]
        assert all(type(client_id) is int for client_id in cohort)
        assert len(set(cohort)) == len(cohort) <= other.nominal_cohort_size
        assert set(cohort) <= set(other.seen_clients.tolist())
    assert np.array_equal(np.union1d(other.seen_clients, other.unseen_clients), np.arange(20))
    assert len(other.unseen_clients) == round(unseen * 20) == 20 - other.num_seen


@pytest.mark.parametrize("make", SAMPLERS[1:], ids=SAMPLER_IDS[1:])
def test_rounds_and_seeds_differ(make: Any) -> None:
    one = ready(make(), num_clients=1000)
    cohorts = {tuple(one.select(round_idx)) for round_idx in range(20)}
    assert len(cohorts) == 20
    assert ready(make(), num_clients=1000, seed=1).select(0) != one.select(0)


@pytest.mark.parametrize("make", SAMPLERS, ids=SAMPLER_IDS)
def test_use_before_setup_is_refused(make: Any) -> None:
    with pytest.raises(RuntimeError, match="before setup"):
        make().select(0)


def test_unseen_clients_are_never_selected_and_do_not_depend_on_the_sampler() -> None:
    full = ready(FullParticipation(unseen_fraction=0.25), seed=3)
    uniform = ready(UniformParticipation(count=5, unseen_fraction=0.25), seed=3)
    assert full.unseen_clients.tolist() == uniform.unseen_clients.tolist()
    assert len(full.unseen_clients) == 5  # 0.25 * 20
    drawn = counts(uniform, 300, 20)
    assert (drawn[uniform.unseen_clients] == 0).all()
    assert (drawn[uniform.seen_clients] > 0).all()
    # the smallest fraction above zero still keeps one client back
    assert len(ready(FullParticipation(unseen_fraction=0.001)).unseen_clients) == 1


def test_only_every_third_client_is_selected_and_the_rest_are_unseen() -> None:
    third = ready(UniformParticipation(count=3, every=3))  # of 20
    assert third.seen_clients.tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert {client for round_idx in range(50) for client in third.select(round_idx)} == {0, 3, 6, 9, 12, 15, 18}
    assert (third.probability(3), third.probability(4)) == (3 / 7, 0.0)
    both = ready(FullParticipation(every=3, unseen_fraction=0.25), seed=3)
    without = ready(FullParticipation(unseen_fraction=0.25), seed=3).seen_clients
    assert both.seen_clients.tolist() == [client for client in without if client % 3 == 0]
    with pytest.raises(ConfigError, match=r"participation\.every is 0; it must be at least 1"):
        ready(FullParticipation(every=0))
    with pytest.raises(
        ConfigError, match=r"count is 8; it must be at least 1 and at most 7, the number of seen clients"
    ):
        ready(UniformParticipation(count=8, every=3))
    with pytest.raises(ConfigError, match=r"unseen_fraction 0.95 and every 19 leave none of the 20"):
        ready(FullParticipation(every=19, unseen_fraction=0.95), seed=0)


def test_full_participation_is_everybody_in_order() -> None:
    full = ready(FullParticipation(), num_clients=7)
    assert full.select(0) == full.select(9) == list(range(7))
    assert full.nominal_cohort_size == 7
    assert {one.fate for one in full.plan(0)} == {Fate.ON_TIME}


# --- cohort sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "num_clients", "unseen", "expected"),
    [
        (0.1, 100, 0.0, 10),
        (0.1, 4, 0.0, 1),  # round(0.4) = 0, at least 1
        (0.5, 5, 0.0, 2),  # round(2.5) = 2, half to even
        (1.0, 9, 0.0, 9),
        (0.5, 20, 0.5, 5),  # of the 10 seen clients
    ],
)
def test_fraction_of_the_seen_clients(fraction: float, num_clients: int, unseen: float, expected: int) -> None:
    uniform = ready(UniformParticipation(fraction=fraction, unseen_fraction=unseen), num_clients)
    assert uniform.nominal_cohort_size == len(uniform.select(0)) == expected


def test_uniform_draws_everybody_equally_often() -> None:
    drawn = counts(ready(UniformParticipation(count=5)), 2000, 20)
    # Each client is in a cohort with probability 5/20: mean 500, standard deviation sqrt(2000 * .25 * .75) = 19.4.
    assert drawn.sum() == 2000 * 5
    assert np.abs(drawn - 500).max() < 4 * 19.4


def test_uniform_round_does_not_touch_the_population() -> None:
    asked: list[int] = []

    def num_samples(client_id: int) -> int:
        asked.append(client_id)
        return 10

    uniform = UniformParticipation(count=10, stragglers=Stragglers(deadline=0.1))
    # O(population) memory or time would need 8 * 10**15 bytes here.
    uniform.setup(10**15, num_samples, seed=0)
    assert len(uniform.plan(0)) == 10
    assert len(asked) == 10
    assert uniform.unseen_clients.size == 0


# --- weighted -------------------------------------------------------------------------------------------------------


def weighted(sizes: list[int], seed: int = 0, **kwargs: Any) -> WeightedParticipation:
    sampler = WeightedParticipation(**kwargs)
    sampler.setup(len(sizes), sizes.__getitem__, seed)
    return sampler


def test_weighted_draws_one_in_proportion_to_size() -> None:
    drawn = counts(weighted([10, 20, 30, 40], count=1), 3000, 4) / 3000
    # Standard deviation of a share p: sqrt(p(1-p)/3000) <= .0092.
    assert np.abs(drawn - [0.1, 0.2, 0.3, 0.4]).max() < 4 * 0.0092


def test_weighted_draws_two_one_after_another() -> None:
    drawn = counts(weighted([1, 1, 2], count=2), 3000, 3) / 3000
    # P(client 0 in) = 1/4 + 1/4 * 1/3 + 2/4 * 1/2 = 7/12, client 1 the same; P(client 2 in) = 2 - 14/12 = 10/12.
    # Standard deviation at most sqrt(.25/3000) = .0092.
    assert np.abs(drawn - [7 / 12, 7 / 12, 10 / 12]).max() < 4 * 0.0092


def test_weighted_never_draws_a_client_without_samples() -> None:
    assert counts(weighted([0, 5, 5, 5], count=3), 20, 4).tolist() == [0, 20, 20, 20]
    with pytest.raises(ConfigError, match=r"cohort has 4 clients, and only 3 clients have training samples"):
        weighted([0, 5, 5, 5], count=4)


# --- availability ---------------------------------------------------------------------------------------------------


def test_availability_of_one_is_uniform_and_of_zero_is_empty() -> None:
    always = ready(AvailabilityParticipation(count=6, availability=1.0))
    assert all(len(always.select(round_idx)) == 6 for round_idx in range(10))
    never = ready(AvailabilityParticipation(count=6, availability=0.0))
    assert never.select(0) == never.plan(0) == never.late(1) == []


def test_all_available_take_part_when_fewer_than_asked() -> None:
    sampler = ready(AvailabilityParticipation(count=20, availability=0.3))
    for round_idx in range(10):
        assert sampler.select(round_idx) == sampler.available(round_idx).tolist()


def test_cohort_is_drawn_from_the_available() -> None:
    sampler = ready(AvailabilityParticipation(count=3, availability=0.5, unseen_fraction=0.2))
    for round_idx in range(20):
        cohort, available = sampler.select(round_idx), sampler.available(round_idx).tolist()
        assert set(cohort) <= set(available)
        assert len(cohort) == min(3, len(available))


def test_each_client_has_its_own_availability() -> None:
    given = [0.0, 0.25, 0.5, 1.0]
    sampler = ready(AvailabilityParticipation(fraction=1.0, availability=given), num_clients=4)
    # Standard deviation at most sqrt(.25/2000) = .0112.
    shares = counts(sampler, 2000, 4) / 2000
    assert np.abs(shares - given).max() < 4 * 0.0112
    assert shares[0] == 0
    assert shares[3] == 1


def test_listed_availability_stays_with_its_client_where_some_are_unseen() -> None:
    given = [client_id / 20 for client_id in range(20)]
    sampler = ready(AvailabilityParticipation(fraction=1.0, availability=given, unseen_fraction=0.5))
    assert sampler.probabilities(0).tolist() == [given[client_id] for client_id in sampler.seen_clients]


def test_beta_availability_has_the_distribution_s_moments() -> None:
    sampler = ready(AvailabilityParticipation(count=1, availability_beta=(2.0, 6.0)), num_clients=20_000)
    drawn = sampler.probabilities(0)
    # Beta(a, b): mean a/(a+b) = .25; variance ab/((a+b)^2 (a+b+1)) = 12/(64*9) = .02083, so the mean of 20,000 has a
    # standard deviation of .00102.
    assert drawn.mean() == pytest.approx(0.25, abs=4 * 0.00102)
    assert drawn.var() == pytest.approx(12 / 576, rel=0.05)


@given(probability=st.floats(0, 1), period=st.integers(2, 40), seed=st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_daily_rhythm_stays_a_probability_and_keeps_the_mean(probability: float, period: int, seed: int) -> None:
    sampler = ready(AvailabilityParticipation(count=1, availability=probability, period=period), 8, seed)
    day = np.stack([sampler.probabilities(round_idx) for round_idx in range(period)])
    assert day.min() > -1e-12
    assert day.max() < 1 + 1e-12
    # A cosine sampled at T >= 2 equal steps sums to zero.
    assert day.mean(axis=0) == pytest.approx(np.full(8, probability))
    assert sampler.probabilities(period).tolist() == day[0].tolist()


# --- dropout and stragglers -----------------------------------------------------------------------------------------


def shares_of_fates(participation: Participation, num_rounds: int) -> dict[Fate, float]:
    fates = [one.fate for round_idx in range(num_rounds) for one in participation.plan(round_idx)]
    return {fate: fates.count(fate) / len(fates) for fate in Fate}


def test_dropout_probabilities() -> None:
    shares = shares_of_fates(ready(FullParticipation(dropout_before=0.3, dropout_after=0.5)), 250)
    # 5,000 fates, standard deviation at most .0071; after = (1 - .3) * .5 = .35, on time = .7 * .5 = .35.
    assert shares[Fate.LOST_BEFORE] == pytest.approx(0.3, abs=4 * 0.0071)
    assert shares[Fate.LOST_AFTER] == pytest.approx(0.35, abs=4 * 0.0071)
    assert shares[Fate.ON_TIME] == pytest.approx(0.35, abs=4 * 0.0071)
    assert shares_of_fates(ready(FullParticipation(dropout_before=1.0)), 2)[Fate.LOST_BEFORE] == 1


def test_a_client_s_fate_does_not_depend_on_the_rest_of_the_cohort() -> None:
    options = {"dropout_before": 0.3, "dropout_after": 0.3, "stragglers": Stragglers(deadline=0.1)}
    full, some = ready(FullParticipation(**options)), ready(UniformParticipation(count=6, **options))
    assert set(some.plan(4)) <= set(full.plan(4))


def test_speeds_are_log_normal_and_fixed() -> None:
    stragglers = Stragglers(deadline=1.0, speed_sigma=0.5)
    logs = np.log([stragglers.speed(7, client_id) for client_id in range(4000)])
    # Normal(0, .5): the mean of 4,000 has a standard deviation of .0079, the standard deviation one of .0056.
    assert logs.mean() == pytest.approx(0, abs=4 * 0.0079)
    assert logs.std() == pytest.approx(0.5, abs=4 * 0.0056)
    assert stragglers.speed(7, 11) == Stragglers(deadline=9.0, speed_sigma=0.5).speed(7, 11)
    assert stragglers.speed(7, 11) != stragglers.speed(8, 11)


def test_durations_and_the_deadline_without_spread() -> None:
    # Without spread all speeds are 1: a client of n samples takes n * .5 seconds; 20 of 10 s is not above 10 s.
    stragglers = Stragglers(deadline=10.0, speed_sigma=0.0, seconds_per_sample=0.5, late="next_round")
    assert stragglers.duration(0, 0, 20) == 10.0
    sizes = [19, 20, 21, 40]
    full = FullParticipation(stragglers=stragglers)
    full.setup(4, sizes.__getitem__, 0)
    assert [one.fate for one in full.plan(0)] == [Fate.ON_TIME, Fate.ON_TIME, Fate.LATE, Fate.LATE]
    assert full.late(0) == []
    assert full.late(1) == [2, 3]


def test_share_of_late_clients() -> None:
    stragglers = Stragglers(deadline=2.0, speed_sigma=0.5, seconds_per_sample=0.01, late="next_round")
    full = ready(FullParticipation(stragglers=stragglers), num_clients=4000, size=150)
    # 150 * .01 / speed > 2 where log(speed) < log(.75): P = Phi(log(.75) / .5) = Phi(-.5754) = .2825; sd .0071.
    expected = 0.5 * (1 + math.erf(math.log(0.75) / 0.5 / math.sqrt(2)))
    assert expected == pytest.approx(0.2825, abs=1e-4)
    assert shares_of_fates(full, 1)[Fate.LATE] == pytest.approx(expected, abs=4 * 0.0071)


def test_late_updates_are_lost_or_arrive_in_the_next_round() -> None:
    lost = ready(FullParticipation(stragglers=Stragglers(deadline=0.1, late="lost")))
    later = ready(FullParticipation(stragglers=Stragglers(deadline=0.1, late="next_round")))
    in_time = [one.client_id for one in lost.plan(3) if one.fate is Fate.ON_TIME]
    assert lost.late(4) == []
    assert {one.fate for one in lost.plan(3)} == {Fate.ON_TIME, Fate.LOST_AFTER}
    assert later.late(4) == [client_id for client_id in range(20) if client_id not in in_time]


# --- settings that cannot work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (UniformParticipation(count=21), r"count is 21; it must be at least 1 and at most 20, the number of clients"),
        (
            UniformParticipation(count=11, unseen_fraction=0.5),
            r"count is 11; it must be at least 1 and at most 10, the number of seen clients",
        ),
        (UniformParticipation(count=0), r"count is 0"),
        (UniformParticipation(), r"count is None and fraction is None; give exactly one"),
        (UniformParticipation(count=1, fraction=0.5), r"count is 1 and fraction is 0.5; give exactly one"),
        (UniformParticipation(fraction=0.0), r"fraction is 0.0; it must be above 0"),
        (UniformParticipation(fraction=1.5), r"fraction is 1.5"),
        (UniformParticipation(fraction=math.nan), r"fraction is nan"),
        (FullParticipation(unseen_fraction=1.0), r"unseen_fraction is 1.0"),
        (FullParticipation(unseen_fraction=0.99), r"unseen_fraction is 0.99, which leaves none of the 20 clients"),
        (FullParticipation(dropout_before=-0.1), r"dropout_before is -0.1"),
        (FullParticipation(dropout_after=1.1), r"dropout_after is 1.1"),
        (FullParticipation(stragglers=Stragglers(deadline=0)), r"stragglers.deadline is 0"),
        (FullParticipation(stragglers=Stragglers(deadline=1, seconds_per_sample=-1)), r"seconds_per_sample is -1"),
        (FullParticipation(stragglers=Stragglers(deadline=1, speed_sigma=-1)), r"speed_sigma is -1"),
        (AvailabilityParticipation(count=1), r"neither of availability and availability_beta"),
        (AvailabilityParticipation(count=1, availability=0.5, availability_beta=(1, 1)), r"both of availability"),
        (AvailabilityParticipation(count=1, availability=1.5), r"availability is 1.5; it must be"),
        (AvailabilityParticipation(count=1, availability=[0.5] * 19), r"lists 19 clients, and the data have 20"),
        (AvailabilityParticipation(count=1, availability=[0.5] * 19 + [-1.0]), r"availability of client 19 is -1.0"),
        (AvailabilityParticipation(count=1, availability_beta=(0.0, 1.0)), r"availability_beta is \(0.0, 1.0\)"),
        (AvailabilityParticipation(count=1, availability=0.5, period=1), r"period is 1"),
    ],
)
def test_contradictory_settings_name_the_key(participation: Participation, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ready(participation)
    assert "\n" not in str(caught.value)


def test_an_empty_population_is_refused() -> None:
    with pytest.raises(ConfigError, match="the number of clients is 0"):
        ready(FullParticipation(), num_clients=0)


# --- config files ---------------------------------------------------------------------------------------------------


def from_config(*arguments: str) -> Participation:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Participation, "trainer.participation")
    parser.add_argument("--config", action="config")
    # `instantiate` came with 4.49, which deprecates `instantiate_classes`; we support 4.40 and newer.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return instantiate(parser.parse_args(list(arguments))).trainer.participation


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_file_works(path: Path) -> None:
    assert path.read_text().startswith("# ")
    participation = ready(from_config(f"--config={path}"), num_clients=100, size=150)
    plans = [participation.plan(round_idx) for round_idx in range(5)]
    assert any(plans)
    fates = {one.fate for plan in plans for one in plan}
    if path.stem == "stragglers":
        assert isinstance(participation.stragglers, Stragglers)
        assert fates == {Fate.ON_TIME, Fate.LATE}
    elif path.stem == "dropout":
        assert fates == {Fate.ON_TIME, Fate.LOST_BEFORE, Fate.LOST_AFTER}
    else:
        assert fates == {Fate.ON_TIME}


def test_common_settings_reach_every_sampler_and_unknown_ones_fail() -> None:
    name = "--trainer.participation=UniformParticipation"
    sampler = from_config(name, "--trainer.participation.fraction=0.5", "--trainer.participation.dropout_after=0.1")
    assert sampler.dropout_after == 0.1
    with pytest.raises(Exception, match="dropout_aftr"):
        from_config(name, "--trainer.participation.dropout_aftr=0.1")


# --- absent clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SAMPLERS, ids=SAMPLER_IDS)
def test_absent_clients_are_lost_where_they_are_drawn_and_move_no_draw(make: Any) -> None:
    whole, rest = (ready(make(unseen_fraction=0.2, dropout_after=0.3)) for _ in range(2))
    absent = {int(whole.unseen_clients[0]), *map(int, whole.seen_clients[:3])}
    rest.lose(absent)
    for round_idx in range(20):
        pairs = list(zip(whole.plan(round_idx), rest.plan(round_idx), strict=True))
        assert [one.client_id for one, _ in pairs] == [one.client_id for _, one in pairs]
        for before, after in pairs:
            assert after.fate is (Fate.LOST_BEFORE if after.client_id in absent else before.fate)
    assert set(rest.seen_clients) == set(whole.seen_clients) - absent
    assert set(rest.unseen_clients) == set(whole.unseen_clients) - absent
    assert rest.nominal_cohort_size == whole.nominal_cohort_size
    assert [rest.probability(client_id) for client_id in absent] == [0.0] * len(absent)


def test_somebody_must_be_left() -> None:
    with pytest.raises(ConfigError, match=r"participation.absent leaves no client to train on; name fewer"):
        ready(FullParticipation(), num_clients=2).lose([0, 1])
