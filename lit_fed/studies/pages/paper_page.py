"""A paper's page: its headline and one table of its claims; and the overview of all papers.

A page asks for the headline by a comment. Its sentence has at most 60 words with its numbers, each of which stands in
braces as the study, the profile and the claim; a setting is told once where numbers of the same follow each other:

.. code-block:: text

    <!-- headline
    says: It is better than FedAvg, by {table1, pocket: dr+ > fedavg at global} points.
    source: Kim et al., 2024, abstract.
    scale: Small data; the paper's own setting has not run.
    -->
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import groupby
from math import isfinite
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.printing import counted
from lit_fed.studies.file.claims import HOW_DECIDED, OUTCOMES, UNDECIDED, rejected
from lit_fed.studies.pages.claims_picture import short, verdict_counts
from lit_fed.studies.results.register_lines import Row, by_statement, headed_by
from lit_fed.studies.results.results import head, line

_NONE = "–"
GENERATED = "<!-- Written by `lit-fed results`; change the studies, not these lines. -->"
_ASKED = re.compile(r"<!-- headline\n(.*?)\n-->", re.DOTALL)
_CLAIM = re.compile(r"\{(.*?): (.*?)\}")  # in a headline
_KEYS, _MOST_WORDS = ("says", "source", "scale"), 60
_DECIDED = ("holds", "fails")
_HOLM = "Holm, “A simple sequentially rejective multiple test procedure”, 1979"
_COUNTED = (
    "A claim is counted once in every setting that asked it; claims marked “(ours)”, which no paper makes, are in the "
    "last column alone. The verdicts are those that remain where all questions of a page are taken together, at 5 % "
    f"for the page ({_HOLM}); what holds or fails by its own test alone counts as undecided here. A claim whose "
    "numbers diverged before p-values were recorded for these keeps its verdict."
)


def read(path: Path, name: str) -> str:
    """Return a page's text, of a new page a title and the marks of a place."""
    title = "Results" if path.stem == "README" else path.stem
    new = f"# {title}\n\n<!-- {name}:begin -->\n<!-- {name}:end -->\n"
    return path.read_text(encoding="utf-8") if path.exists() else new


def filled(path: Path, text: str, name: str, lines: Sequence[str]) -> str:
    """Return a page's text with the lines between its marks ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ConfigError(f"{path} has no place for a table; add a line {begin} and a line {end} below it")
    return "\n".join([before + begin, "", GENERATED, "", *lines, "", end + after])


def headed(
    path: Path, text: str, rows: Sequence[Row], earlier: Mapping[str, int], on_test: Collection[str] = ()
) -> str:
    """Return a page's text with the headline that its comment asks for, if it does.

    Args:
        path: The page.
        text: Its text.
        rows: Its claims.
        earlier: See `table`.
        on_test: Settings whose numbers are of a round that the test set chose.
    """
    asked = _ASKED.search(text)
    if asked is None:
        return text
    entries = [entry.partition(": ") for entry in asked[1].splitlines()]
    if sorted(name for name, *_ in entries) != sorted(_KEYS):
        raise ConfigError(f"{path}: the headline is not one line each of {', '.join(_KEYS)}; write these three")
    if not rows:
        raise ConfigError(f"{path}: the page has a headline and no claim; remove the headline")
    words = {name: told_there for name, _, told_there in entries}
    after = after_holm(rows, earlier)
    by_claim = {(row.setting, row.sentence): row for row in after}
    used = list[Row]()

    def number(found: re.Match[str]) -> str:
        row = by_claim.get((found[1], found[2]))
        if row is None:
            raise ConfigError(f"{path}: {found[0]} in the headline is not a claim of the page; copy a claim's setting")
        paper, before = _published([row]), _ran(used[-1], ()) if used else ""
        used.append(row)
        ran = f"{row.seeds} seeds, {row.data}, {row.network}" if _ran(row, ()) != before else ""
        theirs = f"paper {paper}" if paper != _NONE else ""
        return f"{_difference(row)} ({'; '.join(filter(None, (theirs, f'**{row.verdict}**', ran)))})"

    says = _CLAIM.sub(number, words["says"])
    if (length := len(says.split())) > _MOST_WORDS:
        raise ConfigError(f"{path}: the headline has {length} words with its numbers; shorten it to {_MOST_WORDS}")
    chosen = "; ".join(dict.fromkeys(row.setting for row in used if row.setting in on_test))
    high = f" The test set chose the round of every number of {chosen}: these are optimistic." if chosen else ""
    lines = [
        f"- **What was run:** {what_ran(rows)}. {words['scale']}",
        f"- **What it says of the paper:** {says} ({words['source']} ± is a two-sided 95 % interval.){high}",
        f"- **All claims, by Holm:** {tally(after)}.",
    ]
    return filled(path, text, "headline", _styled("headline", lines))


def what_ran(rows: Sequence[Row]) -> str:
    """Return the data sets of claims, each with its networks, and the numbers of seeds."""
    networks: dict[str, dict[str, None]] = {}
    for row in rows:
        networks.setdefault(row.data, {})[row.network] = None
    seeds = sorted({int(row.seeds) for row in rows})
    several = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    told = (f"{data} ({', '.join(filter(None, names))})".replace(" ()", "") for data, names in networks.items())
    return "; ".join(told) + f"; {several} seeds"


def table(
    rows: Sequence[Row], pictures: Sequence[str] = (), drawn: str = "", earlier: Mapping[str, int] | None = None
) -> list[str]:
    """Return a paper's claims as one table, by statement, with a heading per source.

    Args:
        rows: The claims.
        pictures: Names of pictures below the table.
        drawn: Name of the picture of all claims, above it.
        earlier: How often the claims of a setting had been asked before, of other seeds, by setting.
    """
    earlier = earlier or {}
    survive = _holm(rows, earlier)
    lines = head(("claim", "published", "ours ± h (seeds, network, data, profile)", "verdict", "why"))
    sources = list(dict.fromkeys(row.source for row in rows))
    for heading, of_these in headed_by(rows):
        lines.append(line((f"**{heading}**", "", "", "", "")))
        for source, several in groupby(by_statement(of_these).values(), key=lambda one: one[0].source):
            found = list(several)
            studies = ", ".join(f"`{study}`" for study in dict.fromkeys(asked[0].study for asked in found))
            lines.append(line((f"**{short(source, sources)}** ({studies})", "", "", "", "")))
            lines += [line(words) for asked in found for words in _statement(asked, survive)]
    decided, after = _decided(rows), after_holm(rows, earlier)
    again = sum(earlier.get(row.setting, 0) > 0 for row in rows)
    asked_twice = (
        f" {counted(again, 'claim')} of this page {'answers' if again == 1 else 'answer'} a second asking, of other "
        "seeds, after seeds that left the claim undecided; Holm's count has both, a raw verdict only the second."
    )
    return [
        *([f"![The claims of this page: {verdict_counts(after)}]({drawn}.svg)", ""] if drawn else []),
        *_styled("claims", lines),
        "",
        HOW_DECIDED,
        "",
        f"Of {counted(len(decided), 'verdict')} “holds” or “fails”, {len(survive)} "
        f"{'remains' if len(survive) == 1 else 'remain'} where a page's questions are taken together ({_HOLM}; the "
        "same two-sided tests, 5 % for the page); the others are marked “not by Holm”, and are "
        "undecided in the headline, in the picture and in the overview." + (asked_twice if again else ""),
        *(part for name in pictures for part in ("", f"![{name}]({name}.png)")),
    ]


def _styled(name: str, lines: Sequence[str]) -> list[str]:
    """Return a table in an element of a class, which the site's style sheet fits to the page."""
    return [f'<div class="{name}" markdown="1">', "", *lines, "", "</div>"]


def after_holm(rows: Sequence[Row], earlier: Mapping[str, int]) -> list[Row]:
    """Return a page's rows, with what does not remain by Holm's procedure as undecided; see `table`."""
    apart = set(_decided(rows)) - _holm(rows, earlier)
    return [row._replace(verdict=UNDECIDED) if row in apart else row for row in rows]


def _holm(rows: Sequence[Row], earlier: Mapping[str, int]) -> set[Row]:
    """Return the rows that hold or fail where the page's questions are taken together.

    An earlier asking counts as a question, too: it was undecided, so its test stands behind all that are rejected.
    """
    asked = sorted((row for row in rows if row.p), key=lambda row: float(row.p))
    questions = sum(1 + earlier.get(row.setting, 0) for row in asked)
    return set(_decided(asked[: rejected([float(row.p) for row in asked], questions)]))


def _decided(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that hold or fail."""
    return [row for row in rows if row.p and row.verdict in _DECIDED]


def _statement(rows: Sequence[Row], survive: Collection[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a statement, one for each setting that asked it; the first has its words."""
    says, sentence = rows[0].says, f"`{rows[0].sentence}`"
    words = f"{says}<br>{sentence}" if says else sentence, _published(rows)
    for row in rows:
        yield (*words, f"{_ours(row)} ({_ran(row)})", _verdict(row, survive), row.cause.partition("; ")[0])
        words = ("", "")


def _ran(row: Row, more: Sequence[str] = ("profile",)) -> str:
    return ", ".join(part for field in ("seeds", "network", "data", *more) if (part := getattr(row, field)))


def _verdict(row: Row, survive: Collection[Row]) -> str:
    apart = row in _decided([row]) and row not in survive
    return f"{row.verdict}, not by Holm" if apart else row.verdict


def _ours(row: Row) -> str:
    return _difference(row) + (f", to exceed {row.limit.replace('-', '−')}" if row.ours and row.limit else "")


def _difference(row: Row) -> str:
    if not row.ours:
        return _NONE
    if not isfinite(float(row.ours)):
        return "diverges"
    text = _signed(_brief(float(row.ours) + float(row.limit or 0), "#.3g"))
    if row.interval:
        lower, upper = (float(end) for end in row.interval.split(" to "))
        text += f" ± {_brief((upper - lower) / 2, '.2g')}"
    return text


def _brief(number: float, form: str) -> str:
    """Return a number with few digits, and without a power of ten where it is large."""
    text = f"{number:{form}}".rstrip(".")
    return f"{float(text):,.0f}" if "e+" in text else text


def _published(rows: Sequence[Row]) -> str:
    """Return the paper's difference: its margin and the number that it must exceed."""
    known = next((row for row in rows if row.published), None)
    return _NONE if known is None else _signed(str(Decimal(known.published) + Decimal(known.limit or 0)))


def _signed(number: str) -> str:
    if number in ("", "0", _NONE) or number.startswith("-"):
        return number.replace("-", "−")
    return f"+{number}"


# ---------------------------------------------------------------------- all papers


def overview(titles: Mapping[str, str], claims: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return a line per page with what ran and the number of its claims by verdict, and what is counted.

    Args:
        titles: The pages' titles.
        claims: The pages' claims, see `after_holm`.
    """
    lines = head(("page", "what ran", "claims", *OUTCOMES, "ours that hold"))
    for paper, rows in claims.items():
        if rows:
            theirs, ours = _apart(rows)
            counts = Counter(row.verdict for row in theirs)
            held = f"{sum(row.verdict == 'holds' for row in ours)} of {len(ours)}" if ours else _NONE
            told = (what_ran(rows), len(theirs), *(counts[verdict] for verdict in OUTCOMES), held)
            lines.append(line((f"[{titles[paper]}]({paper}.md)", *told)))
    return [*_styled("overview", lines), "", _COUNTED]


def tally(rows: Sequence[Row]) -> str:
    """Return the number of the papers' claims by verdict, as a sentence."""
    theirs, ours = _apart(rows)
    told = f"{counted(len(theirs), 'claim')} of papers" + (f": {verdict_counts(theirs)}" if theirs else "")
    return told + (f"; {counted(len(ours), 'claim')} of ours: {verdict_counts(ours)}" if ours else "")


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if not row.is_ours], [row for row in rows if row.is_ours]
