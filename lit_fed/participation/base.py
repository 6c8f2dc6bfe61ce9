"""A round's cohort of clients, and the fate of their work.

All are pure functions of (seed, round, client): a resumed run and every process of a parallel run see the same cohorts
and the same fates without communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.arguments import Checked, checked_class
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.participation.speeds import Speeds, log_normal, uniform
from lit_fed.seeding import numpy_generator

CLOCK = "clock/virtual_s"
"""The metric of virtual time, in seconds."""

ProbabilityIs = Literal["exact", "estimated", "unknown"]
"""Accuracy of the probabilities of taking part."""


class Fate(Enum):
    """The fate of a selected client's work."""

    ON_TIME = "on_time"
    """The update arrives in its round."""
    LATE = "late"
    """The client finishes after the deadline, and its update arrives in the next round."""
    LOST_BEFORE = "lost_before"
    """The client drops out before its local work, at the cost of a download."""
    LOST_AFTER = "lost_after"
    """The client trains, but its update is lost: it drops out, or is late and late updates are lost."""


@dataclass(frozen=True)
class Participant:
    """One selected client of a round.

    Args:
        client_id: The client, counted from 0.
        fate: The fate of its work.
        version: The round whose broadcast the client starts from; None for its own round's.
        began: Virtual time of its download, in seconds; only in an `lit_fed.participation.Asynchronous` federation.
        ended: Virtual time at which its update arrives, or at which the server gives it up.
    """

    client_id: int
    fate: Fate
    version: int | None = None
    began: float = 0.0
    ended: float = 0.0


@checked_class
@dataclass(frozen=True)
class Stragglers:
    """Simulated compute speeds and a deadline.

    A client's local work takes ``num_samples * seconds_per_sample / speed`` simulated seconds. Speeds are log-normal
    with median 1: ``speed = exp(speed_sigma * z)``, z standard normal, drawn once per client from the seed. No real
    time passes.

    Args:
        deadline: Simulated seconds after which an update is late; exactly on the deadline is in time.
        speed_sigma: Standard deviation of the log-speed (no unit); 0 for equal speeds. With the default of 0.5 one
            client in twenty is slower than 0.44 times the median.
        late: ``"lost"`` drops late updates; ``"next_round"`` delays them by one round.
        seconds_per_sample: Simulated seconds per training sample of a client of speed 1 in one round, all local epochs
            together.
    """

    deadline: float
    speed_sigma: float = 0.5
    late: Literal["lost", "next_round"] = "lost"
    seconds_per_sample: float = 0.01

    def validate(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: A setting is out of range.
        """
        key = "participation.stragglers"
        check_range(f"{key}.deadline", self.deadline, above=0, why=" seconds")
        check_range(f"{key}.seconds_per_sample", self.seconds_per_sample, above=0)
        check_range(f"{key}.speed_sigma", self.speed_sigma, least=0)

    def speed(self, seed: int, client_id: int) -> float:
        """A client's speed relative to the median client (no unit), the same in every round."""
        return log_normal(self.speed_sigma, seed, client_id)

    def duration(self, seed: int, client_id: int, num_samples: int) -> float:
        """Simulated seconds that a client's local work takes."""
        return num_samples * self.seconds_per_sample / self.speed(seed, client_id)


class Participation(Checked, ABC):
    """Selects the clients of every round and decides whose update arrives.

    A selected client may drop out before its work, or else after it, or else be late. A late client may be selected
    again in the round in which its old update arrives, which then receives two updates of it.

    Args:
        unseen_fraction: Fraction of all clients, ``max(1, round(fraction * num_clients))`` if not 0, that the seed
            chooses once and that are never selected, to measure generalisation to new clients.
        dropout_before: Probability, per selected client and round, of dropping out before the local work.
        dropout_after: Probability of dropping out after the local work, for clients that began it.
        stragglers: A deadline, and speeds unless `speeds` gives them; null for no late clients.
        every: Only clients 0, `every`, 2 · `every`, … are selected, and the others are unseen: with k kinds of network
            in turn, k selects the first kind.
        speeds: Durations of the clients' work; null for those of `stragglers`, and without these for no clock.
        absent: Clients that drop out before their work in every round, are not tested, and hold no sample: names, or
            numbers if clients have no names. The draws of cohorts stay as they are.
        absent_positions: Absent clients by position, counted from 0.
    """

    def __init__(
        self,
        unseen_fraction: float = 0.0,
        dropout_before: float = 0.0,
        dropout_after: float = 0.0,
        stragglers: Stragglers | None = None,
        every: int = 1,
        speeds: Speeds | None = None,
        absent: Sequence[str | int] | None = None,
        absent_positions: Sequence[int] | None = None,
    ) -> None:
        self.unseen_fraction = unseen_fraction
        self.dropout_before = dropout_before
        self.dropout_after = dropout_after
        self.stragglers = stragglers
        self.every = every
        self.speeds = speeds
        self.absent, self.absent_positions = absent, absent_positions
        self.absent_clients: frozenset[int] = frozenset()
        self.payload_bytes: Callable[[int], tuple[int, int]] = lambda client_id: (0, 0)
        self._num_clients: int | None = None
        # None for all clients, at no cost in memory.
        self._seen: NDArray[np.int64] | None = None
        self._left_out: dict[int, frozenset[int]] = {-1: frozenset()}

    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        """Set the population, unseen clients included, and check the settings against it.

        Raises:
            ConfigError: The settings do not fit the population.
        """
        check_range("participation: the number of clients", num_clients, least=1)
        check_range("participation.unseen_fraction", self.unseen_fraction, least=0, below=1)
        check_range("participation.dropout_before", self.dropout_before, least=0, most=1)
        check_range("participation.dropout_after", self.dropout_after, least=0, most=1)
        if self.stragglers is not None:
            self.stragglers.validate()
        if self.speeds is not None:
            self.speeds.setup(num_clients)
            if self.stragglers is not None and self.stragglers != Stragglers(
                self.stragglers.deadline, late=self.stragglers.late
            ):
                raise ConfigError(
                    "participation has speeds beside stragglers.seconds_per_sample or speed_sigma; leave these out"
                )
        check_range("participation.every", self.every, least=1)
        self._num_clients, self._num_samples, self._seed = num_clients, num_samples, seed
        self.absent_clients = frozenset()
        self._seen = None if self.every == 1 else np.arange(0, num_clients, self.every, dtype=np.int64)
        if self.unseen_fraction > 0:
            num_unseen = max(1, round(self.unseen_fraction * num_clients))
            if num_unseen >= num_clients:
                raise ConfigError(
                    f"participation.unseen_fraction is {self.unseen_fraction}, which leaves none of the {num_clients} "
                    "clients to train on; lower it"
                )
            order = numpy_generator(seed, "unseen").permutation(num_clients)
            seen = np.sort(order[num_unseen:]).astype(np.int64)
            self._seen = seen[seen % self.every == 0]
            if not len(self._seen):
                raise ConfigError(
                    f"participation.unseen_fraction {self.unseen_fraction} and every {self.every} leave none of the "
                    f"{num_clients} clients to train on; lower one"
                )

    def lose(self, clients: Collection[int]) -> None:
        """Lose the work of the clients that `absent` names in every round; called once after `setup`.

        Raises:
            ConfigError: None is left to train on.
        """
        self.absent_clients = frozenset(clients)
        if not len(self.seen_clients):
            raise ConfigError("participation.absent leaves no client to train on; name fewer")

    def reseed(self, seed: int) -> None:
        """Draw cohorts and fates from another seed; the unseen clients stay the same."""
        self._require_setup()
        self._seed = seed

    @property
    def num_clients(self) -> int:
        """Size of the whole population, unseen clients included."""
        return self._require_setup()

    @property
    def num_seen(self) -> int:
        """Number of clients that can be selected."""
        return self.num_clients if self._seen is None else len(self._seen)

    @property
    def seen_clients(self) -> NDArray[np.int64]:
        """The clients that can be selected and are not absent, ascending; made on each access, of order num_clients."""
        selected = np.arange(self.num_clients, dtype=np.int64) if self._seen is None else self._seen
        return np.setdiff1d(selected, list(self.absent_clients), assume_unique=True).astype(np.int64)

    @property
    def unseen_clients(self) -> NDArray[np.int64]:
        """The clients that are never selected and not absent, ascending."""
        if self._seen is None:
            return np.empty(0, dtype=np.int64)
        others = [*self._seen.tolist(), *self.absent_clients]
        return np.setdiff1d(np.arange(self.num_clients, dtype=np.int64), others).astype(np.int64)

    @property
    @abstractmethod
    def nominal_cohort_size(self) -> int:
        """Clients per round; a round has fewer only if too few are available."""

    @abstractmethod
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        """Return the positions of a round's cohort among the seen clients, (cohort,), each from 0 to `num_seen` − 1.

        A pure function of (seed, round_idx): a random cohort is drawn from `generator`.
        """

    def generator(self, round_idx: int) -> np.random.Generator:
        """Return a random generator for `draw`, which depends on the run's seed and the round only."""
        return numpy_generator(self._seed, "cohort", round_idx)

    one_model = True
    """Whether all clients of a round start from one model."""

    by_data = False
    """Whether a client's data decide who else is selected; then no privacy can be accounted."""

    @property
    def label(self) -> str:
        """The class by the name that its user wrote."""
        return type(self).__name__

    @property
    def probability_is(self) -> ProbabilityIs:
        """Accuracy of `probability`."""
        return "unknown"

    def chance(self, position: int) -> float | None:
        """Return a client's probability of being drawn, by its position among the seen clients; None if unknown."""
        return None

    def probability(self, client_id: int) -> float | None:
        """The probability that a client is selected and its update arrives, maybe a round late; equal in all rounds.

        Updates divided by it have the mean of all clients' updates. The first call may estimate it.

        Returns:
            Exactly 0 for unseen, absent and always late clients; None if it is unknown or varies (`probability_is`).
        """
        self._require_setup()
        position = client_id if self._seen is None else int(np.searchsorted(self._seen, client_id))
        if self._seen is not None and (position == len(self._seen) or self._seen[position] != client_id):
            return 0.0
        arrives = (1 - self.dropout_before) * (1 - self.dropout_after) * (client_id not in self.absent_clients)
        if self.stragglers is not None and self.stragglers.late == "lost" and self._is_late(client_id):
            arrives = 0.0
        if arrives == 0:
            return 0.0
        drawn = self.chance(position)
        return None if drawn is None else drawn * arrives

    def leave_out(self, clients: Collection[int], round_idx: int) -> None:
        """Select some clients, and none but these, no more from a round on: their privacy budgets are spent."""
        self._left_out = {first: out for first, out in self._left_out.items() if first < round_idx}
        self._left_out[round_idx] = frozenset(clients)

    def left_out(self, round_idx: int) -> frozenset[int]:
        """The clients that a round leaves out."""
        return self._left_out[max((first for first in self._left_out if first <= round_idx), default=-1)]

    def select(self, round_idx: int) -> list[int]:
        """The cohort of a round, in a fixed but arbitrary order."""
        self._require_setup()
        positions = self.draw(round_idx)
        chosen: list[int] = (positions if self._seen is None else self._seen[positions]).tolist()
        out = self.left_out(round_idx)
        return [one for one in chosen if one not in out] if out else chosen

    def plan(self, round_idx: int) -> list[Participant]:
        """The cohort of a round with each client's fate, in the order of `select`."""
        return [Participant(client_id, self._fate(round_idx, client_id)) for client_id in self.select(round_idx)]

    def in_flight(self, round_idx: int) -> Mapping[int, Mapping[int, float]]:
        """The clients at work when the server takes a round's step, with the virtual time of their end.

        They are listed by the round whose broadcast they started from.
        """
        found: dict[int, dict[int, float]] = {}
        for one in self.at_work(round_idx):
            found.setdefault(one.version or 0, {})[one.client_id] = one.ended
        return found

    def at_work(self, round_idx: int) -> list[Participant]:
        """The clients of `in_flight`, by the time of their end."""
        return []

    def duration(self, client_id: int) -> float:
        """Virtual seconds of a client's work; 0 without `speeds` and `stragglers`."""
        if self.speeds is None and self.stragglers is None:
            return 0.0
        num_samples = self._num_samples(client_id)
        if self.speeds is not None:
            return self.speeds.duration(self._seed, client_id, num_samples, *self.payload_bytes(client_id))
        assert self.stragglers is not None
        return self.stragglers.duration(self._seed, client_id, num_samples)

    def clock(self, round_idx: int, before: float) -> float | None:
        """Virtual time at which a round ends, in seconds; None if durations are unknown.

        A round lasts as long as its slowest client would, dropouts included, but not beyond the stragglers' deadline.

        Args:
            round_idx: The round.
            before: The end of the round before it.
        """
        if self.speeds is None and self.stragglers is None:
            return None
        longest = max(map(self.duration, self.select(round_idx)), default=0.0)
        return before + (longest if self.stragglers is None else min(longest, self.stragglers.deadline))

    def metrics(self, round_idx: int, before: float) -> dict[str, float]:
        """Metrics of a round's plan, such as ``clock/virtual_s``; the arguments are `clock`'s."""
        end = self.clock(round_idx, before)
        return {} if end is None else {CLOCK: end}

    def late(self, round_idx: int) -> list[int]:
        """The clients whose late update of the previous round arrives in this one; after the last round none does."""
        if round_idx < 1 or self.stragglers is None or self.stragglers.late == "lost":
            return []
        return [participant.client_id for participant in self.plan(round_idx - 1) if participant.fate is Fate.LATE]

    def _require_setup(self) -> int:
        if self._num_clients is None:
            raise RuntimeError("participation was used before setup(); call setup(num_clients, num_samples, seed)")
        return self._num_clients

    def _fate(self, round_idx: int, client_id: int) -> Fate:
        def happens(probability: float, what: str) -> bool:
            return probability > 0 and uniform(self._seed, what, round_idx, client_id) < probability

        if client_id in self.absent_clients or happens(self.dropout_before, "dropout_before"):
            return Fate.LOST_BEFORE
        if happens(self.dropout_after, "dropout_after"):
            return Fate.LOST_AFTER
        if self.stragglers is not None and self._is_late(client_id):
            return Fate.LATE if self.stragglers.late == "next_round" else Fate.LOST_AFTER
        return Fate.ON_TIME

    def _is_late(self, client_id: int) -> bool:
        assert self.stragglers is not None
        return self.duration(client_id) > self.stragglers.deadline
