"""Independent participation of each client, for which amplification by sampling is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.checks import check_range
from lit_fed.participation.base import Participation, ProbabilityIs
from lit_fed.seeding import numpy_generator


class PoissonParticipation(Participation):
    r"""Every seen client takes part with probability q, independently of all others.

    The cohort's size is binomial, with mean q · N and standard deviation :math:`\sqrt{q (1 - q) N}`; it may be 0. A
    round costs of the order of the cohort, whatever the size of the population.

    Args:
        fraction: q, above 0 and at most 1.
        kwargs: The settings of `lit_fed.participation.Participation`.
    """

    def __init__(self, fraction: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fraction = fraction

    def setup(self, num_clients: int, num_samples: Callable[[int], int], seed: int) -> None:
        """As `Participation.setup`; also checks the fraction."""
        super().setup(num_clients, num_samples, seed)
        check_range("participation.fraction", self.fraction, above=0, most=1)

    @property
    def nominal_cohort_size(self) -> int:
        """The expected cohort, rounded, and at least 1."""
        return max(1, round(self.fraction * self.num_seen))

    @property
    def probability_is(self) -> ProbabilityIs:
        """Exact: q, times what dropouts and stragglers leave."""
        return "exact"

    def _selected(self, position: int) -> float:
        return self.fraction

    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        generator = numpy_generator(self._seed, "cohort", round_idx)
        size = generator.binomial(self.num_seen, self.fraction)  # as many as N draws would give, and then which
        return generator.choice(self.num_seen, size, replace=False, shuffle=False)
