"""Draws what a command prints on a terminal, for the docs.

``script -qec "lit-fed log state/audit" /dev/null | python -m website.terminal docs/assets/log.svg "North's log"``

The picture has the terminal's letters, colours and ends of lines, and needs no font or file from elsewhere.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

_COLUMNS = 140
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>TITLE</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#292929"/>
<g transform="translate({terminal_x}, 25)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def drawn(text: str, title: str) -> str:
    """Return an SVG of a terminal's text, which may have ANSI's colours."""
    kept = re.sub(r"[^\n]*\x1b\[K", "", text.replace("\r", ""))  # without lines that were erased
    whole = Text.from_ansi(kept).split("\n", allow_blank=True)
    lines = [part for line in whole for part in line.divide(range(_COLUMNS, len(line), _COLUMNS))]
    console = Console(record=True, file=io.StringIO(), width=max(map(len, lines)) + 1)
    for line in lines:
        console.print(line, no_wrap=True)
    return console.export_svg(code_format=_SVG.replace("TITLE", escape(title)), unique_id="terminal")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(sys.stdin.read().rstrip(), sys.argv[2]), encoding="utf-8")
