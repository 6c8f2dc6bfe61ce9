"""A study's page, and its claims as lines of ``claims.csv``, from finished cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lit_fed.studies.cells import Cell
from lit_fed.studies.claims import HOW_DECIDED, Claim, Verdict
from lit_fed.studies.markdown import head, line
from lit_fed.studies.results import Results, caption, table_csv, table_lines, verdict_text
from lit_fed.studies.study import Place, Study

GENERATED = "Written by `lit-fed results` from the cells that have finished; change the studies, not this page."


class Row(NamedTuple):
    """A claim as a line of ``claims.csv``; an empty text stands for an unknown value.

    Args:
        paper: The paper, and the table or figure.
        claim: The paper's wording, and the sentence that was checked.
        published: The margin beyond the limit in the paper's numbers.
        ours: The margin in our numbers, mean over seeds.
        interval: The ends of its confidence interval, see `lit_fed.studies.claims.decide`.
        verdict: One of `lit_fed.studies.claims.OUTCOMES`.
        seeds: The number of seeds with all values that the claim needs.
        setting: The study and its profile.
        commit: The commit with which the study's cells ran.
        cause: Why the claim does not hold, if the study file says so.
    """

    paper: str
    claim: str
    published: str
    ours: str
    interval: str
    verdict: str
    seeds: str
    setting: str
    commit: str
    cause: str

    @property
    def sentence(self) -> str:
        """The sentence that was checked."""
        return self.claim.rpartition("[")[2].rstrip("]")

    @property
    def is_ours(self) -> bool:
        """Whether the claim is marked "(ours)": it looks for a cause, or answers a paper's open question."""
        return "(ours)" in self.claim

    @property
    def said(self) -> str:
        """The claim in the format of the study's page."""
        says = self.claim.rpartition(" [")[0]
        return f"{says} (`{self.sentence}`)" if says else f"`{self.sentence}`"


class StudyRow(NamedTuple):
    """A study as a line of ``studies.csv``.

    Args:
        study: The study's name.
        profile: The profile.
        cells: The number of finished cells, of all cells.
        seeds: The number of seeds.
        minutes: The cells' durations, summed.
        cpu: The cells' CPU minutes.
        again: The profile whose claims it asks again, over other seeds; empty for none.
    """

    study: str
    profile: str
    cells: str
    seeds: str
    minutes: str
    cpu: str
    again: str = ""

    @property
    def setting(self) -> str:
        """The study's name in claims."""
        return f"{self.study}, {self.profile}"

    @property
    def page(self) -> str:
        """The path of its page, without the suffix."""
        return f"studies/{self.study}-{self.profile}"


class Finished(NamedTuple):
    """The results of a study or simulation.

    Args:
        entry: The line of ``studies.csv``.
        claims: The lines of ``claims.csv``.
        page: The page, Markdown.
        table: The numbers, CSV.
        picture: A picture on the page.
    """

    entry: StudyRow
    claims: list[Row]
    page: str
    table: str
    picture: Path | None = None


def finished_study(results: Results) -> Finished:
    """Return the results of a study with at least one finished cell."""
    study, cells = results.grid.study, results.grid.cells
    done = [cell for cell in cells if cell.done]
    minutes, cpu = (_minutes(done, key) for key in ("seconds", "cpu_seconds"))
    finished, seeds = f"{len(done)} of {len(cells)}", str(len(study.seeds))
    entry = StudyRow(study.name, study.profile, finished, seeds, minutes, cpu, study.again)
    commits = " ".join(dict.fromkeys(_made_with(cell, "commit") for cell in done))
    paper, claims = study.source or study.title, []
    for claim, verdict in results.verdicts:
        published = published_margin(study, claim, verdict)
        claims.append(row_of(claim, verdict, paper, entry.setting, commits, published))
    return Finished(entry, claims, _study_page(results, done, claims), table_csv(results))


def row_of(claim: Claim, verdict: Verdict, paper: str, setting: str, commit: str, published: float | None) -> Row:
    """Return the line of a claim and its verdict."""
    return Row(
        paper=paper,
        claim=claim_text(claim.says, claim.sentence),
        published=_text(published),
        ours=_text(verdict.margin),
        interval=_interval(verdict),
        verdict=verdict.outcome,
        seeds=str(verdict.seeds),
        setting=setting,
        commit=commit,
        cause="" if verdict.outcome == "holds" else claim.cause,
    )


def claim_text(says: str, sentence: str) -> str:
    """Format a claim for ``claims.csv``."""
    return f"{says} [{sentence}]" if says else sentence


def published_margin(study: Study, claim: Claim, verdict: Verdict) -> float | None:
    """Return the margin in the paper's numbers of the inequality that is the worst in ours; None if unknown."""
    if claim.published is not None:
        return claim.published
    link = verdict.link
    if link is None or link.change or claim.metric is not None:
        return None
    numbers = [study.published.get(Place(*place)) for _, place in link.terms]
    known = [number[0] for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    return sum(weight * value for (weight, _), value in zip(link.terms, known, strict=True)) - link.limit


def _study_page(results: Results, done: Sequence[Cell], claims: Sequence[Row]) -> str:
    """Return the page of a study: versions, table and claims."""
    study = results.grid.study
    lines = [
        f"# {study.name}, {study.profile}",
        "",
        GENERATED,
        "",
        f"{_sentence(study.title)} {study.source}".strip(),
        "",
    ]
    for key in ("commit", "hardware", "versions"):
        found = list(dict.fromkeys(_made_with(cell, key) for cell in done))
        lines.append(f"- {key}: {'; '.join(found)}")
    lines += ["", *table_lines(results), "", *caption(results), *claim_lines(results.verdicts, claims)]
    return "\n".join(lines) + "\n"


def claim_lines(verdicts: Sequence[tuple[Claim, Verdict]], rows: Sequence[Row]) -> list[str]:
    """Return claims as a table, and how they are decided; empty without claims."""
    if not rows:
        return []
    lines = ["", *head(("claim", "verdict", "the paper's margin", "ours", "seeds", "cause"))]
    for (_, verdict), row in zip(verdicts, rows, strict=True):
        lines.append(line((row.said, row.verdict, row.published, verdict_text(verdict), row.seeds, row.cause)))
    return [*lines, "", HOW_DECIDED]


def with_cause(page: str, row: Row, cause: str) -> str:
    """Replace a claim's cause on a study's page."""
    first, last = line((row.said, "")).removesuffix(" |"), line((row.cause,))
    lines = (
        one.removesuffix(last) + line((cause,)) if one.startswith(first) and one.endswith(last) else one
        for one in page.split("\n")
    )
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text if text.endswith(("?", ".")) else f"{text}."


def _minutes(done: Sequence[Cell], key: str) -> str:
    taken = [cell.record()[key] for cell in done if key in cell.record()]
    return f"{sum(taken) / 60:.1f}" if len(taken) == len(done) else "not measured"


def _made_with(cell: Cell, key: str) -> str:
    return str(cell.record().get("made_with", {}).get(key, "unknown"))


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _interval(verdict: Verdict) -> str:
    if verdict.margin is None or verdict.spread is None:
        return ""
    return f"{verdict.margin - verdict.spread:.4g} to {verdict.margin + verdict.spread:.4g}"
