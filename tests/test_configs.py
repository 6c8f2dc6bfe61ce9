"""Every configuration says what it is, parses with the quickstart below it, and runs where it needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.cli import main
from lit_fed.studies.cells import lay_out
from lit_fed.studies.metrics import check_metrics
from lit_fed.studies.parts import check_parts
from lit_fed.studies.study import read_study
from tests.support import ROOT, rows

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))  # no runs, but grids of them
PROFILES = [(path, profile) for path in STUDIES for profile in yaml.safe_load(path.read_text("utf-8"))["profiles"]]
ALL = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path not in STUDIES]
SHORT = ("--trainer.max_rounds", "1", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
SMALL = ("--model.init_args.local_epochs", "null", "--model.init_args.local_steps", "1")


def name(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def parsed(capsys: Any, *paths: Path) -> dict[str, Any]:
    """What a command with these files would run with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(word for path in paths for word in ("-c", str(path))), "--print_config"])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (0, "")
    content: dict[str, Any] = yaml.safe_load(captured.out)
    return content


def contains(whole: Any, part: Any) -> bool:
    """Whether each setting of a file has arrived; classes may be named with or without their module."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part or (isinstance(whole, str) and isinstance(part, str) and whole.endswith(f".{part}"))


@pytest.mark.parametrize("path", ALL, ids=name)
def test_says_what_it_is_and_parses_on_top_of_the_quickstart(path, capsys):
    text = path.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    content = parsed(capsys, QUICKSTART, path)
    assert contains(content, yaml.safe_load(text)), "a setting was dropped"
    assert all(content[key]["class_path"] for key in ("model", "data", "algorithm"))


@pytest.mark.parametrize("path", [p for p in ALL if p.parent.name in ("experiment", "feddr_plus", "configs")], ids=name)
def test_an_experiment_is_complete_by_itself(path, capsys):
    content = parsed(capsys, path)
    schedule = content["model"]["init_args"]["lr_scheduler"]
    assert schedule is None or schedule["init_args"].get("T_max") in (None, content["trainer"]["max_rounds"])


RUNNABLE = [
    *(CONFIGS / "participation").glob("*.yaml"),
    *(CONFIGS / "data").glob("digits_*.yaml"),
    *(CONFIGS / "method").glob("*.yaml"),
    *(CONFIGS / "network").glob("*.yaml"),
    CONFIGS / "trainer" / "cpu.yaml",
    QUICKSTART,
]


@pytest.mark.parametrize("path", sorted(RUNNABLE), ids=name)
def test_runs_a_round_on_embedded_data(path, tmp_path, capsys):
    # A network of millions of parameters need not be tested on every client.
    few = ("--trainer.participation.init_args.count", "1", "--trainer.evaluate_every", "0")
    options = [*SHORT, *SMALL, *(few if path.parent.name == "network" else ())]
    main(["fit", "-c", str(QUICKSTART), "-c", str(path), *options, "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    assert len(rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")) == 1


def test_methods_and_data_compose_because_they_set_different_things():
    sets = {"method": {"model", "algorithm"}, "data": {"data"}, "network": {"model"}, "participation": {"trainer"}}
    for folder, keys in sets.items():
        for path in (CONFIGS / folder).glob("*.yaml"):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            protocols = content.pop("trainer", None) if folder == "method" else None
            assert set(content) <= keys, path
            assert protocols is None or set(protocols) == {"protocols"}, path


TUNED = sorted((CONFIGS / "experiment" / "feddr_plus" / "tuned").glob("digits_*.yaml"))


@pytest.mark.parametrize("path", [CONFIGS / "method" / "fedavg.yaml", *TUNED], ids=name)
def test_the_pocket_experiment_runs_with_every_tuned_method(path, tmp_path, capsys):
    files = ["-c", str(CONFIGS / "experiment" / "feddr_plus" / "digits.yaml"), "-c", str(path)]
    main(["fit", *files, *SHORT, *SMALL, "--trainer.evaluate_every", "0", "--trainer.default_root_dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    (row,) = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert -1 <= float(row["alignment/observed"]) <= 1


def test_a_method_keeps_the_settings_below_it(capsys):
    base = parsed(capsys, QUICKSTART)["model"]
    prox = parsed(capsys, QUICKSTART, CONFIGS / "method" / "fedprox.yaml")["model"]
    assert prox["class_path"] == "lit_fed.methods.FedProx"
    assert prox["init_args"] == base["init_args"] | {"mu": 0.01}
    again = parsed(capsys, QUICKSTART, CONFIGS / "method" / "fedprox.yaml", CONFIGS / "method" / "fedavg.yaml")
    assert again["model"] == base


def test_a_network_leaves_nothing_of_the_one_below_it(capsys):
    folder = CONFIGS / "network"
    content = parsed(capsys, QUICKSTART, folder / "mlp.yaml", folder / "small_cnn.yaml")["model"]["init_args"]
    assert (content["network"], content["network_args"]) == ("small_cnn", {"width": 16})


def test_every_study_has_the_two_profiles_of_the_readme():
    assert all({(path, "paper"), (path, "pocket")} <= set(PROFILES) for path in STUDIES)


@pytest.mark.parametrize(("path", "profile"), PROFILES, ids=lambda part: part if isinstance(part, str) else name(part))
def test_a_study_says_what_it_is_and_all_of_its_cells_parse(path, profile, tmp_path, monkeypatch):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith((".", "?"))
    monkeypatch.chdir(ROOT)  # the files that it names are relative to the working directory
    grid = lay_out(read_study(path.relative_to(ROOT), profile), tmp_path)
    check_metrics(grid)
    assert grid.cells
    if profile == "pocket":
        check_parts(grid.cells)  # on data that need no file


def test_no_configuration_names_a_folder_of_one_machine():
    for path in [*ALL, *STUDIES]:
        assert ": /" not in path.read_text(encoding="utf-8")
