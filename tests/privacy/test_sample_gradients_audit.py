"""An audit of samples by a canary: a sample that alone moves a coordinate, by all that it may.

With z = q = 1 and one step, the coordinate's sum is N(0, 1) · C without the canary and C + N(0, 1) · C with it, as in
`tests/privacy/test_across_canary.py`: μ = 1. With half the noise, or one sample clipped at 2C, μ = 2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lit_fed.data import Arrays
from lit_fed.engine.loop.rounds import run_round
from lit_fed.privacy import SampleLevel
from lit_fed.privacy.keys import RunKey
from lit_fed.privacy.sample_gradients import SampleGradients
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
    """Takes a step with the canary and one without it, 250 times, and guesses which is which."""
    guessed = {True: 0, False: 0}
    for there in guessed:
        made = fit(
            folder, data=Canary(there), algorithm=uniform(), max_rounds=1, evaluate_every=0,
            enable_checkpointing=False, privacy=SampleLevel(NORM, 1.0, delta=0.01),
        )  # fmt: skip
        run, private = made.run, made.run.federation.wrappers.stack[0]
        assert isinstance(private, SampleLevel)
        run.callbacks, run._listeners = (), {}  # a round alone, without files
        private.release = lambda aggregate, cohort, kept: (aggregate, cohort, {})  # type: ignore[method-assign]
        model = run.federation.server["model"]
        with run.federation.session.at_work("fit"):
            for seed in range(RUNS):
                private._key = RunKey.of_seed(2 * seed + there)
                run.federation.server["model"] = {name: tensor * 0 for name, tensor in model.items()}
                run_round(run, 0)
                # A step of ½ along the mean over 3 of a gradient of -C: back to the sum.
                total = float(weights(made)["network.weight"][0, 1]) * 2 * 3
                guessed[there] += total > NORM / 2
    return lower_bound(guessed[True], guessed[False])


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
