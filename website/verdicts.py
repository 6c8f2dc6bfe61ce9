"""Claims on the site: verdicts in colour, and a filter of their table by verdict that needs no script."""

from __future__ import annotations

import re

VERDICTS = ("holds", "equal", "undecided", "fails")
_CELL = re.compile(rf"<td>(({'|'.join(VERDICTS)})(?:, not by Holm)?)</td>")
_WORD = re.compile(rf"<strong>(({'|'.join(VERDICTS)})(?:, not by Holm)?)</strong>")  # in a headline
_TABLE = '<div class="claims">'


def with_verdicts(html: str) -> str:
    """Mark each verdict by a class, which the style sheet colours, and put a box per verdict above the table."""
    if _TABLE not in html:
        return html
    boxes = "".join(
        f'<label><input type="checkbox" class="show-{one}" checked> <span class="{one}">{one}</span></label> '
        for one in VERDICTS
    )
    filled = html.replace(_TABLE, f'{_TABLE}\n<p class="filter">show {boxes}</p>', 1)
    coloured = _WORD.sub(r'<span class="verdict \2">\1</span>', filled)
    return _CELL.sub(r'<td class="verdict"><span class="\2">\1</span></td>', coloured)
