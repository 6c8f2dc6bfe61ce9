"""Settings and arrays that cannot work, each named in a line before there is a run's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from tests.command.support import QUICKSTART, command, error_of
from tests.support import fit

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
LABELS = np.arange(60) % 3
SCHEDULE = "--model.lr_scheduler"
SHAPES = """
import torch
from lightning import LightningModule
from torch import nn


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(63, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
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
        (["--seed_everything", "3"], "unknown option --seed_everything; here it is trainer.seed"),
        (["--trainer.profiler", "simple"], "here it is python -m cProfile -m lit_fed fit …"),
        (
            ["--trainer.callbacks", "[ModelSummary]"],
            "which a federation does not have; use lit-fed cost",
        ),
        (["--model", "nett.Net"], "model: there is no module 'nett', neither in this folder nor installed"),
        (["--trainer.max_rounds", "a" * 5000], f"expected a whole number, not {'a' * 80}…{'a' * 40}"),
        (["--trainer.overfit_batches", "1"], "unknown option --trainer.overfit_batches; here it is data.max_train_"),
    ],
)
def test_what_cannot_work_is_said_at_once(args: list[str], expected: str, capsys: Any) -> None:
    assert expected in error_of(command("fit", *args), capsys)
    assert not Path("lightning_logs").exists()


def test_an_error_of_shapes_names_the_layer_and_begins_in_the_users_code(capsys: Any) -> None:
    Path("shapes_of_mine.py").write_text(SHAPES)
    with pytest.raises(SystemExit):
        main(command("fit", "--model", "shapes_of_mine.Net", "--trainer.protocols", "[]"))
    traceback, _, line = capsys.readouterr().err.rstrip().rpartition("\n")
    layer = "RuntimeError in the layer layers.1, Linear(in_features=63, out_features=10, bias=True), on an input ("
    assert layer in line
    first, second = [one for one in traceback.splitlines() if not one.startswith("    ")][:2]
    assert first == "Traceback (most recent call last):"
    assert "shapes_of_mine.py" in second


def test_a_class_of_pytorch_lightning_is_told_where_to_import_from(tmp_path: Path) -> None:
    theirs = type("LightningModule", (), {"__module__": "pytorch_lightning.core.module"})
    mine: Any = type("Mine", (theirs,), {})
    told = "Mine derives from pytorch_lightning's LightningModule; import LightningModule from lightning"
    with pytest.raises(ConfigError, match=told):
        fit(tmp_path, mine())


@pytest.mark.parametrize("name", ["RANK", pytest.param("SLURM_PROCID", marks=pytest.mark.long)])
def test_one_of_several_processes_on_one_device_is_refused_in_a_line(name: str) -> None:
    words = ["-c", str(QUICKSTART), "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "lit_fed", "fit", *words], env=os.environ | {name: "1"}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        f"lit-fed: error: {name} is 1, as in one of several processes, but trainer.devices 1 "
    )
    assert done.stderr.count("\n") == 1


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
