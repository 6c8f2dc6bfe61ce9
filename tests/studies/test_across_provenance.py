"""The results in ``docs/results``: each has its numbers, its commit and its study, and they can be read."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from lit_fed.studies.file.claims import check
from lit_fed.studies.file.study import profiles_of, read_study
from lit_fed.studies.pages.register import Register
from lit_fed.studies.results.register_lines import Number, Row, StudyRow, claim_texts, paper_of, published_of, texts_of
from tests.support import ROOT

RESULTS = ROOT / "docs" / "results"
STUDIES = {path.stem: path for path in (ROOT / "configs" / "papers").glob("*/studies/*.yaml")}
SIMULATIONS = {path.stem: path for path in (ROOT / "configs" / "papers").glob("*/simulations/*.yaml")}
MOST_CSV, MOST_BYTES, MOST_WORDS = 1_000_000, 2_500_000, 6_000
MOST_LINES = 250


def lines(name: str) -> list[list[str]]:
    with open(RESULTS / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


CLAIMS = [Row(*line) for line in lines("claims")]
ENTRIES = [StudyRow(*line) for line in lines("studies")]
NUMBERS = {paper: [Number(*line) for line in lines(paper)] for paper in dict.fromkeys(entry.paper for entry in ENTRIES)}


def test_every_result_has_its_numbers_by_seed_and_the_commit_that_made_them() -> None:
    entries = {entry.setting: entry for entry in ENTRIES}
    assert CLAIMS
    for row in CLAIMS:
        entry = entries[row.setting]
        numbers = [one for one in NUMBERS[row.paper] if one.setting == row.setting]
        assert numbers, row.setting
        assert {row.commit, *(one.commit for one in numbers)} == {entry.commit}, row.setting
        assert all(re.fullmatch("[0-9a-f]{12}", commit) for commit in entry.commit.split(" + ")), row.setting
        assert row.network, row
        assert row.data, row


def test_a_place_has_as_many_values_as_seeds_and_a_simulation_none() -> None:
    for paper, numbers in NUMBERS.items():
        for one in numbers:
            values = len(one.values.split())
            assert values == (0 if one.profile.startswith("simulation") else int(one.n)), (paper, one)
            assert len(one.seeds.split()) == values, (paper, one)


def test_every_commit_is_in_this_history() -> None:
    try:
        asked = ["git", "rev-parse", "--is-shallow-repository"]
        shallow = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("not a git repository")
    if shallow == "true":
        pytest.skip("a shallow clone has no history")
    known = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    history = {commit[:12] for commit in known.split()}
    named = {commit for entry in ENTRIES for commit in entry.commit.split(" + ")}
    assert named - history == set()


def decided() -> Iterator[tuple[Row, str, list[float]]]:
    """Claims of profiles in the tree that need no curve, and the margin that their numbers give."""
    for entry in ENTRIES:
        if entry.study not in STUDIES or entry.profile not in profiles_of(STUDIES[entry.study]):
            continue
        values = {
            ((one.row, one.column), int(seed)): float(value)
            for one in NUMBERS[entry.paper]
            if one.setting == entry.setting
            for seed, value in zip(one.seeds.split(), one.values.split(), strict=True)
        }
        study = read_study(STUDIES[entry.study], entry.profile)
        rows = {row.claim: row for row in CLAIMS if row.setting == entry.setting}
        for text, claim in zip(texts_of(study), study.claims, strict=True):
            row = rows.get(text)
            if row is None or claim.metric or claim.report or any(link.change for link in claim.links):
                continue
            known = partial(lambda values, place, seed: values.get((place, seed)), values)
            verdict = check(claim, study.seeds, known, lambda place, seed: [])
            yield row, verdict.outcome, [] if verdict.margin is None else [verdict.margin]


def test_the_numbers_give_the_margins_and_the_verdicts() -> None:
    found = list(decided())
    assert len(found) > 100
    for row, outcome, margins in found:
        assert row.verdict == outcome, row
        # Six digits of each value, and four of the margin.
        assert [float(row.ours)] == pytest.approx(margins, rel=1e-3, abs=1e-3), row


def test_claims_of_profiles_in_the_tree_are_theirs_with_their_causes_of_today() -> None:
    for entry in ENTRIES:
        rows = [row for row in CLAIMS if row.setting == entry.setting]
        if entry.profile.startswith("simulation"):  # or simulation_again, whose file is called so
            path = SIMULATIONS[entry.study + entry.profile.removeprefix("simulation")]
            file = yaml.safe_load(path.read_text("utf-8"))
            asked = file["simulate"]["init_args"]["claims"]
            texts = claim_texts(((one["says"], one["claim"]) for one in asked), file["source"])
            causes = [" ".join((one.get("not_applicable") or one.get("cause", "")).split()) for one in asked]
        else:
            path = STUDIES[entry.study]
            if entry.profile not in profiles_of(path):
                continue  # it left the tree; its commit has it
            study = read_study(path, entry.profile)
            texts, causes = texts_of(study), [claim.not_applicable or claim.cause for claim in study.claims]
        claims = dict(zip(texts, causes, strict=True))
        assert paper_of(path) == entry.paper
        for row in rows:
            assert row.claim in claims, (entry.setting, row.claim)
            assert row.cause in (claims[row.claim], ""), (entry.setting, row.claim)


def test_the_published_margins_are_those_of_todays_studies() -> None:
    for entry in ENTRIES:
        rows = {row.claim: row for row in CLAIMS if row.setting == entry.setting}
        if entry.study in STUDIES and entry.profile in profiles_of(STUDIES[entry.study]):
            study = read_study(STUDIES[entry.study], entry.profile)
            for text, margin in zip(texts_of(study), published_of(study), strict=True):
                if text in rows:
                    told = rows[text].published
                    assert (float(told) if told else None) == (margin and pytest.approx(margin, rel=1e-3)), rows[text]


def test_the_pages_are_of_the_tables_beside_them(tmp_path: Path) -> None:
    for path in (*RESULTS.glob("*.md"), *RESULTS.glob("*.csv")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for path in RESULTS.glob("*.png"):
        (tmp_path / path.name).touch()
    Register(tmp_path).write()
    for path in (*RESULTS.glob("*.md"), *RESULTS.glob("*.csv"), *RESULTS.glob("*.svg")):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name}; write it with lit-fed results"


def test_results_are_small_enough_to_read() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if path.suffix == ".csv") <= MOST_CSV
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    prose = 0
    for path in files:
        if path.suffix == ".md" and not path.stem.endswith("_appendix"):
            text = path.read_text("utf-8")
            prose += len(re.sub(r"<!-- (\w+):begin -->.*<!-- \1:end -->", "", text, flags=re.DOTALL).split())
    assert prose <= MOST_WORDS


@pytest.mark.parametrize("path", STUDIES.values(), ids=lambda path: path.stem)
def test_a_study_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES
