"""``lit-fed results``: one page and one table of what has finished."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.studies.cells import lay_out
from lit_fed.studies.study import read_study
from tests.command.support import error_of
from tests.studies.support import finish, grid_of, write_study

CLAIMS = [
    {"claim": "prox > fedavg at iid", "says": "It | helps", "cause": "of no use where it holds"},
    {"claim": "fedavg > prox + 2 at iid", "cause": "its steps are | short"},
    {"claim": "prox - fedavg > 20 at iid", "equal": 5, "published": 1.5},
    {"claim": "prox rises at iid"},
    {"claim": "prox > fedavg at iid", "metric": "train/loss"},
]


@pytest.fixture
def studied(tmp_path: Path) -> tuple[Path, Path]:
    """FedAvg 0.50, 0.51; FedProx 0.70, 0.72, both after 0.1; the paper has 54 and 80."""
    settings: dict[str, Any] = {
        "scale": 100,
        "seeds": [0, 1],
        "source": "Somebody, 2026, Table 1",
        "published": {"fedavg": {"iid": 54}, "prox": {"iid": 80}},
        "claims": CLAIMS,
        "profiles": {"paper": {"set": {"trainer.max_rounds": 3}}, "pocket": {}},
    }
    grid = grid_of(tmp_path, **settings)
    for row, seed, value in (("fedavg", 0, 0.50), ("fedavg", 1, 0.51), ("prox", 0, 0.70), ("prox", 1, 0.72)):
        finish(grid, row, "iid", seed, f"round,global/acc\n0,0.1\n1,{value}\n")
    for number, cell in enumerate(grid.cells):
        cell.write_record(
            seconds=30.0,
            cpu_seconds=24.0,
            made_with={"commit": f"c{number // 3}", "hardware": "2 cores", "versions": "1"},
        )
    return write_study(tmp_path, **settings), tmp_path / "out"


def results(path: Path, studies: Path, output: Path) -> None:
    main(["results", "-c", str(path), "--studies", str(studies), "--output", str(output)])


def test_every_claim_is_a_line_with_the_papers_margin_and_ours(studied, tmp_path, capsys):
    results(*studied, tmp_path / "page")
    with open(tmp_path / "page" / "claims.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert ",".join(lines[0]) == "paper,claim,published,ours,interval,verdict,seeds,setting,commit,cause"
    assert {(line["paper"], line["setting"], line["commit"]) for line in lines} == {
        ("Somebody, 2026, Table 1", "tiny, pocket", "c0 c1")
    }
    assert lines[-1]["claim"] == "prox > fedavg at iid, train/loss"
    assert [line["claim"] for line in lines[:2]] == ["It | helps [prox > fedavg at iid]", "fedavg > prox + 2 at iid"]
    # 70 − 50 and 72 − 51: 20 and 21, mean 20.5, s = 0.7071; t(1) = 6.314, so ± 6.314·0.7071/√2 = 3.157.
    # The paper's: 80 − 54 = 26; against 2, 54 − 80 − 2 = −28; a number beside the claim goes before the table's.
    ours = [line["ours"] for line in lines]
    assert ours == ["20.5", "-22.5", "0.5", "61", ""]  # the last: 70 − 10 and 72 − 10; nobody reports the loss
    assert [line["interval"] for line in lines[:3]] == ["17.34 to 23.66", "-25.66 to -19.34", "-2.657 to 3.657"]
    assert [line["published"] for line in lines] == ["26", "-28", "1.5", "", ""]
    assert [line["verdict"] for line in lines] == ["holds", "fails", "equal", "holds", "undecided"]
    assert [line["cause"] for line in lines] == ["", "its steps are | short", "", "", ""]
    assert [line["seeds"] for line in lines] == ["2", "2", "2", "2", "0"]
    assert "5 claims of 1 study: holds 2, equal 1, undecided 1, fails 1" in capsys.readouterr().out


def test_the_page_counts_and_the_studys_own_explains(studied, tmp_path):
    results(*studied, tmp_path / "page")
    page = (tmp_path / "page" / "claims.md").read_text(encoding="utf-8")
    # Four cells of half a minute, 24 s of them at work; of the profile paper no cell was run, so it is not there.
    assert "| [`tiny`](studies/tiny-pocket.md) | pocket | 4 of 4 | 2 | 2.0 | 1.6 | 2 | 1 | 1 | 1 |\n" in page
    assert "paper |" not in page
    page = (tmp_path / "page/studies/tiny-pocket.md").read_text(encoding="utf-8")
    assert "- commit: c0; c1\n- hardware: 2 cores\n" in page
    # 50 and 51: 50.5, s = 1/√2 = 0.71; 70 and 72: 71, s = 2/√2 = 1.41, 9 below the published 80.
    assert "| fedavg | 50.50 ± 0.71 (paper 54, −3.50) |\n| prox | **71.00 ± 1.41** (paper 80, −9.00) |\n" in page
    assert "| `fedavg > prox + 2 at iid` | fails | -28 | −22.5 ± 3.2 | 2 | its steps are \\| short |\n" in page
    assert "| It \\| helps (`prox > fedavg at iid`) | holds | 26 | +20.5 ± 3.2 | 2 |  |\n" in page
    with open(tmp_path / "page/studies/tiny-pocket.csv", newline="", encoding="utf-8") as file:
        assert [line["values"] for line in csv.DictReader(file)] == ["50.0 51.0", "70.0 72.0"]


def settings(folder: Path) -> list[str]:
    with open(folder / "claims.csv", newline="", encoding="utf-8") as file:
        return [line["setting"] for line in csv.DictReader(file)]


def test_a_study_that_is_run_again_replaces_its_lines_and_others_stand(studied, tmp_path):
    path, studies = studied
    results(path, studies, tmp_path / "page")
    other = path.rename(path.with_name("another.yaml"))
    (studies / "tiny").rename(studies / "another")
    results(other, studies, tmp_path / "page")  # on a machine that has only this one's runs
    assert settings(tmp_path / "page") == ["another, pocket"] * 5 + ["tiny, pocket"] * 5
    write_study(tmp_path, "another", seeds=[0, 1], scale=100, claims=CLAIMS[:1])
    for _ in range(2):  # twice is once
        results(other, studies, tmp_path / "page")
        assert settings(tmp_path / "page") == ["another, pocket"] + ["tiny, pocket"] * 5
    page = (tmp_path / "page" / "claims.md").read_text(encoding="utf-8")
    assert "6 claims of 2 studies and profiles: holds 3, equal 1, undecided 1, fails 1." in page


def test_claims_of_ours_are_counted_apart(studied, tmp_path):
    path, studies = studied
    claims = [{"says": "It helps", "claim": "prox > fedavg at iid"}, {"says": "Why (ours)", "claim": "prox < 3 at iid"}]
    write_study(tmp_path, seeds=[0, 1], scale=100, claims=claims)
    results(path, studies, tmp_path / "page")
    page = (tmp_path / "page" / "claims.md").read_text(encoding="utf-8")
    told = (
        "holds 1, equal 0, undecided 0, fails 1; without ours, which ask for causes, 1: holds 1, equal 0, undecided 0"
    )
    assert f"2 claims of 1 study: {told}, fails 0." in page


def test_of_a_study_that_claims_nothing_the_table_is_entered(studied, tmp_path, capsys):
    path, studies = studied
    seeds = {"seeds": [0, 1], "scale": 100, "profiles": {"paper": {"set": {"trainer.max_rounds": 3}}, "pocket": {}}}
    write_study(tmp_path, claims=[], **seeds)
    results(path, studies, tmp_path / "page")
    assert "1 entered; 0 changed causes; 0 claims of 1 study" in capsys.readouterr().out
    page = (tmp_path / "page/studies/tiny-pocket.md").read_text(encoding="utf-8")
    assert "| fedavg | 50.50 ± 0.71 |\n" in page
    assert "claim" not in page.partition("hardware")[2]
    assert page.endswith("over 2 seeds (0, 1).\n")


def test_a_cause_found_later_is_entered_without_the_runs(studied, tmp_path, capsys):
    path, studies = studied
    results(path, studies, tmp_path / "page")
    with pytest.raises(SystemExit):  # neither runs nor another cause
        results(path, tmp_path / "elsewhere", tmp_path / "page")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("its steps are | short", "its rounds | are few"), encoding="utf-8")
    results(path, tmp_path / "elsewhere", tmp_path / "page")
    assert "0 entered; 1 changed causes; 5 claims" in capsys.readouterr().out
    with open(tmp_path / "page" / "claims.csv", newline="", encoding="utf-8") as file:
        assert [line["cause"] for line in csv.DictReader(file)] == ["", "its rounds | are few", "", "", ""]
    page = tmp_path / "page/studies/tiny-pocket.md"
    apart = page.read_text(encoding="utf-8")
    assert "| fails | -28 | −22.5 ± 3.2 | 2 | its rounds \\| are few |\n" in apart
    results(path, studies, tmp_path / "page")  # as from the runs themselves
    assert page.read_text(encoding="utf-8") == apart


def test_what_was_asked_again_stands_in_place_of_what_was_undecided(studied, tmp_path):
    path, studies = studied
    settings: dict[str, Any] = {
        "scale": 100,
        "seeds": [0, 1],
        "claims": [*CLAIMS, "prox > 70 at iid"],  # 70 and 72: ours of two seeds is 0 and 2
        "profiles": {
            "pocket": {},
            "again": {"again": "pocket", "seeds": [2, 3], "claims": ["prox > 70 at iid", "prox > fedavg at iid"]},
        },
    }
    write_study(tmp_path, **settings)
    results(path, studies, tmp_path / "page")
    assert told(tmp_path / "page")["pocket"] == ["holds", "fails", "equal", "holds", "undecided", "undecided"]
    again = lay_out(read_study(path, "again"), studies)
    for row, seed, value in (("fedavg", 2, 0.9), ("fedavg", 3, 0.91), ("prox", 2, 0.75), ("prox", 3, 0.751)):
        finish(again, row, "iid", seed, f"round,global/acc\n1,{value}\n")
    for _ in range(2):  # also where the first profile is entered anew
        results(path, studies, tmp_path / "page")
        # The one that was undecided is decided by the other seeds alone; one that was decided stays beside theirs.
        assert told(tmp_path / "page") == {
            "pocket": ["holds", "fails", "equal", "holds", "undecided"],
            "again": ["holds", "fails"],
        }
    page = (tmp_path / "page" / "claims.md").read_text(encoding="utf-8")
    assert "A profile with `again` in its name asks claims that were left undecided of other seeds" in page


def told(folder: Path) -> dict[str, list[str]]:
    """Verdicts by profile."""
    found: dict[str, list[str]] = {}
    with open(folder / "claims.csv", newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            found.setdefault(line["setting"].removeprefix("tiny, "), []).append(line["verdict"])
    return found


@pytest.mark.parametrize(
    "content", [b"claim,verdict\nit works,yes\n", b"\xff\xfe", b""], ids=["other", "bytes", "empty"]
)
def test_somebody_elses_table_is_named_and_stands(studied, tmp_path, capsys, content):
    path, studies = studied
    page = tmp_path / "page"
    page.mkdir()
    (page / "claims.csv").write_bytes(content)
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(page)], capsys)
    told = "was not written by lit-fed results; give another folder by --output, or remove it"
    assert message == f"{page}/claims.csv {told}"
    assert [path.name for path in page.iterdir()] == ["claims.csv"]


def test_claims_of_a_study_that_is_not_listed_are_not_dropped(studied, tmp_path, capsys):
    path, studies = studied
    page = tmp_path / "page"
    results(path, studies, page)
    (page / "studies.csv").unlink()
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(page)], capsys)
    assert message == f"{page}/claims.csv has claims of tiny, pocket, which studies.csv beside it does not list"


def test_cells_with_other_settings_and_unfinished_ones_are_left_out(studied, tmp_path, capsys):
    path, studies = studied
    write_study(path.parent, seeds=[0, 1], scale=100, set={"trainer.max_rounds": 5}, claims=CLAIMS[:1])
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(tmp_path)], capsys)
    assert message == (
        f"no cell of these studies has finished in {studies}, and no simulation in simulations; "
        "name their folders with --studies and --simulations"
    )
    assert not (tmp_path / "claims.md").exists()
