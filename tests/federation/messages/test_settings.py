"""What a server and its nodes must have been told alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lit_fed.errors import ConfigError
from lit_fed.federation.messages.settings import agreed, difference
from lit_fed.privacy import ClientLevel
from lit_fed.robust import Median
from tests.federation.support import deploy, simulate, small
from tests.support import LeastSquares, Points, assert_same, weights


def test_what_a_schedule_by_steps_spans_is_the_same_everywhere() -> None:
    node, server = agreed("trainer: {schedule_steps: run}"), agreed("trainer: {schedule_steps: round}")
    assert difference(node, server) == 'trainer.schedule_steps is "run" on the node and "round" on the server'
    assert difference(node, node) is None


def test_privacy_is_the_same_everywhere_but_for_the_key_and_what_the_server_withholds() -> None:
    def told(**settings: object) -> dict[str, str]:
        return agreed(f"trainer: {{privacy: {{class_path: ClientLevel, init_args: {json.dumps(settings)}}}}}")

    common: dict[str, object] = {"clip_norm": 0.5, "epsilon": 8.0, "delta": 0.001}
    server = told(**common, key_file="run.key", withhold=True)
    assert difference(told(**common), server) is None
    assert "run.key" not in str(server)
    for name in common:
        changed = told(**common | {name: 0.25})
        (key,) = {key for key in server if key.endswith(f".{name}")}
        assert difference(changed, server) == f"{key} is 0.25 on the node and {common[name]} on the server"
    assert difference({}, server) is not None, "a node without privacy is refused"


class OwnPrivacy(ClientLevel):
    own_settings = ("device",)


class OwnRule(Median):
    own_settings = ("device",)


@pytest.mark.parametrize(("key", "kind"), [("privacy", OwnPrivacy), ("aggregation", OwnRule)])
def test_a_wrapper_of_ones_own_says_which_of_its_settings_each_end_chooses(key: str, kind: type) -> None:
    def told(**settings: object) -> dict[str, str]:
        section = {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": settings}
        return agreed(json.dumps({"trainer": {key: section}}))

    assert difference(told(device="cpu", key_file="a"), told(device="cuda", key_file="a")) is None
    assert difference(told(key_file="a"), told(key_file="b")) is not None, "which ClientLevel leaves to each end"


def test_weights_are_compared_by_their_file_and_not_by_its_place(tmp_path: Path) -> None:
    def told(file: Path) -> dict[str, str]:
        return agreed(f"model: {{class_path: Classifier, init_args: {{weights: {file}}}}}")

    for folder, value in (("server", 1.0), ("node", 1.0), ("other", 2.0)):
        (tmp_path / folder).mkdir()
        save_file({"weight": torch.full((2,), value)}, tmp_path / folder / "model.safetensors")
    server = told(tmp_path / "server")
    assert difference(told(tmp_path / "node" / "model.safetensors"), server) is None
    refused = difference(told(tmp_path / "other"), server)
    assert refused is not None
    assert refused.startswith("model.init_args.weights is ")
    assert str(tmp_path) not in refused
    assert told(Path("DEFAULT"))["model.init_args.weights"] == '"DEFAULT"', "as torchvision names its weights"
    with pytest.raises(ConfigError, match=r"model.init_args.weights is .*; the folder has neither of"):
        told(tmp_path)


class WarmingUp(LeastSquares):
    """Rates 1/8, 2/8, 3/8 and on."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
        return [optimizer], [{"scheduler": ramp, "interval": "step"}]


def test_nodes_go_on_with_a_schedule_by_steps_as_the_simulation_does(tmp_path: Path) -> None:
    make = small(WarmingUp, lambda: Points(3), max_rounds=3, local_steps=2, schedule_steps="run")
    apart = deploy(make, tmp_path / "apart", [[0, 2], [1]])
    assert_same(weights(apart), weights(simulate(make, tmp_path / "together")))
    # Client 1 of three alone moves the second weight, towards 4; it has 3 of the 5 samples. What is left of the way
    # after rounds at rates 1/8 2/8, 3/8 4/8, 5/8 6/8: 42/64, 20/64, 6/64.
    expected = 0.0
    for left in (42 / 64, 20 / 64, 6 / 64):
        trained = 4 - (4 - expected) * left
        expected += (trained - expected) * 3 / 5
    assert abs(float(weights(apart)["network.weight"][0, 1]) - expected) < 1e-6
