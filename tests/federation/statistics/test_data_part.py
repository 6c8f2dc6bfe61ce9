"""The data of a run as statistics write them: from files to a training by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_fed import Classifier
from lit_fed.command.cli import main
from lit_fed.data import Table
from tests.command.support import error_of
from tests.data.formats.test_table_gaps import FEATURES, WARDS, patients
from tests.federation.support import deploy, simulate, small
from tests.support import assert_same, weights

pandas = pytest.importorskip("pandas")


def words(path: Path, *more: str) -> list[str]:
    data = ["--data", "Table", "--data.path", str(path), "--data.target", "ill", "--data.client", "site"]
    return ["statistics", *data, "--data.features", str(FEATURES), *more]


def written(path: Path, folder: Path, *more: str) -> dict[str, Any]:
    files = ["--output", str(folder / "statistics.json"), "--write", str(folder / "data.yaml"), "--overwrite"]
    assert main([*words(path, *more), *files]) in (0, None)
    content: dict[str, Any] = yaml.safe_load((folder / "data.yaml").read_text())
    return content["data"]


def test_levels_medians_classes_and_scale_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians are those of pandas to within a cell of 1,000; a gap may also be in a test row."""
    path = patients(tmp_path)
    data = Table(str(path), "ill", FEATURES, "site", impute="median", levels={"ward": WARDS})
    data.setup()
    part = written(path, tmp_path, "--bins", "1000")
    settings, frame = part["init_args"], pandas.read_csv(path)
    assert part["class_path"] == "lit_fed.data.Table"
    assert settings["features"] == FEATURES
    assert settings["levels"] == {"ward": sorted(frame["ward"].dropna().unique())}
    assert settings["class_names"] == ["no", "yes"]
    assert settings["normalize"] == str(tmp_path / "statistics.json")
    assert settings["mean"] is None
    (encode, _) = data.preprocessing() or []
    assert settings["impute"].keys() == {"age", "dose"}
    for name, place in (("age", 0), ("dose", 2)):
        width = (frame[name].max() - frame[name].min()) / 1000
        assert settings["impute"][name] == pytest.approx(encode["fill"][place], abs=1.5 + 2 * width)
    counts = data.census.class_histogram().sum(axis=0).tolist()
    head = (tmp_path / "data.yaml").read_text().splitlines()[0]
    assert head == f"# {sum(counts)} training samples, no {counts[0]}, yes {counts[1]}"
    told = capsys.readouterr()
    assert "ward is a category of 4 levels (data.levels)" in told.out + told.err


def test_a_run_reads_the_written_data_and_what_is_given_stays(tmp_path: Path) -> None:
    path = patients(tmp_path)
    given = ["--data.impute", "{age: 50}", "--data.levels", str({"ward": WARDS}), "--data.class_names"]
    given += ['["yes", "no"]']
    settings = written(path, tmp_path, *given)["init_args"]
    assert settings["impute"]["age"] == 50
    assert settings["levels"] == {"ward": WARDS}
    assert settings["class_names"] == ["yes", "no"]
    data = Table(**settings)
    data.setup()
    x = torch.cat([x for x, _ in data.test_loader()])
    assert x.shape[1] == data.input_shape[0] == 9
    assert torch.isfinite(x).all()
    figures = yaml.safe_load((tmp_path / "statistics.json").read_text())["all"]["columns"]
    assert [column["name"] for column in figures] == ["age", "dose", "stay"]  # a category has no mean
    (_, normalize) = data.preprocessing() or []
    assert normalize["mean"][:3] == [column["mean"] for column in figures]


def test_nodes_train_on_the_written_data_as_a_simulation_does(tmp_path: Path) -> None:
    settings = written(patients(tmp_path), tmp_path)["init_args"]

    def model() -> Classifier:
        torch.manual_seed(0)
        return Classifier("mlp", num_classes=2, input_shape=(10,), network_args={"hidden": [4]})

    make = small(model, lambda: Table(**settings), num_threads=1)
    simulation = simulate(make, tmp_path / "here")
    nodes = deploy(make, tmp_path / "there", [[0, 2], [1]])
    assert_same(weights(simulation), weights(nodes))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--least", "5", "--ranges", "{'*': [0, 200]}"], "--write tells the levels of 'ward', which --least and"),
        (["--ranges", "{age: [1000, 2000]}", "--data.levels", "{ward: [icu]}"], "the median of 'age' is withheld or"),
    ],
)
def test_what_would_tell_of_single_samples_or_is_not_known_is_refused(
    more: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = patients(tmp_path)
    files = ["--output", str(tmp_path / "s.json"), "--write", str(tmp_path / "data.yaml")]
    assert line in error_of([*words(path, *more), *files], capsys)
    assert not (tmp_path / "data.yaml").exists()


def test_given_levels_may_be_written_below_a_threshold(tmp_path: Path) -> None:
    """The file holds levels that were given, and no count of one."""
    more = ["--least", "5", "--ranges", "{'*': [0, 200]}", "--data.levels", str({"ward": WARDS})]
    settings = written(patients(tmp_path), tmp_path, *more)["init_args"]
    assert settings["levels"] == {"ward": WARDS}
    assert "icu" not in (tmp_path / "statistics.json").read_text()


@pytest.mark.parametrize("gap", [False, True])
def test_whether_a_protected_column_has_a_gap_is_not_written(tmp_path: Path, gap: bool) -> None:
    """In `stay` one sample of 120 has one, or none has; `age` is given."""
    path = patients(tmp_path)
    frame = pandas.read_csv(path)
    frame["stay"] = frame["stay"].astype(float)
    if gap:
        frame.loc[3, "stay"] = float("nan")
    frame.to_csv(path, index=False)
    more = ["--least", "5", "--ranges", "{'*': [0, 200]}", "--data.levels", str({"ward": WARDS})]
    settings = written(path, tmp_path, *more, "--data.impute", "{age: 50}")["init_args"]
    assert settings["impute"].keys() == {"age", "dose", "stay"}


def test_a_column_of_free_text_is_no_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = patients(tmp_path)
    frame = pandas.read_csv(path)
    frame["ward"] = [f"seen on day {row} of the study" for row in range(len(frame))]
    frame.to_csv(path, index=False)
    line = error_of([*words(path), "--output", str(tmp_path / "s.json")], capsys)
    assert "ward has 120 different values in 120 rows, too many for levels; leave it out of data.features" in line


def test_images_get_a_scale_and_no_settings_of_tables(tmp_path: Path) -> None:
    files = ["--output", str(tmp_path / "s.json"), "--write", str(tmp_path / "data.yaml")]
    assert main(["statistics", "--data", "Digits", "--data.num_clients", "3", *files]) in (0, None)
    settings = yaml.safe_load((tmp_path / "data.yaml").read_text())["data"]["init_args"]
    assert settings["normalize"] == str(tmp_path / "s.json")
    assert not {"levels", "impute", "features"} & settings.keys()
    assert np.isscalar(settings["num_clients"])
