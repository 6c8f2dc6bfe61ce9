"""``lit-fed results``: a page a paper, its claims and its numbers by seed, of what has finished."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.studies.file.study import read_study
from lit_fed.studies.running.cells import lay_out
from tests.command.support import error_of
from tests.studies.support import commit_in, finish, grid_of, write_study

CLAIMS = [
    {"claim": "prox > fedavg at iid", "says": "It | helps", "cause": "of no use where it holds"},
    {"claim": "fedavg > prox + 2 at iid", "cause": "its steps are | short"},
    {"claim": "prox - fedavg > 20 at iid", "equal": 8, "published": 1.5},
    {"claim": "prox rises at iid"},
    {"claim": "prox > fedavg at iid", "metric": "train/loss"},
]


@pytest.fixture
def studied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """FedAvg 0.50, 0.51; FedProx 0.70, 0.72, both after 0.1; the paper has 54 and 80."""
    monkeypatch.chdir(tmp_path)
    commits = [commit_in(tmp_path), commit_in(tmp_path)]
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
            made_with={"commit": commits[number // 3], "hardware": "2 cores", "versions": "1"},
        )
    return write_study(tmp_path, **settings), tmp_path / "out"


def results(path: Path, studies: Path, output: Path) -> None:
    main(["results", "-c", str(path), "--studies", str(studies), "--output", str(output)])


def lines_of(page: Path, name: str) -> list[dict[str, str]]:
    with open(page / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_claim_is_a_line_with_the_papers_margin_and_ours(studied, tmp_path, capsys):
    results(*studied, tmp_path / "page")
    lines = lines_of(tmp_path / "page", "claims")
    assert ",".join(lines[0]) == (
        "paper,source,claim,published,ours,interval,limit,p,verdict,seeds,network,data,setting,commit,cause"
    )
    assert {(line["paper"], line["source"], line["setting"]) for line in lines} == {
        ("tiny", "Somebody, 2026, Table 1", "tiny, pocket")
    }
    assert {(line["network"], line["data"]) for line in lines} == {("small_cnn", "Digits")}
    assert [len(commit) for commit in lines[0]["commit"].split(" + ")] == [12, 12]
    assert len(lines) == 4, "of the fifth, about a loss that nobody reports, there is no number"
    assert [line["claim"] for line in lines[:2]] == ["It | helps [prox > fedavg at iid]", "fedavg > prox + 2 at iid"]
    # 70 − 50 and 72 − 51: 20 and 21, mean 20.5, s = 0.7071; t(1) = 12.706, so ± 12.706·0.7071/√2 = 6.353.
    # The paper's: 80 − 54 = 26; against 2, 54 − 80 − 2 = −28; a number beside the claim goes before the table's.
    ours = [line["ours"] for line in lines]
    assert ours == ["20.5", "-22.5", "0.5", "61"]  # the last: 70 − 10 and 72 − 10
    assert [line["interval"] for line in lines[:3]] == ["14.15 to 26.85", "-28.85 to -16.15", "-5.853 to 6.853"]
    assert [line["limit"] for line in lines] == ["", "2", "20", ""]
    # Student's t of one degree of freedom is Cauchy's: P = 1 − 2·arctan(t)/π, with t of 20.5/0.5, 22.5/0.5 and 61/1.
    chances = [1 - 2 * math.atan(t) / math.pi for t in (41, 45, 1, 61)]
    assert [float(line["p"]) for line in lines] == pytest.approx(chances, rel=1e-3)
    assert [line["published"] for line in lines] == ["26", "-28", "1.5", ""]
    assert [line["verdict"] for line in lines] == ["holds", "fails", "equal", "holds"]
    assert [line["cause"] for line in lines] == ["", "its steps are | short", "", ""]
    assert [line["seeds"] for line in lines] == ["2", "2", "2", "2"]
    assert "by Holm, 4 claims of papers: 2 holds, 1 equal, 1 fails; see " in capsys.readouterr().out


def test_every_place_is_a_line_with_its_seeds_its_commit_and_no_curve(studied, tmp_path):
    results(*studied, tmp_path / "page")
    numbers = lines_of(tmp_path / "page", "tiny")
    assert [(line["row"], line["seeds"], line["values"]) for line in numbers] == [
        ("fedavg", "0 1", "50 51"),
        ("prox", "0 1", "70 72"),
    ]
    # Of two numbers the median is their mean, and a quartile a number itself: place 1/4·(2 + 1/3) + 1/3 = 0.92 from 1.
    assert [numbers[0][key] for key in ("n", "mean", "median", "lower", "upper")] == ["2", "50.5", "50.5", "50", "51"]
    assert {line["metric"] for line in numbers} == {"global/acc × 100, last"}
    (study,) = lines_of(tmp_path / "page", "studies")
    assert [study[key] for key in ("paper", "study", "profile", "cells", "seeds", "minutes", "cpu", "again")] == [
        *("tiny", "tiny", "pocket", "4 of 4", "2", "2.0", "1.6", "")
    ]
    assert {study["commit"]} == {line["commit"] for line in numbers}


def test_a_papers_page_is_a_table_and_keeps_the_text_around_it(studied, tmp_path):
    results(*studied, tmp_path / "page")
    page = tmp_path / "page" / "tiny.md"
    text = page.read_text(encoding="utf-8")
    ran = "(2, small_cnn, Digits, pocket)"
    assert f"| It \\| helps<br>`prox > fedavg at iid` | +26 | +20.5 ± 6.4 {ran} | holds |  |\n" in text
    ours = f"−20.5 ± 6.4, to exceed 2 {ran}"
    assert f"| `fedavg > prox + 2 at iid` | −26 | {ours} | fails | its steps are \\| short |\n" in text
    page.write_text(f"# Tiny and *small*\n\nBefore.\n\n{text.partition('# tiny')[2].strip()}\n\nAfter.\n")
    results(*studied, tmp_path / "page")
    told = page.read_text(encoding="utf-8")
    assert told.startswith("# Tiny and *small*\n\nBefore.\n")
    assert told.endswith("\nAfter.\n")
    assert told.count("It \\| helps") == 1
    overview = (tmp_path / "page" / "README.md").read_text(encoding="utf-8")
    assert "| [Tiny and *small*](tiny.md) | Digits (small_cnn); 2 seeds | 4 | 2 | 1 | 0 | 1 | 0 | – |\n" in overview


def test_a_page_without_a_place_for_the_table_stands_and_is_named(studied, tmp_path, capsys):
    path, studies = studied
    page = tmp_path / "page"
    page.mkdir()
    (page / "README.md").write_text("# Ours\n")
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(page)], capsys)
    assert message == (
        f"{page}/README.md has no place for a table; add a line <!-- overview:begin --> and a line "
        "<!-- overview:end --> below it"
    )
    assert [file.name for file in page.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("commit", "told"),
    [
        ("none: the working directory is not a git repository", "commit all changes, and run it again"),
        ("98f24d6af6c5 with uncommitted changes", "commit all changes, and run it again"),
        ("98f24d6af6c5", "is not in the history of this repository; merge it, or run it again"),
    ],
)
def test_results_without_a_commit_of_this_history_are_refused(studied, tmp_path, capsys, commit, told):
    path, studies = studied
    lay_out(read_study(path, "pocket"), studies).cells[2].write_record(made_with={"commit": commit})
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(tmp_path / "p")], capsys)
    assert message.startswith("the commit ")
    assert "tiny, pocket" in message
    assert message.endswith(told)
    assert not (tmp_path / "p").exists()


def test_a_claim_that_cannot_be_asked_here_is_not_applicable_whatever_its_numbers(studied, tmp_path, capsys):
    path, studies = studied
    why = "four parameters; a byte is | a byte"
    asked = {"says": "It is dear", "claim": "prox > fedavg at iid", "cause": "not told", "not_applicable": why}
    write_study(tmp_path, source="A paper", seeds=[0, 1], scale=100, claims=[asked], profiles={"pocket": {}})
    results(path, studies, tmp_path / "page")
    (line,) = lines_of(tmp_path / "page", "claims")
    assert (line["verdict"], line["cause"], line["ours"]) == ("not applicable", why, "20.5")
    assert "| not applicable | four parameters |\n" in (tmp_path / "page" / "tiny.md").read_text(encoding="utf-8")
    assert "1 claim of papers: 1 not applicable" in capsys.readouterr().out


def test_a_pockets_claim_has_the_published_margin_of_the_same_statement(studied, tmp_path):
    path, studies = studied
    paper = {
        "published": {"fedavg": {"iid": 54}, "prox": {"iid": 80}},
        "claims": [
            {"says": "It helps", "claim": "prox > fedavg at iid"},
            {"says": "… by a lot", "claim": "prox > fedavg + 20 at iid"},
        ],
    }
    pocket = [
        {"says": "It helps", "claim": "prox - fedavg > 1 at iid"},
        {"says": "… by a lot", "claim": "prox - fedavg > 2 at iid"},
        {"says": "It is new", "claim": "prox - fedavg > 3 at iid"},
    ]
    write_study(tmp_path, seeds=[0, 1], scale=100, profiles={"paper": paper, "pocket": {"claims": pocket}})
    results(path, studies, tmp_path / "page")
    # 80 − 54 = 26, and 26 − 20 = 6.
    assert [line["published"] for line in lines_of(tmp_path / "page", "claims")] == ["26", "6", ""]


def settings(folder: Path) -> list[str]:
    return [line["setting"] for line in lines_of(folder, "claims")]


def test_a_study_that_is_run_again_replaces_its_lines_and_others_stand(studied, tmp_path):
    path, studies = studied
    results(path, studies, tmp_path / "page")
    other = path.rename(path.with_name("another.yaml"))
    (studies / "tiny").rename(studies / "another")
    results(other, studies, tmp_path / "page")  # on a machine that has only this one's runs
    assert settings(tmp_path / "page") == ["another, pocket"] * 4 + ["tiny, pocket"] * 4
    write_study(tmp_path, "another", source="A paper", seeds=[0, 1], scale=100, claims=CLAIMS[:1])
    for _ in range(2):  # twice is once
        results(other, studies, tmp_path / "page")
        assert settings(tmp_path / "page") == ["another, pocket"] + ["tiny, pocket"] * 4
    page = (tmp_path / "page" / "README.md").read_text(encoding="utf-8")
    # Of the four claims two hold, one fails, and one is equal.
    assert (
        "| [another](another.md) | Digits (small_cnn); 2 seeds | 1 | 1 | 0 | 0 | 0 | 0 | – |\n"
        "| [tiny](tiny.md) | Digits (small_cnn); 2 seeds | 4 | 2 | 1 | 0 | 1 | 0 | – |\n" in page
    )


def test_claims_of_ours_are_counted_apart(studied, tmp_path, capsys):
    path, studies = studied
    claims = [{"says": "It helps", "claim": "prox > fedavg at iid"}, {"says": "Why (ours)", "claim": "prox < 3 at iid"}]
    write_study(tmp_path, source="A paper", seeds=[0, 1], scale=100, claims=claims)
    results(path, studies, tmp_path / "page")
    assert "1 claim of papers: 1 holds; 1 claim of ours: 1 fails" in capsys.readouterr().out
    page = (tmp_path / "page/tiny.md").read_text(encoding="utf-8")
    told = ("| **What the paper says** |", "| It helps", "| **Claims of ours** |", "| Why (ours)")
    assert sorted(map(page.index, told)) == list(map(page.index, told))


def test_a_study_of_no_paper_makes_no_claim_of_one(studied, tmp_path, capsys):
    path, studies = studied
    claims = [{"says": "It helps", "claim": "prox > fedavg at iid"}, "prox < 3 at iid"]
    write_study(tmp_path, seeds=[0, 1], scale=100, claims=claims)
    results(path, studies, tmp_path / "page")
    assert "0 claims of papers; 2 claims of ours: 1 holds, 1 fails" in capsys.readouterr().out
    told = [line["claim"] for line in lines_of(tmp_path / "page", "claims")]
    assert told == ["It helps (ours) [prox > fedavg at iid]", "(ours) [prox < 3 at iid]"]
    page = (tmp_path / "page/tiny.md").read_text(encoding="utf-8")
    assert "**Claims of ours**" in page
    assert "**What the paper says**" not in page


def test_of_a_study_that_claims_nothing_the_table_is_entered(studied, tmp_path, capsys):
    path, studies = studied
    seeds = {"seeds": [0, 1], "scale": 100, "profiles": {"paper": {"set": {"trainer.max_rounds": 3}}, "pocket": {}}}
    write_study(tmp_path, claims=[], **seeds)
    results(path, studies, tmp_path / "page")
    assert "1 entered; 0 changed causes; by Holm, 0 claims of papers" in capsys.readouterr().out
    assert [line["values"] for line in lines_of(tmp_path / "page", "tiny")] == ["50 51", "70 72"]
    assert lines_of(tmp_path / "page", "claims") == []


def test_a_cause_found_later_is_entered_without_the_runs(studied, tmp_path, capsys):
    path, studies = studied
    results(path, studies, tmp_path / "page")
    first = (tmp_path / "page/tiny.md").read_text(encoding="utf-8")
    results(path, tmp_path / "elsewhere", tmp_path / "page")  # neither runs nor another cause: the page is written anew
    assert (tmp_path / "page/tiny.md").read_text(encoding="utf-8") == first
    assert "0 entered; 0 changed causes" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("its steps are | short", "its rounds | are few"), encoding="utf-8")
    results(path, tmp_path / "elsewhere", tmp_path / "page")
    assert "0 entered; 1 changed causes; by Holm, 4 claims of papers" in capsys.readouterr().out
    causes = [line["cause"] for line in lines_of(tmp_path / "page", "claims")]
    assert causes == ["", "its rounds | are few", "", ""]
    page = tmp_path / "page/tiny.md"
    apart = page.read_text(encoding="utf-8")
    assert "| fails | its rounds \\| are few |\n" in apart
    results(path, studies, tmp_path / "page")  # as from the runs themselves
    assert page.read_text(encoding="utf-8") == apart


def test_what_was_asked_again_stands_in_place_of_what_was_undecided(studied, tmp_path):
    path, studies = studied
    settings: dict[str, Any] = {
        "source": "A paper",
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
    assert told(tmp_path / "page")["pocket"] == ["holds", "fails", "equal", "holds", "undecided"]
    again, commit = lay_out(read_study(path, "again"), studies), commit_in(tmp_path)
    for row, seed, value in (("fedavg", 2, 0.9), ("fedavg", 3, 0.911), ("prox", 2, 0.75), ("prox", 3, 0.751)):
        finish(again, row, "iid", seed, f"round,global/acc\n1,{value}\n")
    for cell in again.cells:
        cell.write_record(made_with={"commit": commit})
    for _ in range(2):  # also where the first profile is entered anew
        results(path, studies, tmp_path / "page")
        # The one that was undecided is decided by the other seeds alone; one that was decided stays beside theirs.
        assert told(tmp_path / "page") == {
            "pocket": ["holds", "fails", "equal", "holds"],
            "again": ["holds", "fails"],
        }
    page = (tmp_path / "page" / "tiny.md").read_text(encoding="utf-8")
    # One statement, asked of two pairs of seeds: 20 and 21, then 75 − 90 and 75.1 − 91.1. By Holm nothing remains of
    # the page's 4 + 2·2 questions: the smallest P is that of 5 and 5.1, 1 − 2·arctan(101)/π = 0.0063 > 0.05/8.
    first, second = (f"(2, small_cnn, Digits, {profile})" for profile in ("pocket", "again"))
    assert (
        f"| It \\| helps<br>`prox > fedavg at iid` | – | +20.5 ± 6.4 {first} | holds, not by Holm |  |\n"
        f"|  |  | −15.5 ± 6.4 {second} | fails, not by Holm |  |\n"
    ) in page


def told(folder: Path) -> dict[str, list[str]]:
    """Verdicts by profile."""
    found: dict[str, list[str]] = {}
    for line in lines_of(folder, "claims"):
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


def test_a_study_without_its_numbers_is_named(studied, tmp_path, capsys):
    path, studies = studied
    page = tmp_path / "page"
    results(path, studies, page)
    (page / "tiny.csv").unlink()
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(page)], capsys)
    assert message == f"{page}/studies.csv lists tiny, pocket, of which tiny.csv beside it has no numbers"


def test_cells_with_other_settings_and_unfinished_ones_are_left_out(studied, tmp_path, capsys):
    path, studies = studied
    write_study(path.parent, seeds=[0, 1], scale=100, set={"trainer.max_rounds": 5}, claims=CLAIMS[:1])
    message = error_of(["results", "-c", str(path), "--studies", str(studies), "--output", str(tmp_path)], capsys)
    assert message == (
        f"no cell of these studies has finished in {studies}, and no simulation in simulations; "
        "name their folders with --studies and --simulations"
    )
    assert not (tmp_path / "README.md").exists()
