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
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, numpy_generator


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
    """

    def __init__(
        self,
        unseen_fraction: float = 0.0,
        dropout_before: float = 0.0,
        dropout_after: float = 0.0,
        stragglers: Stragglers | None = None,
    ) -> None:
        self.unseen_fraction = unseen_fraction
        self.dropout_before = dropout_before
        self.dropout_after = dropout_after
        self.stragglers = stragglers
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
        self._num_clients, self._num_samples, self._seed = num_clients, num_samples, seed
        self._seen = None
        if self.unseen_fraction > 0:
            num_unseen = max(1, round(self.unseen_fraction * num_clients))
            if num_unseen >= num_clients:
                raise ConfigError(
                    f"participation.unseen_fraction is {self.unseen_fraction}, which leaves none of the {num_clients} "
                    "clients to train on; lower it"
                )
            order = numpy_generator(seed, "unseen").permutation(num_clients)
            self._seen = np.sort(order[num_unseen:]).astype(np.int64)

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

    def select(self, round_idx: int) -> list[int]:
        """The cohort of a round, without repetition, in an order that is fixed but has no meaning."""
        self._require_setup()
        positions = self._draw(round_idx)
        chosen: list[int] = (positions if self._seen is None else self._seen[positions]).tolist()
        return chosen

    def probability(self, client_id: int) -> float | None:
        """The probability with which a client takes part in a round; None where it is not known."""
        return None

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
        if self.stragglers is not None:
            seconds = self.stragglers.duration(self._seed, client_id, self._num_samples(client_id))
            if seconds > self.stragglers.deadline:
                return Fate.LATE if self.stragglers.late == "next_round" else Fate.LOST_AFTER
        return Fate.ON_TIME


class FullParticipation(Participation):
    """Every seen client takes part in every round, in ascending order."""

    @property
    def nominal_cohort_size(self) -> int:
        """How many clients a round has: all the seen ones."""
        return self.num_seen

    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        return np.arange(self.num_seen, dtype=np.int64)


class SampledParticipation(Participation):
    """A cohort of a given size: what the samplers below have in common.

    Args:
        count: Clients per round.
        fraction: Clients per round as a fraction of the seen clients: ``max(1, round(fraction * num_seen))``, halves
            rounded to even. Exactly one of `count` and `fraction` is given.
        kwargs: The settings of `Participation`.
    """

    def __init__(self, count: int | None = None, fraction: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count
        self.fraction = fraction

    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        """As `Participation.setup`; also checks the cohort size."""
        super().setup(num_clients, num_samples, seed)
        if (self.count is None) == (self.fraction is None):
            raise ConfigError(
                f"participation: count is {self.count} and fraction is {self.fraction}; give exactly one of the two"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"participation.fraction is {self.fraction}; give more than 0 and at most 1")
        if self.count is not None and not 1 <= self.count <= self.num_seen:
            raise ConfigError(
                f"participation.count is {self.count}, but there are {self.num_seen} clients to choose from"
                f"{'' if self._seen is None else ' (the others are unseen)'}; give 1 to {self.num_seen}"
            )

    @property
    def nominal_cohort_size(self) -> int:
        """How many clients a round asks for: `count`, or ``max(1, round(fraction * num_seen))``."""
        if self.count is not None:
            return self.count
        return max(1, round((self.fraction or 0.0) * self.num_seen))

    def _generator(self, round_idx: int) -> np.random.Generator:
        return numpy_generator(self._seed, "cohort", round_idx)


class UniformParticipation(SampledParticipation):
    """Each round draws a cohort uniformly, without replacement.

    A round costs of the order of the cohort, whatever the size of the population. The settings are those of
    `SampledParticipation`.
    """

    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        # shuffle=False: with it NumPy uses Floyd's algorithm (O(cohort)) for small cohorts; the order has no meaning.
        return self._generator(round_idx).choice(self.num_seen, self.nominal_cohort_size, replace=False, shuffle=False)


class WeightedParticipation(SampledParticipation):
    """Each round draws a cohort without replacement, larger clients with a higher probability.

    Clients are drawn one after another, each with a probability proportional to its number of training samples among
    those not yet drawn. Clients without samples are never drawn. A round costs of the order of the population. The
    settings are those of `SampledParticipation`.

    Note:
        The chance of being *in* the cohort is proportional to the size for a cohort of one, and flatter for larger
        ones; averaging the updates weighted by size again counts size twice.
    """

    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        """As `Participation.setup`; also asks for every seen client's number of samples."""
        super().setup(num_clients, num_samples, seed)
        sizes = np.array([num_samples(client_id) for client_id in self.seen_clients.tolist()], dtype=np.float64)
        num_drawable = int(np.count_nonzero(sizes))
        if num_drawable < self.nominal_cohort_size:
            raise ConfigError(
                f"participation: a cohort of {self.nominal_cohort_size} is asked for, but only {num_drawable} clients "
                "have training samples; lower count or fraction"
            )
        self._probabilities = sizes / sizes.sum()

    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        return self._generator(round_idx).choice(
            self.num_seen, self.nominal_cohort_size, replace=False, p=self._probabilities
        )


class AvailabilityParticipation(SampledParticipation):
    """Each round draws a cohort uniformly from the clients that happen to be available.

    Client c is available in round t with probability p_c, independently of all else; if fewer are available than asked
    for, all of them take part, and a round may be empty. A round costs of the order of the population.

    With a `period` T, availability follows a daily rhythm with a phase φ_c of the client's own, drawn by the seed:
    ``p_c(t) = p_c + min(p_c, 1 − p_c) · cos(2π(t/T + φ_c))``, the widest swing that stays a probability; its mean over
    a period is p_c.

    Args:
        count: Clients per round.
        fraction: Clients per round as a fraction of the seen clients: ``max(1, round(fraction * num_seen))``, halves
            rounded to even. Exactly one of `count` and `fraction` is given.
        availability: The probability of being available: one number for all clients, or a list with one per client of
            the whole population.
        availability_beta: Instead of `availability`, the two shape parameters of the Beta distribution from which the
            seed draws each client's probability.
        period: Rounds in a day, at least 2; without it there is no rhythm.
        kwargs: The settings of `Participation`.

    Note:
        The form of the rhythm is ours, not a paper's.
    """

    def __init__(
        self,
        count: int | None = None,
        fraction: float | None = None,
        availability: float | list[float] | None = None,
        availability_beta: tuple[float, float] | None = None,
        period: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(count=count, fraction=fraction, **kwargs)
        self.availability = availability
        self.availability_beta = availability_beta
        self.period = period

    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        """As `Participation.setup`; also draws what the seed decides about each client's availability."""
        super().setup(num_clients, num_samples, seed)
        if self.period is not None and self.period < 2:
            raise ConfigError(f"participation.period is {self.period}; give at least 2 rounds, or leave it out")
        # Only the seen clients' probabilities are kept, (num_seen,), or (1,) where all are alike.
        self._probabilities = self._seen_only(self._base_probabilities(num_clients, seed))
        if self.period is not None:
            self._phases = self._seen_only(numpy_generator(seed, "availability_phase").random(num_clients))

    def _seen_only(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values if self._seen is None or len(values) == 1 else values[self._seen]

    def _base_probabilities(self, num_clients: int, seed: int) -> NDArray[np.float64]:
        given, beta = self.availability, self.availability_beta
        if (given is None) == (beta is None):
            raise ConfigError(
                f"participation: {'neither' if beta is None else 'both'} of availability and availability_beta given; "
                "give exactly one of the two"
            )
        if beta is not None:
            if len(beta) != 2 or not all(shape > 0 and math.isfinite(shape) for shape in beta):
                raise ConfigError(f"participation.availability_beta is {beta}; give two numbers above 0")
            return numpy_generator(seed, "availability_beta").beta(beta[0], beta[1], size=num_clients)
        values = np.atleast_1d(np.asarray(given, dtype=np.float64))
        if isinstance(given, (list, tuple)) and len(values) != num_clients:
            raise ConfigError(
                f"participation.availability lists {len(values)} clients, but the data has {num_clients}; give one "
                "probability per client, or a single number for all"
            )
        for client_id, value in enumerate(values.tolist()):
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"participation.availability is {value}{f' for client {client_id}' if len(values) > 1 else ''}; "
                    "give probabilities from 0 to 1"
                )
        return values

    def probabilities(self, round_idx: int) -> NDArray[np.float64]:
        """Each seen client's probability of being available in a round, (num_seen,) or (1,) where all are alike."""
        base = self._probabilities
        if self.period is None:
            return base
        # The remainder keeps the angle exact after many rounds.
        angle = 2 * np.pi * (round_idx % self.period / self.period + self._phases)
        swung: NDArray[np.float64] = base + np.minimum(base, 1 - base) * np.cos(angle)
        return swung

    def available(self, round_idx: int) -> NDArray[np.int64]:
        """The seen clients that are available in a round, ascending."""
        positions = self._available_positions(round_idx)
        return positions if self._seen is None else self._seen[positions]

    def _available_positions(self, round_idx: int) -> NDArray[np.int64]:
        draws = numpy_generator(self._seed, "available", round_idx).random(self.num_seen)
        return np.flatnonzero(draws < self.probabilities(round_idx)).astype(np.int64)

    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        available = self._available_positions(round_idx)
        if len(available) <= self.nominal_cohort_size:
            return available
        return self._generator(round_idx).choice(available, self.nominal_cohort_size, replace=False, shuffle=False)


def _uniform(seed: int, *keys: int | str) -> float:
    """One number strictly between 0 and 1; a hash alone, as a generator per client would cost ten times as much."""
    return ((derive_seed(seed, *keys) >> 11) + 0.5) / 2**52
