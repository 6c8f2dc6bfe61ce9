"""A run that is private at sample level gives the same models on two processes, and after a kill in any phase."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.privacy.support import PLACES
from tests.privacy.test_across_paths import keyed, outcome
from tests.support import ROOT, assert_same, rows, run_cli, saved_weights, start_cli

pytest.importorskip("dp_accounting")
RUN = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/privacy/sample_level.yaml")]
RUN += ["--trainer.max_rounds", "3", "--trainer.accelerator", "cpu", "--trainer.local_epochs", "1"]
KEYED = [*RUN, "--trainer.privacy.key_file", "run.key"]


@pytest.mark.long
def test_killed_in_every_phase_of_a_round_and_resumed_releases_the_same_models(tmp_path: Path) -> None:
    whole, folder = keyed(tmp_path / "whole"), keyed(tmp_path / "killed")
    done = run_cli(*KEYED, cwd=whole)
    assert done.returncode == 0, done.stderr
    started = start_cli(*KEYED, cwd=folder, program=(sys.executable, "-m", "tests.privacy.support"))
    out, err = started.communicate(timeout=900)
    killed = ["status -9"] * (2 * PLACES) + ["status 0"]
    assert [line for line in out.splitlines() if line.startswith("status")] == killed, err
    assert_same(saved_weights(whole / "lightning_logs/version_0"), saved_weights(folder / "lightning_logs/version_0"))
    assert outcome(folder) == outcome(whole)


@pytest.mark.long
@pytest.mark.parametrize("words", [RUN, KEYED], ids=["simulated", "keyed"])
def test_two_processes_are_one(words: list[str], tmp_path: Path) -> None:
    found = []
    for devices in ("1", "2"):
        folder = keyed(tmp_path / devices)
        done = run_cli(*words, "--trainer.devices", devices, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(folder / "lightning_logs/version_0")
    one, two = found
    assert_same(saved_weights(one), saved_weights(two))
    epsilons = [[row["privacy/epsilon"] for row in rows(folder / "metrics.csv")] for folder in found]
    assert epsilons[0] == epsilons[1]
