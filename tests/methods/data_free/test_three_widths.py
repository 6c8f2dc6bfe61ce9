"""FedGen and HFedCKD on clients with networks of three widths: resumed == uninterrupted, 1 process == 2."""

import sys
from pathlib import Path

import pytest

from tests.methods.test_every_method import assert_same_run, trained
from tests.support import ROOT, rows, run_cli

RUN = ROOT / "configs/papers/hfedckd/runs/digits_three_widths.yaml"
METHODS = {"hfedckd": [], "fedgen": ["-c", str(ROOT / "configs/method/fedgen.yaml")]}
SMALL = {
    "trainer.local_epochs": "1",
    "trainer.evaluate_every": "2",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.participation.init_args.count": "4",
    "data.init_args.num_clients": "9",
    "data.init_args.max_train_samples": "360",
    "algorithm.init_args.generator_steps": "4",
}


def run(folder: Path, method: str, rounds: int, devices: int = 1) -> Path:
    """Start, or go on with, a run of 9 clients, 4 a round; returns its folder."""
    options = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    options += ["--trainer.max_rounds", str(rounds), "--trainer.devices", str(devices), "--ckpt_path", "last"]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = (sys.executable,) if devices == 1 else torchrun
    folder.mkdir(exist_ok=True)
    done = run_cli("fit", "-c", RUN, *METHODS[method], *options, cwd=folder, program=program)
    assert done.returncode == 0, done.stderr
    return folder / "lightning_logs/version_0"


@pytest.mark.parametrize("method", METHODS)
def test_resumed_is_uninterrupted_and_two_processes_are_one(method: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", method, 4)
    early = trained(run(tmp_path / "resumed", method, 2))
    resumed = run(tmp_path / "resumed", method, 4)
    assert trained(resumed) - early, "no client appears late"
    assert_same_run(whole, resumed)
    assert_same_run(whole, run(tmp_path / "spread", method, 4, devices=2))
    last = rows(whole / "metrics.csv")[-1]
    assert all(last[f"global_{kind}/acc"] for kind in ("full", "half", "quarter"))
