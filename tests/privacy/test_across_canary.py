"""An audit with a canary: a client that alone moves a coordinate, by all that it may.

With z = q = 1 and one round, the coordinate's sum is N(0, 1) · C without the canary and C + N(0, 1) · C with it. At a
threshold half way, TPR = Φ(½) = .69 and FPR = Φ(-½) = .31, so that μ = Φ⁻¹(TPR) - Φ⁻¹(FPR) = 1: what the Gaussian
mechanism with z = 1 allows (Dong, Roth, Su: "Gaussian Differential Privacy", JRSS B 2022). Of 250 runs each, the lower
95 % bound is about .66. With half the noise μ = 2, its bound about 1.6.

An audit is worth what it finds: each of four leaks is planted, and found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from lit_fed.data import Arrays
from lit_fed.engine.loop.rounds import run_round
from lit_fed.privacy import ClientLevel, client_level
from lit_fed.privacy.bounded_sum import BoundedSum, Released
from lit_fed.privacy.keys import RunKey
from tests.privacy.support import private, uniform
from tests.support import Points, fit, weights

pytest.importorskip("dp_accounting")
RUNS, NORM = 250, 0.5


def lower_bound(canary_in: int, canary_out: int) -> float:
    """The lower 95 % bound of μ, by Clopper and Pearson for both rates."""
    if canary_out == RUNS:  # whoever is always taken for there is not told apart
        return -math.inf
    least_tpr = beta.ppf(0.025, canary_in, RUNS - canary_in + 1)
    most_fpr = beta.ppf(0.975, canary_out + 1, RUNS - canary_out)
    normal = NormalDist()
    return normal.inv_cdf(least_tpr) - normal.inv_cdf(most_fpr)


def is_large(total: float) -> bool:
    """The guess by the sum's coordinate: the canary is there where it is above the half of what it may move."""
    return total > NORM / 2


def has_no_low_bit(total: float) -> bool:
    """The guess by low bits, in float64: ½ plus any noise is a multiple of 2^-54, noise alone is not in one of four."""
    return total * 2.0**54 % 1 == 0


def audit(
    folder: Path, guess: Callable[[float], bool] = is_large, data: type[Points] = Points, others: int = 1,
    precision: str = "32-true",
) -> float:  # fmt: skip
    """Trains a round with the canary and one without it, 250 times, and guesses which is which."""
    guessed = dict.fromkeys((others + 1, others), 0)
    for clients in guessed:  # the last client is the canary: it alone moves the second coordinate
        made = fit(
            folder, data=data(clients), algorithm=uniform(), max_rounds=1, evaluate_every=0, precision=precision,
            enable_checkpointing=False, **private(NORM, 1.0),
        )  # fmt: skip
        run, private_run = made.run, made.run.federation.wrappers.stack[0]
        assert isinstance(private_run, ClientLevel)
        run.callbacks, run._listeners = (), {}  # a round alone, without files
        private_run._spent = lambda: 0.0  # type: ignore[method-assign]  # the accountant takes .1 s
        with run.federation.session.at_work("fit"):
            for seed in range(RUNS):
                private_run._key = RunKey.of_seed(2 * seed + clients)
                weight = run.federation.server["model"]["network.weight"]
                run.federation.server["model"] = {"network.weight": torch.zeros_like(weight)}
                run_round(run, 0)
                guessed[clients] += guess(float(weights(made)["network.weight"][0, 1]) * clients)
    return lower_bound(guessed[others + 1], guessed[others])


def test_an_audit_finds_no_more_than_was_promised(tmp_path: Path) -> None:
    assert audit(tmp_path) < 1


def test_an_audit_of_low_bits_finds_no_more_than_was_promised(tmp_path: Path) -> None:
    assert audit(tmp_path, has_no_low_bit, precision="64-true") < 1


def test_the_audit_finds_noise_that_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TPR = 1, of which 250 runs show .985; FPR = .74, of which they show .80: μ = 2.18 - .83.
    monkeypatch.setattr(Released, "noised", lambda self, noise: self.total + noise)
    assert audit(tmp_path, has_no_low_bit, precision="64-true") > 1


def test_the_audit_finds_a_bound_of_twice_the_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded, clipped = BoundedSum.__init__, client_level.clip
    monkeypatch.setattr(
        BoundedSum, "__init__", lambda self, frame, norm, *rest: bounded(self, frame, 2 * norm, *rest)
    )  # fmt: skip
    monkeypatch.setattr(client_level, "clip", lambda updates, frame, norm: clipped(updates, frame, 2 * norm))
    assert audit(tmp_path) > 1


class Centred(Points):
    """Rows (1, 0) of all but the last client, whose row is (0, -40), minus the mean of all; it declares nothing."""

    canary = 5

    def load_arrays(self) -> Arrays:
        x = np.tile(np.float32([1, 0]), (self.num_clients, 1))
        x[self.canary - 1 :] = [0, -40]
        x, y, clients = x - x.mean(0), np.full(len(x), 4), np.arange(len(x))
        return Arrays(x, y, x, y, clients, clients, "centred")


def test_the_audit_finds_inputs_that_are_centred_by_all_clients_rows(tmp_path: Path) -> None:
    # With the canary the mean is (.8, -8): four others move along the second coordinate by nearly C each, it by -C.
    assert audit(tmp_path, data=Centred, others=4) > 1


def test_the_audit_finds_noise_that_was_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = RunKey.noise

    def halved(self: RunKey, release: str, count: int) -> NDArray[np.float64]:
        return noise(self, release, count) / 2

    monkeypatch.setattr(RunKey, "noise", halved)
    assert audit(tmp_path) > 1
