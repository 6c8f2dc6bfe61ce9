"""Who is in a round's cohort, and with which probability.

Where the probability of being in a cohort has no cheap closed form, it is estimated once, when it is first asked for,
from `PROBABILITY_DRAWS` draws of everybody's luck, which the seed fixes and which no round uses; this takes memory of
the order of the population, and seconds for 100,000 clients. A draw gives each client the probability that it has given
the luck of the others, so that small probabilities are as precise as large ones: the relative standard error is at most
1/√`PROBABILITY_DRAWS`, 3 %, and falls with the square root of the cohort's size where clients are much alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError
from lit_fed.participation.base import Participation, ProbabilityIs
from lit_fed.seeding import numpy_generator

PROBABILITY_DRAWS = 1000
"""How many draws an estimated probability is the mean of."""


class FullParticipation(Participation):
    """Every seen client takes part in every round, in ascending order."""

    @property
    def nominal_cohort_size(self) -> int:
        """How many clients a round has: all the seen ones."""
        return self.num_seen

    @property
    def probability_is(self) -> ProbabilityIs:
        """Exact: 1, times what dropouts and stragglers leave."""
        return "exact"

    def _selected(self, position: int) -> float:
        return 1.0

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

    @property
    def probability_is(self) -> ProbabilityIs:
        """Exact: the cohort's size over the number of seen clients, times what dropouts and stragglers leave."""
        return "exact"

    def _selected(self, position: int) -> float:
        return self.nominal_cohort_size / self.num_seen

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
        self._num_drawable = num_drawable
        self._inclusion: NDArray[np.float64] | None = None

    @property
    def probability_is(self) -> ProbabilityIs:
        """Exact for a cohort of one, of everybody with samples, and for clients of one size; else estimated."""
        return "exact" if self._exact_inclusion() is not None else "estimated"

    def _selected(self, position: int) -> float:
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
        # Drawing one after another is a race: client i arrives after an exponential time of rate p_i, and the cohort
        # are the first n. Given the others' times, i is among them with probability 1 - exp(-p_i T), where T is the
        # n-th of the others' times: the (n+1)-th of all where i itself is among the first n.
        count, generator = self.nominal_cohort_size, numpy_generator(self._seed, "probability")
        rates = self._probabilities
        total = np.zeros(self.num_seen)
        for _ in range(PROBABILITY_DRAWS):
            with np.errstate(divide="ignore"):  # who has no samples never arrives
                times = generator.standard_exponential(self.num_seen) / rates
            last, after = np.partition(times, (count - 1, count))[count - 1 : count + 1]
            total -= np.expm1(-rates * np.where(times <= last, after, last))
        return total / PROBABILITY_DRAWS

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
        self._places: NDArray[np.float64] | None = None

    @property
    def probability_is(self) -> ProbabilityIs:
        """Unknown with a `period`, where it changes with the round.

        Else exact where all clients are available with one probability, or where all that are available take part, and
        estimated elsewhere.
        """
        if self.period is not None:
            return "unknown"
        alike = np.ptp(self._probabilities) == 0 or self.nominal_cohort_size == self.num_seen
        return "exact" if alike else "estimated"

    def _selected(self, position: int) -> float | None:
        if self.period is not None:
            return None
        if self._places is None:
            self._places = self._place_probabilities()
        own = self._probabilities
        return float(own[position % len(own)] * self._places[position % len(self._places)])

    def _place_probabilities(self) -> NDArray[np.float64]:
        """The probability with which an available client gets a place, (num_seen,) or (1,) where all are alike."""
        count, own = self.nominal_cohort_size, self._probabilities
        if count == self.num_seen:
            return np.ones(1)
        if np.ptp(own) == 0:
            # All together they get as many places as are given away.
            given = _mean_of_smaller(count, self.num_seen, float(own[0]))
            return np.array([given / (self.num_seen * own[0]) if own[0] else 1.0])
        # Given who of the others is available, A of them, an available client gets a place with min(1, n / (A + 1)).
        generator, total = numpy_generator(self._seed, "probability"), np.zeros(self.num_seen)
        for _ in range(PROBABILITY_DRAWS):
            available = generator.random(self.num_seen) < own
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


def _mean_of_smaller(count: int, number: int, probability: float) -> float:
    """The mean of the smaller of `count` and a binomial variable of so many trials."""
    if probability in (0.0, 1.0):
        return min(count, number * probability)
    trials = np.arange(number)
    ratios = np.log((number - trials) / (trials + 1)) + math.log(probability / (1 - probability))
    log_masses = number * math.log1p(-probability) + np.concatenate([[0.0], np.cumsum(ratios)])
    return float(np.minimum(np.arange(number + 1), count) @ np.exp(log_masses))
