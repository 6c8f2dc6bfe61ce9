"""An asynchronous federation as a schedule: arrival times do not depend on what is learnt.

The queue of all events is a pure function of (seed, population, speeds). A server's step is a round, and the plan of a
round is the work that ends in it, each from the version of the model that it began with. Nothing here knows a model.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.participation.base import Fate, Participant, Participation
from lit_fed.participation.speeds import Speeds
from lit_fed.seeding import derive_seed


@dataclass(frozen=True)
class Step:
    """A step of the server.

    Args:
        plan: The clients whose work ended since the step before, ascending by version and client.
        time: Its virtual time, in seconds.
    """

    plan: list[Participant]
    time: float


Flight = tuple[float, int, int, Participant]
"""Work under way: its end, the number of its start, the client's position among the seen clients."""


class Asynchronous(Participation):
    r"""Clients at work all the time, each at its own speed; the server steps on every K-th arrival.

    M clients are in flight. A client that ends makes room for another one, drawn uniformly from those that may start,
    which downloads the server's present model: its *version*, the number of steps taken so far. A step takes the K
    updates that arrived since the step before it, and the *staleness* τ of an update is the number of steps since its
    download, this one not counted. Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: "Federated Learning with
    Buffered Asynchronous Aggregation", AISTATS 2022, for K > 1; Xie, Koyejo, Gupta: "Asynchronous Federated
    Optimization", 2019, for K = 1.

    An event costs O(log M) comparisons, whatever the population, and a later round the steps before it.

    Args:
        concurrency: M, clients in flight.
        buffer: K, updates of a step.
        speeds: Durations of the clients' work; by default one virtual second each.
        max_staleness: Updates with a larger τ are dropped, and counted as ``staleness/dropped``; null for no limit.
        replay: The ``order.csv`` of a federation on machines: its order, times and fates in place of the speeds'.
        kwargs: The settings of `lit_fed.participation.Participation`, without ``stragglers``.

    Note:
        Our readings. All arrivals of an instant, in the order in which they started, come before its starts, so that
        clients of equal speeds with M = K take part in rounds. A client starts at most once per version: one whose work
        has ended waits for the next step before it may start again, so that no step has two updates of a client. With
        a population of about M the server may therefore have fewer than M clients at work, and if all have ended it
        steps with what it has. A client that drops out keeps its place until its update would have arrived, as a
        server that waits for it notices.
    """

    one_model = False

    def __init__(
        self,
        concurrency: int,
        buffer: int = 10,
        speeds: Speeds | None = None,
        max_staleness: int | None = None,
        replay: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(speeds=speeds or Speeds(), **kwargs)
        self.concurrency = concurrency
        self.buffer = buffer
        self.max_staleness = max_staleness
        self.replay = replay

    @override
    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        super().setup(num_clients, num_samples, seed)
        if self.stragglers is not None:
            raise ConfigError("participation.stragglers is a deadline of rounds; leave it out, or set max_staleness")
        check_range(
            "participation.concurrency", self.concurrency, least=1, most=self.num_seen, why=", the number of clients"
        )
        check_range("participation.buffer", self.buffer, least=1, most=self.concurrency, why=", the concurrency")
        check_range("participation.max_staleness", self.max_staleness, least=0, null="for no limit")
        for name in ("dropout_before", "dropout_after"):
            why = ", or no step has an update"
            check_range(f"participation.{name}", getattr(self, name), least=0, below=1, why=why)
        if self.replay is not None:
            if self.dropout_before or self.dropout_after or self.absent or self.absent_positions:
                raise ConfigError("participation.replay has a recorded run's fates; leave dropout_… and absent… out")
            self._recorded = read_order(self.replay, set(self.seen_clients.tolist()))
        self._rewind()

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._rewind()

    @property
    @override
    def nominal_cohort_size(self) -> int:
        return self.buffer

    @override
    def plan(self, round_idx: int) -> list[Participant]:
        return self._step_at(round_idx).plan

    @override
    def at_work(self, round_idx: int) -> list[Participant]:
        self._step_at(round_idx)
        return [one for *_, one in sorted(self._flying)]

    @override
    def clock(self, round_idx: int, before: float) -> float:
        return self._step_at(round_idx).time

    @override
    def metrics(self, round_idx: int, before: float) -> dict[str, float]:
        """The clock, and the staleness of the updates that count and of those that are dropped."""
        stale = [(round_idx - (one.version or 0), one.fate) for one in self.plan(round_idx)]
        taken = [tau for tau, fate in stale if fate is Fate.ON_TIME]
        found = super().metrics(round_idx, before)
        if taken:
            found |= {"staleness/mean": sum(taken) / len(taken), "staleness/max": max(taken)}
        if (most := self.max_staleness) is not None:
            found["staleness/dropped"] = sum(tau > most and fate is Fate.LOST_AFTER for tau, fate in stale)
        return found

    @override
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        chosen = np.array([one.client_id for one in self.plan(round_idx)], dtype=np.int64)
        return chosen if self._seen is None else np.searchsorted(self._seen, chosen)

    def _rewind(self) -> None:
        self._steps, self._reached = self._queue() if self.replay is None else self._replayed(), -1

    def _step_at(self, round_idx: int) -> Step:
        """A step; an earlier one than the last asked for costs all steps before it."""
        self._require_setup()
        if round_idx < self._reached:
            self._rewind()
        while self._reached < round_idx:
            self._step, self._reached = next(self._steps), self._reached + 1
        return self._step

    def _queue(self, in_flight: Sequence[Participant] = (), started: int = 0, version: int = 0) -> Iterator[Step]:
        """The steps from a version on.

        Args:
            in_flight: The clients at work, in the order of their starts.
            started: Number of all starts so far.
            version: Steps taken so far.
        """
        flying = [(one.ended, number, self._place(one.client_id), one) for number, one in enumerate(in_flight)]
        self._flying = flying  # a heap by (time, number of the start)
        busy = sorted(place for _, _, place, _ in flying)  # seen clients in flight, or ended since the last step
        ended: list[Participant] = []
        places: list[int] = []  # their positions
        now, arrived = 0.0, 0
        while True:
            while len(flying) < self.concurrency and len(busy) < self.num_seen:
                place = _free(derive_seed(self._seed, "start", started) % (self.num_seen - len(busy)), busy)
                insort(busy, place)
                client_id = place if self._seen is None else int(self._seen[place])
                one = self._begin(client_id, version, now)
                heappush(flying, (one.ended, started, place, one))
                started += 1
            for place, one in self._arrive(flying):
                now = one.ended
                late = self.max_staleness is not None and version - (one.version or 0) > self.max_staleness
                if late and one.fate is Fate.ON_TIME:
                    one = replace(one, fate=Fate.LOST_AFTER)
                ended.append(one)
                places.append(place)
                arrived += one.fate is Fate.ON_TIME
                if arrived == self.buffer or (not flying and len(busy) == self.num_seen):
                    ended.sort(key=lambda one: (one.version, one.client_id))
                    yield Step(ended, now)
                    for place in places:
                        del busy[bisect_left(busy, place)]
                    ended, places, arrived, version = [], [], 0, version + 1

    def _begin(self, client_id: int, version: int, now: float) -> Participant:
        """Start a client's work."""
        due = now + self.duration(client_id)
        return Participant(client_id, self._fate(version, client_id), version, now, due)

    def _arrive(self, flying: list[Flight]) -> Iterator[tuple[int, Participant]]:
        """Take the next work that ends out of the heap, and all that ends at this instant, with positions."""
        now = flying[0][0]
        while flying and flying[0][0] == now:
            _, _, place, one = heappop(flying)
            yield place, one

    def _place(self, client_id: int) -> int:
        return client_id if self._seen is None else int(np.searchsorted(self._seen, client_id))

    def _replayed(self) -> Iterator[Step]:
        """The steps of a recorded run."""
        works = [one for plan in self._recorded for one in plan]
        self._flying = flying = list[Flight]()
        for step, plan in enumerate(self._recorded):
            ended = {(one.version, one.client_id) for one in plan}
            flying += [(one.ended, number, 0, one) for number, one in enumerate(works) if one.version == step]
            flying[:] = [flight for flight in flying if (flight[3].version, flight[3].client_id) not in ended]
            yield Step(plan, max(one.ended for one in plan))
        raise ConfigError(
            f"participation.replay {self.replay} has {len(self._recorded)} steps; lower trainer.max_rounds to it"
        )


def _free(rank: int, busy: list[int]) -> int:
    """The position of a rank among those that are not in an ascending list."""
    return rank + bisect_right(range(len(busy)), rank, key=lambda place: busy[place] - place)


# ---------------------------------------------------------------------- a recorded order
# The order in which a federation's work arrived: `order.csv` of a run on machines.


_KEY = "participation.replay"
COLUMNS = ("round", "client_id", "version", "fate", "began", "ended")
"""Of a row: the step, the client, the step of its download, the fate of its work, and its times in seconds."""


def cells_of(round_idx: int, one: Participant) -> list[str]:
    """The cells of a row."""
    return [str(round_idx), str(one.client_id), str(one.version), one.fate.value, repr(one.began), repr(one.ended)]


def read_order(path: str, clients: Collection[int]) -> list[list[Participant]]:
    """Read the work that arrived in each step, ascending by version and client.

    Args:
        path: The file.
        clients: The clients that may take part.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            header, *table = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{_KEY} {path} cannot be read: {error}") from error
    if header != list(COLUMNS):
        raise ConfigError(f"{_KEY} {path}: line 1 is not {','.join(COLUMNS)}; use the order.csv of a run")
    steps: list[list[Participant]] = []
    free: dict[int, int] = {}  # by client, the first version from which it may start again
    for number, row in enumerate(table, start=2):
        where = f"{_KEY} {path}, line {number}"
        try:
            round_idx, client_id, version = (int(cell) for cell in row[:3])
            fate, (began, ended) = Fate(row[3]), (float(cell) for cell in row[4:])
        except (ValueError, IndexError):
            raise ConfigError(f"{where} is not a row of an order; restore the file") from None
        if round_idx not in (len(steps) - 1, len(steps)) or round_idx < 0:
            raise ConfigError(f"{where} is of step {round_idx} after step {len(steps) - 1}; restore the missing rows")
        if client_id not in clients:
            raise ConfigError(f"{where} is of client {client_id}, which does not take part; use the run's own data")
        if not (free.get(client_id, 0) <= version <= round_idx and 0 <= began <= ended < math.inf):
            raise ConfigError(f"{where}: client {client_id} cannot have started so; restore the file")
        free[client_id] = round_idx + 1
        if round_idx == len(steps):
            steps.append([])
        steps[-1].append(Participant(client_id, fate, version, began, ended))
    if not steps:
        raise ConfigError(f"{_KEY} {path} has no steps; use the order.csv of a run")
    return [sorted(plan, key=lambda one: (one.version, one.client_id)) for plan in steps]
