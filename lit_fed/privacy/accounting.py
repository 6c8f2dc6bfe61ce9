r"""The privacy that a run has spent, by Google's ``dp-accounting``.

A release is a sum of clipped updates with Gaussian noise of standard deviation z · C. Its Rényi divergences (RDP) add
up over releases: they are computed for one release and multiplied. The privacy loss distribution (PLD) of one release
is convolved with itself, and mostly gives the smaller bound. `Mechanism.epsilon`, the smaller of the two, is what a
budget is checked by, what the column shows, and what the card says.

Mironov: "Rényi Differential Privacy of the Gaussian Mechanism", CSF 2017. Doroshenko, Ghazi, Kamath, Kumar, Manurangsi:
"Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions", PoPETs 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from lit_fed.errors import ConfigError

IntArray = NDArray[np.int64]

Sampling = Literal["poisson", "fixed_size", "none", "known"]
"""How a cohort is drawn: each client by itself, a fixed number without replacement, in no way that is accounted, or
known to those against whom the promise is made."""

Releases = Mapping[int, int]
"""Number of rounds by number of releases: ``{1: 10}`` for ten rounds, ``{1: 9, 2: 1}`` if one of them was repeated."""

_TOLERANCE = 1e-4  # of a calibrated noise multiplier, relative
_INTERVAL = 1e-3  # grid of privacy losses: 10,000 releases are at most 0.005 above a grid ten times finer
_MOST_NOISE = 1e6
_LARGE = 100.0  # above this ε a distribution takes minutes and gigabytes, and no bound means anything


@dataclass(frozen=True)
class Mechanism:
    r"""One release: clients sampled with probability q, sums of sensitivity 1, noise of standard deviation z.

    - ``poisson``: the subsampled Gaussian mechanism; in a neighbour one client has no data.
    - ``fixed_size``: a cohort without replacement, by RDP, or as ``none`` where that is smaller; in a neighbour one
      client has other data.
    - ``none``: no amplification, as if every client were in every round; in a neighbour one client has other data.
    - ``known``: noise of h nodes, and no amplification; in a neighbour one client has no data. By RDP alone: with
      discrete Gaussians of deviation s, on the grid, a sum of d values is ½ε²-concentrated private for

      .. math:: ε = 1 / z + τ \sqrt d, \qquad τ = 10 \sum_{k=1}^{h-1} e^{-2 π^2 s^2 k / (k + 1)}

      (Kairouz, Liu, Steinke: "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
      Aggregation", ICML 2021, Theorem 1). `ClientLevel` has s > 2^19, for which τ is 0 in float64: the divergences are
      those of the Gaussian mechanism.

    Other data of a client move a sum of clipped updates by up to two clipping norms, none by one: the noise counts half
    for the former.

    Args:
        sampling: How cohorts are drawn.
        num_clients: N.
        cohort: q · N for ``poisson``, the cohort's size for ``fixed_size``; without influence for ``none``.
        noise_multiplier: z.
    """

    sampling: Sampling
    num_clients: int
    cohort: float
    noise_multiplier: float
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def relation(self) -> str:
        """How neighbouring populations differ."""
        return f"the data of one client replaced by {'none' if self.sampling in ('poisson', 'known') else 'other data'}"

    def rdp_epsilon(self, releases: Releases, delta: float) -> float:
        """ε of some releases by RDP: an upper bound that costs microseconds."""
        if not releases:
            return 0.0
        if not self.noise_multiplier:
            return math.inf
        _, rdp = _accounting()
        total = sum(rounds * self._divergences(repeats) for repeats, rounds in releases.items())
        return float(rdp.compute_epsilon(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS, total, delta)[0])

    def epsilon(self, releases: Releases, delta: float) -> tuple[float, str]:
        """The smallest bound on ε of some releases, and its accountant: all that is printed and checked is this one."""
        bounds = [(self.rdp_epsilon(releases, delta), "RDP")]
        if releases and self.sampling == "fixed_size":  # amplification is proven by bounds that may be looser than none
            plain = self._known.setdefault("none", replace(self, sampling="none", _known={}))
            bounds.append(plain.epsilon(releases, delta))
        elif releases and self.sampling != "known" and bounds[0][0] <= _LARGE:
            bounds.append((self.pld_epsilon(releases, delta), "PLD"))
        return min(bounds)

    def pld_epsilon(self, releases: Releases, delta: float, interval: float = _INTERVAL) -> float:
        """ε of some releases by PLD.

        Args:
            releases: The releases.
            delta: δ.
            interval: Width of the grid of privacy losses; a wider grid is quicker, and its ε larger.
        """
        parts = [self._losses(repeats, interval).self_compose(rounds) for repeats, rounds in releases.items()]
        return float(reduce(lambda total, other: total.compose(other), parts).get_epsilon_for_delta(delta))

    def _losses(self, repeats: int, interval: float) -> Any:
        """The distribution of privacy losses of one round."""
        if (repeats, interval) not in self._known:
            accounting, _ = _accounting()
            accountant = accounting.pld.PLDAccountant(value_discretization_interval=interval)
            accountant.compose(self._event(accounting, repeats))
            self._known[repeats, interval] = accountant._pld  # no public name; pinned by tests
        return self._known[repeats, interval]

    def _divergences(self, repeats: int) -> Any:
        """The divergences of one round, for the default orders of RDP."""
        if repeats not in self._known:
            accounting, rdp = _accounting()
            relations = accounting.NeighboringRelation
            relation = relations.REPLACE_ONE if self.sampling == "fixed_size" else relations.ADD_OR_REMOVE_ONE
            accountant = rdp.RdpAccountant(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS, relation)
            accountant.compose(self._event(accounting, repeats))
            self._known[repeats] = accountant._rdp  # no public name; pinned by tests
        return self._known[repeats]

    def _event(self, accounting: Any, repeats: int) -> Any:
        """One round in the library's words: its noise is in units of the most that a neighbour moves the sum.

        A round that was released several times, for one cohort, is one release with less noise: independent noise on
        each tells as much as noise of deviation 1 / √repeats.
        """
        multiplier = self.noise_multiplier / math.sqrt(repeats)
        noise = accounting.GaussianDpEvent(multiplier)
        if self.sampling == "known" or (self.sampling == "poisson" and self.cohort == self.num_clients):
            return noise
        if self.sampling == "poisson":
            return accounting.PoissonSampledDpEvent(self.cohort / self.num_clients, noise)
        noise = accounting.GaussianDpEvent(multiplier / 2)
        if self.sampling == "none":
            return noise
        return accounting.SampledWithoutReplacementDpEvent(self.num_clients, round(self.cohort), noise)


def calibrate(sampling: Sampling, num_clients: int, cohort: float, rounds: int, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier, to four digits, with which some rounds stay within a budget."""

    def over(log_noise: float) -> float:
        return _over(Mechanism(sampling, num_clients, cohort, math.exp(log_noise)), rounds, epsilon, delta)

    check_budget(sampling, num_clients, cohort, rounds, epsilon, delta)
    high = 0.0
    while over(high) > 0:
        high += math.log(2)
    low = high - math.log(1.5)
    while over(low) <= 0:
        low, high = low - math.log(1.5), low
        if low < math.log(1e-2):
            return math.exp(high)
    root = float(brentq(over, low, high, xtol=_TOLERANCE / 4))
    while over(root) > 0:  # the root may lie on either side
        root += _TOLERANCE / 4
    return math.exp(root)


def check_budget(
    sampling: Sampling, num_clients: int, cohort: float, rounds: int, epsilon: float, delta: float
) -> None:
    """Refuse a budget that the largest noise exceeds."""
    if _over(Mechanism(sampling, num_clients, cohort, _MOST_NOISE), rounds, epsilon, delta) > 0:
        raise ConfigError(
            f"trainer.privacy.epsilon is {epsilon}; no noise_multiplier up to a million keeps {rounds} rounds "
            f"within it at delta {delta}; give a larger epsilon or delta"
        )


def _over(mechanism: Mechanism, rounds: int, epsilon: float, delta: float) -> float:
    """By how much some rounds exceed the budget, as a logarithm."""
    spent, _ = mechanism.epsilon({1: rounds}, delta)
    return math.log(spent / epsilon) if spent else -math.inf


class SampleAccount:
    """The privacy of the samples of each client of a population, by the client's q and its noisy steps.

    Args:
        sizes: Samples of each client, (N,).
        steps: Steps of each client in a round, (N,).
        batch_size: B; a client draws each of its n samples with q = min(1, B / n).
        noise_multiplier: z.
        delta: δ.
    """

    def __init__(
        self, sizes: IntArray, steps: IntArray, batch_size: int, noise_multiplier: float, delta: float
    ) -> None:
        self.sizes, self.steps, self.batch_size, self.delta = sizes, steps, batch_size, delta
        self.noise_multiplier = noise_multiplier
        self._mechanisms: dict[int, Mechanism] = {}
        self._found: dict[Any, tuple[float, str]] = {}

    def epsilon(self, rounds: IntArray, repeated: Releases) -> tuple[float, str]:
        """The largest ε of a client, and its accountant.

        Args:
            rounds: Rounds in which each client took part, (N,).
            repeated: Rounds of the run by number of releases; a client counts the most repeated of them as its own.
        """
        bounds = [
            (self._mechanism(size).rdp_epsilon(parts, self.delta), size, parts)
            for size, parts in self._hardest(rounds, repeated)
        ]
        best = (0.0, "RDP")
        for rdp, size, parts in sorted(bounds, key=lambda one: -one[0]):
            if rdp <= best[0]:  # an upper bound: no client that follows can be above
                break
            best = max(best, self._epsilon(size, parts))
        return best

    def exceeds(self, rounds: IntArray, repeated: Releases, budget: float) -> NDArray[np.bool_]:
        """Whether each client's ε exceeds a budget, (N,)."""
        found = np.zeros(len(self.sizes), bool)
        for size, steps, taken in self._kinds(rounds):
            parts = _shared_out(taken, steps, repeated)
            if self._mechanism(size).rdp_epsilon(parts, self.delta) > budget < self._epsilon(size, parts)[0]:
                found |= (self.sizes == size) & (self.steps == steps) & (rounds == taken)
        return found

    def calibrated(self, rounds: IntArray, epsilon: float) -> float:
        """The smallest noise multiplier with which no client exceeds a budget in some rounds of its own, (N,)."""
        noise = 0.0
        for size, parts in self._hardest(rounds, {}):
            steps = parts[1]
            tried = Mechanism("poisson", size, min(self.batch_size, size), noise)
            if not noise or tried.epsilon({1: steps}, self.delta)[0] > epsilon:
                noise = calibrate("poisson", size, min(self.batch_size, size), steps, epsilon, self.delta)
        return noise

    def _hardest(self, rounds: IntArray, repeated: Releases) -> list[tuple[int, Releases]]:
        """Sizes and releases of clients of which no other has both a larger q and more steps."""
        found, most = list[tuple[int, Releases]](), 0
        for size, steps, taken in self._kinds(rounds):
            if steps * taken > most or repeated.keys() - {1}:
                most = max(most, steps * taken)
                found.append((size, _shared_out(taken, steps, repeated)))
        return found

    def _kinds(self, rounds: IntArray) -> list[list[int]]:
        """Samples, steps a round and rounds of clients that made any, the largest q first."""
        kinds = np.unique(np.stack([self.sizes, self.steps, rounds], 1), axis=0)
        found: list[list[int]] = kinds[(kinds[:, 1:] > 0).all(1)].tolist()
        return sorted(found, key=lambda one: (max(one[0], self.batch_size), -one[1] * one[2]))

    def _mechanism(self, size: int) -> Mechanism:
        if size not in self._mechanisms:
            self._mechanisms[size] = Mechanism("poisson", size, min(self.batch_size, size), self.noise_multiplier)
        return self._mechanisms[size]

    def _epsilon(self, size: int, parts: Releases) -> tuple[float, str]:
        key = size, *parts.items()
        if key not in self._found:
            self._found[key] = self._mechanism(size).epsilon(parts, self.delta)
        return self._found[key]


def _shared_out(rounds: int, steps: int, repeated: Releases) -> Releases:
    """Releases of a client's steps, if its rounds are the most repeated of the run's."""
    found: dict[int, int] = {}
    for repeats, count in sorted(repeated.items(), reverse=True):
        if repeats > 1 and (own := min(count, rounds)):
            found[repeats], rounds = own * steps, rounds - own
    return found | ({1: rounds * steps} if rounds and steps else {})


def check_installed() -> None:
    """Raise `ConfigError` if the accountant is not installed."""
    _accounting()


def _accounting() -> tuple[Any, Any]:
    """The library and its module ``rdp``, imported where it is asked for: it takes a second."""
    try:
        import dp_accounting
        from absl import logging
        from dp_accounting import pld, rdp  # noqa: F401  # the attribute `pld` is there once it is imported
    except ImportError as error:
        raise ConfigError(
            "trainer.privacy needs dp-accounting, which is not installed; pip install 'lit-fed[privacy]'"
        ) from error
    logging.set_verbosity(logging.ERROR)  # orders that do not converge are left out, which is safe
    return dp_accounting, rdp
