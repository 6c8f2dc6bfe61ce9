"""The success of a backdoor: by hand, and refused without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.protocols import GlobalTest
from lit_fed.robust import Backdoor, BackdoorTest
from tests.robust.support import Spots
from tests.support import LeastSquares, fit


class Reader(LeastSquares):
    """Predicts class 7 where the last feature is 5, class 3 elsewhere, as logits."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.where(batch[:, -1] == 5, 7, 3), 101).float()


@pytest.mark.parametrize(("target", "value", "success"), [(7, 5.0, 1.0), (7, 4.0, 0.0), (3, 4.0, 1.0)])
def test_is_the_share_taken_for_the_target(target: int, value: float, success: float, tmp_path: Path) -> None:
    attack = Backdoor(target, 1, value, clients=[0])
    made = fit(tmp_path, Reader(), Spots((7, 2, 3)), attack=attack, protocols=[BackdoorTest()], max_rounds=1)
    assert made.metrics["attack/backdoor_success"] == success


def test_samples_of_the_target_are_left_out(tmp_path: Path) -> None:
    attack = Backdoor(7, 1, 5.0, clients=[0])
    made = fit(tmp_path, Reader(), Spots((7, 7)), attack=attack, protocols=[BackdoorTest()], max_rounds=1)
    assert "attack/backdoor_success" not in made.metrics


def test_needs_a_backdoor_and_predicted_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BackdoorTest needs a trigger; set"):
        fit(tmp_path, Reader(), Spots((2, 3)), protocols=[GlobalTest(), BackdoorTest()])

    class Silent(LeastSquares):
        def predict_step(self, batch: Any, batch_idx: int) -> str:
            return "three"

    with pytest.raises(ConfigError, match="predict_step gives logits or a prediction"):
        fit(tmp_path, Silent(), Spots((2, 3)), protocols=[BackdoorTest()], attack=Backdoor(clients=[0]))
