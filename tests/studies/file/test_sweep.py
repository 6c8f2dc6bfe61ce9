"""Sweeps by ``grid``, studies without profiles, and what both are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.errors import ConfigError
from lit_fed.studies.file.study import Study, read_study
from lit_fed.studies.pages.figures import has_lines
from lit_fed.studies.results.results import collect, table_markdown
from lit_fed.studies.running.cells import lay_out
from tests.studies.support import CONFIGS, finish

MU, LR = "algorithm.init_args.mu", "model.init_args.optimizer.init_args.lr"
BASE = {"configs": [str(CONFIGS / "quickstart.yaml"), str(CONFIGS / "method/fedprox.yaml")], "metric": "global/acc"}


def write(folder: Path, **content: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(BASE | content, sort_keys=False))
    return path


def swept(tmp_path: Path, **content: Any) -> Study:
    return read_study(write(tmp_path, **content))


def names(study: Study) -> tuple[list[str], list[str]]:
    return list(study.rows), list(study.columns)


def test_one_setting_makes_rows_and_two_a_table(tmp_path: Path) -> None:
    one = swept(tmp_path, grid={MU: [0.01, 0.1]})
    assert names(one) == (["mu=0.01", "mu=0.1"], ["all"])
    assert (one.rows["mu=0.1"].label, one.rows["mu=0.1"].set, one.rows["mu=0.1"].x) == ("mu = 0.1", {MU: 0.1}, 0.1)
    assert (one.x_label, has_lines(one)) == ("mu", True)
    two = swept(tmp_path, grid={MU: [0.01, 0.1], LR: [0.1, 0.2, 0.4]})
    assert names(two) == (["mu=0.01", "mu=0.1"], ["lr=0.1", "lr=0.2", "lr=0.4"])
    assert two.x_label == "lr"
    three = swept(tmp_path, grid={MU: [0, 1], "trainer.local_epochs": [1, 2], LR: [0.1]})
    assert names(three)[0] == [
        "mu=0_local_epochs=1",
        "mu=0_local_epochs=2",
        "mu=1_local_epochs=1",
        "mu=1_local_epochs=2",
    ]


def test_beside_rows_it_makes_columns_and_beside_columns_rows(tmp_path: Path) -> None:
    assert names(swept(tmp_path, rows={"a": {}}, grid={MU: [1, 2]})) == (["a"], ["mu=1", "mu=2"])
    both = {MU: [1, 2], "trainer.local_epochs": [3]}
    assert names(swept(tmp_path, columns={"c": {}}, grid=both))[0] == ["mu=1_local_epochs=3", "mu=2_local_epochs=3"]


def test_a_row_may_be_swept_alone(tmp_path: Path) -> None:
    prox = {"label": "FedProx", "set": {LR: 0.2}, "grid": {MU: [0.1, 1]}}
    study = swept(tmp_path, rows={"fedavg": {}, "prox": prox}, claims=["prox_mu=1 > fedavg"])
    assert list(study.rows) == ["fedavg", "prox_mu=0.1", "prox_mu=1"]
    assert (study.rows["prox_mu=1"].label, study.rows["prox_mu=1"].set) == ("FedProx, mu = 1", {LR: 0.2, MU: 1})
    assert not has_lines(study), "FedAvg stands nowhere on that axis"


def test_values_that_are_no_words_get_names_that_are_folders(tmp_path: Path) -> None:
    part = {"class_path": "Dirichlet", "init_args": {"alpha": 0.1}}
    values = [part, {"class_path": "IID"}, "a/b", "a b", True, None, "x" * 90, -1, 1e-05, "ä"]
    study = swept(tmp_path, grid={"data.init_args.partition": values})
    rows = list(study.rows)
    assert len(set(rows)) == len(values)
    assert rows[4:6] == ["partition=true", "partition=null"]
    assert rows[7:] == ["partition=-1", "partition=1e-05", "partition=ä"]
    assert all("/" not in row and len(row) < 80 for row in rows)
    assert study.rows[rows[2]].label == "partition = a/b"
    assert study.rows[rows[0]].set == {"data.init_args.partition": part}


def test_settings_that_end_alike_are_called_in_full(tmp_path: Path) -> None:
    study = swept(tmp_path, grid={"data.init_args.seed": [1], "trainer.seed": [2], MU: [1]})
    assert list(study.rows) == ["data.init_args.seed=1_trainer.seed=2"]


def test_a_profile_may_change_a_sweep(tmp_path: Path) -> None:
    profiles = {"pocket": {"grid": {MU: [5], LR: None}}, "paper": {}}
    path = write(tmp_path, grid={MU: [0.01, 0.1], LR: [0.1, 0.2]}, profiles=profiles)
    assert names(read_study(path)) == (["mu=5"], ["all"])
    assert len(read_study(path, "paper").places) == 4


def test_cells_of_a_sweep_are_ordinary_runs(tmp_path: Path) -> None:
    grid = lay_out(swept(tmp_path, grid={MU: [0.01, 0.1], "trainer.local_epochs": [1, 2]}), tmp_path / "out")
    found = [
        (c.name, c.config["algorithm"]["init_args"]["mu"], c.config["trainer"]["local_epochs"]) for c in grid.cells
    ]
    assert found == [
        ("mu=0.01/local_epochs=1/0", 0.01, 1),
        ("mu=0.01/local_epochs=2/0", 0.01, 2),
        ("mu=0.1/local_epochs=1/0", 0.1, 1),
        ("mu=0.1/local_epochs=2/0", 0.1, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"grid": [1]}, "grid is [1]; it must be a mapping from settings to lists of values"),
        ({"grid": {MU: 3}}, f"grid.{MU} is 3; it must be a list of values"),
        ({"grid": {MU: []}}, f"grid.{MU} is []; it must be a list of values"),
        ({"grid": {MU: [1, 2, 1]}}, f"grid.{MU}: 1 occurs twice; remove one"),
        ({"grid": {3: [1]}}, "grid: 3 is not a setting; write it as on the command line"),
        (
            {"grid": {MU: [1]}, "rows": {"a": {}}, "columns": {"b": {}}},
            "grid: the study already has rows and columns",
        ),
        ({"rows": {"a": {"grid": {MU: [1]}, "set": {MU: 2}}}}, f"rows.a: {MU} is in set and in grid; remove one"),
        ({"rows": {"a": {"grid": 3}}}, "rows.a.grid is 3; it must be a mapping from settings"),
        ({"rows": {"a": {"grid": {MU: [1]}, "lable": "x"}}}, "rows.a_mu=1: unknown key 'lable'; did you mean label?"),
        ({}, "rows is missing; name at least one row, or sweep a setting with grid"),
        ({"gird": {}}, "unknown key 'gird'; did you mean grid?"),
    ],
    ids=str,
)
def test_a_mistake_in_a_sweep_is_named(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_study(path)
    assert str(caught.value).startswith(f"{path}: {told}")


# ---------------------------------------------------------------------- profiles


def test_a_study_needs_no_profiles(tmp_path: Path) -> None:
    study = swept(tmp_path, rows={"a": {}}, published={"a": {"all": 0.5}})
    grid = lay_out(study, tmp_path / "out")
    finish(grid, "a", "all", 0, "round,global/acc\n0,0.25\n")
    assert grid.cells[0].folder == tmp_path / "out/sweep/default/a/all/seed_0"
    text = table_markdown(collect(grid))
    assert "rofile" not in text, "nothing is told of what it does not have"
    assert "0.2500 (paper 0.5, −0.2500)" in text


@pytest.mark.parametrize(
    ("profiles", "wanted", "chosen"),
    [
        ({"paper": {}, "pocket": {}}, None, "pocket"),
        ({"paper": {}, "pocket": {}}, "paper", "paper"),
        ({"long": {}}, None, "long"),
        ({}, None, "default"),
        ({}, "default", "default"),
    ],
)
def test_which_profile_counts(profiles: dict[str, Any], wanted: str | None, chosen: str, tmp_path: Path) -> None:
    assert read_study(write(tmp_path, rows={"a": {}}, profiles=profiles), wanted).profile == chosen


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file has several profiles; choose one of long, longer with --profile"):
        read_study(write(tmp_path, rows={"a": {}}, profiles={"long": {}, "longer": {}}))
    with pytest.raises(ConfigError, match="the profile 'pocket' does not exist; omit --profile"):
        read_study(write(tmp_path, rows={"a": {}}), "pocket")
