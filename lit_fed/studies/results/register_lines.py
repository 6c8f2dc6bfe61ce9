"""The results of studies as lines of the tables that outlive the runs: claims, studies, numbers by seed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_fed.studies.file.claims import NOT_APPLICABLE, Claim, Verdict
from lit_fed.studies.file.rounds import chosen_on_test, quantile
from lit_fed.studies.file.study import Place, Study, profiles_of, read_study
from lit_fed.studies.results.results import Results, evaluated_on
from lit_fed.studies.running.cells import Cell, CellGrid

_JOIN = " + "  # of several commits, networks or data sets
_DIGITS = 6  # significant digits of a number by seed
_NUMBER = re.compile(r"\d+(\.\d+)?")
_CONTINUES = "…"  # begins the wording of a claim that continues the claims before it
_OURS = "(ours)"  # marks the wording of a claim that no paper makes
PAPERS, OURS = "What the paper says", "Claims of ours"
"""Headings of the claims of papers, and of all others."""


class Row(NamedTuple):
    """A claim as a line of ``claims.csv``; an empty text stands for an unknown value.

    Args:
        paper: The paper's short name, which is also that of its files.
        source: The paper, and the table or figure.
        claim: The paper's wording, whole, and the sentence that was checked.
        published: The margin beyond the limit in the paper's numbers.
        ours: The margin in our numbers, mean over seeds.
        interval: The ends of its two-sided 95 % confidence interval, see `lit_fed.studies.file.claims.decide`.
        limit: The number that the difference must exceed, if it is not zero: the difference is margin + limit.
        p: The claim's two-sided p-value.
        verdict: One of `lit_fed.studies.file.claims.OUTCOMES`.
        seeds: The number of seeds with all values that the claim needs.
        network: The networks of the claim's runs.
        data: Their data sets.
        setting: The study and its profile.
        commit: The commit with which the study's cells ran.
        cause: Why the claim does not hold or is not applicable, if the study file says so.
    """

    paper: str
    source: str
    claim: str
    published: str
    ours: str
    interval: str
    limit: str
    p: str
    verdict: str
    seeds: str
    network: str
    data: str
    setting: str
    commit: str
    cause: str

    @property
    def study(self) -> str:
        """The study's name."""
        return self.setting.partition(", ")[0]

    @property
    def profile(self) -> str:
        """The study's profile, or ``simulation``."""
        return self.setting.partition(", ")[2]

    @property
    def sentence(self) -> str:
        """The sentence that was checked."""
        return self.claim.rpartition("[")[2].rstrip("]")

    @property
    def says(self) -> str:
        """The paper's wording; empty without one."""
        return self.claim.rpartition(" [")[0]

    @property
    def is_ours(self) -> bool:
        """Whether no paper makes the claim: it looks for a cause, or answers an open question."""
        return is_ours(self.claim)


class StudyRow(NamedTuple):
    """A study as a line of ``studies.csv``.

    Args:
        paper: The paper's short name.
        study: The study's name.
        profile: The profile.
        cells: The number of finished cells, of all cells.
        seeds: The number of seeds.
        minutes: The cells' durations, summed.
        cpu: The cells' CPU minutes.
        again: The profile whose claims it asks again, over other seeds; empty for none.
        commit: The commit with which the cells ran.
    """

    paper: str
    study: str
    profile: str
    cells: str
    seeds: str
    minutes: str
    cpu: str
    again: str
    commit: str

    @property
    def setting(self) -> str:
        """The study's name in claims."""
        return f"{self.study}, {self.profile}"


class Number(NamedTuple):
    """A place of a study as a line of the paper's table of numbers.

    Args:
        study: The study's name.
        profile: The profile.
        row: The row of the study, or the line of a simulation.
        column: The column of the study, or the panel of a simulation and the place on its axis.
        metric: The metric, and the round that counts; empty for a simulation.
        commit: The commit with which the cells ran.
        n: The number of seeds with a value.
        mean: Mean over seeds.
        median: Median.
        lower: Lower quartile.
        upper: Upper quartile.
        seeds: The seeds with a value; empty for a simulation.
        values: Their values, in the same order; empty for a simulation.
    """

    study: str
    profile: str
    row: str
    column: str
    metric: str
    commit: str
    n: str
    mean: str
    median: str
    lower: str
    upper: str
    seeds: str
    values: str

    @property
    def setting(self) -> str:
        """The study's name in claims."""
        return f"{self.study}, {self.profile}"


class Finished(NamedTuple):
    """The results of a study or simulation.

    Args:
        entry: The line of ``studies.csv``.
        claims: The lines of ``claims.csv``.
        numbers: The lines of the paper's table of numbers.
        picture: A picture for the paper's page.
    """

    entry: StudyRow
    claims: list[Row]
    numbers: list[Number]
    picture: Path | None = None


def paper_of(path: Path) -> str:
    """Return a file's paper: the folder above ``studies`` or ``simulations``; else the file's name."""
    whole = path.absolute()
    return whole.parent.parent.name if whole.parent.name in ("studies", "simulations") else whole.stem


def finished_study(results: Results) -> Finished:
    """Return the results of a study with at least one finished cell."""
    grid, study = results.grid, results.grid.study
    done = [cell for cell in grid.cells if cell.done]
    minutes, cpu = (_minutes(done, key) for key in ("seconds", "cpu_seconds"))
    made_with = [cell.record().get("made_with", {}) for cell in done]
    commits = _JOIN.join(dict.fromkeys(str(record.get("commit", "unknown")) for record in made_with))
    paper, finished = paper_of(study.path), f"{len(done)} of {len(grid.cells)}"
    entry = StudyRow(
        paper, study.name, study.profile, finished, str(len(study.seeds)), minutes, cpu, study.again, commits
    )
    claims = [
        row_of(text, claim, verdict, entry, study.source or study.title, published, *_ran(grid, claim))
        for text, (claim, verdict), published in zip(
            texts_of(study), results.verdicts, published_of(study), strict=True
        )
        if verdict.seeds  # a claim without numbers is not a result
    ]
    numbers = []
    for place, entry_there in results.entries.items():
        values = [(seed, grid.value(place, seed)) for seed in study.seeds if (place, seed) in grid.runs]
        known = {seed: value for seed, value in values if value is not None}
        if known:
            chosen = chosen_on_test(entry_there.measure.report, entry_there.measure.metric, evaluated_on(grid))
            metric = f"{entry_there.measure.words}, {entry_there.measure.report}{chosen}"
            numbers.append(number_of(entry, place.row, place.column, metric, list(known.values()), list(known)))
    return Finished(entry, claims, numbers)


def number_of(
    entry: StudyRow, row: str, column: str, metric: str, values: Sequence[float], seeds: Sequence[int] = ()
) -> Number:
    """Return a line of numbers; without seeds it has their mean and quartiles alone."""
    ordered = [value if np.isfinite(value) else np.inf for value in values]
    with np.errstate(invalid="ignore"):
        mean = float(np.mean(values))
    median, lower, upper = (_brief(quantile(ordered, share)) for share in (0.5, 0.25, 0.75))
    return Number(
        study=entry.study,
        profile=entry.profile,
        row=row,
        column=column,
        metric=metric,
        commit=entry.commit,
        n=str(len(values)),
        mean=_brief(mean),
        median=median,
        lower=lower,
        upper=upper,
        seeds=" ".join(map(str, seeds)),
        values=" ".join(map(_brief, values)) if seeds else "",
    )


def row_of(
    text: str,
    claim: Claim,
    verdict: Verdict,
    entry: StudyRow,
    source: str,
    published: float | None,
    network: str,
    data: str,
) -> Row:
    """Return the line of a claim and its verdict."""
    return Row(
        paper=entry.paper,
        source=source,
        claim=text,
        published=_text(published),
        ours=_text(verdict.margin),
        interval=_interval(verdict),
        limit=_text(verdict.link.limit or None) if verdict.link else "",
        p=_text(verdict.p),
        verdict=verdict.outcome,
        seeds=str(verdict.seeds),
        network=network,
        data=data,
        setting=entry.setting,
        commit=entry.commit,
        cause=cause_of(claim, verdict.outcome),
    )


def claim_texts(claims: Iterable[tuple[str, str]], source: str) -> list[str]:
    """Format the wordings and sentences of a profile's claims for ``claims.csv``.

    A wording that begins with "…" continues the last one that does not, and is told with it. Claims that no paper makes
    are marked "(ours)": by their wording, and all claims without a `source`.
    """
    texts, head = [], ""
    for says, sentence in claims:
        continues = says.startswith(_CONTINUES) and bool(head)
        whole = f"{head.removesuffix(' …')} {says}" if continues else says
        head = head if continues else says
        whole = whole if source or _OURS in whole else f"{whole} {_OURS}".strip()
        texts.append(f"{whole} [{sentence}]" if whole else sentence)
    return texts


def is_ours(text: str) -> bool:
    """Whether a claim in the format of ``claims.csv`` is marked "(ours)"."""
    return _OURS in text


def texts_of(study: Study) -> list[str]:
    """Return the claims of a study in the format of ``claims.csv``."""
    return claim_texts(((claim.says, claim.sentence) for claim in study.claims), study.source)


def cause_of(claim: Claim, verdict: str) -> str:
    """Return the reason that the study file gives for a verdict; empty where the claim holds."""
    if verdict == NOT_APPLICABLE:
        return claim.not_applicable
    return "" if verdict == "holds" else claim.cause


# ---------------------------------------------------------------------- statements


class Statement(NamedTuple):
    """A claim of a study as often as it was asked.

    Args:
        study: The study.
        says: Its wording, or its sentence without one.
        shape: Its sentence without numbers, and without the places of "at".
        number: How many claims of the same wording and shape precede it in a profile.
    """

    study: str
    says: str
    shape: str
    number: int


def statements_of(study: str, texts: Iterable[str]) -> Iterator[Statement]:
    """Yield the statement of each claim of one profile."""
    seen = Counter[tuple[str, str]]()
    for text in texts:
        says, _, sentence = text.rpartition(" [")
        says_what, *measured = sentence.split(", ")
        shape = _NUMBER.sub("#", ", ".join((says_what.partition(" at ")[0], *measured)))
        yield Statement(study, says or text, shape, seen[says, shape])
        seen[says, shape] += 1


def headed_by(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the claims of papers and then all others, each with their heading, where there are any."""
    for heading, is_ours in ((PAPERS, False), (OURS, True)):
        if found := [row for row in rows if row.is_ours == is_ours]:
            yield heading, found


def by_statement(rows: Sequence[Row]) -> dict[Statement, list[Row]]:
    """Group claims by statement: of one study, with the same wording or the same sentence."""
    by_text: dict[Statement, list[Row]] = {}
    by_sentence: dict[tuple[str, str], Statement] = {}
    for setting in dict.fromkeys(row.setting for row in rows):
        several = [row for row in rows if row.setting == setting]
        asked = statements_of(several[0].study, (row.claim for row in several))
        for row, statement in zip(several, asked, strict=True):
            same = statement if statement in by_text else by_sentence.get((row.study, row.sentence), statement)
            by_text.setdefault(same, []).append(row)
            by_sentence.setdefault((row.study, row.sentence), same)
    return by_text


# ---------------------------------------------------------------------- published numbers


def published_of(study: Study) -> list[float | None]:
    """Return the margin of each claim of a study in the paper's numbers; None if the paper does not print it.

    A profile without a table of the paper has the margins of the same statements in the profile ``paper``; one that
    asks another's claims again has that profile's.
    """
    margins = [published_margin(study, claim) for claim in study.claims]
    of_others: list[float | None] = [None] * len(margins)
    if study.again:
        first = read_study(study.path, study.again)
        by_sentence = dict(zip((claim.sentence for claim in first.claims), published_of(first), strict=True))
        of_others = [by_sentence.get(claim.sentence) for claim in study.claims]
    elif study.profile != "paper" and "paper" in profiles_of(study.path):
        theirs = read_study(study.path, "paper")
        of_paper = dict(zip(statements_of(study.name, texts_of(theirs)), published_of(theirs), strict=True))
        wordings = Counter(statement.says for statement in of_paper)
        once = {statement.says: margin for statement, margin in of_paper.items() if wordings[statement.says] == 1}
        asked = statements_of(study.name, texts_of(study))
        of_others = [of_paper.get(statement, once.get(statement.says)) for statement in asked]
    return [other if margin is None else margin for margin, other in zip(margins, of_others, strict=True)]


def published_margin(study: Study, claim: Claim) -> float | None:
    """Return a claim's margin in the paper's numbers, of its inequality with the smallest; None if unknown."""
    if claim.published is not None:
        return claim.published
    margins = published_margins(study, claim).values()
    known = [margin for margin in margins if margin is not None]
    return min(known) if known and len(known) == len(margins) else None


def published_margins(study: Study, claim: Claim) -> Mapping[str, float | None]:
    """Return the margin of each inequality of a claim in the paper's table; None if the table does not give it.

    A margin is the exact sum of the decimals that the paper prints.
    """
    margins: dict[str, float | None] = {}
    for link in claim.links:
        numbers = [study.published.get(Place(*place)) for _, place in link.terms]
        known = [number[0] for number in numbers if number is not None]
        there = not link.change and claim.metric is None and len(known) == len(numbers)
        parts = (_decimal(weight) * _decimal(value) for (weight, _), value in zip(link.terms, known, strict=False))
        margins[link.text] = float(sum(parts, -_decimal(link.limit))) if there else None
    return margins


def _decimal(number: float) -> Decimal:
    """Return a number as it is written, so that a paper's decimals add up exactly: 46.38 − 42.52 − 3.86 is 0."""
    return Decimal(repr(float(number)))


# ---------------------------------------------------------------------- details


def _ran(grid: CellGrid, claim: Claim) -> tuple[str, str]:
    """Return the networks and the data sets of a claim's runs."""
    seed = grid.study.seeds[0]
    configs = [grid.runs[Place(*place), seed].config for place in claim.places if (Place(*place), seed) in grid.runs]
    networks, data = (
        dict.fromkeys(name for config in configs for name in words_of(config)) for words_of in (_networks, _data)
    )
    return _JOIN.join(networks), _JOIN.join(data)


def _networks(content: Any) -> Iterator[str]:
    if isinstance(content, list):
        for item in content:
            yield from _networks(item)
    elif isinstance(content, Mapping):
        for key, item in content.items():
            if key == "network" and isinstance(item, str):
                yield item
            else:
                yield from _networks(item)


def _data(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the data's file or folder if a user's own format reads them, else the data's class."""
    data = config["data"]
    settings, kind = data.get("init_args", {}), str(data["class_path"]).rpartition(".")[2]
    folder = Path(settings.get("root") or "data").name
    yield settings.get("name") or (kind if folder == "data" else folder)


def _minutes(done: Sequence[Cell], key: str) -> str:
    taken = [cell.record()[key] for cell in done if key in cell.record()]
    return f"{sum(taken) / 60:.1f}" if len(taken) == len(done) else "not measured"


def _brief(number: float) -> str:
    return f"{number:.{_DIGITS}g}"


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _interval(verdict: Verdict) -> str:
    if verdict.margin is None or verdict.spread is None:
        return ""
    return f"{verdict.margin - verdict.spread:.4g} to {verdict.margin + verdict.spread:.4g}"
