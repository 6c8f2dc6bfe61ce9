"""What holds for every method, on its own configuration file: resumed == uninterrupted, 1 process == 2.

Four of eight clients take part in a round, so some appear for the first time after the resume; `IN_FLIGHT` are
asynchronous federations.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.methods.run_methods import METHODS, ON_PUPPETS, VARIANTS, run_method
from tests.support import ROOT, assert_same, client_states, rows, saved_weights

ROUNDS = 4
IN_FLIGHT = [f"{name}_asynchronous" for name in ("fedasync", "fedavg", "fedbuff", "fednova", "fedper", "scaffold")]
EVERY = [*METHODS, *IN_FLIGHT, *VARIANTS]
EACH = pytest.mark.parametrize("method", EVERY)


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The methods whose tests are to run, of which ``-k`` may leave some out."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["method"] for item in items}
    return [method for method in EVERY if method in asked]


@pytest.fixture(scope="module")
def whole(chosen: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uninterrupted runs on one process."""
    folder = tmp_path_factory.mktemp("whole")
    for method in chosen:
        run_method(method, folder, ROUNDS)
    return folder


@pytest.fixture(scope="module")
def spread(chosen: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on two processes, interrupted after two rounds."""
    folder = tmp_path_factory.mktemp("spread")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for rounds in (2, ROUNDS):
        command = [*torchrun, "-m", "tests.methods.run_methods", str(folder), str(rounds), "2", *chosen]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    """Bit-identical weights, server state and client states; metrics up to the order of float64 sums."""
    assert_same(saved_weights(one), saved_weights(other))
    servers = [torch.load(run / "checkpoints/last.ckpt", weights_only=True)["server"] for run in (one, other)]
    torch.testing.assert_close(*servers, rtol=0, atol=0)
    states = client_states(one), client_states(other)
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0)
    for mine, theirs in zip(rows(one / "metrics.csv"), rows(other / "metrics.csv"), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if not name.startswith("time/") and mine[name]:
                assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-5, abs=1e-7), name


def trained(run: Path) -> set[str]:
    return {row["client_id"] for row in rows(run / "clients.csv") if row["stage"] == "train"}


@EACH
def test_resumed_is_uninterrupted(method: str, whole: Path, tmp_path: Path) -> None:
    early = {
        row["client_id"] for row in rows(run_method(method, tmp_path, 2) / "clients.csv") if row["stage"] == "train"
    }
    resumed = run_method(method, tmp_path, ROUNDS)
    late = {row["client_id"] for row in rows(resumed / "clients.csv") if row["stage"] == "train"} - early
    assert late, "no client appears late"
    assert_same_run(whole / method / "lightning_logs/version_0", resumed)


@pytest.mark.long
@EACH
def test_two_processes_are_one(method: str, whole: Path, spread: Path) -> None:
    assert_same_run(*(folder / method / "lightning_logs/version_0" for folder in (whole, spread)))


@pytest.mark.parametrize("method", [method for method in EVERY if method not in ON_PUPPETS])
def test_it_learns(method: str, whole: Path) -> None:
    """Below the loss of guessing, ln 10 = 2.303, on what the clients would use."""
    last = rows(whole / method / "lightning_logs/version_0/metrics.csv")[-1]
    assert float(last["clients/loss_mean"]) < 2.303
