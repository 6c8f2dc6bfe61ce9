"""``lit-fed results``: what simulations that have run came to, beside studies."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lit_fed.command.cli import main
from lit_fed.studies.results.register_lines import StudyRow
from lit_fed.studies.simulations.finished import numbers_of
from lit_fed.studies.simulations.run_simulation import check_again, read_file, settings_of
from lit_fed.studies.simulations.simulation import Point
from tests.command.support import error_of
from tests.studies.support import commit_in
from tests.support import ROOT

FIGURE = "lit_fed.studies.papers.fedfrozen.Figure1"
SETTINGS = """\
source: Somebody, 2026, Figure 1
simulate:
  class_path: {figure}
  init_args:
    task: {{num_clients: 2, dim: 3, key_dim: 2, value_dim: 2, tokens: 2, examples: 3}}
    seeds: 2
    rounds: {rounds}
    rhos: [0.0, 1.0]
    claims:
      - {{says: "h | falls", claim: first > last + 0.5 at rho=0, cause: of no use where it holds}}
      - {{claim: last > first at rho=0, cause: it was said to fall}}
"""
# Two points a line; first over last at ρ = 0 is e² and e³, whose logarithms are 2 and 3.
POINTS = [
    ("profile, rho 0", seed, value) for seed, values in ((0, (7.389056, 1)), (1, (20.085537, 1))) for value in values
]


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulation that has run, with points by hand in the place of its own."""
    monkeypatch.chdir(tmp_path)
    commit_in(tmp_path)
    path = tmp_path / "somebody_figure1.yaml"
    path.write_text(SETTINGS.format(figure=FIGURE, rounds=5))
    main(["simulate", "-c", str(path), "--processes", "1"])
    with open("simulations/somebody_figure1/points.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("panel", "line", "x", "seed", "value"))
        table.writerows((panel, "h", 5 * (n % 2), seed, value) for n, (panel, seed, value) in enumerate(POINTS))
        table.writerows((panel.replace("0", "1"), "h", 0, seed, 1) for panel, seed, _ in POINTS[::2])
    return path


def test_a_simulation_is_lines_a_page_its_numbers_and_its_picture(figure: Path, capsys: pytest.CaptureFixture[str]):
    record = json.loads(Path("simulations/somebody_figure1/simulation.json").read_text("utf-8"))
    assert record["settings"]["init_args"]["lr"] == 1e-3, "a default of the class"
    assert record["seconds"] > 0 < record["cpu_seconds"]
    main(["results", "-c", str(figure), "--output", "page"])
    with open("page/claims.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["claim"] for line in lines] == ["h | falls [first > last + 0.5 at rho=0]", "last > first at rho=0"]
    # 2 − ½ and 3 − ½: 2 ± 12.706·0.7071/√2 = 6.353; and −2, −3.
    assert [(line["ours"], line["interval"]) for line in lines] == [
        ("2", "-4.353 to 8.353"),
        ("-2.5", "-8.853 to 3.853"),
    ]
    assert [line["verdict"] for line in lines] == ["undecided", "undecided"]
    assert {(line["paper"], line["source"], line["setting"], line["seeds"], line["commit"]) for line in lines} == {
        (
            *("somebody_figure1", "Somebody, 2026, Figure 1", "somebody_figure1, simulation", "2"),
            record["made_with"]["commit"],
        )
    }
    assert {(line["network"], line["data"]) for line in lines} == {("linear attention", "drawn tokens")}
    assert lines[1]["cause"] == "it was said to fall"
    with open("page/studies.csv", newline="", encoding="utf-8") as file:
        (study,) = csv.DictReader(file)
    assert (study["study"], study["profile"], study["cells"], study["seeds"]) == (
        "somebody_figure1",
        "simulation",
        "–",
        "2",
    )
    with open("page/somebody_figure1.csv", newline="", encoding="utf-8") as file:
        numbers = list(csv.DictReader(file))
    assert [(line["row"], line["column"], line["n"], line["mean"]) for line in numbers] == [
        ("h", "profile, rho 0: 0", "2", "13.7373"),  # (7.389056 + 20.085537)/2
        ("h", "profile, rho 0: 5", "2", "1"),
        ("h", "profile, rho 1: 0", "2", "1"),
    ]
    assert {line["values"] for line in numbers} == {""}
    page = Path("page/somebody_figure1.md").read_text("utf-8")
    assert "h \\| falls" in page
    assert "![somebody_figure1](somebody_figure1.png)" in page
    assert Path("page/somebody_figure1.png").stat().st_size > 10_000
    assert "by Holm, 2 claims of papers: 2 undecided" in capsys.readouterr().out


def test_of_a_curve_the_end_alone_is_entered():
    entry = StudyRow("somebody", "figure", "simulation", "–", "1", "", "", "", "c0")
    short = [Point("loss by round", "h", x, 0, x / 2) for x in range(12)]
    long = [Point("loss by step", "h", x, 0, x / 2) for x in range(13)]
    columns = [one.column for one in numbers_of(entry, [*short, *long])]
    assert columns == [*(f"loss by round: {x}" for x in range(12)), "loss by step: 12"]


def test_a_claim_may_change_after_the_run_and_a_setting_may_not(figure: Path, capsys: pytest.CaptureFixture[str]):
    text = figure.read_text()
    figure.write_text(text.replace("last > first at rho=0", "0.5 > first - last at rho=0"))
    main(["results", "-c", str(figure), "--output", "page"])
    assert "0.5 > first - last at rho=0" in Path("page/claims.csv").read_text("utf-8")
    figure.write_text(text.replace("rounds: 5", "rounds: 6"))
    before = Path("page/claims.csv").read_bytes()
    main(["results", "-c", str(figure), "--output", "page"])
    printed = capsys.readouterr().out
    assert "somebody_figure1: ran with different settings and is skipped" in printed
    assert "0 entered" in printed
    assert Path("page/claims.csv").read_bytes() == before


def test_a_cause_found_later_is_entered_without_the_run(figure: Path, capsys: pytest.CaptureFixture[str]):
    main(["results", "-c", str(figure), "--output", "page"])
    Path("simulations").rename("elsewhere")
    figure.write_text(figure.read_text().replace("it was said to fall", "it falls |"))
    main(["results", "-c", str(figure), "--output", "page"])
    assert "0 entered; 1 changed causes; by Holm, 2 claims of papers" in capsys.readouterr().out
    with open("page/claims.csv", newline="", encoding="utf-8") as file:
        assert [line["cause"] for line in csv.DictReader(file)] == ["of no use where it holds", "it falls |"]
    assert "| it falls \\| |\n" in Path("page/somebody_figure1.md").read_text("utf-8")


def test_a_simulation_that_did_not_end_is_not_entered(figure: Path, capsys: pytest.CaptureFixture[str]):
    Path("simulations/somebody_figure1/simulation.json").unlink()
    assert "no simulation in simulations" in error_of(["results", "-c", str(figure)], capsys)


@pytest.mark.parametrize("name", ["simulation.json", "points.csv"])
def test_files_of_somebody_else_are_named(figure: Path, name: str, capsys: pytest.CaptureFixture[str]):
    Path("simulations/somebody_figure1", name).write_text("{}\na,b\n1,2\n")
    message = error_of(["results", "-c", str(figure)], capsys)
    assert message.startswith(f"simulations/somebody_figure1/{name} was not written by lit-fed simulate")
    assert not Path("docs").exists()


AGAIN = """\
source: Somebody, 2026, Figure 1
again: somebody_figure1.yaml
simulate:
  class_path: {figure}
  init_args:
    task: {{num_clients: 2, dim: 3, key_dim: 2, value_dim: 2, tokens: 2, examples: 3}}
    seeds: 3
    first_seed: {first}
    rounds: {rounds}
    rhos: [0.0]
    claims:
      - {{claim: {claim}}}
"""
LATER = {"figure": FIGURE, "first": 2, "rounds": 5, "claim": "last > first at rho=0"}


def test_what_was_left_undecided_is_asked_again_of_other_seeds(figure: Path):
    again = Path("somebody_figure1_again.yaml")
    again.write_text(AGAIN.format(**LATER))
    main(["simulate", "-c", str(again), "--processes", "1"])
    with open("simulations/somebody_figure1_again/points.csv", newline="", encoding="utf-8") as file:
        assert {line["seed"] for line in csv.DictReader(file)} == {"2", "3", "4"}
    with open("simulations/somebody_figure1_again/points.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("panel", "line", "x", "seed", "value"))
        for seed, first in ((2, 7.389056), (3, 7.389056), (4, 20.085537)):
            table.writerows([("profile, rho 0", "h", 0, seed, first), ("profile, rho 0", "h", 5, seed, 1)])
    main(["results", "-c", str(figure), str(again), "--output", "page"])
    with open("page/claims.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    # -2, -2 and -3: -2.333 ± 4.303·0.5774/√3 = 1.434; the other claim, which was not asked again, stands.
    assert [(line["setting"], line["ours"], line["interval"], line["verdict"], line["seeds"]) for line in lines] == [
        ("somebody_figure1, simulation", "2", "-4.353 to 8.353", "undecided", "2"),
        ("somebody_figure1, simulation_again", "-2.333", "-3.768 to -0.8991", "fails", "3"),
    ]
    assert sorted(path.name for path in Path("page").glob("*.png")) == ["somebody_figure1.png"], "of the first"


def test_one_file_asks_a_simulation_again_and_none_asks_that_one(figure: Path, capsys: pytest.CaptureFixture[str]):
    Path("later.yaml").write_text(AGAIN.format(**LATER))
    main(["simulate", "-c", "later.yaml", "--processes", "1"])
    told = error_of(["results", "-c", "later.yaml"], capsys)
    assert told == "later.yaml asks somebody_figure1.yaml again; rename it to somebody_figure1_again.yaml"
    Path("last.yaml").write_text(AGAIN.format(**LATER | {"first": 5}).replace("somebody_figure1", "later"))
    told = error_of(["simulate", "-c", "last.yaml"], capsys)
    assert told == "again: later.yaml itself asks somebody_figure1.yaml again; name somebody_figure1.yaml"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"first": 1}, "somebody_figure1.yaml has seed 1, too; choose other seeds with first_seed"),
        (
            {"rounds": 6},
            "rounds is 6, and 5 in somebody_figure1.yaml; only seeds may differ, and a grid may be smaller",
        ),
        (
            {"claim": "first > last at rho=0"},
            "somebody_figure1.yaml has no claim 'first > last at rho=0'; copy a claim from it",
        ),
        (
            {"figure": FIGURE.replace("1", "3")},
            f"somebody_figure1.yaml simulates {FIGURE}, and this file {FIGURE.replace('1', '3')}; use the same",
        ),
    ],
)
def test_only_the_seeds_of_what_is_asked_again_differ(
    figure: Path, change: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]
):
    Path("later.yaml").write_text(AGAIN.format(**LATER | change))
    assert error_of(["simulate", "-c", "later.yaml"], capsys) == f"again: {told}"
    assert not Path("simulations/later").exists()


def test_a_file_that_is_no_simulations_is_named(figure: Path, capsys: pytest.CaptureFixture[str]):
    again = AGAIN.format(**LATER)
    Path("later.yaml").write_text(again.replace("somebody_figure1", "nowhere"))
    assert error_of(["simulate", "-c", "later.yaml"], capsys) == "simulation file nowhere.yaml does not exist"
    Path("nowhere.yaml").write_text("trainer: {max_rounds: 1}\n")
    told = error_of(["simulate", "-c", "later.yaml"], capsys)
    assert told == "nowhere.yaml has no key simulate; name a simulation's file"


def test_what_we_ask_again_is_what_was_asked():
    files = sorted(ROOT.glob("configs/papers/*/simulations/*_again.yaml"))
    assert files
    for path in files:
        simulation, options = read_file(path)
        assert path.stem == f"{Path(options.again).stem}_again"
        check_again(options.again, simulation, settings_of(options))
