"""A CNN, a vision transformer and an MLP in one federation: the configuration, resumed, and on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.methods.test_across_every_method import assert_same_run, client_states
from tests.support import ROOT, run_cli

pytestmark = pytest.mark.long

CONFIG = ROOT / "configs/papers/uwa/runs/suwa_three_architectures.yaml"


def run(folder: Path, rounds: int, devices: int) -> Path:
    folder.mkdir(exist_ok=True)
    options = ["--trainer.max_rounds", str(rounds), "--trainer.devices", str(devices), "--trainer.logger", "false"]
    small = ["--algorithm.first_epochs", "2", "--trainer.local_epochs", "1", "--data.num_clients", "6"]
    done = run_cli("fit", "-c", CONFIG, *options, *small, "--ckpt_path", "last", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "lightning_logs/version_0"


def test_resumed_on_two_processes_is_uninterrupted_on_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4, 1)
    run(tmp_path / "parts", 2, 2)
    assert_same_run(whole, run(tmp_path / "parts", 4, 2))
    initial = torch.load(whole / "checkpoints/last.ckpt", weights_only=True)["initial"]
    assert list(initial) == ["small_cnn", "vit_tiny_patch16_224", "mlp"]
    states = {int(name): state for (name, _), state in client_states(whole).items()}
    assert len(states) == 6
    for client_id, state in states.items():  # its own network, and nothing else
        assert state.keys() == list(initial.values())[client_id % 3].keys()
