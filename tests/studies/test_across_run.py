"""Studies as a user runs them: finished, failing, killed, interrupted, changed; and mistakes told before any cell."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_fed.command.cli import main
from lit_fed.studies.run_studies import add_arguments
from tests.studies.support import CONFIGS, TINY, write_study
from tests.support import assert_same, rows, run_cli, saved_weights, start_cli

NO_DATA = {"data": "ArrayFile", "data.init_args.path": "no.npz"}
TIMES = {"time/round_s", "time/local_s", "time/aggregate_s", "time/eval_s"}
TABLES = ("table.md", "table.csv", "claims.md")
THREE = {
    "rows": TINY["rows"]
    | {"broken": {"set": {"model.init_args.optimizer.init_args.lr": 1e30}}},  # its loss is not finite
    "claims": ["prox > fedavg", {"claim": "fedavg rises by -1", "metric": "global/loss"}],
    "metric": "clients/acc_mean",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study that ran without interruption, one of its cells failing: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    process = start_cli("study", "-c", write_study(folder, **THREE), "--jobs", "2", cwd=folder)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (1, ""), "a failed cell is the exit status 1"
    return folder / "studies_out" / "tiny" / "pocket", out


def error_of(args: list[str], capsys: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["study", *args])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert len(lines) == 1, lines
    assert not Path("studies_out/tiny/pocket/fedavg").exists(), "a cell has run"
    return lines[0].removeprefix("lit-fed: error: ")


def run_here(*args: str, code: int = 0) -> None:
    status = 0
    try:
        main(["study", *args])
    except SystemExit as stop:
        status = stop.code
    assert status == code


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_study_leaves_tables_pictures_and_ordinary_runs(finished):
    folder, out = finished
    pictures = {"bars.png", "bars.svg", "curves.png", "curves.svg"}
    assert {*TABLES, *pictures, "table.tex", "report.html"} <= {path.name for path in folder.iterdir()}
    run = folder / "prox" / "iid" / "seed_0" / "lightning_logs" / "version_0"
    accuracy = float(rows(run / "metrics.csv")[1]["clients/acc_mean"])
    assert f"{accuracy:.4f}" in (folder / "table.md").read_text()
    assert f"prox/iid/0  clients/acc_mean {accuracy:.4f}" in out
    assert (run / "config.yaml").is_file()
    assert "one seed has no spread" in (folder / "claims.md").read_text()


def test_all_studies_end_in_one_table_of_claims_and_a_page(finished):
    folder, out = finished[0].parents[1], finished[1]
    assert out.count("1 study: 2 claims of ours: 2 undecided\n") == 1
    assert 'href="tiny/pocket/report.html"' in (folder / "index.pocket.html").read_text()
    assert (folder / "claims.pocket.md").read_bytes() == (finished[0] / "claims.md").read_bytes()


def test_a_cell_is_what_its_printed_command_gives_to_the_bit(finished, tmp_path):
    folder = finished[0] / "prox" / "iid" / "seed_0"  # the second cell of its worker, or the first
    command = json.loads((folder / "cell.json").read_text())["fit"]
    assert run_cli("fit", *command, cwd=tmp_path).returncode == 0
    ours, its = (path / "lightning_logs" / "version_0" for path in (folder, tmp_path))
    for one, other in zip(rows(ours / "metrics.csv"), rows(its / "metrics.csv"), strict=True):
        assert one.keys() == other.keys()
        assert {key: value for key, value in one.items() if value != other[key]}.keys() <= TIMES
    assert (ours / "clients.csv").read_bytes().count(b"\n") > 2
    assert_same(saved_weights(ours), saved_weights(its))


def test_a_failed_cell_is_listed_and_stops_no_other(finished):
    folder, out = finished
    assert "failed  tiny: broken/iid/0: client " in out
    assert "is not finite; try a smaller learning rate (see " in out
    assert "| broken | failed |" in (folder / "table.md").read_text()
    assert "is not finite" in (folder / "report.html").read_text()


@pytest.mark.long
def test_killed_and_started_again_gives_the_same_tables(finished, tmp_path, capsys):
    study = write_study(tmp_path, **THREE)
    process = start_cli("study", "-c", study, "--jobs", "1", cwd=tmp_path)
    folder = tmp_path / "studies_out" / "tiny" / "pocket"
    second = folder / "prox" / "iid" / "seed_0" / "lightning_logs" / "version_0" / "metrics.csv"
    wait_for(lambda: second.is_file() and len(second.read_text().splitlines()) > 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = (folder / "fedavg/iid/seed_0/lightning_logs/version_0/metrics.csv").stat().st_mtime_ns
    run_here("-c", str(study), code=1)  # the cell of the killed study is gone, or the folder's lock would be held
    out = capsys.readouterr().out
    assert "3 cells, 1 of them finished before" in out
    assert (folder / "fedavg/iid/seed_0/lightning_logs/version_0/metrics.csv").stat().st_mtime_ns == before
    assert [path.name for path in second.parents[1].iterdir()] == ["version_0"], "it went on in its folder"
    for name in TABLES:
        assert (folder / name).read_bytes() == (finished[0] / name).read_bytes()


def test_changed_cells_begin_in_a_fresh_folder(finished, tmp_path, capsys):
    shutil.copytree(finished[0], "studies_out/tiny/pocket")
    shutil.rmtree("studies_out/tiny/pocket/broken")
    changed = write_study(tmp_path, rows=TINY["rows"], set=TINY["set"] | {"trainer.local_steps": 1})
    run_here("-c", str(changed), "--only", "prox")
    out = capsys.readouterr().out
    assert "prox/iid/0: the settings have changed; the old run is now studies_out/tiny/pocket/prox/iid/" in out
    assert Path("studies_out/tiny/pocket/prox/iid/seed_0.before_1/lightning_logs").is_dir()
    assert Path("studies_out/tiny/pocket/fedavg/iid/seed_0/lightning_logs").is_dir()
    assert "| fedavg | – |" in Path("studies_out/tiny/pocket/table.md").read_text(), "the table mixes settings"


def test_a_dry_run_lists_cells_and_tells_the_time(finished, tmp_path, capsys):
    shutil.copytree(finished[0], "studies_out/tiny/pocket")
    before = {path: path.stat().st_mtime_ns for path in Path("studies_out").rglob("*")}
    run_here("-c", str(write_study(tmp_path, rows=TINY["rows"], seeds=[0, 1])), "--dry_run", "--jobs", "2")
    out = capsys.readouterr().out
    assert [out.count(word) for word in ("finished", "to run")] == [3, 3], "two cells each, and the last line"
    assert "2 cells to run, 2 side by side: about " in out
    assert "from finished cells" in out
    assert {path: path.stat().st_mtime_ns for path in Path("studies_out").rglob("*")} == before


@pytest.mark.long
def test_ctrl_c_stops_the_cells_and_says_how_to_go_on(tmp_path):
    study = write_study(tmp_path, set=TINY["set"] | {"trainer.max_rounds": 500})
    process = start_cli("study", "-c", study, "--only", "fedavg", cwd=tmp_path)
    log = tmp_path / "studies_out/tiny/pocket/fedavg/iid/seed_0/log.txt"
    wait_for(lambda: log.is_file() and "round 1 " in log.read_text(), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "interrupted with 0 of 2 cells finished; resume with" in out
    assert f"lit-fed study -c {study} --only fedavg" in out
    assert "interrupted in round" in log.read_text(), "the cell said good-bye"


@pytest.mark.parametrize(
    ("changes", "args", "expected"),
    [
        (
            {"rows": {"a": {"configs": ["configs/method/fedavgg.yaml"]}}},
            [],
            "a/iid: config file configs/method/fedavgg",
        ),
        (
            {"metric": "global/accuracy"},
            [],
            "fedavg/iid does not report the metric 'global/accuracy'; did you mean global/acc?",
        ),
        ({"claims": ["prox > fedavg at shards"]}, [], "the column 'shards' does not exist; choose one of iid"),
        ({}, ["--profile", "paper"], "the profile 'paper' does not exist; choose one of pocket"),
        ({}, ["--only", "prax"], "--only prax matches no cell"),
        ({}, ["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        ({}, ["--jobs", "two"], "jobs: expected a whole number, not two"),
        (
            {"columns": {"iid": {"set": {"data": "ArrayFile", "data.init_args.path": "no.npz"}}}},
            [],
            "no.npz does not exist",
        ),
    ],
    ids=str,
)
def test_a_mistake_ends_in_one_line_before_any_cell(changes, args, expected, tmp_path, capsys):
    assert expected in error_of(["-c", str(write_study(tmp_path, **changes)), *args], capsys)


def test_a_metric_that_no_round_reports_is_found_by_running_one(tmp_path, capsys):
    message = error_of(["-c", str(write_study(tmp_path, metric="train/lossy"))], capsys)
    assert message.endswith("fedavg/iid does not report the metric 'train/lossy'; did you mean train/loss?")


def test_two_studies_of_one_name_are_refused(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    files = [str(write_study(folder)) for folder in (tmp_path, tmp_path / "other")]
    assert error_of(["-c", *files], capsys).startswith("two studies would write into studies_out/tiny/pocket")


def test_a_number_of_jobs_is_refused_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert error_of(["-c", str(write_study(tmp_path)), "--jobs", "0"], capsys) == "--jobs is 0; it must be at least 1"
    assert not Path("studies_out").exists()


def test_a_dry_run_lists_cells_where_the_data_are_missing_too(tmp_path, capsys):
    columns = {"files": {"set": NO_DATA}}
    study = write_study(tmp_path, columns=columns)
    run_here("-c", str(study), "--dry_run")
    out = capsys.readouterr().out
    assert "fedavg/files/0" in out
    assert f"2 cells to run; they cannot run yet: {study}: fedavg/files: no.npz does not exist" in out
    assert not Path("studies_out").exists()


@pytest.mark.long
def test_a_dry_run_looks_at_the_names_of_metrics_as_the_run_does(tmp_path, capsys):
    held_out = {
        "set": TINY["set"] | {"data.init_args.val_fraction": 0.2},
        "rows": {"ditto": {"set": {"algorithm": "Ditto"}}},
    }
    for options in ([], ["--dry_run"]):
        study = write_study(tmp_path, **held_out, metric="train/lass")
        line = error_of(["-c", str(study), *options], capsys)
        assert line == f"{study}: ditto/iid does not report the metric 'train/lass'; did you mean train/loss?"
    study = write_study(tmp_path, **held_out, metric="val/clients/acc_mean", report="best")
    run_here("-c", str(study), "--dry_run")
    assert "1 cells to run" in capsys.readouterr().out


def test_help_is_there(capsys):
    run_here("--help")
    assert "--dry_run" in capsys.readouterr().out
    parser = ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["-c", "a.yaml", "b.yaml", "-c", "c.yaml"]).config == ["a.yaml", "b.yaml", "c.yaml"]
    assert (CONFIGS / "papers").is_dir()


@pytest.mark.long
def test_a_sweep_without_profiles_ends_in_a_latex_table(tmp_path):
    """The first study of the docs, shorter; its files are the package's."""
    study = tmp_path / "sweep.yaml"
    settings = {key: value for key, value in TINY["set"].items() if key != "trainer.max_rounds"}
    study.write_text(
        yaml.safe_dump(
            {
                "configs": ["quickstart.yaml", "method/fedprox.yaml"],
                "metric": "global/acc",
                "report": "best of val/global/acc",
                "grid": {"algorithm.init_args.mu": [0.01, 1]},
                "set": settings | {"trainer.max_rounds": 1},
            }
        )
    )
    run_here("-c", str(study))
    folder = tmp_path / "studies_out/sweep/default"
    lines = (folder / "table.tex").read_text().splitlines()
    assert [line.partition(" & ")[0] for line in lines if " & 0." in line or "{0." in line] == ["mu = 0.01", "mu = 1"]
    assert {"lines.svg", "table.md", "table.csv", "report.html"} <= {path.name for path in folder.iterdir()}
    assert (tmp_path / "studies_out/index.default.html").is_file()


# ---------------------------------------------------------------------- data that lie in a file


def numbers(seed: int) -> None:
    """A data set of 80 samples in a file."""
    generator = np.random.default_rng(seed)
    x, y = generator.random((80, 8, 8, 1), dtype=np.float32), generator.integers(0, 10, 80)
    np.savez("numbers.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])


def test_cells_that_were_run_on_other_data_are_refused_by_name(tmp_path, capsys):
    """Replaced while a study waits: what ran before is not shown beside what runs now."""
    data = {"data": "ArrayFile", "data.init_args.path": "numbers.npz", "data.init_args.num_clients": 4}
    study = write_study(tmp_path, columns={"own": {"set": data}}, seeds=[0, 1])
    numbers(0)
    run_here("-c", str(study), "--jobs", "1", "--only", "fedavg")
    record = json.loads(Path("studies_out/tiny/pocket/fedavg/own/seed_0/cell.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", record["data"]["sha256"])
    run_here("-c", str(study), "--only", "fedavg")
    assert "2 cells, 2 of them finished before" in capsys.readouterr().out

    numbers(1)
    for options in ([], ["--dry_run", "--only", "fedavg"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["study", "-c", str(study), *options])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2
        assert "tiny.yaml: fedavg/own/0 ran on different data than the current files; restore the old files, or" in line
    assert not Path("studies_out/tiny/pocket/prox").exists(), "a cell has run"

    Path("numbers.npz").unlink()
    run_here("-c", str(study), "--only", "fedavg")
    said = " ".join(capsys.readouterr().out.split())
    assert "fedavg/own/0: its data cannot be compared with those of the run: numbers.npz does not exist" in said
    numbers(0)
    run_here("-c", str(study), "--only", "fedavg")
    assert "cannot be seen" not in capsys.readouterr().out
