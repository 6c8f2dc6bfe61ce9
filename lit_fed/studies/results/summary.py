"""Summaries of studies, as files next to their tables, from which the pages over all studies are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_fed.printing import counted
from lit_fed.studies.file.claims import HOW_DECIDED, OUTCOMES, Claim, Verdict, outcome_counts
from lit_fed.studies.file.study import Study
from lit_fed.studies.results.register_lines import OURS, PAPERS, claim_texts, is_ours
from lit_fed.studies.results.results import Results, head, line, verdict_text

_FILE = "summary.json"


@dataclass(frozen=True)
class Decided:
    """A claim with its verdict.

    Args:
        says: The paper's wording.
        text: The claim in the study file's grammar, with its metric and round if they differ from the table's.
        outcome: ``holds``, ``equal``, ``undecided`` or ``fails``.
        difference: The difference, its spread, and the number that it must exceed.
        seeds: The number of seeds with all values that the claim needs.
    """

    says: str
    text: str
    outcome: str
    difference: str
    seeds: int


@dataclass(frozen=True)
class Summary:
    """A study's line on a page, and its claims.

    Args:
        name: The study's name.
        profile: The profile.
        title: The comparison in one line.
        source: The paper, and the table or figure.
        cells: The number of cells.
        done: The number of finished cells.
        failed: The number of failed cells.
        claims: The claims.
    """

    name: str
    profile: str
    title: str
    source: str
    cells: int
    done: int
    failed: int
    claims: tuple[Decided, ...]

    def claims_under(self, heading: str) -> list[Decided]:
        """Return the claims of the paper, or those of ours, by `PAPERS` or `OURS`."""
        texts = claim_texts(((claim.says, claim.text) for claim in self.claims), self.source)
        return [claim for claim, text in zip(self.claims, texts, strict=True) if is_ours(text) == (heading == OURS)]

    def tally(self, heading: str) -> str:
        """Return the number of claims under a heading by outcome."""
        return outcome_counts(claim.outcome for claim in self.claims_under(heading))


def summary_of(results: Results) -> Summary:
    """Return the summary of a study."""
    grid, study = results.grid, results.grid.study
    claims = (_decided(study, claim, verdict) for claim, verdict in results.verdicts)
    done, failed = (sum(getattr(cell, state) for cell in grid.cells) for state in ("done", "failed"))
    heading = (study.name, study.profile, study.title, study.source)
    return Summary(*heading, len(grid.cells), done, failed, tuple(claims))


def _decided(study: Study, claim: Claim, verdict: Verdict) -> Decided:
    metric = study.printed(claim.metric) if claim.metric else ""
    text = ", ".join(filter(None, (claim.text, metric, claim.report)))
    return Decided(claim.says, text, verdict.outcome, verdict_text(verdict), verdict.seeds)


def summary_json(summary: Summary) -> str:
    """Serialise a summary."""
    return json.dumps(asdict(summary), indent=1, ensure_ascii=False) + "\n"


def summaries_in(output: Path, profile: str) -> list[Summary]:
    """Read the summaries of all studies in a folder for one profile, sorted by name; skip files of other origin."""
    summaries = [_read(path) for path in sorted(output.glob(f"*/{profile}/{_FILE}"))]
    return [summary for summary in summaries if summary is not None]


def _read(path: Path) -> Summary | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        claims = tuple(Decided(**claim) for claim in content.pop("claims"))
        summary = Summary(**content, claims=claims)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    ours = (summary.name, summary.profile) == path.parts[-3:-1] and all(c.outcome in OUTCOMES for c in claims)
    return summary if ours else None


def headings(several: Sequence[Summary]) -> list[str]:
    """Return the headings under which studies have claims: those of papers, those of ours."""
    return [heading for heading in (PAPERS, OURS) if any(summary.claims_under(heading) for summary in several)]


def tally_text(several: Sequence[Summary]) -> str:
    """Return the number of claims by outcome, those of papers and those of ours, as a sentence."""
    told = []
    for heading in headings(several):
        outcomes = [claim.outcome for summary in several for claim in summary.claims_under(heading)]
        whose = "ours" if heading == OURS else "papers"
        told.append(f"{counted(len(outcomes), 'claim')} of {whose}: {outcome_counts(outcomes)}")
    return f"{counted(len(several), 'study')}: {'; '.join(told) or 'no claims'}"


def claims_markdown(several: Sequence[Summary]) -> str:
    """Return the claims of studies as Markdown tables: those of papers, those of ours."""
    lines = list[str]()
    for heading in headings(several):
        lines += [f"## {heading}", "", *head(("study", "claim", "verdict", "difference", "seeds"))]
        for summary in several:
            for claim in summary.claims_under(heading):
                said = f"{claim.says} (`{claim.text}`)" if claim.says else f"`{claim.text}`"
                lines.append(line((summary.name, said, claim.outcome, claim.difference, claim.seeds)))
        lines.append("")
    return "\n".join([*lines, HOW_DECIDED if lines else "No claims."]) + "\n"
