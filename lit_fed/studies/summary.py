"""What a study came to, in a file beside its tables: from these the pages over all studies of a folder are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_fed.printing import counted
from lit_fed.studies.claims import HOW_DECIDED, OUTCOMES
from lit_fed.studies.markdown import head, line
from lit_fed.studies.results import Results, verdict_text

_FILE = "summary.json"


@dataclass(frozen=True)
class Decided:
    """A claim and how it stands.

    Args:
        says: What the paper says, in words.
        text: The claim as it stands in the study file.
        outcome: ``holds``, ``equal``, ``undecided`` or ``fails``.
        margin: What is left beyond the claimed margin, and how sure that is.
        seeds: How many seeds have all that it needs.
    """

    says: str
    text: str
    outcome: str
    margin: str
    seeds: int


@dataclass(frozen=True)
class Summary:
    """A study in a line of a page, with its claims.

    Args:
        name: Its name.
        profile: Its profile.
        title: One line that says what is compared.
        source: The paper, and the table or figure.
        cells: How many there are.
        done: How many have finished.
        failed: How many have failed.
        claims: Its claims.
    """

    name: str
    profile: str
    title: str
    source: str
    cells: int
    done: int
    failed: int
    claims: tuple[Decided, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many claims came out in each way."""
        found = [claim.outcome for claim in self.claims]
        return {outcome: found.count(outcome) for outcome in OUTCOMES}


def summary_of(results: Results) -> Summary:
    """What there is to say of a study."""
    grid, study = results.grid, results.grid.study
    claims = (Decided(c.says, c.text, v.outcome, verdict_text(v), v.seeds) for c, v in results.verdicts)
    done, failed = (sum(getattr(cell, state) for cell in grid.cells) for state in ("done", "failed"))
    told = (study.name, study.profile, study.title, study.source)
    return Summary(*told, len(grid.cells), done, failed, tuple(claims))


def summary_json(summary: Summary) -> str:
    """A summary as a file holds it."""
    return json.dumps(asdict(summary), indent=1, ensure_ascii=False) + "\n"


def summaries_in(output: Path, profile: str) -> list[Summary]:
    """What studies in a folder came to under a profile, by their names, whenever they ran.

    Files that no study wrote are passed over, as are studies that ended before there were such files.

    Args:
        output: Folder of all studies.
        profile: The profile.
    """
    found = [_read(path) for path in sorted(output.glob(f"*/{profile}/{_FILE}"))]
    return [summary for summary in found if summary is not None]


def _read(path: Path) -> Summary | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        claims = tuple(Decided(**claim) for claim in content.pop("claims"))
        summary = Summary(**content, claims=claims)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    ours = (summary.name, summary.profile) == path.parts[-3:-1] and all(c.outcome in OUTCOMES for c in claims)
    return summary if ours else None


def tally_text(several: Sequence[Summary]) -> str:
    """How many claims of some studies came out in each way, as a sentence."""
    counts = {outcome: sum(summary.counts[outcome] for summary in several) for outcome in OUTCOMES}
    claims = counted(sum(counts.values()), "claim")
    return f"{claims} of {counted(len(several), 'study')}: " + ", ".join(
        f"{outcome} {count}" for outcome, count in counts.items()
    )


def claims_markdown(several: Sequence[Summary]) -> str:
    """The claims of some studies as one Markdown table."""
    lines = head(("study", "claim", "verdict", "margin", "seeds"))
    for summary in several:
        for claim in summary.claims:
            said = f"{claim.says} (`{claim.text}`)" if claim.says else f"`{claim.text}`"
            lines.append(line((summary.name, said, claim.outcome, claim.margin, claim.seeds)))
    if len(lines) == 2:
        return "No claims.\n"
    return "\n".join([*lines, "", HOW_DECIDED]) + "\n"
