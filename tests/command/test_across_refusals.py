"""Settings and arrays that cannot work, each named in a line before there is a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fed.command.cli import main
from tests.command.support import command, error_of

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
LABELS = np.arange(60) % 3
SCHEDULE = "--model.lr_scheduler"
SHORT = ("--trainer.max_rounds", "1", "--trainer.local_epochs", "null", "--trainer.local_steps", "1")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--trainer.devices", "500"], "trainer.devices is 500, but this machine has"),
        (["--trainer.num_threads", "100000"], "trainer.num_threads is 100000; this machine can have at most"),
        (["--model.optimizer", "SparseAdam"], "cannot be trained by SparseAdam: RuntimeError: SparseAdam does not"),
        (["--model.optimizer", "LBFGS"], "has the optimizer LBFGS, which asks for the loss several times a step"),
        ([f"{SCHEDULE}.T_max", "0"], "its schedule CosineAnnealingLR fails in round 1: ZeroDivisionError"),
        (
            [SCHEDULE, "OneCycleLR", f"{SCHEDULE}.max_lr", "0.1", f"{SCHEDULE}.total_steps", "2"],
            "its schedule OneCycleLR fails in round 3: ValueError: Tried to step 3 times",
        ),
        (["--trainer.protocols", "[GlobalTest, GlobalTest]"], "trainer.protocols has two named 'global'"),
        (["--model.in_channels", "0"], "in_channels is 0; it must be at least 1"),
        (["--model.network", "vit_tiny_patch16_224"], "has no patch in an image of (8, 8) pixels"),
        (["--trainer.local_epochs", "2", "--trainer.local_steps", "2"], "local_epochs is 2.0 and local_steps is 2"),
        (
            ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "."],
            "trainer.logger CSVLogger would write its metrics.csv over a run's own",
        ),
        (["--algorithm", "NewHead"], "NewHead is abstract; name a class that derives from it"),
        (["--trainer.fast_dev_run", "true"], "unknown option --trainer.fast_dev_run; here it is --trainer.max_rounds"),
    ],
)
def test_what_cannot_work_is_said_at_once(args: list[str], expected: str, capsys: Any) -> None:
    assert expected in error_of(command("fit", *args), capsys)
    assert not Path("lightning_logs").exists()


def test_deterministic_algorithms_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torch.use_deterministic_algorithms", lambda mode, **_: asked.append(mode))
    main(command("fit", *SHORT, "--trainer.deterministic", "true"))
    assert True in asked


def arrays(**changes: Any) -> list[str]:
    """A command over arrays of images, some of them others."""
    found = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES, "y_test": LABELS} | changes
    np.savez("my.npz", **found)
    data = ("--data", "ArrayFile", "--data.path", "my.npz", "--data.num_clients", "5", "--data.partition", "IID")
    return command("fit", *SHORT, *data, "--model.network", "mlp")


def floats(value: float = 0.0) -> Any:
    found = (IMAGES / 255.0).astype(np.float32)
    found[7, 1, 1] += value
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x_train": floats(np.nan)}, "sample 7 holds NaN or infinity"),
        ({"x_train": floats(), "x_test": floats(np.inf)}, "test inputs of my.npz: sample 7 holds NaN or infinity"),
        ({"x_train": IMAGES * 1.0, "x_test": IMAGES * 1.0}, "x_train holds float64 from 0 to 255; set data.max_value"),
        ({"x_train": IMAGES.astype(int), "x_test": IMAGES.astype(int)}, "x_train holds int64 from 0 to 255; set"),
        ({"y_train": LABELS * 1_000_000}, "training labels go up to 2000000, but only 3 occur"),
        ({"y_train": LABELS.astype(np.uint64) + np.uint64(2**63)}, "my.npz"),
        ({"y_train": np.array(3)}, "my.npz"),
        ({"y_train": np.array(["cat", "dog", "cow"] * 20)}, "my.npz"),
    ],
)
def test_arrays_that_would_be_learnt_from_wrongly(changes: dict[str, Any], expected: str, capsys: Any) -> None:
    assert expected in error_of(arrays(**changes), capsys)
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("kind", [">f4", ">f8", "longdouble", "f2"])
def test_numbers_of_other_machines_are_converted(kind: str) -> None:
    main(arrays(x_train=floats().astype(kind), x_test=floats().astype(kind), y_train=LABELS.astype(">i8")))
    assert Path("lightning_logs/version_0/metrics.csv").is_file()
