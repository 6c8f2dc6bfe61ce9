"""The queue of an asynchronous federation: by hand, against a plain event queue, and as a pure function."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.errors import ConfigError
from lit_fed.participation import Asynchronous, Fate, FullParticipation, Participant, Speeds, Stragglers
from lit_fed.seeding import derive_seed


def ready(num_clients: int, concurrency: int, buffer: int, seed: int = 0, size: Any = None, **kwargs: Any) -> Any:
    made = Asynchronous(concurrency, buffer, **kwargs)
    made.setup(num_clients, size or (lambda client_id: 10), seed)
    return made


def trace(folder: Path, *seconds: float) -> Speeds:
    path = folder / "trace.csv"
    path.write_text("client,seconds\n" + "".join(f"{client},{s}\n" for client, s in enumerate(seconds)))
    return Speeds(trace=str(path))


def test_three_clients_by_hand(tmp_path: Path) -> None:
    """Of 2, 3 and 4 seconds, all in flight, a step on every second arrival.

    0.0 starts 0, 1, 2 from version 0
    2.0 client 0 (τ 0) arrives, and waits for the step
    3.0 client 1 (τ 0) arrives: step 0; 0 and 1 start from version 1
    4.0 client 2 (τ 1) arrives, and waits
    5.0 client 0 (τ 0) arrives: step 1; 0 and 2 start from version 2
    6.0 client 1 (τ 1) arrives, and waits
    7.0 client 0 (τ 0) arrives: step 2; 0 and 1 start from version 3
    9.0 client 2 (version 2, τ 1), then client 0 (version 3, τ 0), which started later: step 3
    """
    made = ready(3, 3, 2, speeds=trace(tmp_path, 2, 3, 4))
    on_time = Fate.ON_TIME
    assert [made.plan(step) for step in range(4)] == [
        [Participant(0, on_time, 0, 0.0, 2.0), Participant(1, on_time, 0, 0.0, 3.0)],
        [Participant(2, on_time, 0, 0.0, 4.0), Participant(0, on_time, 1, 3.0, 5.0)],
        [Participant(1, on_time, 1, 3.0, 6.0), Participant(0, on_time, 2, 5.0, 7.0)],
        [Participant(2, on_time, 2, 5.0, 9.0), Participant(0, on_time, 3, 7.0, 9.0)],
    ]
    assert [made.clock(step, 0.0) for step in range(4)] == [3.0, 5.0, 7.0, 9.0]
    assert [made.in_flight(step) for step in range(4)] == [{0: {2: 4.0}}, {1: {1: 6.0}}, {2: {2: 9.0}}, {3: {1: 10.0}}]


def plain_queue(
    seconds: list[float], concurrency: int, buffer: int, cap: int | None, lost: Any, seed: int, steps: int
) -> list[tuple[float, list[tuple[int, int, bool]], set[int]]]:
    """Of every step the time, (version, client, whether its update counts) and the versions in flight."""
    found, now, version, starts = [], 0.0, 0, 0
    flying: list[tuple[float, int, int, int]] = []  # end, number of the start, client, version
    ended: list[tuple[int, int, bool]] = []
    while len(found) < steps:
        while len(flying) < concurrency:
            away = {client for _, _, client, _ in flying} | {client for _, client, _ in ended}
            free = [client for client in range(len(seconds)) if client not in away]
            if not free:
                break
            client = free[derive_seed(seed, "start", starts) % len(free)]
            flying.append((now + seconds[client], starts, client, version))
            starts += 1
        now = min(flying)[0]
        for event in sorted(event for event in flying if event[0] == now):
            flying.remove(event)
            _, _, client, begun = event
            late = cap is not None and version - begun > cap
            ended.append((begun, client, not late and not lost(begun, client)))
            away = {client for _, _, client, _ in flying} | {client for _, client, _ in ended}
            everybody_waits = not flying and len(away) == len(seconds)
            if sum(counts for _, _, counts in ended) == buffer or everybody_waits:
                found.append((now, sorted(ended), {begun for *_, begun in flying}))
                ended, version = [], version + 1
    return found


@settings(max_examples=1000, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_plain_event_queue_agrees(data: Any, seed: int) -> None:
    seconds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.25]), min_size=1, max_size=9))
    concurrency = data.draw(st.integers(1, len(seconds)))
    buffer = data.draw(st.integers(1, concurrency))
    cap = data.draw(st.none() | st.integers(0, 3))
    dropout = data.draw(st.sampled_from([0.0, 0.3]))
    made = ready(len(seconds), concurrency, buffer, seed, max_staleness=cap, dropout_before=dropout)
    made.speeds.duration = lambda seed, client_id, *_: seconds[client_id]
    made._rewind()
    fates = FullParticipation(dropout_before=dropout)
    fates.setup(len(seconds), lambda client_id: 10, seed)

    def lost(version: int, client: int) -> bool:
        return fates.plan(version)[client].fate is not Fate.ON_TIME

    expected = plain_queue(seconds, concurrency, buffer, cap, lost, seed, 12)
    for step in data.draw(st.permutations(range(12))):  # in any order: a prefix depends on nothing after it
        time_s, ended, versions = expected[step]
        plan = made.plan(step)
        assert [(one.version, one.client_id, one.fate is Fate.ON_TIME) for one in plan] == ended
        assert (made.clock(step, 0.0), set(made.in_flight(step))) == (time_s, versions)
        assert made.select(step) == [client for _, client, _ in ended]
        assert len({client for _, client, _ in ended}) == len(ended)  # at most one update a client and step
        assert len(versions) <= concurrency


def test_equal_speeds_with_a_buffer_of_all_are_rounds_of_full_participation() -> None:
    rounds = FullParticipation(dropout_before=0.2, dropout_after=0.2)
    rounds.setup(8, lambda client_id: 10, 3)
    made = ready(8, 8, 8, seed=3, dropout_before=0.2, dropout_after=0.2)
    for step in range(20):
        assert [(one.client_id, one.fate) for one in made.plan(step)] == [
            (one.client_id, one.fate) for one in rounds.plan(step)
        ]
        assert {one.version for one in made.plan(step)} == {step}
        assert not made.in_flight(step)
        assert made.clock(step, 0.0) == step + 1.0


def test_no_partial_buffer_is_flushed_and_staleness_counts_from_the_download(tmp_path: Path) -> None:
    """Slow client 0 of 10 s downloads once; meanwhile steps of client 1 alone are 1 s apart: τ = 9 at its arrival.

    At 10.0 client 0 started before client 1's tenth work, and comes first: step 9, the steps 0 to 8 before it.
    """
    made = ready(2, 2, 1, speeds=trace(tmp_path, 10, 1))
    plans = [made.plan(step) for step in range(11)]
    assert all(len(plan) == 1 for plan in plans)  # never fewer: FLSim flushes what it has when an epoch ends
    assert [plan[0].client_id for plan in plans] == [1] * 9 + [0, 1]
    assert 9 - (plans[9][0].version or 0) == 9  # APPFL counts from the client's last upload
    assert plans[10][0].version == 9  # started at 9.0, after step 8


def test_a_client_that_drops_out_is_not_tried_again_at_the_same_time() -> None:
    made = ready(1, 1, 1, dropout_before=0.5)
    steps = [made.plan(step)[0] for step in range(50)]
    assert {one.fate for one in steps} == {Fate.ON_TIME, Fate.LOST_BEFORE}
    assert [(one.began, one.ended) for one in steps] == [(float(step), float(step + 1)) for step in range(50)]


def test_too_stale_updates_are_lost_and_do_not_fill_the_buffer(tmp_path: Path) -> None:
    made = ready(2, 2, 1, speeds=trace(tmp_path, 10, 1), max_staleness=3)
    fates = [(one.client_id, one.fate) for step in range(10) for one in made.plan(step)]
    assert fates[:9] == [(1, Fate.ON_TIME)] * 9
    assert sorted(fates[9:], key=lambda pair: pair[0]) == [(0, Fate.LOST_AFTER), (1, Fate.ON_TIME)]


def test_unseen_clients_never_start() -> None:
    made = ready(40, 10, 3, unseen_fraction=0.25, every=2)
    drawn = {one.client_id for step in range(200) for one in made.plan(step)}
    assert drawn == set(made.seen_clients.tolist())


def test_a_million_clients_cost_what_the_concurrency_costs() -> None:
    """1,000 steps of 10 updates with 1,000 in flight: seconds, and as much memory at the end as at the beginning."""
    made = ready(10**6, 1000, 10, speeds=Speeds(sigma=1.0))
    tracemalloc.start()
    started = time.perf_counter()
    made.plan(100)
    tracemalloc.reset_peak()
    made.plan(999)
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 30  # 0.5 s without tracing; the machine may be busy
    assert peak < 5e6  # bytes; a list of the population would have 8e6


# --- speeds ---------------------------------------------------------------------------------------------------------


def test_durations_by_hand(tmp_path: Path) -> None:
    # 2 s + 0.5 s for each of 10 samples = 7 s; a client without samples counts as one sample: 2.5 s
    speeds = Speeds(seconds=2.0, seconds_per_sample=0.5)
    speeds.setup(3)
    assert (speeds.duration(0, 0, 10), speeds.duration(0, 1, 0)) == (7.0, 2.5)
    path = tmp_path / "devices.csv"
    path.write_text("client,seconds,seconds_per_sample,down_bytes_per_s,up_bytes_per_s\n1,1,0.5,100,50\n0,3,,,\n")
    speeds = Speeds(trace=str(path))
    speeds.setup(2)
    # 1 + 0.5 · 10 + 400 / 100 + 100 / 50 = 12 s; without rates and samples 3 s
    assert (speeds.duration(0, 1, 10, 400, 100), speeds.duration(0, 0, 10, 400, 100)) == (12.0, 3.0)


def test_log_normal_speeds_have_the_median_and_the_spread_that_are_set() -> None:
    speeds = Speeds(seconds=2.0, sigma=0.5)
    speeds.setup(4000)
    durations = sorted(speeds.duration(7, client_id, 1) for client_id in range(4000))
    # quantiles of 2 exp(0.5 z): the median 2, and at z = ±1 (0.1587 and 0.8413) 2 exp(±0.5) = 1.213 and 3.297
    for share, expected in ((0.5, 2.0), (0.1587, 1.2131), (0.8413, 3.2974)):
        assert durations[int(share * 4000)] == pytest.approx(expected, rel=0.05)


def test_a_round_of_synchronous_clients_lasts_as_long_as_the_slowest(tmp_path: Path) -> None:
    made = FullParticipation(speeds=trace(tmp_path, 2, 5, 3))
    made.setup(3, lambda client_id: 1, 0)
    assert made.clock(0, 0.0) == 5.0
    assert made.clock(7, 35.0) == 40.0
    without = FullParticipation()
    without.setup(3, lambda client_id: 1, 0)
    assert without.clock(0, 0.0) is None


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"concurrency": 5}, r"concurrency is 5; it must be at least 1 and at most 4, the number of clients"),
        ({"concurrency": 0}, r"concurrency is 0"),
        ({"buffer": 4}, r"buffer is 4; it must be at least 1 and at most 3, the concurrency"),
        ({"max_staleness": -1}, r"max_staleness is -1; it must be at least 0, or None for no limit"),
        ({"dropout_after": 1.0}, r"dropout_after is 1.0; it must be at least 0 and below 1, or no step has an update"),
        ({"speeds": Speeds(seconds=-1)}, r"speeds.seconds is -1; it must be at least 0"),
        ({"speeds": Speeds(seconds=0)}, r"seconds and seconds_per_sample are 0; set one above 0"),
        ({"speeds": Speeds(sigma=float("nan"))}, r"speeds.sigma is nan"),
        ({"speeds": Speeds(sigma=1, trace="x.csv")}, r"a trace beside seconds, seconds_per_sample or sigma"),
        ({"speeds": Speeds(trace="absent.csv")}, r"trace absent.csv cannot be read"),
    ],
)
def test_bad_settings(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ready(4, **({"concurrency": 3, "buffer": 2} | kwargs))


def test_stragglers_take_the_speeds_and_have_none_beside_them(tmp_path: Path) -> None:
    """Of 2, 5 and 3 s with a deadline of 3 s, exactly on which is in time, client 1 is late; a round ends at 3 s."""
    made = FullParticipation(speeds=trace(tmp_path, 2, 5, 3), stragglers=Stragglers(deadline=3.0))
    made.setup(3, lambda client_id: 1, 0)
    assert [one.fate for one in made.plan(0)] == [Fate.ON_TIME, Fate.LOST_AFTER, Fate.ON_TIME]
    assert made.clock(0, 0.0) == 3.0
    made = FullParticipation(speeds=Speeds(), stragglers=Stragglers(deadline=1.0, speed_sigma=1.0))
    with pytest.raises(ConfigError, match=r"speeds beside stragglers\.seconds_per_sample or speed_sigma; leave these"):
        made.setup(4, lambda client_id: 1, 0)
    with pytest.raises(ConfigError, match=r"stragglers is a deadline of rounds; leave it out, or set max_staleness"):
        Asynchronous(2, 1, stragglers=Stragglers(deadline=1.0)).setup(4, lambda client_id: 1, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("client,seconds\n0,1\n2,1\n", r"has no row for client 1, one of 3; add it"),
        ("client,seconds\n1,1\n2,1\n", r"has no row for client 0, one of 3; add it"),
        ("client,seconds\n0,1\n0,2\n", r"line 3 is a second row of client 0"),
        ("client,seconds\n0,0\n", r"line 2: the seconds of client 0 and its rates must be above 0"),
        ("client,seconds\n0,nan\n", r"line 2: the seconds of client 0"),
        ("client,seconds,up_bytes_per_s\n0,1,0\n", r"line 2: the seconds of client 0 and its rates"),
        ("client,seconds\n0,fast\n", r"line 2 has a value that is not a number"),
        ("client,seconds\n0\n", r"line 2: the seconds of client 0 and its rates must be above 0"),
        ("client,minutes\n0,1\n", r"column 'minutes' is missing or unknown"),
        ("client\n0\n", r"column 'seconds' is missing or unknown"),
        ("", r"has no row for client 0"),
        ("\xff\xfe", r"cannot be read|missing or unknown|no row"),
    ],
)
def test_traces_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        ready(3, 3, 2, speeds=Speeds(trace=str(path)))
