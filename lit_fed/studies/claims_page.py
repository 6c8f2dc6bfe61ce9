"""All claims of studies on one page and in one table, from the cells that have finished."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

from lit_fed.studies.cells import Cell
from lit_fed.studies.claims import HOW_DECIDED, OUTCOMES, Claim, Verdict
from lit_fed.studies.results import Results, caption, table_lines, verdict_text
from lit_fed.studies.study import Place, Study
from lit_fed.studies.summary import summary_of, tally_text

_GENERATED = "Written by `lit-fed results` from the cells that have finished; change the studies, not this page."
_MINUTES = (
    "Minutes are those of the cells one after the other, whatever else ran on the machine; those of CPU are the "
    "time that cores spent on them."
)


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


def claims_csv(several: Sequence[Results]) -> str:
    """``claims.csv``: a line a claim."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(row for results in several for row in rows_of(results))
    return file.getvalue()


def claims_page(several: Sequence[Results]) -> str:
    """The page: how many claims came out how, how long each study took, every table and every claim."""
    heads = ("study", "profile", "cells", "seeds", "minutes", "of CPU", *OUTCOMES)
    lines = [
        "# Claims",
        "",
        _GENERATED,
        "",
        f"{tally_text([summary_of(results) for results in several])}.",
        "",
        *_head(heads),
    ]
    for results in several:
        study, done = results.grid.study, _done(results)
        minutes, cpu = (_minutes(done, key) for key in ("seconds", "cpu_seconds"))
        counts = summary_of(results).counts
        cells = f"{len(done)} of {len(results.grid.cells)}"
        named = f"[`{study.name}`](#{_anchor(results)})"
        words = (named, study.profile, cells, len(study.seeds), minutes, cpu, *(counts[o] for o in OUTCOMES))
        lines.append(_line(words))
    lines += ["", _MINUTES, "", HOW_DECIDED]
    for results in several:
        lines += _section(results)
    return "\n".join(lines) + "\n"


def _minutes(done: Sequence[Cell], key: str) -> str:
    taken = [cell.record()[key] for cell in done if key in cell.record()]
    return f"{sum(taken) / 60:.1f}" if len(taken) == len(done) else "not measured"


def _section(results: Results) -> list[str]:
    study = results.grid.study
    lines = ["", f"## {study.name}, {study.profile}", "", f"{study.title}. {study.source}".strip(), ""]
    for key in ("commit", "hardware", "versions"):
        found = list(dict.fromkeys(_made_with(cell, key) for cell in _done(results)))
        lines.append(f"- {key}: {'; '.join(found)}")
    lines += ["", *table_lines(results), "", *caption(results)]
    lines += ["", *_head(("claim", "verdict", "the paper's margin", "ours", "seeds", "cause"))]
    for (claim, verdict), row in zip(results.verdicts, rows_of(results), strict=True):
        said = f"{claim.says} (`{claim.text}`)" if claim.says else f"`{claim.text}`"
        lines.append(_line((said, row.verdict, row.published, verdict_text(verdict), row.seeds, row.cause)))
    return lines


def _head(words: Sequence[str]) -> list[str]:
    return [_line(words), "|---" * len(words) + "|"]


def _line(words: Sequence[object]) -> str:
    return "| " + " | ".join(str(word).replace("|", "\\|") for word in words) + " |"


def _anchor(results: Results) -> str:
    """What Markdown's readers make of the heading of a study."""
    study = results.grid.study
    return f"{study.name}, {study.profile}".lower().replace(",", "").replace(" ", "-")


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
