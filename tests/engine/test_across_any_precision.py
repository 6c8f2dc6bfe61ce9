"""Strangers' modules in mixed precision, on several processes and with ``ddp`` inside a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision

from lit_fed.methods import FedAvg
from tests.engine.stranger_support import CONFIGS, DIGITS, SMALL, STRANGERS, Backwards, digits
from tests.support import assert_same, rows, run_cli, saved_weights, trainer, weights


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_close_and_hands_nothing_on(tmp_path: Path, kind: Any, precision: str) -> None:
    """On the CPU Lightning replaces 16-mixed by bf16-mixed, so the plugin with its scaler is put in by hand."""
    found = []
    for options in ({}, {"participation": None}, {"participation": Backwards()}):
        torch.manual_seed(0)
        plain = not options
        made = trainer(tmp_path, max_rounds=1, logger=True, precision="32-true" if plain else "bf16-mixed", **options)
        scales: list[float] = []
        if precision == "16-mixed" and not plain:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            made.fabric.strategy._precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
            scaler.update = _watched(scaler.update, scaler, scales)  # type: ignore[method-assign]  # to look at it
        made.fit(kind(), digits(), FedAvg())
        found.append(weights(made))
        assert precision == "bf16-mixed" or plain or max(scales) > 2.0**10 >= min(scales)
    assert_same(found[1], found[2])
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0.1, atol=0.05)


def _watched(update: Any, scaler: Any, scales: list[float]) -> Any:
    def watch() -> None:
        scales.append(scaler.get_scale())
        update()
        scales.append(scaler.get_scale())

    return watch


@pytest.mark.long
def test_two_processes_are_one(cwd: Path) -> None:
    """Also for metric objects, of which the global test's are merged, and where one process has no batch to test."""
    runs = []
    for processes in ("1", "2"):
        settings = (
            SMALL | DIGITS | {"trainer.max_rounds": "2", "trainer.devices": processes, "trainer.accelerator": "cpu"}
        )
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        files: list[str | Path] = ["-c", CONFIGS / "quickstart.yaml", "--model", "strangers_in_cwd.Net"]
        done = run_cli("fit", *files, *words, "--trainer.default_root_dir", processes, cwd=cwd)
        assert done.returncode == 0, done.stderr
        runs.append(cwd / processes / "lightning_logs" / "version_0")
    assert_same(saved_weights(runs[0]), saved_weights(runs[1]))
    for one, other in zip(*(rows(folder / "metrics.csv") for folder in runs), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if not key.startswith("time/") and one[key]:
                assert float(one[key]) == pytest.approx(float(other[key]), rel=1e-5, abs=1e-7), key


@pytest.mark.long
def test_ddp_within_a_client_is_one_process(cwd: Path) -> None:
    """Batches of 16 are cut into two parts of 8, whose gradients' mean is the whole batch's, up to the last bits."""
    runs = []
    for name, more in (("one", []), ("ddp", ["-c", str(CONFIGS / "trainer" / "ddp.yaml")])):
        settings = SMALL | {"trainer.max_rounds": "2", "trainer.accelerator": "cpu", "trainer.precision": "32-true"}
        settings |= {} if not more else {"trainer.devices": "2"}
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        files: list[str | Path] = [
            "-c",
            CONFIGS / "quickstart.yaml",
            *more,
            "--model",
            "strangers_in_cwd.RegressionNet",
        ]
        files += ["-c", CONFIGS / "data" / "diabetes.yaml"]
        done = run_cli("fit", *files, *words, "--trainer.default_root_dir", name, cwd=cwd)
        assert done.returncode == 0, done.stderr
        runs.append(cwd / name / "lightning_logs" / "version_0")
    torch.testing.assert_close(saved_weights(runs[0]), saved_weights(runs[1]), rtol=1e-4, atol=1e-6)
    for one, other in zip(*(rows(folder / "metrics.csv") for folder in runs), strict=True):
        assert one.keys() == other.keys()
        for key in ("train/loss", "global/mse", "global/mae", "clients/mae_mean"):
            assert float(one[key]) == pytest.approx(float(other[key]), rel=1e-4), key
