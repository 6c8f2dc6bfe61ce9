"""Which clients take part in a round, and what becomes of their work.

Everything here is a pure function of (seed, round, client): nothing is remembered between rounds, so a resumed run and
every process of a parallel run see the same cohorts and the same fates without exchanging a word.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, numpy_generator

ProbabilityIs = Literal["exact", "estimated", "unknown"]
"""How far the probabilities with which clients take part can be relied on."""


class Fate(Enum):
    """What becomes of a selected client's work."""

    ON_TIME = "on_time"
    """The update arrives in the round it was computed for."""
    LATE = "late"
    """The client trains, but finishes after the deadline: its update arrives in the next round."""
    LOST_BEFORE = "lost_before"
    """The client drops out before its local work: it costs a download and nothing else."""
    LOST_AFTER = "lost_after"
    """The client trains, but its update never arrives: it dropped out, or was late where late updates are lost."""


@dataclass(frozen=True)
class Participant:
    """One selected client of a round.

    Args:
        client_id: The client, counted from 0.
        fate: What becomes of its work.
    """

    client_id: int
    fate: Fate


@dataclass(frozen=True)
class Stragglers:
    """Simulated compute speeds and a deadline.

    A client's local work takes ``num_samples * seconds_per_sample / speed`` simulated seconds. Speeds are log-normal
    with median 1: ``speed = exp(speed_sigma * z)``, z standard normal, drawn once per client from the seed. No real
    time passes and nothing is measured.

    Args:
        deadline: Simulated seconds after which an update is late; finishing exactly on the deadline is in time.
        speed_sigma: Standard deviation of the log-speed (no unit). 0 makes all clients equally fast; with the default
            of 0.5 one client in twenty is slower than 0.44 times the median.
        late: ``"lost"`` throws late updates away; ``"next_round"`` lets them arrive one round later.
        seconds_per_sample: Simulated seconds that a client of speed 1 spends on each of its training samples in one
            round, all its local epochs together.
    """

    deadline: float
    speed_sigma: float = 0.5
    late: Literal["lost", "next_round"] = "lost"
    seconds_per_sample: float = 0.01

    def validate(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: If a setting cannot work.
        """
        for name in ("deadline", "seconds_per_sample"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"participation.stragglers.{name} is {value}; give a number of seconds above 0")
        if not (self.speed_sigma >= 0 and math.isfinite(self.speed_sigma)):
            raise ConfigError(f"participation.stragglers.speed_sigma is {self.speed_sigma}; give 0 or more")
        if self.late not in ("lost", "next_round"):
            raise ConfigError(f"participation.stragglers.late is {self.late!r}; choose 'lost' or 'next_round'")

    def speed(self, seed: int, client_id: int) -> float:
        """A client's speed relative to the median client (no unit), the same in every round."""
        return math.exp(self.speed_sigma * NormalDist().inv_cdf(_uniform(seed, "speed", client_id)))

    def duration(self, seed: int, client_id: int, num_samples: int) -> float:
        """Simulated seconds that a client's local work takes."""
        return num_samples * self.seconds_per_sample / self.speed(seed, client_id)


class Participation(ABC):
    """Decides for every round who is selected and whose update arrives.

    Each selected client first may drop out before its work, then after it, and then may be late; the first that
    happens is its fate. A client that is late may be selected again in the round in which its old update arrives: that
    round then receives two updates of it.

    Args:
        unseen_fraction: This fraction of all clients, ``max(1, round(fraction * num_clients))`` of them where it is
            not 0, is chosen once by the seed and never selected: the clients on which generalisation to newcomers is
            measured.
        dropout_before: Probability, per selected client and round, of dropping out before the local work.
        dropout_after: Probability of dropping out after the local work, for those that began it.
        stragglers: Simulated speeds and a deadline; without it nobody is late.
        every: Only clients 0, `every`, 2 · `every`, … are ever selected, the others are unseen: where clients take k
            kinds of network in turn, k leaves those of the first kind.
    """

    def __init__(
        self,
        unseen_fraction: float = 0.0,
        dropout_before: float = 0.0,
        dropout_after: float = 0.0,
        stragglers: Stragglers | None = None,
        every: int = 1,
    ) -> None:
        self.unseen_fraction = unseen_fraction
        self.dropout_before = dropout_before
        self.dropout_after = dropout_after
        self.stragglers = stragglers
        self.every = every
        self._num_clients: int | None = None
        # None stands for "everybody", so that a large population without unseen clients costs no memory.
        self._seen: NDArray[np.int64] | None = None

    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        """Learn the population and check the settings against it.

        Args:
            num_clients: Size of the whole population, unseen clients included.
            num_samples: Gives a client's number of training samples.
            seed: The run's seed.

        Raises:
            ConfigError: If the settings cannot work with this population.
        """
        if num_clients < 1:
            raise ConfigError(f"participation: the data has {num_clients} clients; a round needs at least 1")
        if not 0 <= self.unseen_fraction < 1:
            raise ConfigError(f"participation.unseen_fraction is {self.unseen_fraction}; give at least 0 and below 1")
        for name in ("dropout_before", "dropout_after"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"participation.{name} is {value}; give a probability from 0 to 1")
        if self.stragglers is not None:
            self.stragglers.validate()
        if self.every < 1:
            raise ConfigError(f"participation.every is {self.every}; give at least 1")
        self._num_clients, self._num_samples, self._seed = num_clients, num_samples, seed
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

    def reseed(self, seed: int) -> None:
        """Draw cohorts and fates from another seed; who is never selected stays as it was set up."""
        self._require_setup()
        self._seed = seed

    @property
    def num_clients(self) -> int:
        """Size of the whole population, unseen clients included."""
        return self._require_setup()

    @property
    def num_seen(self) -> int:
        """How many clients can be selected."""
        return self.num_clients if self._seen is None else len(self._seen)

    @property
    def seen_clients(self) -> NDArray[np.int64]:
        """The clients that can be selected, ascending, (num_seen,); made on each access, of order num_clients."""
        everyone = np.arange(self.num_clients, dtype=np.int64)
        return everyone if self._seen is None else self._seen.copy()

    @property
    def unseen_clients(self) -> NDArray[np.int64]:
        """The clients that are never selected, ascending, (num_clients − num_seen,)."""
        if self.num_seen == self.num_clients:
            return np.empty(0, dtype=np.int64)
        return np.setdiff1d(np.arange(self.num_clients, dtype=np.int64), self.seen_clients, assume_unique=True)

    @property
    @abstractmethod
    def nominal_cohort_size(self) -> int:
        """How many clients a round asks for; a round may have fewer only where clients can be unavailable."""

    @abstractmethod
    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        """The positions, among the seen clients, of a round's cohort: a pure function of (seed, round_idx)."""

    @property
    def probability_is(self) -> ProbabilityIs:
        """How far `probability` can be relied on; ``unknown`` for a sampler that does not say."""
        return "unknown"

    def _selected(self, position: int) -> float | None:
        """The probability with which a seen client is in a round's cohort, None where it is not known.

        Args:
            position: The client's, among the seen ones.
        """
        return None

    def probability(self, client_id: int) -> float | None:
        """The probability with which a client is selected in a round and its update is not lost, the same every round.

        Updates that arrive a round later count. Divided by it, what arrives is in the mean what everybody would have
        sent. What needs more than a look-up is worked out at the first call.

        Args:
            client_id: Any client of the population.

        Returns:
            Exactly 0 for unseen clients and for those that are always too late; None where there is no single value,
            or nobody knows it (`probability_is`).
        """
        self._require_setup()
        position = client_id if self._seen is None else int(np.searchsorted(self._seen, client_id))
        if self._seen is not None and (position == len(self._seen) or self._seen[position] != client_id):
            return 0.0
        arrives = (1 - self.dropout_before) * (1 - self.dropout_after)
        if self.stragglers is not None and self.stragglers.late == "lost" and self._is_late(client_id):
            arrives = 0.0
        if arrives == 0:
            return 0.0
        selected = self._selected(position)
        return None if selected is None else selected * arrives

    def select(self, round_idx: int) -> list[int]:
        """The cohort of a round, without repetition, in an order that is fixed but has no meaning."""
        self._require_setup()
        positions = self._draw(round_idx)
        chosen: list[int] = (positions if self._seen is None else self._seen[positions]).tolist()
        return chosen

    def plan(self, round_idx: int) -> list[Participant]:
        """The cohort of a round with everybody's fate, in the order of `select`."""
        return [Participant(client_id, self._fate(round_idx, client_id)) for client_id in self.select(round_idx)]

    def late(self, round_idx: int) -> list[int]:
        """The clients whose update from the round before arrives in this round.

        Updates that are late in the last round of a run never arrive.
        """
        if round_idx < 1 or self.stragglers is None or self.stragglers.late == "lost":
            return []
        return [one.client_id for one in self.plan(round_idx - 1) if one.fate is Fate.LATE]

    def _require_setup(self) -> int:
        if self._num_clients is None:
            raise RuntimeError("participation was used before setup(); call setup(num_clients, num_samples, seed)")
        return self._num_clients

    def _fate(self, round_idx: int, client_id: int) -> Fate:
        def happens(probability: float, what: str) -> bool:
            return probability > 0 and _uniform(self._seed, what, round_idx, client_id) < probability

        if happens(self.dropout_before, "dropout_before"):
            return Fate.LOST_BEFORE
        if happens(self.dropout_after, "dropout_after"):
            return Fate.LOST_AFTER
        if self.stragglers is not None and self._is_late(client_id):
            return Fate.LATE if self.stragglers.late == "next_round" else Fate.LOST_AFTER
        return Fate.ON_TIME

    def _is_late(self, client_id: int) -> bool:
        assert self.stragglers is not None
        seconds = self.stragglers.duration(self._seed, client_id, self._num_samples(client_id))
        return seconds > self.stragglers.deadline


def _uniform(seed: int, *keys: int | str) -> float:
    """One number strictly between 0 and 1; a hash alone, as a generator per client would cost ten times as much."""
    return ((derive_seed(seed, *keys) >> 11) + 0.5) / 2**52
