r"""The privacy that a run has spent, by Google's ``dp-accounting``.

A release is a sum of clipped updates with Gaussian noise of standard deviation z · C. Its Rényi divergences (RDP) add
up over releases, so that those of one release are computed once and multiplied; the privacy loss distribution (PLD)
gives the smaller bound, takes a second, and is asked once, at the end.

Mironov: "Rényi Differential Privacy of the Gaussian Mechanism", CSF 2017. Doroshenko, Ghazi, Kamath, Kumar, Manurangsi:
"Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions", PoPETs 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from lit_fed.errors import ConfigError

Sampling = Literal["poisson", "fixed_size", "none"]
"""How a cohort is drawn: each client by itself, a fixed number without replacement, or in no way that is accounted."""

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Mechanism:
    r"""One release: clients sampled with probability q, sums of sensitivity 1, noise of standard deviation z.

    - ``poisson``: the subsampled Gaussian mechanism; neighbours differ by one client added or removed.
    - ``fixed_size``: a cohort without replacement, by RDP alone; neighbours differ by one client replaced.
    - ``none``: no amplification. A client may be in every round; one client replaced moves the sum by two clipping
      norms, so that the noise counts half.

    Args:
        sampling: How cohorts are drawn.
        num_clients: N.
        cohort: q · N for ``poisson``, the cohort's size otherwise; of no influence for ``none``.
        noise_multiplier: z.
    """

    sampling: Sampling
    num_clients: int
    cohort: float
    noise_multiplier: float

    @property
    def relation(self) -> str:
        """How neighbouring populations differ."""
        everyone = self.sampling == "poisson"
        return "one client added or removed" if everyone else "one client replaced by another"

    @property
    def accountant(self) -> str:
        """The accountant of `epsilon`."""
        return "RDP" if self.sampling == "fixed_size" else "PLD"

    def rdp_epsilon(self, releases: int, delta: float) -> float:
        """ε of some releases by RDP: an upper bound that costs microseconds."""
        if not releases:
            return 0.0
        if not self.noise_multiplier:
            return math.inf
        _, rdp = _accounting()
        orders, one = self._divergences
        return float(rdp.compute_epsilon(orders, one * releases, delta)[0])

    def epsilon(self, releases: int, delta: float) -> float:
        """ε of some releases by the tightest accountant for this sampling."""
        if not releases or not self.noise_multiplier or self.sampling == "fixed_size":
            return self.rdp_epsilon(releases, delta)
        accounting, _ = _accounting()
        accountant = accounting.pld.PLDAccountant()
        accountant.compose(self._event(accounting), releases)
        return float(accountant.get_epsilon(delta))

    @cached_property
    def _divergences(self) -> tuple[Any, Any]:
        """The orders of RDP and one release's divergences at them."""
        accounting, rdp = _accounting()
        relations = accounting.NeighboringRelation
        relation = relations.REPLACE_ONE if self.sampling == "fixed_size" else relations.ADD_OR_REMOVE_ONE
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
        accountant.compose(self._event(accounting))
        return accountant._orders, accountant._rdp  # no public name; pinned by tests

    def _event(self, accounting: Any) -> Any:
        noise = accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling == "fixed_size":
            return accounting.SampledWithoutReplacementDpEvent(self.num_clients, round(self.cohort), noise)
        if self.sampling == "none":
            return accounting.GaussianDpEvent(self.noise_multiplier / 2)
        return noise if self.cohort == self.num_clients else accounting.PoissonSampledDpEvent(self.rate, noise)

    @property
    def rate(self) -> float:
        """Q: the probability with which a client is in a round."""
        return self.cohort / self.num_clients


def calibrate(
    sampling: Sampling, num_clients: int, cohort: float, releases: int, epsilon: float, delta: float
) -> float:
    """The smallest noise multiplier, to four digits, with which some releases stay within a budget.

    Raises:
        ConfigError: If the budget is too small for any noise that is tried.
    """

    def spent(noise_multiplier: float, tight: bool) -> float:
        mechanism = Mechanism(sampling, num_clients, cohort, noise_multiplier)
        return mechanism.epsilon(releases, delta) if tight else mechanism.rdp_epsilon(releases, delta)

    enough = 0.25
    while spent(enough, tight=False) > epsilon:  # RDP is an upper bound: noise that is enough for it is enough
        enough *= 2
        if enough > 1e6:
            raise ConfigError(
                f"trainer.privacy.epsilon is {epsilon}; no noise_multiplier up to a million keeps {releases} rounds "
                f"within it at delta {delta}; give a larger epsilon or delta"
            )
    low, high = 0.0, enough
    for tight, tolerance in ((False, 1e-2), (True, _TOLERANCE)):
        low = 0.0 if not tight else high / 2
        while tight and spent(low, tight) <= epsilon:  # PLD needs far less noise than RDP
            low, high = low / 2, low
            if low < 1e-3:
                return high
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (low, middle) if spent(middle, tight) <= epsilon else (middle, high)
    return high


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    r"""δ of one release without sampling: :math:`\Phi(1/2z - εz) - e^ε \Phi(-1/2z - εz)`.

    Balle, Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8.
    """

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    half, scaled = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return phi(half - scaled) - math.exp(epsilon) * phi(-half - scaled)


def _accounting() -> tuple[Any, Any]:
    """The library and its module ``rdp``, imported where it is asked for: it takes a second.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401  # the attribute `pld` is there once it is imported
    except ImportError as error:
        raise ConfigError(
            "trainer.privacy needs dp-accounting, which is not installed; pip install 'lit-fed[privacy]'"
        ) from error
    return dp_accounting, rdp
