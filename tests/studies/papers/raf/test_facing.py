"""Front or back by hand, and in a run whose features are pictured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.studies.papers.raf import Facing

JOINTS = ("left_shoulder", "right_shoulder")


class Maps(nn.Module):
    """The pictures themselves as heatmaps and as features."""

    stride = 1

    def forward_features(self, images: Tensor) -> Tensor:
        return images

    def forward(self, images: Tensor) -> Tensor:
        return images


def facing(**kwargs: Any) -> Facing:
    return Facing(**{"network": Maps(), "num_joints": 2, "joint_names": JOINTS, "flip_test": False} | kwargs)


def test_who_is_seen_from_the_front_has_the_right_shoulder_on_the_left() -> None:
    task, joints = facing(), torch.zeros(2, 2, 2)
    joints[0, 1, 0], joints[1, 0, 0] = -1, -1  # from the front, from behind
    # The first maps' means, 2 and 3, are the logits; the second maps do not count: ln(1 + e^−2) and ln(1 + e^3), mean.
    images = torch.tensor([[[1.0, 3.0], [100, 100]], [[3.0, 3.0], [100, 100]]])[..., None]
    batch: Any = {"image": images, "keypoints": joints, "visible": torch.ones(2, 2), "head_size": torch.ones(2)}
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(3))) / 2
    logged: dict[str, float] = {}
    task.log = lambda name, value, **_: logged.update({name: float(value)})  # type: ignore[method-assign, assignment]
    found = task.training_step(batch, 0)
    assert (found["loss"].item(), found["logits"].tolist()) == (pytest.approx(expected), [2, 3])
    task.test_step(batch, 0)
    assert logged == {"train/loss": found["loss"].item(), "test/loss": found["loss"].item(), "test/acc": 0.5}
    assert task.test_figures({"a": batch, "b": batch}) == {}, "too few for t-SNE"
    many = {name: batch | {"image": torch.randn(20, 2, 2, 1)} for name in "ab"}
    assert list(task.test_figures(many)) == ["features"]


def test_a_networks_first_output_is_the_logit_and_its_last_block_the_features(tmp_path: Path) -> None:
    """Beside torchvision's ResNet-50, whose weights timm's takes from a file."""
    known = torchvision.models.resnet50(weights=None, num_classes=2).eval()
    torch.save(known.state_dict(), tmp_path / "resnet50.pth")
    task = facing(network="resnet50", weights=str(tmp_path / "resnet50.pth")).eval()
    batch: Any = {"image": torch.randn(2, 3, 64, 48), "keypoints": torch.zeros(2, 2, 2)}
    blocks = nn.Sequential(*list(known.children())[:-1], nn.Flatten())  # all except the last layer
    with torch.no_grad():
        torch.testing.assert_close(task.test_features(batch), blocks(batch["image"]))
        torch.testing.assert_close(task.training_step(batch, 0)["logits"], known(batch["image"])[:, 0])


def test_joints_without_shoulders_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.joint_names lacks left_shoulder, which tells front from back"):
        facing(joint_names=("nose", "right_shoulder"))
