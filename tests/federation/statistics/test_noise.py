"""Noisy statistics: the bound of a sample's contribution, the noise's scale, and ε."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fed.data import ArrayFile
from lit_fed.errors import ConfigError
from lit_fed.federation.statistics.federation import first_question, simulated
from lit_fed.federation.statistics.noise import Noise, _contributions, card, sensitivity
from lit_fed.federation.statistics.site import Inquiry, columns_of
from lit_fed.privacy import ClientLevel, SampleLevel
from tests.federation.statistics.test_federation import table, write_table
from tests.privacy.support import gaussian_delta

pytest.importorskip("dp_accounting")

RANGES = {"age": [0, 100], "dose": [999_990, 1_000_010], "flag": [0, 1]}


def noisy(data: Any, noise: Noise, ranges: Any = None, **kwargs: Any) -> Any:
    data.keeps_missing = True
    question = first_question(columns_of(data), 5, 1, ranges or {"*": [0, 1]}, noise)
    data.setup()
    return simulated(data, question, noise, **kwargs)


def test_almost_without_noise_the_figures_are_the_exact_ones(tmp_path: Path) -> None:
    """All values lie within the ranges; the grid of 2⁻²⁰ and the noise of 1e-6 · √14 allow 1e-4 of a range."""
    path = write_table(tmp_path)
    exact = simulated(*_of(table(path))).as_dict()
    found = noisy(table(path), Noise(1e-6, 1e-5), RANGES).as_dict()
    for row, true in [
        (found["all"], exact["all"]),
        *zip(found["clients"].values(), exact["clients"].values(), strict=True),
    ]:
        assert row["samples"] == pytest.approx(true["samples"], abs=1e-4)
        assert row["classes"] == pytest.approx(true["classes"], abs=1e-4)
        for column, whole in zip(row["columns"], true["columns"], strict=True):
            width = np.diff(RANGES[column["name"]])[0]
            assert column["count"] == pytest.approx(whole["count"], abs=1e-3)
            assert column["missing"] == pytest.approx(whole["missing"], abs=1e-3)
            assert column["mean"] == pytest.approx(whole["mean"], abs=1e-4 * width)
            assert column["variance"] == pytest.approx(whole["variance"], abs=1e-4 * width**2)
            assert column["cells"] == pytest.approx(whole["cells"], abs=1e-3)
            assert (column["minimum"], column["maximum"]) == (None, None)


def _of(data: Any) -> tuple[Any, Inquiry]:
    data.keeps_missing = True
    data.setup()
    return data, first_question(columns_of(data), 5, 1, RANGES, None)


def test_no_sample_contributes_more_than_the_sensitivity() -> None:
    """One presence, one class, and four parts of norm 1 for each column, whatever its values are."""
    question = Inquiry(4, 1, np.array([[-2.0, 3.0]]))
    drawn = np.random.default_rng(0).normal(0, 4, (500, 6))
    drawn[drawn > 6] = np.nan
    drawn[:5] = np.array([[np.nan] * 6, [-2] * 6, [3] * 6, [99] * 6, [-99] * 6])
    made = _contributions(drawn, question, 0)
    for part in (made[:, :2], made[:, 2:3], made[:, 3:4], made[:, 4:]):
        assert np.linalg.norm(part, axis=1).max() <= 1 + 1e-12
    assert np.allclose(made[:, 4:].sum(axis=1), made[:, 0])
    assert (np.linalg.norm(made, axis=1) ** 2 + 2).max() == pytest.approx(sensitivity(1, has_classes=True) ** 2)


def test_the_noise_has_the_standard_deviation_of_the_card(tmp_path: Path) -> None:
    """Z · Δ with Δ² = 1 + 1 + 4 · 3 = 14, over 200 seeds: 200 counts are within 20 % of it (4 standard errors)."""
    data = table(write_table(tmp_path))
    noise = Noise(2.0, 1e-5)
    found = [noisy(data, noise, RANGES, by_client=False, seed=seed).whole.samples for seed in range(200)]
    assert np.std(found) == pytest.approx(2 * math.sqrt(14), rel=0.2)


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """Balle and Wang's closed form of δ at the ε of the card; and a budget is kept."""
    facts = Noise(3.0, 1e-5).facts("the seed", 2.0)
    assert gaussian_delta(3.0, facts["epsilon"]) <= 1e-5
    assert gaussian_delta(3.0, facts["epsilon"] * 0.98) > 1e-5
    made = Noise.from_privacy(SampleLevel(1.0, epsilon=0.7, delta=1e-6))
    assert made is not None
    assert gaussian_delta(made.noise_multiplier, 0.7) <= 1e-6
    assert made.facts("the seed", 2.0)["epsilon"] == pytest.approx(0.7, rel=1e-2)


def test_pixels_of_an_image_are_one_sample(tmp_path: Path) -> None:
    """Counts are of images: shares of pixels add up to one for each."""
    x = np.random.default_rng(0).integers(0, 256, (60, 5, 4), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", x_train=x, y_train=np.arange(60) % 3, x_test=x[:3], y_test=np.arange(3))
    found = noisy(ArrayFile(str(tmp_path / "i.npz"), num_clients=2), Noise(1e-6, 1e-5)).as_dict()["all"]["columns"][0]
    assert found["count"] == pytest.approx(60, abs=1e-3)
    assert sum(found["cells"]) == pytest.approx(60, abs=1e-3)
    assert found["mean"] == pytest.approx((x / 255).mean(), abs=1e-4)


def test_refusals(tmp_path: Path) -> None:
    data, noise = table(write_table(tmp_path)), Noise(1.0, 1e-5)
    data.keeps_missing = True
    with pytest.raises(ConfigError, match=r"trainer.privacy is ClientLevel, and statistics protect single samples"):
        Noise.from_privacy(ClientLevel(1.0, 1.0))
    with pytest.raises(ConfigError, match=r"trainer.privacy.noise_multiplier is 0.0; give noise"):
        Noise.from_privacy(SampleLevel(1.0, 0.0))
    with pytest.raises(ConfigError, match=r"--least is 3, and trainer.privacy adds noise"):
        first_question(columns_of(data), 5, 3, RANGES, noise)
    with pytest.raises(ConfigError, match=r"--ranges lacks 'dose'; with trainer.privacy values are cut to a range"):
        first_question(columns_of(data), 5, 1, {"age": [0, 1]}, noise)


def test_the_card_says_who_can_take_the_noise_off() -> None:
    facts = Noise(3.0, 1e-5).facts
    assert "**A simulation**" in card(facts("the seed", 2.0))
    assert "A simulation" not in card(facts("each site", 2.0))
    assert f"ε = {facts('each site', 2.0)['epsilon']:.6g}" in card(facts("each site", 2.0))
