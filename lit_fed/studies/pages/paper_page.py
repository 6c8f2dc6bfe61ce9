"""A paper's page: its headline in three lines and one table of its claims; and the overview of all papers.

A page asks for the three lines by a comment with the paper's words, the claims that answer them, each by its sentence
behind words of the page's own, and the scale:

.. code-block:: text

    <!-- headline
    paper: It is better than all others.
    over FedAvg: dr+ > fedavg at global
    scale: Small data; the paper's own setting has not run.
    -->
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import groupby, takewhile
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.printing import counted
from lit_fed.studies.file.claims import HOW_DECIDED, LEVEL, NOT_APPLICABLE, OUTCOMES
from lit_fed.studies.pages.claims_picture import verdict_counts
from lit_fed.studies.results.register_lines import Row, by_statement
from lit_fed.studies.results.results import head, line

_NONE = "–"
GROUPS = ("hold throughout", "never fail", "mixed", "only fail", NOT_APPLICABLE)
GENERATED = "<!-- Written by `lit-fed results`; change the studies, not these lines. -->"
_ASKED = re.compile(r"<!-- headline\n(.*?)\n-->", re.DOTALL)
_ALL = {"hold throughout": "holds throughout", "never fail": "never fails", "only fail": "fails"}
_DECIDED = ("holds", "fails")
_HOLM = "Holm, “A simple sequentially rejective multiple test procedure”, 1979"
_COUNTED = (
    "A statement is counted once, however many profiles of its study asked it (asked): it holds throughout if all "
    "verdicts are “holds”, never fails if none is “fails”, is mixed if some are, and only fails if all are. Claims "
    "marked “(ours)”, which look for causes, are not counted in these columns. Each verdict has a test of its own; the "
    "last column takes all questions of a page together, at 5 % for the page: of its verdicts “holds” or “fails”, this "
    "many remain by Holm’s procedure."
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
    """Return a page's text with the three lines that its comment asks for, if it does.

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
    words, claims = dict[str, str](), dict[str, list[Row]]()
    for entry in asked[1].splitlines():
        name, colon, told_there = entry.partition(": ")
        if not colon:
            raise ConfigError(f"{path}: {name!r} in the headline is not 'words: claim'; write both")
        if name in ("paper", "scale"):
            words[name] = told_there
            continue
        claims[name] = [row for row in rows if row.sentence == told_there]
        if not claims[name]:
            raise ConfigError(
                f"{path}: {told_there!r} in the headline is not a claim of the page; copy one of its claims"
            )
    survive, verdicts = _holm(rows, earlier), dict[str, dict[str, list[str]]]()
    for name, found in claims.items():
        for row in found:
            where = _ran(row, found, ("data" if len({one.data for one in found}) > 1 else "network",))
            verdicts.setdefault(_verdict(row, survive), {}).setdefault(name, []).append(where)
    published = {name: _published(found) for name, found in claims.items()}
    theirs = "; ".join(f"{name} {number}" for name, number in published.items() if number != _NONE)
    ours = (
        f"{name} " + ", ".join(f"{_ours(row)} ({_ran(row, found)})" for row in found) for name, found in claims.items()
    )
    settings = dict.fromkeys(row.setting for found in claims.values() for row in found)
    chosen = "; ".join(setting for setting in settings if setting in on_test)
    high = f" The test set chose the round of every number of {chosen}: these are too high." if chosen else ""
    told_by_verdict = (
        f"**{verdict}** " + ", ".join(f"{name} ({'; '.join(dict.fromkeys(there))})" for name, there in names.items())
        for verdict, names in sorted(verdicts.items(), key=lambda one: OUTCOMES.index(one[0].partition(",")[0]))
    )
    group = _group({row.verdict for found in claims.values() for row in found})
    lines = [
        f"- **Claimed:** {words.get('paper', '')}" + (f" Published: {theirs}." if theirs else ""),
        f"- **Ours ± h:** {'; '.join(ours)}. ± is a two-sided 95 % interval.{high}",
        f"- **Verdict: {_ALL.get(group, group)}.** {'; '.join(told_by_verdict)}. {words.get('scale', '')}".rstrip(),
    ]
    return filled(path, text, "headline", _styled("headline", lines))


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
    for source, several in groupby(by_statement(rows).values(), key=lambda one: one[0].source):
        found = list(several)
        studies = ", ".join(f"`{study}`" for study in dict.fromkeys(asked[0].study for asked in found))
        lines.append(line((f"**{_short(source, sources)}** ({studies})", "", "", "", "")))
        lines += [line(words) for asked in found for words in _statement(asked, survive)]
    decided = _decided(rows)
    again = sum(earlier.get(row.setting, 0) > 0 for row in rows)
    asked_twice = (
        f" {counted(again, 'claim')} of this page {'answers' if again == 1 else 'answer'} a second asking, of other "
        "seeds, after seeds that left the claim undecided; Holm's count has both, a raw verdict only the second."
    )
    return [
        *([f"![The claims of this page: {verdict_counts(rows)}]({drawn}.svg)", ""] if drawn else []),
        *_styled("claims", lines),
        "",
        HOW_DECIDED,
        "",
        f"Of {counted(len(decided), 'verdict')} “holds” or “fails”, {len(survive)} "
        f"{'remains' if len(survive) == 1 else 'remain'} where a page's questions are taken together ({_HOLM}; the "
        "same two-sided tests, 5 % for the page); the others are marked “not by Holm”."
        + (asked_twice if again else ""),
        *(part for name in pictures for part in ("", f"![{name}]({name}.png)")),
    ]


def _styled(name: str, lines: Sequence[str]) -> list[str]:
    """Return a table in an element of a class, which the site's style sheet fits to the page."""
    return [f'<div class="{name}" markdown="1">', "", *lines, "", "</div>"]


def _holm(rows: Sequence[Row], earlier: Mapping[str, int]) -> set[Row]:
    """Return the rows that hold or fail where the page's questions are taken together.

    An earlier asking counts as a question, too: it was undecided, so its test stands behind all that are rejected.
    """
    asked = sorted((row for row in rows if row.p), key=lambda row: float(row.p))
    questions = sum(1 + earlier.get(row.setting, 0) for row in asked)
    small = (float(row.p) <= LEVEL / (questions - number) for number, row in enumerate(asked))
    return set(_decided([row for row, _ in zip(asked, takewhile(bool, small), strict=False)]))


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


def _ran(row: Row, beside: Sequence[Row] = (), what: Sequence[str] = ("seeds", "network", "data")) -> str:
    """Return the settings in which a row differs from others of its claim: its study if they are of several."""
    fields = [*what, "profile", *(["study"] if len({one.study for one in beside}) > 1 else [])]
    return ", ".join(dict.fromkeys(part for field in fields if (part := getattr(row, field))))


def _verdict(row: Row, survive: Collection[Row]) -> str:
    apart = row in _decided([row]) and row not in survive
    return f"{row.verdict}, not by Holm" if apart else row.verdict


def _ours(row: Row) -> str:
    if not row.ours:
        return _NONE
    text = _signed(f"{float(row.ours) + float(row.limit or 0):#.3g}".rstrip("."))
    if row.interval:
        lower, upper = (float(end) for end in row.interval.split(" to "))
        text += f" ± {(upper - lower) / 2:.2g}"
    return text + (f", to exceed {row.limit.replace('-', '−')}" if row.limit else "")


def _published(rows: Sequence[Row]) -> str:
    """Return the paper's difference: its margin and the number that it must exceed."""
    known = next((row for row in rows if row.published), None)
    return _NONE if known is None else _signed(str(Decimal(known.published) + Decimal(known.limit or 0)))


def _signed(number: str) -> str:
    if number in ("", "0", _NONE) or number.startswith("-"):
        return number.replace("-", "−")
    return f"+{number}"


def _short(source: str, sources: Sequence[str]) -> str:
    """Return a source without the citation with which all of a paper's sources begin."""
    parts = [source.split(", ") for source in sources]
    common = next((n for n, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), 0)
    return ", ".join(source.split(", ")[common:])


# ---------------------------------------------------------------------- all papers


def overview(
    titles: Mapping[str, str], claims: Mapping[str, Sequence[Row]], earlier: Mapping[str, int] | None = None
) -> list[str]:
    """Return a line per paper with the number of its statements by outcome, and what is counted."""
    lines = head(("paper", "statements", "asked", *GROUPS, "by Holm"))
    verdicts: list[str] = []
    for paper, rows in claims.items():
        left, decided = _holm(rows, earlier or {}), _decided(rows)
        verdicts += [_verdict(row, left) for row in decided if row.verdict == "holds"]
        if theirs := [row for row in rows if not row.is_ours]:
            counts = _counts(theirs)
            groups = (counts.total(), len(theirs), *(counts[group] for group in GROUPS))
            lines.append(line((f"[{titles[paper]}]({paper}.md)", *groups, f"{len(left)} of {len(decided)}")))
    by_holm = f"Of {counted(len(verdicts), 'verdict')} “holds” on all pages, {verdicts.count('holds')} remain by Holm."
    return [*_styled("overview", lines), "", f"{_COUNTED} {by_holm}"]


def tally(rows: Sequence[Row]) -> str:
    """Return the number of the papers' statements by outcome, as a sentence."""
    theirs = [row for row in rows if not row.is_ours]
    counts = _counts(theirs)
    sentence = f"{counted(counts.total(), 'statement')}, asked {counted(len(theirs), 'time')}: "
    sentence += ", ".join(f"{group} {counts[group]}" for group in GROUPS)
    ours = len(rows) - len(theirs)
    return sentence + (f"; besides, {counted(ours, 'claim')} of ours" if ours else "")


def _counts(rows: Sequence[Row]) -> Counter[str]:
    return Counter(_group({row.verdict for row in several}) for several in by_statement(rows).values())


def _group(verdicts: set[str]) -> str:
    decided = verdicts - {NOT_APPLICABLE}
    if not decided:
        return NOT_APPLICABLE
    if "fails" not in decided:
        return "hold throughout" if decided == {"holds"} else "never fail"
    return "only fail" if decided == {"fails"} else "mixed"
