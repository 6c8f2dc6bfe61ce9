"""Plain LightningDataModules in configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from lit_fed.command.reading.words import CommandLine, wrapped
from tests.command.support import error_of
from tests.support import rows

MY_DATA = "tests.data.formats.test_wrapped.MyData"


@pytest.mark.parametrize(
    ("section", "module", "rest"),
    [
        (MY_DATA, {"class_path": MY_DATA}, {}),
        ({"class_path": MY_DATA}, {"class_path": MY_DATA}, {}),
        (
            {"class_path": MY_DATA, "init_args": {"batch_size": 8, "num_clients": 3, "target": 1, "oops": 1}},
            {"class_path": MY_DATA, "init_args": {"batch_size": 8, "oops": 1}},  # both know batch_size
            {"num_clients": 3, "target": 1},
        ),
    ],
)
def test_settings_go_to_whom_they_belong(section: Any, module: dict[str, Any], rest: dict[str, Any]) -> None:
    assert wrapped(section) == {"class_path": "Wrapped", "init_args": {"module": module, **rest}}


@pytest.mark.parametrize("section", ["Digits", {"class_path": "Wrapped"}, {"init_args": {}}, None, 3, "no.such.Data"])
def test_other_data_stay_as_they_are(section: Any) -> None:
    assert wrapped(section) is section


def test_an_option_is_wrapped() -> None:
    mine = {"class_path": "Wrapped", "init_args": {"module": {"class_path": MY_DATA}}}
    for words, expected in (
        (["--data", MY_DATA], mine),
        ([f"--data={MY_DATA}"], mine),
        ([f"--data={{class_path: {MY_DATA}}}"], mine),
        (["-c", f"{{data: {MY_DATA}}}"], mine),
        (["--data", "Digits"], "Digits"),
    ):
        assert CommandLine(["fit", *words]).settings.content == {"data": expected}


@pytest.mark.parametrize("before", [[], ["-c", "configs/data/digits_iid.yaml"]])
def test_a_file_runs_as_the_command_line_does(tmp_path: Path, before: list[str]) -> None:
    content = {
        "trainer": {"max_rounds": 1, "enable_progress_bar": False, "logger": False},
        "model": {"class_path": "Classifier", "init_args": {"network": "logistic"}},
        "data": {"class_path": MY_DATA, "init_args": {"batch_size": 8}},
        "algorithm": "FedAvg",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    root = ["--trainer.default_root_dir", str(tmp_path)]
    main(["fit", *before, "-c", str(tmp_path / "run.yaml"), *root, "--data.num_clients", "3"])
    folder = tmp_path / "lightning_logs/version_0"
    assert len(rows(folder / "metrics.csv")) == 1
    data = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["data"]
    assert data["class_path"] == "lit_fed.data.Wrapped"
    assert data["init_args"]["num_clients"] == 3
    assert data["init_args"]["module"] == {"class_path": MY_DATA, "init_args": {"batch_size": 8, "noise": 0.0}}


def test_a_setting_that_neither_knows_is_the_modules(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.yaml").write_text(f"data: {{class_path: {MY_DATA}, init_args: {{nois: 1}}}}\n", encoding="utf-8")
    words = ["fit", "--model", "Classifier", "--algorithm", "FedAvg", "-c", str(tmp_path / "run.yaml")]
    assert error_of(words, capsys) == (
        "config file run.yaml, line 1: unknown key data.init_args.module.init_args.nois: MyData has no such setting; "
        "did you mean noise?"
    )
