"""The results of a study: the table's numbers and the claims, as Markdown and CSV.

The output depends only on the runs: equal runs give equal bytes, whenever and wherever the study ran.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lit_fed.studies.file.claims import Claim, Verdict, by_holm, check, decide
from lit_fed.studies.file.rounds import chosen_on_test, goal_of, guide_of, report_words
from lit_fed.studies.file.study import PLAIN, Measure, Place
from lit_fed.studies.running.cells import CellGrid

_MISSING = "–"
_COLUMNS = ("row", "column", "metric", "report", "seeds", "mean", "std", "best")


@dataclass(frozen=True)
class Entry:
    """One place of the table.

    Args:
        place: The place.
        measure: The measure of its numbers.
        values: One number per finished seed.
        seeds: The number of seeds; 0 for a skipped place.
        published: The paper's mean, and its standard deviation or None.
        best: Whether no other row of the column is better, as far as the seeds tell.
        failed: The number of failed seeds.
    """

    place: Place
    measure: Measure
    values: tuple[float, ...]
    seeds: int
    published: tuple[float, float | None] | None = None
    best: bool = False
    failed: int = 0

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds (n − 1); None below two, or with an infinite value."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 and np.isfinite(self.values).all() else None

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's."""
        return None if self.mean is None or self.published is None else self.mean - self.published[0]

    @property
    def ours(self) -> str:
        """Mean ± standard deviation, with the number of seeds if some are missing or failed."""
        if self.mean is None and self.failed < self.seeds:
            return f"{_MISSING} ({self.failed} of {self.seeds} seeds failed)" if self.failed else _MISSING
        if self.mean is None:
            return "failed" if self.seeds else ""
        text = self._number(self.mean) + (f" ± {self._number(self.std)}" if self.std is not None else "")
        if goal_of(self.measure.report) is not None and not np.isfinite(self.mean):
            text = f"not in {sum(map(np.isinf, self.values))} of {len(self.values)}"
        if len(self.values) == self.seeds:
            return text
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{text} ({len(self.values)} of {self.seeds} seeds{failed})"

    @property
    def paper(self) -> str:
        """The paper's value and our difference from it; empty without one."""
        if self.published is None:
            return ""
        mean, std = self.published
        text = f"paper {mean:g}" + (f" ± {std:g}" if std is not None else "")
        return text if self.difference is None else f"{text}, {self._number(self.difference, '+')}"

    def _number(self, value: float, sign: str = "") -> str:
        return f"{value:{sign}.{self.measure.decimals}f}".replace("-", "−")


@dataclass(frozen=True)
class Results:
    """A study's table and claims.

    Args:
        grid: The study and its runs.
        entries: The entries by place, row by row.
        verdicts: The claims with their verdicts.
    """

    grid: CellGrid
    entries: dict[Place, Entry]
    verdicts: list[tuple[Claim, Verdict]]


def collect(grid: CellGrid) -> Results:
    """Collect the results of finished cells."""
    study, entries = grid.study, dict[Place, Entry]()
    for row in study.rows:
        for column in study.columns:
            place = Place(row, column)
            by_seed = [grid.value(place, seed) for seed in study.seeds if place not in study.skip]
            values = tuple(value for value in by_seed if value is not None)
            failed = sum(grid.runs[place, seed].failed for seed in study.seeds if (place, seed) in grid.runs)
            published = study.published.get(place)
            entries[place] = Entry(place, grid.measure_of(place), values, len(by_seed), published, failed=failed)
    for column in study.columns:
        for place in _best([entries[Place(row, column)] for row in study.rows]):
            entries[place] = Entry(**{**vars(entries[place]), "best": True})
    verdicts = []
    for claim in study.claims:
        value = partial(grid.value, metric=claim.metric, report=claim.report)
        curve = partial(grid.curve, metric=claim.metric)
        verdicts.append(check(claim, study.seeds, value, curve))
    return Results(grid, entries, list(zip(study.claims, by_holm(verdicts), strict=True)))


def _best(column: Sequence[Entry]) -> list[Place]:
    """Return the best place of a column, and places that it does not beat; empty if rows have different metrics.

    The best does not beat a place if the claim that it is better does not hold over their seeds, see
    `lit_fed.studies.file.claims.decide`; of one seed, or with seeds missing, if the table shows the same mean.
    """
    there = [entry for entry in column if entry.mean is not None and np.isfinite(entry.mean)]
    if len(there) < 2 or len({entry.measure.words for entry in there}) > 1:
        return []
    means = [round(float(np.mean(entry.values)), entry.measure.decimals) for entry in there]
    sign = -1.0 if there[0].measure.lower else 1.0
    top, best = max(zip(means, there, strict=True), key=lambda pair: sign * pair[0])
    places = []
    for entry, mean in zip(there, means, strict=True):
        paired = 1 < len(entry.values) == len(best.values) == best.seeds
        gains = [sign * (value - other) for value, other in zip(best.values, entry.values, strict=False)]
        if mean == top or (paired and decide(gains).outcome != "holds"):
            places.append(entry.place)
    return places


# ---------------------------------------------------------------------- as text


def evaluated_on(grid: CellGrid) -> str:
    """Return ``test`` if any cell evaluates on test data, else ``val``."""
    return "test" if any(cell.config["trainer"]["evaluate_on"] == "test" for cell in grid.cells) else "val"


def caption(results: Results) -> list[str]:
    """Return the sentences below the table, which explain its numbers."""
    study, entries = results.grid.study, list(results.entries.values())
    subset = evaluated_on(results.grid)
    measures = list(dict.fromkeys(entry.measure for entry in entries if entry.seeds))
    kinds = dict.fromkeys(
        (f"{m.y_label}, which is " if m.y_label else "")
        + ("log10 of " if m.log else "")
        + f"{m.metric}, {report_words(m.report, study.printed(guide_of(m.report)))}"
        + chosen_on_test(m.report, m.metric, subset)
        + ("" if m.scale == 1 else f", times {m.scale:g}")
        for m in measures
    )
    lines = [f"Metric: {'; '.join(kinds)}."]
    count = len(study.seeds)
    lines.append(
        f"Mean ± sample standard deviation over {count} seeds ({', '.join(map(str, study.seeds))})."
        " Bold: the best of a column, and what it does not beat (paired t test, two-sided at 5 %)."
        if count > 1
        else f"One seed ({study.seeds[0]}), so there is no spread."
    )
    lines += [results.grid.partitions] if count > 1 else []
    if any(entry.published for entry in entries):
        line = '"paper" is the published value, and how far ours is from it'
        lines.append(
            f"{line}; it is not of the setting of the profile {study.profile}."
            if study.profile not in ("paper", PLAIN)
            else f"{line}."
        )
    return lines


def table_markdown(results: Results) -> str:
    """Return the table as Markdown, with the best in bold, title and source."""
    study = results.grid.study
    profile = f"Profile {study.profile}." if study.profile != PLAIN else ""
    source = f"Source: {study.source}." if study.source else ""
    lines = [f"# {study.title}", "", *([f"{profile} {source}".strip(), ""] if profile or source else [])]
    return "\n".join([*lines, *table_lines(results), "", *caption(results)]) + "\n"


def table_lines(results: Results) -> list[str]:
    """Return the lines of the Markdown table, with the best in bold."""
    study = results.grid.study
    lines = ["| | " + " | ".join(_escaped(column.label) for column in study.columns.values()) + " |"]
    lines.append("|---" * (len(study.columns) + 1) + "|")
    for row, variant in study.rows.items():
        cells = [_markdown(results.entries[Place(row, column)]) for column in study.columns]
        lines.append(f"| {_escaped(variant.label)} | " + " | ".join(cells) + " |")
    return lines


def _markdown(entry: Entry) -> str:
    ours = f"**{entry.ours}**" if entry.best else entry.ours
    return f"{ours} ({entry.paper})" if entry.paper else ours


def table_csv(results: Results) -> str:
    """Return the table as CSV: a line per place, with all digits."""
    lines = []
    for entry in results.entries.values():
        if not entry.seeds:
            continue
        numbers = (entry.mean, entry.std, entry.published[0] if entry.published else None, entry.difference)
        mean, std, published, difference = ("" if number is None else repr(number) for number in numbers)
        values = " ".join(map(repr, entry.values))
        measure, best = entry.measure, "yes" if entry.best else "no"
        ours = [measure.metric, measure.report, len(entry.values), mean, std, best]
        lines.append([*entry.place, *ours, published, difference, values, entry.failed])
    return csv_text((*_COLUMNS, "published", "difference", "values", "failed"), lines)


def csv_text(heads: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    """Return a table as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([heads, *lines])
    return file.getvalue()


def verdict_text(verdict: Verdict) -> str:
    """Return a verdict's difference, spread, number to exceed unless it is zero, and note."""
    if verdict.difference is None:
        return verdict.note
    text = f"{verdict.difference + 0.0:+.4g}" + (f" ± {verdict.spread:.2g}" if verdict.spread is not None else "")
    text += f" (to exceed {verdict.link.limit:.4g})" if verdict.link and verdict.link.limit else ""
    return text.replace("-", "−") + (f", {verdict.note}" if verdict.note else "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


# ---------------------------------------------------------------------- as LaTeX


def head(words: Sequence[object]) -> list[str]:
    """Return the first two lines of a table."""
    return [line(words), "|---" * len(words) + "|"]


def line(words: Sequence[object]) -> str:
    """Return a line of a table, with bars in words escaped."""
    return "| " + " | ".join(str(word).replace("|", "\\|") for word in words) + " |"


_CHARACTERS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    **{"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "·": r"$\cdot$", "–": "--", "—": "---", "…": r"\ldots{}"},
    **{"≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$", "≈": r"$\approx$", "→": r"$\to$", "∞": r"$\infty$"},
    **{"²": "$^2$", "³": "$^3$", "°": r"$^\circ$", "‖": r"$\|$"},
}
_LATIN = {"alpha": "A", "beta": "B", "epsilon": "E", "zeta": "Z", "eta": "H", "iota": "I", "kappa": "K", "mu": "M"}
_LATIN |= {"nu": "N", "omicron": "O", "rho": "P", "tau": "T", "chi": "X"}
_SMALL = {"omicron": "o", "lamda": r"$\lambda$", "final sigma": r"$\varsigma$"}
_GREEK = "GREEK SMALL LETTER ", "GREEK CAPITAL LETTER "


def table_latex(results: Results) -> str:
    """Return the table for the package booktabs, the best in bold, the paper's values in brackets."""
    study = results.grid.study
    heads = "".join(f" & {escaped(column.label)}" for column in study.columns.values())
    lines = [f"% {study.called}: {' '.join(study.title.split())}", f"\\begin{{tabular}}{{l{'r' * len(study.columns)}}}"]
    lines += ["\\toprule", f"{heads} \\\\".lstrip(), "\\midrule"]
    for row, variant in study.rows.items():
        cells = "".join(f" & {_cell(results.entries[Place(row, column)])}" for column in study.columns)
        lines.append(f"{escaped(variant.label)}{cells} \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {line}" for line in caption(results))]
    return "\n".join(lines) + "\n"


def _cell(entry: Entry) -> str:
    ours = escaped(entry.ours)
    ours = f"\\textbf{{{ours}}}" if entry.best else ours
    if entry.published is None:
        return ours
    mean, std = entry.published
    return f"{ours} ({mean:g}" + (f" $\\pm$ {std:g}" if std is not None else "") + ")"


def escaped(text: str) -> str:
    """Escape a text for LaTeX; Greek letters and some symbols become mathematics."""
    return "".join(_CHARACTERS.get(character) or _letter(character) for character in text)


def _letter(character: str) -> str:
    name = unicodedata.name(character, "")
    small, capital = (name.removeprefix(prefix).lower() if name.startswith(prefix) else "" for prefix in _GREEK)
    if small in _SMALL:
        return _SMALL[small]
    if " " in small + capital:  # with an accent
        return character
    if small:
        return f"$\\{small}$"
    if capital:
        return _LATIN.get(capital) or ("$\\Lambda$" if capital == "lamda" else f"$\\{capital.capitalize()}$")
    return character
