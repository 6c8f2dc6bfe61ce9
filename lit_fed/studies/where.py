"""A place in a study file: what its messages begin with, and the checks that name it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from lit_fed.errors import ConfigError
from lit_fed.file_names import is_file_name
from lit_fed.studies.claims import WORDS

_NAME = re.compile(r"[^\s/\\<>,*?\[\]{}.-][^\s/\\<>,*?\[\]{}]*")


@dataclass(frozen=True)
class Where:
    """A place in a study file, and the checks that need it.

    Args:
        file: The file.
        key: The dotted key; empty for the file itself.
    """

    file: str
    key: str = ""

    def at(self, key: str) -> Where:
        """A key below it."""
        return Where(self.file, f"{self.key}.{key}" if self.key else str(key))

    def error(self, text: str) -> ConfigError:
        """An error that names it."""
        return ConfigError(f"{self.file}: {self.key + ': ' if self.key else ''}{text}")

    def check_keys(self, content: Mapping[Any, Any], known: Sequence[str]) -> None:
        """Refuse keys that are none."""
        for key in content:
            if key not in known:
                raise self.error(f"unknown key {key!r}; {meant(str(key), known)}")

    def checked(self, content: Any, known: Sequence[str]) -> dict[str, Any]:
        """A mapping without unknown keys."""
        if not isinstance(content, dict):
            raise self.error(f"expected a mapping, not {content!r}")
        self.check_keys(content, known)
        return content

    def mapping(self, content: Mapping[str, Any], key: str) -> dict[Any, Any]:
        """The mapping at a key; empty where there is none."""
        value = content.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.at(key).error(f"expected a mapping, not {value!r}")
        return value or {}

    def texts(self, content: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """The list of texts at a key."""
        value = content.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.at(key).error(f"expected a list of texts, not {value!r}")
        return tuple(value)

    def text(self, content: Mapping[str, Any], key: str, default: str = "") -> str:
        """The text at a key, its white space made even."""
        value = content.get(key, default)
        if not isinstance(value, str):
            raise self.at(key).error(f"expected a text, not {value!r}")
        return " ".join(value.split())

    def name(self, name: Any) -> str:
        """A name of a row or a column, or of a study."""
        text = str(name)
        if not is_file_name(text) or not _NAME.fullmatch(text) or text in WORDS or _is_number(text):
            raise self.error(
                f"{text!r} cannot be a name: it must be one word, no number and none of {' '.join(WORDS)}, "
                "without / \\ < > , : * ? and not beginning with . or -; put the rest into label"
            )
        return text

    def number(self, content: Mapping[str, Any], key: str) -> float | None:
        """The number at a key; None where there is none."""
        value = content.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.at(key).error(f"expected a number, not {value!r}")
        return value

    def choice(self, content: Mapping[str, Any], key: str, choices: Sequence[str]) -> None:
        """Refuse a value that is none of some words."""
        if key in content and content[key] not in choices:
            raise self.at(key).error(f"expected {' or '.join(choices)}, not {content[key]!r}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def meant(word: str, known: Sequence[str]) -> str:
    """The end of a message about a word that is none of the known ones."""
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
