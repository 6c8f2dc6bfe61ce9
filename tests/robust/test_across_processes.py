"""Two processes give one process's bits, for rules and attacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ROOT, assert_same, rows, run_cli, saved_weights

RUN = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_rounds", "3", "--trainer.accelerator", "cpu"]
RUN += ["--trainer.local_epochs", "1", "--trainer.evaluate_every", "0", "--trainer.participation.count", "7"]
PAIRS = [
    ("Median", "ALIE", "sequential"),
    ("{class_path: Krum, init_args: {attackers: 2}}", "InnerProduct", "sequential"),
    ("{class_path: CentredClipping, init_args: {radius: 1.0}}", "Mimic", "vectorized"),
    ("{class_path: GeometricMedian, init_args: {before: Bucketing}}", "GaussianNoise", "sequential"),
    ("{class_path: TrimmedMean, init_args: {attackers: 2}}", "Backdoor", "vectorized"),
    ("null", "ALIE", "sequential"),
]


@pytest.mark.long
@pytest.mark.parametrize(("rule", "attack", "executor"), PAIRS)
def test_two_processes_are_one(rule: str, attack: str, executor: str, tmp_path: Path) -> None:
    found = []
    for devices in ("1", "2"):
        folder = tmp_path / devices
        folder.mkdir()
        done = run_cli(
            *RUN, "--trainer.aggregation", rule, "--trainer.attack", attack, "--trainer.attack.fraction", "0.3",
            "--trainer.executor", executor, "--trainer.devices", devices, cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(folder / "lightning_logs/version_0")
    one, two = found
    for name in ("aggregation/kept", "aggregation/left_out", "aggregation/skipped", "attack/attackers"):
        columns = [[row.get(name) for row in rows(folder / "metrics.csv")] for folder in found]
        assert columns[0] == columns[1]
    if executor == "sequential":
        assert_same(saved_weights(one), saved_weights(two))
    else:  # groups of other sizes round differently
        weights, others = saved_weights(one), saved_weights(two)
        assert all((weights[name] - others[name]).abs().max() < 1e-5 for name in weights)
