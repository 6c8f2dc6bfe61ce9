"""`lit_fed.poses.PCK` and `PCKh`: by hand, with what is invisible or left out, over batches and under a trainer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.poses import PCK, KeypointEstimator, PCKh


def shifted(truth: Tensor, *shifts: tuple[int, int, float]) -> Tensor:
    """Points that are off along x: (person, joint, by how much)."""
    found = truth.clone()
    for person, joint, by in shifts:
        found[person, joint, 0] += by
    return found


def test_pckh_by_hand_with_invisible_joints_and_those_that_mpii_leaves_out() -> None:
    torch.manual_seed(0)
    truth = 200 * torch.rand(2, 16, 2)
    visible = torch.ones(2, 16)
    visible[0, 0] = visible[1, 3] = 0
    # Heads of 30×40 and 60×80 pixels: diagonals 50 and 100, lengths .6 · 50 = 30 and 60, half of them 15 and 30.
    boxes = torch.tensor([[[10.0, 10.0], [40.0, 50.0]], [[0.0, 0.0], [60.0, 80.0]]])
    found = shifted(
        truth,
        *((0, 0, 999.0), (1, 3, 999.0)),  # not visible
        *((0, 6, 999.0), (1, 7, 999.0)),  # pelvis and thorax, which do not count
        *((0, 1, 14.9), (0, 2, 15.1), (1, 1, 29.9), (1, 2, 30.1), (1, 15, -31.0)),
    )
    metric = PCKh()
    metric.update(found, truth, visible, boxes)
    # 2 · 16 joints without 2 · 2 that do not count and 2 that are not visible: 26; three are too far.
    assert (metric.correct, metric.total) == (23, 26)
    assert float(metric.compute()) == pytest.approx(100 * 23 / 26)


def test_joints_weigh_by_how_often_they_are_visible() -> None:
    # Joint 0 is visible in all three persons and found in two, joint 1 in one and not found: by joints ⅔ and 0, weighed
    # 3 : 1 that is ½ (their plain mean would be ⅓).
    truth, visible = torch.zeros(3, 2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    metric = PCK(0.5)
    metric.update(shifted(truth, (0, 0, 6.0), (0, 1, 6.0)), truth, visible, torch.full((3,), 10.0))
    assert float(metric.compute()) == 50.0


def test_all_joints_found_is_the_largest_value_that_a_node_may_tell() -> None:
    truth, metric = torch.zeros(2, 3, 2), PCK()
    metric.update(truth, truth, torch.ones(2, 3), torch.ones(2))
    assert float(metric.compute()) == KeypointEstimator.ranges["pck"][1] == KeypointEstimator.ranges["pck_strict"][1]


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, 75.0), (0.25, 50.0), (0.2, 25.0)])
def test_the_threshold_is_a_share_of_each_persons_length(threshold: float, expected: float) -> None:
    # Off by 3 and 4, that is 5 pixels, of lengths 10, 20, 25 and 8: shares .5, .25, .2 and .625.
    truth = torch.zeros(4, 1, 2)
    metric = PCK(threshold)
    metric.update(truth + torch.tensor([3.0, 4.0]), truth, torch.ones(4, 1), torch.tensor([10.0, 20.0, 25.0, 8.0]))
    assert float(metric.compute()) == expected


def test_a_person_of_unknown_length_does_not_count() -> None:
    truth, metric = torch.zeros(2, 3, 2), PCK()
    metric.update(truth, truth, torch.ones(2, 3), torch.tensor([math.nan, 4.0]))
    assert (metric.correct, metric.total) == (3, 3)
    nobody = PCK()
    nobody.update(truth, truth, torch.zeros(2, 3), torch.ones(2))
    assert math.isnan(float(nobody.compute()))


def test_it_does_not_matter_how_batches_are_cut() -> None:
    torch.manual_seed(1)
    truth, lengths, visible = 50 * torch.rand(7, 5, 2), 20 * torch.rand(7), (torch.rand(7, 5) > 0.3).float()
    found = truth + 5 * torch.randn(7, 5, 2)
    whole, parts = PCK(), PCK()
    whole.update(found, truth, visible, lengths)
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        parts.update(found[part], truth[part], visible[part], lengths[part])
    assert 0 < float(whole.compute()) == float(parts.compute()) < 100


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"PCK\.threshold is 0; it must be above 0"):
        PCK(0)
    truth = torch.zeros(1, 5, 2)
    with pytest.raises(ConfigError, match=r"PCKh\.excluded is \[6, 7\]; joints are 0 … 4"):
        PCKh().update(truth, truth, torch.ones(1, 5), torch.ones(1, 2, 2))
