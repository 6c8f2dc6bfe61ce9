"""A register of the results of all studies and simulations, in files that outlive the runs.

A study that ran here replaces its lines; lines of studies that ran earlier or on other machines stay.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import TypeVar

from lit_fed.engine.storage.files import in_place_of, write_text
from lit_fed.errors import ConfigError
from lit_fed.printing import counted
from lit_fed.studies.claims import HOW_DECIDED, OUTCOMES, UNDECIDED
from lit_fed.studies.claims_page import GENERATED, Finished, Row, StudyRow, with_cause
from lit_fed.studies.markdown import head, line

_MINUTES = (
    "Minutes are those of the cells one after the other, and of a simulation from its start to its end, whatever else "
    "ran on the machine; those of CPU are the time that cores spent on them, which others' work on these cores makes "
    "longer."
)
_AGAIN = (
    "A profile with `again` in its name asks claims that were left undecided of other seeds, more of them and fixed "
    "before they ran. Its answer stands for those claims alone: they are undecided on the study's own page, and not "
    "listed for it here."
)

_Line = TypeVar("_Line", Row, StudyRow)


class Register:
    """``claims.csv``, ``studies.csv`` and ``claims.md`` of a folder, and a page per study in ``studies/``.

    Args:
        folder: The folder; an existing register is read.

    Raises:
        ConfigError: If a file does not belong to a register.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._claims: dict[str, list[Row]] = {}
        for row in _read(folder / "claims.csv", Row):
            self._claims.setdefault(row.setting, []).append(row)
        self._entries = {entry.setting: entry for entry in _read(folder / "studies.csv", StudyRow)}
        if odd := [setting for setting in self._claims if setting not in self._entries]:
            raise ConfigError(f"{folder}/claims.csv has claims of {odd[0]}, which studies.csv beside it does not list")

    def enter(self, finished: Finished) -> None:
        """Write a study's page, table and picture, and replace its claims."""
        entry = finished.entry
        self._entries[entry.setting], self._claims[entry.setting] = entry, finished.claims
        write_text([finished.page], self._folder / f"{entry.page}.md")
        write_text([finished.table], self._folder / f"{entry.page}.csv")
        if finished.picture:
            with in_place_of(self._folder / f"{entry.page}.png") as temporary:
                copyfile(finished.picture, temporary)

    def profiles(self, study: str) -> list[str]:
        """Return the registered profiles of a study."""
        return [entry.profile for entry in self._entries.values() if entry.study == study]

    def explain(self, setting: str, causes: Mapping[str, str]) -> int:
        """Update the causes of a study's claims, in the register and on its page.

        Args:
            setting: The study and its profile.
            causes: Causes by claim in the format of ``claims.csv``; other claims keep their causes.

        Returns:
            The number of changed causes.
        """
        rows, page = self._claims.get(setting, []), self._folder / f"{self._entries[setting].page}.md"
        told = [row._replace(cause=causes.get(row.claim, row.cause)) if row.verdict != "holds" else row for row in rows]
        changed = [(old, new) for old, new in zip(rows, told, strict=True) if old != new]
        if changed:
            text = page.read_text(encoding="utf-8")
            for old, new in changed:
                text = with_cause(text, old, new.cause)
            write_text([text], page)
            self._claims[setting] = told
        return len(changed)

    def write(self) -> None:
        """Write the register, sorted by study."""
        entries = [self._entries[setting] for setting in sorted(self._entries)]
        for entry in entries:
            if entry.again:
                self._replace(f"{entry.study}, {entry.again}", self._claims.get(entry.setting, []))
        claims = [row for entry in entries for row in self._claims.get(entry.setting, [])]
        write_text([_csv(Row._fields, claims)], self._folder / "claims.csv")
        write_text([_csv(StudyRow._fields, entries)], self._folder / "studies.csv")
        write_text(["\n".join(self._page(entries)) + "\n"], self._folder / "claims.md")

    def _replace(self, setting: str, later: Sequence[Row]) -> None:
        """Drop the undecided claims that were asked again over other seeds."""
        asked = {row.sentence for row in later}
        rows = self._claims.get(setting, [])
        self._claims[setting] = [row for row in rows if row.verdict != UNDECIDED or row.sentence not in asked]

    @property
    def tally(self) -> str:
        """The number of claims by outcome, as a sentence."""
        rows = [row for rows in self._claims.values() for row in rows]
        of = f"{len(self._entries)} studies and profiles" if len(self._entries) != 1 else "1 study"
        told = f"{counted(len(rows), 'claim')} of {of}: {_outcomes(rows)}"
        theirs = [row for row in rows if not row.is_ours]
        if len(theirs) < len(rows):
            told += f"; without ours, which ask for causes, {len(theirs)}: {_outcomes(theirs)}"
        return told

    def _page(self, entries: Iterable[StudyRow]) -> list[str]:
        lines = ["# Claims", "", GENERATED, "", f"{self.tally}.", ""]
        lines += head(("study", "profile", "cells", "seeds", "minutes", "of CPU", *OUTCOMES))
        for entry in entries:
            counts = Counter(row.verdict for row in self._claims.get(entry.setting, []))
            named = f"[`{entry.study}`]({entry.page}.md)"
            lines.append(line((named, *entry[1:6], *(counts[outcome] for outcome in OUTCOMES))))
        again = [_AGAIN, ""] if any(entry.again for entry in entries) else []
        return [*lines, "", *again, _MINUTES, "", HOW_DECIDED]


def _outcomes(rows: Sequence[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES)


def _read(path: Path, kind: type[_Line]) -> list[_Line]:
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error):
        lines = []
    if lines[:1] != [list(kind._fields)] or any(len(one) != len(kind._fields) for one in lines):
        raise ConfigError(f"{path} was not written by lit-fed results; give another folder by --output, or remove it")
    return [kind(*one) for one in lines[1:]]


def _csv(fields: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(lines)
    return file.getvalue()
