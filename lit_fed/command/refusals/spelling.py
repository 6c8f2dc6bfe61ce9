"""Lists of words in an error, the word that was meant, and the message about a command that does not exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from lit_fed.command.table import COMMANDS, asked


def join_or(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def join_and(words: Sequence[str]) -> str:
    """``a, b and c are``."""
    return f"{', '.join(words[:-1])} and {words[-1]} are" if len(words) > 1 else f"{words[0]} is"


def close(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that is most similar, whatever its case: ``Scaffold`` for SCAFFOLD; empty if none is similar."""
    spellings = {name.casefold(): name for name in known}
    return spellings.get(next(iter(get_close_matches(word.casefold(), list(spellings), n=1, cutoff=cutoff)), ""), "")


def no_command(words: Sequence[str]) -> str:
    """Message about a command line that does not begin with a command."""
    command, word = asked(words), words[0] if words else "-"
    if not word.startswith("-"):
        meant = close(word, COMMANDS)
        hint = f"did you mean {meant}?" if meant else f"choose {join_or([*COMMANDS])}"
        return f"there is no command {word!r}; {hint}"
    if command is not None:
        return f"settings come after the command: lit-fed {command} --config my.yaml"
    return f"no command given; choose {join_or([*COMMANDS])}, as in: lit-fed fit --config my.yaml"
