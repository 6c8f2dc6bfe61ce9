"""A picture of a paper's claims: a row per claim, its interval against zero and the published margin, as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby

from lit_fed.studies.file.claims import NOT_APPLICABLE, OUTCOMES, UNDECIDED
from lit_fed.studies.results.register_lines import Row

# Okabe and Ito, "Color universal design", 2008; each with a mark of its own
_COLOURS = {"holds": "#0072B2", "equal": "#56B4E9", UNDECIDED: "#767676", "fails": "#D55E00", NOT_APPLICABLE: "#767676"}
_MARKS = {"holds": "●", "equal": "◆", UNDECIDED: "○", "fails": "■", NOT_APPLICABLE: "–"}
_WIDTH, _ROW, _MOST = 960, 16, 84  # pixels, pixels, characters
_ZERO, _HALF = 705, 135  # middle and half width of the axis
_LEGEND = (
    "bar: our margin ± h, see below; │: the published margin; each row has its own scale, zero in the middle; "
    "verdicts before Holm"
)


def verdict_counts(rows: Sequence[Row]) -> str:
    """Return the number of claims by verdict, as a text in place of the picture."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in OUTCOMES if counts[verdict])


def drawn(title: str, rows: Sequence[Row]) -> str:
    """Return the picture of the rows, in their order, under a line per source."""
    lines: list[str] = []
    y = 2.5 * _ROW
    for source, several in groupby(rows, key=lambda row: row.source):
        lines.append(_text(8, y, _cut(source, 1.5 * _MOST), "font-weight='bold'"))
        y += _ROW
        for row in several:
            lines += _claim(row, y)
            y += _ROW
        y += _ROW / 2
    lines.append(
        f"<line x1='{_ZERO}' x2='{_ZERO}' y1='{1.5 * _ROW:g}' y2='{y - _ROW:g}' stroke='#333' stroke-dasharray='2'/>"
    )
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


def _claim(row: Row, y: float) -> list[str]:
    colour, words = _COLOURS[row.verdict], row.says or row.sentence
    words = f"… {words.rpartition(' … ')[2]}" if " … " in words else words  # continues the claim above
    lines = [
        _text(20, y, _cut(words, _MOST)),
        _text(_WIDTH - 112, y, f"{_MARKS[row.verdict]} {row.verdict}", f"fill='{colour}'"),
    ]
    ends = [float(end) for end in row.interval.split(" to ")] if row.interval else []
    published = float(row.published) if row.published else None
    most = max((abs(number) for number in (*ends, published) if number is not None), default=0.0)
    if not most:
        return lines
    at = [f"{_ZERO + _HALF * number / most:.1f}" for number in ends]
    if at:
        lines.append(
            f"<path d='M{at[0]} {y - 4:g}H{at[1]}' stroke='{colour}' stroke-width='5' stroke-linecap='square'/>"
        )
    if published is not None:
        lines.append(
            f"<path d='M{_ZERO + _HALF * published / most:.1f} {y - 10:g}v12' stroke='black' stroke-width='2'/>"
        )
    return lines


def _cut(words: str, most: float) -> str:
    return words if len(words) <= most else words[: int(most) - 1] + "…"


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' {more}>{escape(words)}</text>"
