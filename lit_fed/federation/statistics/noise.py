r"""Noisy statistics: every site adds Gaussian noise to its counts and bounded sums, in one release.

.. math:: \tilde S = \sum_i c_i + \mathcal{N}(0, z^2 \Delta^2 I), \qquad \lVert c_i \rVert_2 \le \Delta

A sample's contribution :math:`c_i` holds 1 for its presence; 1 for its class; and for every column the shares of finite
and of missing values, the mean and the mean square of its values, cut to the column's range and mapped to [−1, 1], and
its histogram as shares. Each of the four has norm 1 at most, so that
:math:`\Delta^2 = 1 + [\text{classes}] + 4 \cdot \text{columns}`. A neighbouring site lacks one sample. A sample is
one client's only, so that ε of a site is ε of the federation.

Dwork, Roth: "The Algorithmic Foundations of Differential Privacy", 2014, Theorem 3.22; the account is that of
`lit_fed.privacy.accounting`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.data import FederatedDataModule
from lit_fed.errors import ConfigError
from lit_fed.federation.statistics.site import (
    Floats,
    Inquiry,
    SiteStatistics,
    columns_of,
    edges,
    empty,
    read_into,
    unit_of,
)
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.accounting import Mechanism, calibrate
from lit_fed.privacy.keys import RunKey

_GRID = (
    2.0**-20
)  # contributions and noise are multiples of it: their sums are exact, and no lower bit tells of a sample


class Noise:
    """The Gaussian mechanism for one release of a site.

    Args:
        noise_multiplier: z.
        delta: δ.
    """

    def __init__(self, noise_multiplier: float, delta: float) -> None:
        self.noise_multiplier, self.delta = noise_multiplier, delta

    @classmethod
    def from_privacy(cls, privacy: Any) -> Noise | None:
        """The noise of ``trainer.privacy``; None without it."""
        if privacy is None:
            return None
        if not isinstance(privacy, SampleLevel):
            raise ConfigError(
                f"trainer.privacy is {type(privacy).__name__}, and statistics protect single samples; set it to "
                "SampleLevel, or leave it out of statistics"
            )
        if (given := privacy.noise_multiplier) is None:
            return cls(calibrate("poisson", 1, 1, 1, float(privacy.epsilon or 0), privacy.delta), privacy.delta)
        if not given:
            raise ConfigError("trainer.privacy.noise_multiplier is 0.0; give noise, or leave trainer.privacy out")
        return cls(float(given), privacy.delta)

    def facts(self, noise_from: str, sensitivity: float) -> dict[str, Any]:
        """The promise, for the file and the card."""
        epsilon, accountant = Mechanism("poisson", 1, 1, self.noise_multiplier).epsilon({1: 1}, self.delta)
        return {
            "epsilon": epsilon, "delta": self.delta, "noise_multiplier": self.noise_multiplier,
            "sensitivity": sensitivity, "accountant": accountant, "unit": "sample", "noise_from": noise_from,
        }  # fmt: skip

    @staticmethod
    def of_seed(seed: int, place: int) -> np.random.Generator:
        """Noise of a simulation, which protects nobody."""
        return np.random.Generator(np.random.Philox(key=RunKey.of_seed(seed).seed("statistics", place)))

    @staticmethod
    def of_system() -> np.random.Generator:
        """Noise that nobody knows."""
        return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))

    def survey(
        self, data: FederatedDataModule, clients: Iterable[int], question: Inquiry, generator: np.random.Generator
    ) -> SiteStatistics:
        """Take noisy statistics of some clients' samples together; counts are of samples, and may be negative."""
        columns = columns_of(data)
        site = empty(len(columns), data.num_classes, question)
        sums = np.zeros((len(columns), 4 + question.bins + 2))  # finite, missing, mean, mean square, cells
        for place, values in read_into(site, data, columns, clients):
            flat = values.reshape(len(values), -1).astype(np.float64) / unit_of(data, columns[place])
            sums[place] += np.trunc(_contributions(flat, question, place) / _GRID).sum(axis=0) * _GRID
        std = self.noise_multiplier * sensitivity(len(columns), data.num_classes is not None)

        def noisy(exact: Floats) -> Floats:
            noise = generator.standard_normal(exact.shape) * std
            return exact + np.round(noise / _GRID) * _GRID

        site.samples = float(noisy(np.array([site.samples]))[0])
        site.classes, sums = noisy(site.classes), noisy(sums)
        site.count, site.missing, site.cells = sums[:, 0], sums[:, 1], sums[:, 4:]
        for place, (low, high) in enumerate(question.ranges.tolist()):
            middle, half = Fraction(low + high) / 2, Fraction(high - low) / 2
            count, first, second = (Fraction(sum_) for sum_ in sums[place, [0, 2, 3]].tolist())
            site.total[place] = middle * count + half * first
            site.squares[place] = middle * middle * count + 2 * middle * half * first + half * half * second
        site.low, site.high = np.full(len(columns), np.nan), np.full(len(columns), np.nan)
        return site


def sensitivity(columns: int, has_classes: bool) -> float:
    """Δ: the largest norm of a sample's contribution."""
    return math.sqrt(1 + has_classes + 4 * columns)


def _contributions(values: Floats, question: Inquiry, place: int) -> Floats:
    """Contributions (n, 4 + bins + 2) of samples with values (n, p) of a column."""
    low, high = question.ranges[place]
    borders = edges(low, high, question.bins)
    finite = np.isfinite(values)
    shares = finite.mean(axis=1)
    cut = np.where(finite, (np.clip(values, low, high) - (low + high) / 2) / ((high - low) / 2), 0.0).clip(-1, 1)
    cells = np.searchsorted(borders, values, side="right")
    cells[values == borders[-1]] = question.bins
    rows = np.arange(len(values))[:, None] * (question.bins + 2)
    flat = np.where(finite, rows + cells, -1).reshape(-1)
    counts = np.bincount(flat[flat >= 0], minlength=len(values) * (question.bins + 2)).reshape(len(values), -1)
    moments: NDArray[np.float64] = np.stack([shares, 1 - shares, cut.mean(axis=1), (cut * cut).mean(axis=1)], axis=1)
    return np.concatenate([moments, counts / values.shape[1]], axis=1)


def card(privacy: Mapping[str, Any]) -> str:
    """The privacy card of noisy statistics, in Markdown."""
    simulated = privacy["noise_from"] != "each site"
    lines = ["# Privacy card of the statistics", ""]
    if simulated:
        lines += ["**A simulation**: the noise follows from the seed, so whoever knows it can take the noise off.", ""]
    lines += [
        f"The statistics are one release, (ε, δ)-differentially private with **ε = {privacy['epsilon']:.6g}** at "
        f"**δ = {privacy['delta']:g}** for one training sample of a client: neighbouring data differ by the "
        "presence of one sample. Another release, such as another call, a restarted node or a private training, spends "
        "its own ε.",
        "",
        "| | |",
        "|---|---|",
        "| mechanism | Gaussian |",
        f"| noise multiplier | {privacy['noise_multiplier']:.6g} |",
        f"| sensitivity | {privacy['sensitivity']:.6g} |",
        f"| accountant | {privacy['accountant']} |",
        f"| noise from | {privacy['noise_from']} |",
        "",
        "Every site adds the noise before anything leaves it, so that the promise holds against the server. Not "
        "private: the number of clients, and the ranges, which must not come from the data.",
    ]
    return "\n".join(lines) + "\n"
