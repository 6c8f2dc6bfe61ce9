"""Random boxes: how often, how far, and what follows from the generator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.poses.data import FLIP_ONLY, LSP, PoseAugmentation

COUNT = 20000
STILL = PoseAugmentation(scale=0.0, rotation=0.0, flip=0.0, shift=0.0, half_body=0.0)


def people(count: int = COUNT) -> dict[str, Tensor]:
    """Joint j of everybody at (10 + j, 100 + 10·j), in a box of 200 pixels around (50, 60)."""
    place = torch.arange(14.0)
    joints = torch.stack([10 + place, 100 + 10 * place], dim=1)
    return {
        "keypoints": joints.repeat(count, 1, 1),
        "visible": torch.ones(count, 14),
        "centre": torch.tensor([[50.0, 60.0]]).repeat(count, 1),
        "extent": torch.full((count,), 200.0),
    }


def draw(augmentation: PoseAugmentation, seed: int = 0, who: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return augmentation.draw(who or people(), LSP.upper, 0.75, torch.Generator().manual_seed(seed))


def test_nothing_is_changed_where_nothing_may_be():
    drawn = draw(STILL)
    assert torch.equal(drawn["centre"], people()["centre"])
    assert torch.equal(drawn["extent"], people()["extent"])
    assert not drawn["rotation"].any()
    assert not drawn["flip"].any()


def test_scale_rotation_flip_and_shift_are_as_often_and_as_far_as_said():
    drawn = draw(PoseAugmentation(half_body=0.0))
    factor = drawn["extent"] / 200
    assert (float(factor.min()), float(factor.max())) == (pytest.approx(0.75), pytest.approx(1.25))
    # A standard normal is beyond ±1 with probability .3173, where factors are cut.
    assert float(((factor < 0.7501) | (factor > 1.2499)).float().mean()) == pytest.approx(0.3173, abs=0.015)
    degrees = drawn["rotation"] * 180 / math.pi
    assert float((degrees != 0).float().mean()) == pytest.approx(0.6, abs=0.015)
    assert float(degrees.abs().max()) == pytest.approx(60.0)
    # Beyond ±2 with probability .0455, of those that are turned.
    assert float((degrees.abs() > 59.99).float().mean()) == pytest.approx(0.6 * 0.0455, abs=0.005)
    assert float(drawn["flip"].mean()) == pytest.approx(0.5, abs=0.015)
    moved = drawn["centre"] - torch.tensor([50.0, 60.0])
    assert float((moved != 0).all(1).float().mean()) == pytest.approx(0.3, abs=0.015)
    # .12 of a box of 150×200
    assert 17.5 < float(moved[:, 0].abs().max()) <= 18.0
    assert 23.5 < float(moved[:, 1].abs().max()) <= 24.0


def test_half_a_body_by_hand():
    drawn = draw(PoseAugmentation(scale=0.0, rotation=0.0, flip=0.0, shift=0.0, half_body=1.0))
    # Upper joints 6 … 13: middle x 10 + 9.5, y 100 + 95; 70 high. Lower joints 0 … 5: (12.5, 125); 50 high. 1.5 times.
    found = torch.cat([drawn["centre"], drawn["extent"][:, None]], dim=1).unique(dim=0)
    assert found.tolist() == [[12.5, 125.0, 75.0], [19.5, 195.0, 105.0]]
    assert float((drawn["extent"] > 100).float().mean()) == pytest.approx(0.5, abs=0.015)
    often = draw(PoseAugmentation(scale=0.0, rotation=0.0, flip=0.0, shift=0.0))
    assert float((often["extent"] != 200).float().mean()) == pytest.approx(0.3, abs=0.015)


def test_half_a_body_needs_joints():
    augmentation = PoseAugmentation(scale=0.0, rotation=0.0, flip=0.0, shift=0.0, half_body=1.0)
    few = people(200)
    few["visible"][:, 8:] = 0.0  # 8 joints: not more than 8
    assert torch.equal(draw(augmentation, who=few)["extent"], few["extent"])
    upper = people(200)
    upper["visible"][:, :4] = 0.0  # 10 joints, 2 of them lower: always the upper half
    assert set(draw(augmentation, who=upper)["extent"].tolist()) == {105.0}
    heap = people(200)
    heap["keypoints"][:] = 5.0  # all in one place: no box around it
    assert torch.equal(draw(augmentation, who=heap)["extent"], heap["extent"])


def test_a_draw_follows_the_generator():
    first, same, other = (draw(PoseAugmentation(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["centre"], other["centre"])
    assert set(draw(FLIP_ONLY)["extent"].tolist()) == {200.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 1.0}, "data.augmentation.scale is 1.0; it must be at least 0 and at most 0.99"),
        ({"flip": 1.5}, "data.augmentation.flip is 1.5; it must be at least 0 and at most 1"),
        ({"rotation": -1.0}, "data.augmentation.rotation is -1.0; it must be at least 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        PoseAugmentation(**settings)
