"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def head(words: Sequence[object]) -> list[str]:
    """Return the first two lines of a table."""
    return [line(words), "|---" * len(words) + "|"]


def line(words: Sequence[object]) -> str:
    """Return a line of a table, with bars in words escaped."""
    return "| " + " | ".join(str(word).replace("|", "\\|") for word in words) + " |"
