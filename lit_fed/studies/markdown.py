"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def head(words: Sequence[object]) -> list[str]:
    """A table's first two lines."""
    return [line(words), "|---" * len(words) + "|"]


def line(words: Sequence[object]) -> str:
    """A line of a table; a bar in a word stays a bar."""
    return "| " + " | ".join(str(word).replace("|", "\\|") for word in words) + " |"
