"""A register of the results of all studies and simulations, in files that outlive the runs.

A study that ran here replaces its lines; lines of studies that ran earlier or on other machines stay.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import TypeVar

from lit_fed.engine.storage.files import in_place_of, write_text
from lit_fed.errors import ConfigError
from lit_fed.studies.file.claims import UNDECIDED
from lit_fed.studies.file.rounds import ON_TEST
from lit_fed.studies.pages.claims_picture import drawn
from lit_fed.studies.pages.paper_page import after_holm, filled, headed, overview, read, table, tally
from lit_fed.studies.results.register_lines import Finished, Number, Row, StudyRow
from lit_fed.studies.results.results import csv_text
from lit_fed.studies.running.environment import check_commits

_Line = TypeVar("_Line", Row, StudyRow, Number)


class Register:
    """The results of a folder: ``claims.csv``, ``studies.csv``, and by paper a page and a table of numbers by seed.

    A page and ``README.md`` keep their text; the tables between their marks are replaced.

    Args:
        folder: The folder; an existing register is read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._claims: dict[str, list[Row]] = {}
        self._numbers: dict[str, list[Number]] = {}
        for row in _read(folder / "claims.csv", Row):
            self._claims.setdefault(row.setting, []).append(row)
        self._entries = {entry.setting: entry for entry in _read(folder / "studies.csv", StudyRow)}
        for paper in dict.fromkeys(entry.paper for entry in self._entries.values()):
            for number in _read(folder / f"{paper}.csv", Number):
                self._numbers.setdefault(number.setting, []).append(number)
        if odd := [setting for setting in self._claims if setting not in self._entries]:
            raise ConfigError(f"{folder}/claims.csv has claims of {odd[0]}, which studies.csv beside it does not list")
        if bare := [setting for setting in self._entries if setting not in self._numbers]:
            paper = self._entries[bare[0]].paper
            raise ConfigError(f"{folder}/studies.csv lists {bare[0]}, of which {paper}.csv beside it has no numbers")

    def enter(self, finished: Finished) -> None:
        """Replace a study's claims and numbers, and copy its picture."""
        entry = finished.entry
        if not finished.numbers:
            raise ConfigError(f"{entry.setting} has no number in its table; run it again")
        check_commits(entry.setting, entry.commit)
        self._entries[entry.setting] = entry
        self._claims[entry.setting], self._numbers[entry.setting] = finished.claims, finished.numbers
        if finished.picture:
            with in_place_of(self._folder / f"{entry.study}.png") as temporary:
                copyfile(finished.picture, temporary)

    def profiles(self, study: str) -> list[str]:
        """Return the registered profiles of a study."""
        return [entry.profile for entry in self._entries.values() if entry.study == study]

    def explain(self, setting: str, causes: Mapping[str, str]) -> int:
        """Update the causes of a study's claims.

        Args:
            setting: The study and its profile.
            causes: Causes by claim in the format of ``claims.csv``; other claims keep their causes.

        Returns:
            The number of changed causes.
        """
        rows = self._claims.get(setting, [])
        rows_explained = [
            row._replace(cause=causes.get(row.claim, row.cause)) if row.verdict != "holds" else row for row in rows
        ]
        self._claims[setting] = rows_explained
        return sum(old != new for old, new in zip(rows, rows_explained, strict=True))

    def write(self) -> str:
        """Write the register, sorted by paper and study, and return the number of claims by verdict."""
        entries = sorted(
            self._entries.values(),
            key=lambda one: (one.paper, one.study, one.again != "", one.profile != "pocket", one.profile),
        )
        for entry in entries:
            if entry.again:
                self._replace(f"{entry.study}, {entry.again}", self._claims.get(entry.setting, []))
        claims = {
            paper: [row for one in entries if one.paper == paper for row in self._claims.get(one.setting, [])]
            for paper in dict.fromkeys(entry.paper for entry in entries)
        }
        earlier = {entry.setting: self._askings_before(entry) for entry in entries}
        by_holm = {paper: after_holm(rows, earlier) for paper, rows in claims.items()}
        on_test = {name for name, numbers in self._numbers.items() if any(ON_TEST in one.metric for one in numbers)}
        pages = {}
        for paper, rows in claims.items():
            path = self._folder / f"{paper}.md"
            text = headed(path, read(path, "claims"), rows, earlier, on_test)
            lines = table(rows, self._pictures(paper), f"{paper}_claims" if rows else "", earlier)
            pages[paper] = filled(path, text, "claims", lines)
        titles = {paper: text.partition("\n")[0].lstrip("# ") for paper, text in pages.items()}
        readme = self._folder / "README.md"
        pages["README"] = filled(readme, read(readme, "overview"), "overview", overview(titles, by_holm))
        for paper in claims:
            numbers = [one for entry in entries if entry.paper == paper for one in self._numbers[entry.setting]]
            write_text([csv_text(Number._fields, numbers)], self._folder / f"{paper}.csv")
        write_text(
            [csv_text(Row._fields, (row for rows in claims.values() for row in rows))], self._folder / "claims.csv"
        )
        write_text([csv_text(StudyRow._fields, entries)], self._folder / "studies.csv")
        for paper, rows in by_holm.items():
            if rows:
                write_text([drawn(titles[paper], rows, self._numbers)], self._folder / f"{paper}_claims.svg")
        for name, text in pages.items():
            write_text([text], self._folder / f"{name}.md")
        return tally([row for rows in by_holm.values() for row in rows])

    def _askings_before(self, entry: StudyRow) -> int:
        """Return how often a study's claims had been asked before it, of other seeds."""
        first = self._entries.get(f"{entry.study}, {entry.again}", entry)
        if first is entry or not first.again:
            return int(entry.again != "")
        return 2  # a third profile asks what the second left undecided

    def _pictures(self, paper: str) -> list[str]:
        studies = sorted({entry.study for entry in self._entries.values() if entry.paper == paper})
        return [study for study in studies if (self._folder / f"{study}.png").exists()]

    def _replace(self, setting: str, later: Sequence[Row]) -> None:
        """Drop the undecided claims that were asked again over other seeds."""
        asked = {row.sentence for row in later}
        rows = self._claims.get(setting, [])
        self._claims[setting] = [row for row in rows if row.verdict != UNDECIDED or row.sentence not in asked]


def _read(path: Path, kind: type[_Line]) -> list[_Line]:
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error):
        lines = []
    if lines[:1] != [list(kind._fields)] or any(len(cells) != len(kind._fields) for cells in lines):
        raise ConfigError(f"{path} was not written by lit-fed results; give another folder by --output, or remove it")
    return [kind(*cells) for cells in lines[1:]]
