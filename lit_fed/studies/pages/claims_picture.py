"""A forest plot of a paper's claims, as SVG: a panel per source with one scale, a row per claim and setting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from math import floor, isfinite, log10

from lit_fed.studies.file.claims import NOT_APPLICABLE, UNDECIDED, outcome_counts
from lit_fed.studies.results.register_lines import Number, Row, by_statement, headed_by

# Okabe and Ito, "Color universal design", 2008; each with a mark of its own
_COLOURS = {"holds": "#0072B2", "equal": "#56B4E9", UNDECIDED: "#767676", "fails": "#D55E00", NOT_APPLICABLE: "#767676"}
_MARKS = {"holds": "●", "equal": "◆", UNDECIDED: "○", "fails": "■", NOT_APPLICABLE: "–"}
_WIDTH, _ROW = 1150, 16  # pixels
_MOST_WORDS, _MOST_NAME, _MOST_SOURCE = 68, 48, 150  # characters
_NAME, _ZERO, _HALF, _VERDICT = 385, 825, 180, 1030  # pixels: middle and half width of the axis, and what stands beside
_LEGEND = (
    "point and bar: our margin ± h, right of 0 what the claim says; │: the published margin; a panel has one scale; "
    "verdicts by Holm"
)


def verdict_counts(rows: Sequence[Row]) -> str:
    """Return the number of claims by verdict, as a text in place of the picture."""
    return outcome_counts(row.verdict for row in rows)


def short(source: str, sources: Sequence[str]) -> str:
    """Return a source without the citation with which all of a paper's sources begin."""
    parts = [source.split(", ") for source in sources]
    common = next((n for n, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), 0)
    return ", ".join(source.split(", ")[common:])


def drawn(title: str, rows: Sequence[Row], numbers: Mapping[str, Sequence[Number]]) -> str:
    """Return the picture of the rows, by statement, in a panel per source and measure; first the claims of papers.

    Args:
        title: The page's title.
        rows: The claims.
        numbers: The numbers of their settings, which say what was measured.
    """
    lines: list[str] = []
    panels: dict[tuple[str, str, str], list[list[Row]]] = {}
    for heading, of_these in headed_by(rows):
        for asked in by_statement(of_these).values():
            measure = _measure(asked[0], numbers[asked[0].setting])
            panels.setdefault((heading, asked[0].source, measure), []).append(asked)
    sources = list(dict.fromkeys(row.source for row in rows))
    y, above = 2.5 * _ROW, ""
    for (heading, source, measure), statements in panels.items():
        if heading != above:
            lines.append(_text(8, y, heading, "font-weight='bold' font-size='13'"))
            y, above = y + 1.25 * _ROW, heading
        told = filter(None, (_cut(short(source, sources), _MOST_SOURCE), measure))
        lines.append(_text(8, y, ": ".join(told), "font-weight='bold'"))
        most = max((abs(number) for asked in statements for row in asked for number in _numbers(row)), default=0.0)
        top, before = y + 4, ""
        for asked in statements:
            words = asked[0].says or asked[0].sentence
            first = words.partition(" … ")[0].removesuffix(" …")
            if " … " in words and first == before:  # continues the claim above
                words = f"… {words.rpartition(' … ')[2]}"
            before = first
            lines.append(_text(20, y + _ROW, _cut(words, _MOST_WORDS)))
            for row in asked:
                y += _ROW
                lines += _setting(row, y, most)
        y += _ROW
        lines += _axis(top, y, most)
        y += 1.5 * _ROW
    words = f"{title}: {verdict_counts(rows)}"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {y:g}' font-family='sans-serif' "
            f"font-size='10.5' role='img'>",
            f"<title>{escape(words)}</title>",
            f"<rect width='{_WIDTH}' height='{y:g}' fill='white'/>",
            _text(8, _ROW, _LEGEND, "fill='#555'"),
            *lines,
            "</svg>\n",
        ]
    )


def _measure(row: Row, numbers: Sequence[Number]) -> str:
    """Return what a claim measures: its metrics up to an underscore, or points where they are percentages."""
    places, _, named = row.sentence.partition(", ")
    words = re.split(r"[\s/]+", places)
    found = [one.metric for one in numbers if one.column in words] or [one.metric for one in numbers]
    metrics = [named] if named else [metric.partition(", ")[0] for metric in found]
    return ", ".join(sorted({"points" if "× 100" in one else one.partition("_")[0] for one in metrics}))


def _numbers(row: Row) -> list[float]:
    texts = [*row.interval.split(" to "), row.ours, row.published]
    return [float(text) for text in texts if text and isfinite(float(text))]


def _setting(row: Row, y: float, most: float) -> list[str]:
    """Draw a claim in one setting."""
    colour = _COLOURS[row.verdict]
    lines = [
        _text(_NAME, y, _cut(f"{row.data}, {row.network}", _MOST_NAME), "fill='#555'"),
        _text(_VERDICT, y, f"{_MARKS[row.verdict]} {row.verdict}", f"fill='{colour}'"),
    ]
    if row.interval:
        lower, upper = (_at(float(end), most) for end in row.interval.split(" to "))
        lines.append(f"<path d='M{lower} {y - 4:g}H{upper}' stroke='{colour}' stroke-width='3'/>")
    if row.ours and isfinite(float(row.ours)):
        lines.append(f"<circle cx='{_at(float(row.ours), most)}' cy='{y - 4:g}' r='3.5' fill='{colour}'/>")
    if row.published:
        lines.append(f"<path d='M{_at(float(row.published), most)} {y - 10:g}v12' stroke='black' stroke-width='2'/>")
    return lines


def _axis(top: float, bottom: float, most: float) -> list[str]:
    """Draw a line at zero, and at the largest 1, 2 or 5 times a power of ten that the panel has room for."""
    if not most:
        return []
    power = 10.0 ** floor(log10(most))
    tick = max(times * power for times in (1, 2, 5) if times * power <= most)
    lines = []
    for number in (-tick, 0.0, tick):
        x = _at(number, most)
        dashes = "" if number else " stroke-dasharray='2'"
        lines.append(f"<line x1='{x}' x2='{x}' y1='{top:g}' y2='{bottom - 10:g}' stroke='#999'{dashes}/>")
        lines.append(_text(float(x), bottom, f"{number:g}".replace("-", "−"), "fill='#555' text-anchor='middle'"))
    return lines


def _at(number: float, most: float) -> str:
    return f"{_ZERO + _HALF * number / (most or 1.0):.1f}"


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' {more}>{escape(words)}</text>"
