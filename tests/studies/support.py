"""A study that runs in seconds, and ways to write one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from lit_fed.studies.file.study import read_study
from lit_fed.studies.running.cells import CellGrid, lay_out
from tests.support import ROOT

CONFIGS = ROOT / "configs"
TINY: dict[str, Any] = {
    "configs": [str(CONFIGS / "quickstart.yaml")],
    "metric": "global/acc",
    "seeds": [0],
    "set": {
        "trainer.max_rounds": 2,
        "trainer.logger": False,
        "trainer.participation.init_args.count": 2,
        "trainer.local_epochs": None,
        "trainer.local_steps": 2,
    },
    "rows": {
        "fedavg": {"configs": [str(CONFIGS / "method" / "fedavg.yaml")]},
        "prox": {"configs": [str(CONFIGS / "method" / "fedprox.yaml")]},
    },
    "columns": {"iid": {"configs": [str(CONFIGS / "data" / "digits_iid.yaml")]}},
    "profiles": {"pocket": {}},
}


def write_study(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """Write the tiny study, changed."""
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in (TINY | changes).items() if value != ""}, sort_keys=False)
    )
    return path


def grid_of(folder: Path, name: str = "tiny", **changes: Any) -> CellGrid:
    """The tiny study, changed and maybe called otherwise, with its cells."""
    return lay_out(read_study(write_study(folder, name, **changes), "pocket"), folder / "out")


def finish(grid: CellGrid, row: str, column: str, seed: int, metrics: str) -> None:
    """Leave what a finished cell leaves: ``metrics.csv`` and the record."""
    cell = next(c for c in grid.cells if (c.row, c.column, c.seed) == (row, column, seed))
    run = cell.folder / "lightning_logs" / "version_0"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text(metrics)
    cell.write_record(status="done", seconds=10.0)


def commit_in(folder: Path) -> str:
    """Commit a folder as it is, in a repository of its own, and return the commit as records have it."""
    identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    for words in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--allow-empty", "-m", "One")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return told.stdout.strip()[:12]
