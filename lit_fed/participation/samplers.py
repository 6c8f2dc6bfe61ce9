"""Samplers of a round's cohort, with each client's probability.

A probability without a cheap closed form is estimated on first use from `PROBABILITY_DRAWS` seeded draws that no round
uses, with memory of the order of the population, in seconds for 100,000 clients. A draw yields each client's
probability conditional on the others' draws, so small probabilities are as precise as large ones: the relative standard
error is at most 1/√`PROBABILITY_DRAWS`, 3 %, and falls with the square root of the cohort's size for similar clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.participation.base import Participation, ProbabilityIs
from lit_fed.seeding import numpy_generator

PROBABILITY_DRAWS = 1000
"""Draws per estimated probability."""


class PoissonParticipation(Participation):
    r"""Every seen client takes part with probability q, independently: what proofs of amplification by sampling assume.

    The cohort's size is binomial, with mean q · N and standard deviation :math:`\sqrt{q (1 - q) N}`; it may be 0. A
    round costs of the order of the cohort, whatever the size of the population.

    Args:
        fraction: q, above 0 and at most 1.
        kwargs: The settings of `Participation`.
    """

    def __init__(self, fraction: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fraction = fraction

    @override
    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        super().setup(num_clients, num_samples, seed)
        check_range("participation.fraction", self.fraction, above=0, most=1)

    @property
    @override
    def nominal_cohort_size(self) -> int:
        """The expected cohort, rounded, and at least 1."""
        return max(1, round(self.fraction * self.num_seen))

    probability_is: ProbabilityIs = "exact"
    """Exact: q, times the probability of no dropout or delay."""

    @override
    def chance(self, position: int) -> float:
        return self.fraction

    @override
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        generator = self.generator(round_idx)
        size = generator.binomial(self.num_seen, self.fraction)  # the number of clients that N draws would give
        return generator.choice(self.num_seen, size, replace=False, shuffle=False)


class FullParticipation(Participation):
    """Every seen client takes part in every round, in ascending order."""

    @property
    @override
    def nominal_cohort_size(self) -> int:
        return self.num_seen

    probability_is: ProbabilityIs = "exact"

    @override
    def chance(self, position: int) -> float:
        return 1.0

    @override
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        return np.arange(self.num_seen, dtype=np.int64)


class SampledParticipation(Participation):
    """A cohort of a given size.

    Args:
        count: Clients per round.
        fraction: Clients per round as a fraction of the seen clients, ``max(1, round(fraction * num_seen))``, halves
            rounded to even, instead of `count`.
        kwargs: The settings of `Participation`.
    """

    def __init__(self, count: int | None = None, fraction: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count
        self.fraction = fraction

    @override
    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        super().setup(num_clients, num_samples, seed)
        if (self.count is None) == (self.fraction is None):
            raise ConfigError(
                f"participation: count is {self.count} and fraction is {self.fraction}; give exactly one of the two"
            )
        check_range("participation.fraction", self.fraction, above=0, most=1, null="for count")
        seen = f", the number of {'' if self._seen is None else 'seen '}clients"
        check_range("participation.count", self.count, least=1, most=self.num_seen, why=seen, null="for fraction")

    @property
    @override
    def nominal_cohort_size(self) -> int:
        if self.count is not None:
            return self.count
        return max(1, round((self.fraction or 0.0) * self.num_seen))


class UniformParticipation(SampledParticipation):
    """Each round draws a cohort uniformly, without replacement, in time of the order of the cohort."""

    probability_is: ProbabilityIs = "exact"

    @override
    def chance(self, position: int) -> float:
        return self.nominal_cohort_size / self.num_seen

    @override
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        # With shuffle=False NumPy uses Floyd's algorithm (O(cohort)) for small cohorts.
        return self.generator(round_idx).choice(self.num_seen, self.nominal_cohort_size, replace=False, shuffle=False)


class WeightedParticipation(SampledParticipation):
    """Each round draws a cohort without replacement, larger clients with a higher probability.

    Clients are drawn one after another, each with a probability proportional to its number of training samples among
    those not yet drawn; clients without samples never. A round costs of the order of the population.

    Note:
        The chance of being *in* the cohort is proportional to the size for a cohort of one, and flatter for larger
        ones; averaging the updates weighted by size again counts size twice.
    """

    by_data = True

    @override
    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        super().setup(num_clients, num_samples, seed)
        sizes = np.array([num_samples(client_id) for client_id in self.seen_clients.tolist()], dtype=np.float64)
        num_drawable = int(np.count_nonzero(sizes))
        if num_drawable < self.nominal_cohort_size:
            raise ConfigError(
                f"participation: a cohort has {self.nominal_cohort_size} clients, and only {num_drawable} clients have "
                "training samples; lower count or fraction"
            )
        self._probabilities = sizes / sizes.sum()
        self._num_drawable = num_drawable
        self._inclusion: NDArray[np.float64] | None = None

    @property
    @override
    def probability_is(self) -> ProbabilityIs:
        """Exact for a cohort of one or of all clients with samples, and for clients of one size; else estimated."""
        return "exact" if self._exact_inclusion() is not None else "estimated"

    @override
    def chance(self, position: int) -> float:
        if self._inclusion is None:
            exact = self._exact_inclusion()
            self._inclusion = self._estimated_inclusion() if exact is None else exact
        return float(self._inclusion[position])

    def _exact_inclusion(self) -> NDArray[np.float64] | None:
        drawable, count = self._probabilities > 0, self.nominal_cohort_size
        if count == 1:
            return np.asarray(self._probabilities)
        if count == self._num_drawable or np.ptp(self._probabilities[drawable]) == 0:
            return np.where(drawable, count / self._num_drawable, 0.0)
        return None

    def _estimated_inclusion(self) -> NDArray[np.float64]:
        # Sequential drawing is a race: client i arrives after an exponential time of rate p_i, and the first n are the
        # cohort. Given the others' times, i is in it with probability 1 - exp(-p_i T), where T is the n-th of the
        # others' times: the (n+1)-th of all if i is among the first n.
        count, generator = self.nominal_cohort_size, numpy_generator(self._seed, "probability")
        rates = self._probabilities
        total = np.zeros(self.num_seen)
        for _ in range(PROBABILITY_DRAWS):
            with np.errstate(divide="ignore"):  # clients without samples never arrive
                times = generator.standard_exponential(self.num_seen) / rates
            last, after = np.partition(times, (count - 1, count))[count - 1 : count + 1]
            total -= np.expm1(-rates * np.where(times <= last, after, last))
        return total / PROBABILITY_DRAWS

    @override
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        return self.generator(round_idx).choice(
            self.num_seen, self.nominal_cohort_size, replace=False, p=self._probabilities
        )


class AvailabilityParticipation(SampledParticipation):
    """Each round draws a cohort uniformly from the available clients.

    Client c is available in round t with probability p_c, independently; if too few are available, all of them take
    part, and a round may be empty. A round costs of the order of the population.

    With a `period` T, availability follows a daily rhythm with a phase φ_c that the seed draws per client:
    ``p_c(t) = p_c + min(p_c, 1 − p_c) · cos(2π(t/T + φ_c))``, the widest swing that stays a probability; its mean over
    a period is p_c.

    Args:
        count: Clients per round.
        fraction: Clients per round as a fraction of the seen clients, instead of `count`; see `SampledParticipation`.
        availability: Probability of being available: one number for all clients, or a list with one per client of the
            whole population.
        availability_beta: Instead of `availability`, the two shape parameters of the Beta distribution from which the
            seed draws each client's probability.
        period: Rounds in a day, at least 2; null for no rhythm.
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

    @override
    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        super().setup(num_clients, num_samples, seed)
        check_range("participation.period", self.period, least=2, why=" rounds", null="for no rhythm")
        # The seen clients' probabilities, (num_seen,), or (1,) if all are equal.
        self._probabilities = self._seen_only(self._base_probabilities(num_clients, seed))
        if self.period is not None:
            self._phases = self._seen_only(numpy_generator(seed, "availability_phase").random(num_clients))
        self._places: NDArray[np.float64] | None = None

    @property
    @override
    def probability_is(self) -> ProbabilityIs:
        """Unknown with a `period`; exact if all clients are equally available, or all available ones take part."""
        if self.period is not None:
            return "unknown"
        alike = np.ptp(self._probabilities) == 0 or self.nominal_cohort_size == self.num_seen
        return "exact" if alike else "estimated"

    @override
    def chance(self, position: int) -> float | None:
        if self.period is not None:
            return None
        if self._places is None:
            self._places = self._place_probabilities()
        probabilities = self._probabilities
        return float(probabilities[position % len(probabilities)] * self._places[position % len(self._places)])

    def _place_probabilities(self) -> NDArray[np.float64]:
        """An available client's probability of a place, (num_seen,), or (1,) if all are equal."""
        count, probabilities = self.nominal_cohort_size, self._probabilities
        if count == self.num_seen:
            return np.ones(1)
        if np.ptp(probabilities) == 0:
            # The clients' places sum to the mean number of places given.
            given = _mean_of_smaller(count, self.num_seen, float(probabilities[0]))
            return np.array([given / (self.num_seen * probabilities[0]) if probabilities[0] else 1.0])
        # With A of the others available, an available client gets a place with probability min(1, n / (A + 1)).
        generator, total = numpy_generator(self._seed, "probability"), np.zeros(self.num_seen)
        for _ in range(PROBABILITY_DRAWS):
            available = generator.random(self.num_seen) < probabilities
            number = int(np.count_nonzero(available))
            total += np.where(available, min(1.0, count / max(number, 1)), min(1.0, count / (number + 1)))
        return total / PROBABILITY_DRAWS

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
                raise ConfigError(f"participation.availability_beta is {beta}; it must be two numbers above 0")
            return numpy_generator(seed, "availability_beta").beta(beta[0], beta[1], size=num_clients)
        values = np.atleast_1d(np.asarray(given, dtype=np.float64))
        if isinstance(given, (list, tuple)) and len(values) != num_clients:
            raise ConfigError(
                f"participation.availability lists {len(values)} clients, and the data have {num_clients}; give one "
                "probability per client, or a single number for all"
            )
        for client_id, value in enumerate(values.tolist()):
            whose = f" of client {client_id}" if len(values) > 1 else ""
            check_range(f"participation.availability{whose}", value, least=0, most=1)
        return values

    def probabilities(self, round_idx: int) -> NDArray[np.float64]:
        """Each seen client's probability of being available in a round, (num_seen,), or (1,) if all are equal."""
        base = self._probabilities
        if self.period is None:
            return base
        # The remainder keeps the angle exact in late rounds.
        angle = 2 * np.pi * (round_idx % self.period / self.period + self._phases)
        swung: NDArray[np.float64] = base + np.minimum(base, 1 - base) * np.cos(angle)
        return swung

    def available(self, round_idx: int) -> NDArray[np.int64]:
        """The available seen clients of a round, ascending."""
        positions = self._available_positions(round_idx)
        return positions if self._seen is None else self._seen[positions]

    def _available_positions(self, round_idx: int) -> NDArray[np.int64]:
        draws = numpy_generator(self._seed, "available", round_idx).random(self.num_seen)
        return np.flatnonzero(draws < self.probabilities(round_idx)).astype(np.int64)

    @override
    def draw(self, round_idx: int) -> NDArray[np.int64]:
        available = self._available_positions(round_idx)
        if len(available) <= self.nominal_cohort_size:
            return available
        return self.generator(round_idx).choice(available, self.nominal_cohort_size, replace=False, shuffle=False)


def _mean_of_smaller(count: int, number: int, probability: float) -> float:
    """The mean of min(`count`, X) with X binomial in `number` trials."""
    if probability in (0.0, 1.0):
        return min(count, number * probability)
    trials = np.arange(number)
    ratios = np.log((number - trials) / (trials + 1)) + math.log(probability / (1 - probability))
    log_masses = number * math.log1p(-probability) + np.concatenate([[0.0], np.cumsum(ratios)])
    return float(np.minimum(np.arange(number + 1), count) @ np.exp(log_masses))
