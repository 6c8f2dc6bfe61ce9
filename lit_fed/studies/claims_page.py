"""A study as a page, and its claims as lines of ``claims.csv``, from the cells that have finished."""

from __future__ import annotations

from typing import NamedTuple

from lit_fed.studies.cells import Cell
from lit_fed.studies.claims import HOW_DECIDED, Claim, Verdict
from lit_fed.studies.markdown import head, line
from lit_fed.studies.results import Results, caption, table_lines, verdict_text
from lit_fed.studies.study import Place, Study

GENERATED = "Written by `lit-fed results` from the cells that have finished; change the studies, not this page."


class Row(NamedTuple):
    """A claim as a line of ``claims.csv``; an empty text is what nobody knows.

    Args:
        paper: The paper, and the table or figure.
        claim: What it says, and the sentence that was checked.
        published: What is left beyond the limit in the paper's own numbers.
        ours: The same in ours, mean over seeds.
        interval: The ends of its confidence interval, see `lit_fed.studies.claims.decide`.
        verdict: One of `lit_fed.studies.claims.OUTCOMES`.
        seeds: How many seeds have all that the claim needs.
        setting: The study and its profile.
        commit: With what the study's cells were run.
        cause: Why it does not hold, where the study file knows.
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


def rows_of(results: Results) -> list[Row]:
    """The claims of a study."""
    study = results.grid.study
    commits = " ".join(dict.fromkeys(_made_with(cell, "commit") for cell in _done(results)))
    return [
        Row(
            paper=study.source or study.title,
            claim=f"{claim.says} [{claim.text}]" if claim.says else claim.text,
            published=_text(published_margin(study, claim, verdict)),
            ours=_text(verdict.margin),
            interval=_interval(verdict),
            verdict=verdict.outcome,
            seeds=str(verdict.seeds),
            setting=f"{study.name}, {study.profile}",
            commit=commits,
            cause="" if verdict.outcome == "holds" else claim.cause,
        )
        for claim, verdict in results.verdicts
    ]


def published_margin(study: Study, claim: Claim, verdict: Verdict) -> float | None:
    """What the paper's own numbers leave beyond the limit, of the inequality that stands worst in ours.

    Returns:
        The margin; None where the paper lacks a number, or has no table of what is claimed.
    """
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


def study_page(results: Results) -> str:
    """The page of a study: with what it was run, its table, and its claims."""
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
        found = list(dict.fromkeys(_made_with(cell, key) for cell in _done(results)))
        lines.append(f"- {key}: {'; '.join(found)}")
    lines += ["", *table_lines(results), "", *caption(results)]
    lines += ["", *head(("claim", "verdict", "the paper's margin", "ours", "seeds", "cause"))]
    for (claim, verdict), row in zip(results.verdicts, rows_of(results), strict=True):
        said = f"{claim.says} (`{claim.text}`)" if claim.says else f"`{claim.text}`"
        lines.append(line((said, row.verdict, row.published, verdict_text(verdict), row.seeds, row.cause)))
    return "\n".join([*lines, "", HOW_DECIDED]) + "\n"


def _sentence(text: str) -> str:
    return text if text.endswith(("?", ".")) else f"{text}."


def _done(results: Results) -> list[Cell]:
    return [cell for cell in results.grid.cells if cell.done]


def _made_with(cell: Cell, key: str) -> str:
    return str(cell.record().get("made_with", {}).get(key, "unknown"))


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _interval(verdict: Verdict) -> str:
    if verdict.margin is None or verdict.spread is None:
        return ""
    return f"{verdict.margin - verdict.spread:.4g} to {verdict.margin + verdict.spread:.4g}"
