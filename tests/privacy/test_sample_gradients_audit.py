"""An audit of samples by a canary: a sample that alone moves a coordinate, by all that it may.

With z = q = 1 and one step, the coordinate's sum is N(0, 1) · C without the canary and C + N(0, 1) · C with it, as in
`tests/privacy/test_across_canary.py`: μ = 1. With half the noise, or one sample clipped at 2C, μ = 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from lit_fed.data import Arrays
from lit_fed.engine.loop.rounds import run_round
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.accounting import Mechanism
from lit_fed.privacy.keys import RunKey
from lit_fed.privacy.sample_gradients import PoissonLoader, SampleGradients
from tests.privacy.support import uniform
from tests.privacy.test_across_canary import NORM, RUNS, lower_bound
from tests.support import Points, fit, weights

pytest.importorskip("dp_accounting")


class Canary(Points):
    """One client with three samples x = (1, 0), y = 2, the last of which may be x = (0, 10), y = 4: the canary."""

    def __init__(self, there: bool) -> None:
        super().__init__(1)
        self.there = there

    def load_arrays(self) -> Arrays:
        x, y = np.tile(np.float32([1, 0]), (3, 1)), np.array([2, 2, 4])
        x[2] = [0, 10] if self.there else [0, 0]  # in a neighbour, its data are replaced by none
        clients = np.zeros(3, np.int64)
        return Arrays(x, y, x, y, clients, clients, "canary")


def audit(folder: Path) -> float:
    """The lower bound of μ, of a step on the whole batch."""
    guessed = guesses(folder, Canary, 1.0, 3)
    return lower_bound(guessed[True], guessed[False])


def guesses(folder: Path, data: type[Canary], noise: float, expected: int) -> dict[bool, int]:
    """Trains a round with the canary and one without it, 250 times, and guesses that it is there: how often."""
    guessed = {True: 0, False: 0}
    for there in guessed:
        made = fit(
            folder, data=data(there), algorithm=uniform(), max_rounds=1, evaluate_every=0,
            enable_checkpointing=False, privacy=SampleLevel(NORM, noise, delta=0.01),
        )  # fmt: skip
        run, private = made.run, made.run.federation.wrappers.stack[0]
        assert isinstance(private, SampleLevel)
        run.callbacks, run._listeners = (), {}  # a round alone, without files
        private.release = lambda aggregate, cohort: (aggregate, cohort, {})  # type: ignore[method-assign]
        model = run.federation.server["model"]
        with run.federation.session.at_work("fit"):
            for seed in range(RUNS):
                private._key = RunKey.of_seed(2 * seed + there)
                run.federation.server["model"] = {name: tensor * 0 for name, tensor in model.items()}
                run_round(run, 0)
                # Steps of ½ along the mean over the expected batch of a gradient of -C: back to the sum.
                total = float(weights(made)["network.weight"][0, 1]) * 2 * expected
                guessed[there] += total > NORM / 2
    return guessed


def test_an_audit_finds_no_more_than_was_promised(tmp_path: Path) -> None:
    assert audit(tmp_path) < 1


def test_the_audit_finds_noise_that_was_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = RunKey.noise

    def halved(self: RunKey, release: str, count: int) -> NDArray[np.float64]:
        return noise(self, release, count) / 2

    monkeypatch.setattr(RunKey, "noise", halved)
    assert audit(tmp_path) > 1


def test_the_audit_finds_a_sample_that_is_clipped_at_twice_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = SampleGradients.enter

    def wide(self: SampleGradients, client: object) -> bool:
        self._norm = 2 * NORM
        return begun(self, client)  # type: ignore[arg-type]

    monkeypatch.setattr(SampleGradients, "enter", wide)
    assert audit(tmp_path) > 1


# A client of four samples makes two steps of two in a round. With hardly any noise everybody sees in which of them the
# canary is: drawn, it is in neither with (1 - ½)² = ¼, so that a guess finds it with ¾, which δ = .8 covers; shuffled,
# it is in one of them for sure.
NOISE, DELTA = 0.15, 0.8


class Fourth(Canary):
    """As `Canary` with one more sample, in batches of two."""

    def __init__(self, there: bool) -> None:
        super().__init__(there)
        self.batch_size = 2

    def load_arrays(self) -> Arrays:
        x, y = np.tile(np.float32([1, 0]), (4, 1)), np.array([2, 2, 2, 4])
        x[3] = [0, 10] if self.there else [0, 0]
        clients = np.zeros(4, np.int64)
        return Arrays(x, y, x, y, clients, clients, "canary")


def found(folder: Path) -> float:
    """The lower 95 % bound of ε at δ, by Clopper and Pearson for both rates."""
    guessed = guesses(folder, Fourth, NOISE, 2)
    least_tpr = beta.ppf(0.025, guessed[True], RUNS - guessed[True] + 1)
    most_fpr = beta.ppf(0.975, guessed[False] + 1, RUNS - guessed[False])
    return math.log((least_tpr - DELTA) / most_fpr) if least_tpr > DELTA else -math.inf


def test_an_audit_of_drawn_batches_finds_no_more_than_was_promised(tmp_path: Path) -> None:
    assert found(tmp_path) < Mechanism("poisson", 4, 2, NOISE).epsilon({1: 2}, DELTA)[0]


def test_the_audit_finds_batches_that_are_shuffled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(0)

    def shuffled(self: PoissonLoader) -> Iterator[Any]:
        yield from self._loader.batches_of(torch.from_numpy(drawn.permutation(4)).split(2))

    monkeypatch.setattr(PoissonLoader, "__iter__", shuffled)
    assert found(tmp_path) > Mechanism("poisson", 4, 2, NOISE).epsilon({1: 2}, DELTA)[0]
