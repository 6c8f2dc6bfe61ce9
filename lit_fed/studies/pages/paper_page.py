"""A paper's page, one table of its claims, and the overview of all papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.printing import counted
from lit_fed.studies.file.claims import HOW_DECIDED, NOT_APPLICABLE
from lit_fed.studies.pages.claims_picture import told
from lit_fed.studies.results.markup import head, line
from lit_fed.studies.results.register_lines import Row, by_statement

_NONE = "–"
GROUPS = ("hold throughout", "never fail", "mixed", "only fail", NOT_APPLICABLE)
GENERATED = "Written by `lit-fed results`; change the studies, not this table."
_DECIDED = ("holds", "fails")
_HOLM = "Holm, “A simple sequentially rejective multiple test procedure”, 1979"
_COUNTED = (
    "A statement is counted once, however many profiles of its study asked it (asked): it holds throughout if all "
    "verdicts are “holds”, never fails if none is “fails”, is mixed if some are, and only fails if all are. Claims "
    "marked “(ours)”, which look for causes, are not counted."
)


def filled(path: Path, name: str, lines: Sequence[str]) -> str:
    """Return a page's text with the lines between its marks ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    title = "Results" if path.stem == "README" else path.stem
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n\n{begin}\n{end}\n"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ConfigError(f"{path} has no place for a table; add a line {begin} and a line {end} below it")
    return "\n".join([before + begin, "", GENERATED, "", *lines, "", end + after])


def table(
    rows: Sequence[Row], pictures: Sequence[str] = (), drawn: str = "", asked_again: Collection[str] = ()
) -> list[str]:
    """Return a paper's claims as one table, by statement, with a heading per source.

    Args:
        rows: The claims.
        pictures: Names of pictures below the table.
        drawn: Name of the picture of all claims, above it.
        asked_again: Settings whose claims are asked a second time, over other seeds.
    """
    survive = _holm(rows)
    lines = head(("claim", "published", "ours (seeds, network, data)", "verdict", "why"))
    sources = list(dict.fromkeys(row.source for row in rows))
    for source, several in groupby(by_statement(rows).values(), key=lambda one: one[0].source):
        found = list(several)
        studies = ", ".join(f"`{study}`" for study in dict.fromkeys(asked[0].study for asked in found))
        lines.append(line((f"**{_short(source, sources)}** ({studies})", "", "", "", "")))
        lines += [line(words) for asked in found for words in _statement(asked, survive)]
    decided = [row for row in rows if row.interval and row.verdict in _DECIDED]
    again = counted(sum(row.setting in asked_again for row in rows), "claim")
    return [
        *([f"![The claims of this page: {told(rows)}]({drawn}.svg)", ""] if drawn else []),
        *_styled("claims", lines),
        "",
        HOW_DECIDED,
        "",
        f"± is half of that interval, t·s/√n. Of {counted(len(decided), 'verdict')} “holds” or “fails”, "
        f"{len(survive)} remain where a page's questions are taken together ({_HOLM}; the same one-sided tests, "
        f"5 % for the page); the others are marked “not by Holm”. {again} of this page "
        "answer a second asking, over other seeds.",
        *(part for name in pictures for part in ("", f"![{name}]({name}.png)")),
    ]


def _styled(name: str, lines: Sequence[str]) -> list[str]:
    """Return a table in an element of a class, which the site's style sheet fits to the page."""
    return [f'<div class="{name}" markdown="1">', "", *lines, "", "</div>"]


def _holm(rows: Sequence[Row]) -> set[Row]:
    """Return the rows that hold or fail where the page's questions are taken together."""
    from scipy.stats import t  # takes a second to import

    chances = []
    for row in rows:
        if row.interval and int(row.seeds) > 1:
            lower, upper = (float(end) for end in row.interval.split(" to "))
            freedom = int(row.seeds) - 1
            spread = (upper - lower) / 2 / float(t.ppf(0.95, freedom))
            chances.append((float(t.sf(abs(float(row.ours)) / spread, freedom)) if spread else 0.0, row))
    found = set()
    for number, (chance, row) in enumerate(sorted(chances, key=lambda one: one[0])):
        if chance > 0.05 / (len(chances) - number):
            break
        found.add(row)
    return {row for row in found if row.verdict in _DECIDED}


def _statement(rows: Sequence[Row], survive: Collection[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a statement, one for each setting that asked it; the first has its words."""
    says, sentence = rows[0].says, f"`{rows[0].sentence}`"
    words = (
        f"{says}<br>{sentence}" if says else sentence,
        _signed(next((r.published for r in rows if r.published), _NONE)),
    )
    for row in rows:
        ran = ", ".join(part for part in (row.seeds, row.network, row.data) if part)
        verdict = (
            f"{row.verdict}, not by Holm"
            if row.interval and row.verdict in _DECIDED and row not in survive
            else row.verdict
        )
        yield (*words, f"{_ours(row)} ({ran})", verdict, row.cause.partition("; ")[0])
        words = ("", "")


def _ours(row: Row) -> str:
    if not row.ours:
        return _NONE
    margin = _signed(f"{float(row.ours):#.3g}".rstrip("."))
    if not row.interval:
        return margin
    lower, upper = (float(end) for end in row.interval.split(" to "))
    return f"{margin} ± {(upper - lower) / 2:.2g}"


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


def overview(titles: Mapping[str, str], claims: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return a line per paper with the number of its statements by outcome, and what is counted."""
    lines = head(("paper", "statements", "asked", *GROUPS))
    for paper, rows in claims.items():
        if theirs := [row for row in rows if not row.is_ours]:
            counts = _counts(theirs)
            lines.append(
                line(
                    (
                        f"[{titles[paper]}]({paper}.md)",
                        counts.total(),
                        len(theirs),
                        *(counts[group] for group in GROUPS),
                    )
                )
            )
    return [*_styled("overview", lines), "", _COUNTED]


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
