"""A cell of the studies of HFedCKD on windows of sensors, as which small files stand in for the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lit_fed.command.cli import main
from lit_fed.studies.file.study import read_study
from lit_fed.studies.running.cells import lay_out
from tests.support import ROOT, rows


@pytest.mark.long
@pytest.mark.parametrize("study", ["hfedckd_limited", "hfedckd_full"])
def test_a_round_on_windows_with_every_kind(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Twelve people with twelve windows each, of whom the last four are tested on in the official split.
    random = np.random.default_rng(0)
    data = {
        split: random.normal(size=(len(people) * 12, 9, 128)).astype(np.float16)
        for split, people in (("train", range(1, 9)), ("test", range(9, 13)))
    }
    np.savez(
        tmp_path / "uci_har.npz",
        x_train=data["train"], y_train=np.arange(96) % 6, client_train=np.repeat(np.arange(1, 9), 12),
        x_test=data["test"], y_test=np.arange(48) % 6, client_test=np.repeat(np.arange(9, 13), 12),
    )  # fmt: skip
    monkeypatch.chdir(ROOT)
    path = Path("configs") / "papers" / "hfedckd" / "studies" / f"{study}.yaml"
    cells = lay_out(read_study(path, "uci_har"), tmp_path / "study").cells
    (args,) = [cell.args for cell in cells if cell.name == "hfedckd/s10/0"]
    options = {
        "trainer.max_rounds": "1", "trainer.evaluate_every": "1", "trainer.logger": "false",
        "trainer.enable_progress_bar": "false", "trainer.default_root_dir": str(tmp_path),
        "data.init_args.root": str(tmp_path), "algorithm.init_args.public_size": "12",
    }  # fmt: skip
    natural = ["-c", "configs/data/uci_har_natural.yaml"]  # the file in place of the folder that is published
    main(["fit", *args, *natural, *(word for key, value in options.items() for word in (f"--{key}", value))])
    (row,) = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert 0 <= float(row["clients_global/acc_mean"]) <= 1
    assert row["participation/count"] == "10"
