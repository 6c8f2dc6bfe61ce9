"""An audit with a canary: a client that alone moves a coordinate, by all that it may.

With z = q = 1 and one round, the coordinate's sum is N(0, 1) · C without the canary and C + N(0, 1) · C with it. At a
threshold half way, TPR = Φ(½) = .69 and FPR = Φ(-½) = .31, so that μ = Φ⁻¹(TPR) - Φ⁻¹(FPR) = 1: what the Gaussian
mechanism with z = 1 allows (Dong, Roth, Su: "Gaussian Differential Privacy", JRSS B 2022). Of 250 runs each, the lower
95 % bound is about .66. With half the noise μ = 2, its bound about 1.6.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from lit_fed.engine.loop.rounds import run_round
from lit_fed.privacy import ClientLevel
from lit_fed.privacy.keys import RunKey
from tests.privacy.support import private, uniform
from tests.support import Points, fit, weights

pytest.importorskip("dp_accounting")
RUNS, NORM = 250, 0.5


def lower_bound(canary_in: int, canary_out: int) -> float:
    """The lower 95 % bound of μ, by Clopper and Pearson for both rates."""
    least_tpr = beta.ppf(0.025, canary_in, RUNS - canary_in + 1)
    most_fpr = beta.ppf(0.975, canary_out + 1, RUNS - canary_out)
    normal = NormalDist()
    return normal.inv_cdf(least_tpr) - normal.inv_cdf(most_fpr)


def audit(folder: Path) -> float:
    """Trains a round with the canary and one without it, 250 times, and guesses which is which."""
    above = dict.fromkeys((2, 1), 0)
    for clients in above:  # client 1 is the canary: it alone moves the second coordinate
        made = fit(
            folder, data=Points(clients), algorithm=uniform(), max_rounds=1, evaluate_every=0,
            enable_checkpointing=False, **private(NORM, 1.0),
        )  # fmt: skip
        run, private_run = made.run, made.run.federation.wrappers.stack[0]
        assert isinstance(private_run, ClientLevel)
        run.callbacks, run._listeners = (), {}  # a round alone, without files
        with run.federation.session.at_work("fit"):
            for seed in range(RUNS):
                private_run._key = RunKey.of_seed(2 * seed + clients)
                weight = run.federation.server["model"]["network.weight"]
                run.federation.server["model"] = {"network.weight": torch.zeros_like(weight)}
                run_round(run, 0)
                above[clients] += float(weights(made)["network.weight"][0, 1]) * clients > NORM / 2
    return lower_bound(above[2], above[1])


def test_an_audit_finds_no_more_than_was_promised(tmp_path: Path) -> None:
    assert audit(tmp_path) < 1


def test_the_audit_finds_noise_that_was_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = RunKey.noise

    def halved(self: RunKey, release: str, count: int) -> NDArray[np.float64]:
        return noise(self, release, count) / 2

    monkeypatch.setattr(RunKey, "noise", halved)
    assert audit(tmp_path) > 1
