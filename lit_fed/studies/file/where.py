"""A place in a study file, for errors that name it, and the checks of its content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fed.errors import ConfigError
from lit_fed.file_names import is_file_name
from lit_fed.studies.file.claims import WORDS, meant, number_in

_NAME = re.compile(r"[^\s/\\<>,*?\[\]{}.-][^\s/\\<>,*?\[\]{}]*")


@dataclass(frozen=True)
class Where:
    """A place in a study file, with the checks of its content.

    Args:
        file: The file.
        key: The dotted key; empty for the file itself.
    """

    file: str
    key: str = ""

    def at(self, key: str) -> Where:
        """Return the place of a key below this one."""
        return Where(self.file, f"{self.key}.{key}" if self.key else str(key))

    def error(self, text: str) -> ConfigError:
        """Return an error that names this place."""
        return ConfigError(f"{self.file}: {self.key + ': ' if self.key else ''}{text}")

    def refusal(self, value: Any, wanted: str) -> ConfigError:
        """Return an error about the value at this place."""
        return ConfigError(f"{self.file}: {self.key} is {value!r}; it must be {wanted}")

    def check_keys(self, content: Mapping[Any, Any], known: Sequence[str]) -> None:
        """Refuse unknown keys."""
        for key in content:
            if key not in known:
                raise self.error(f"unknown key {key!r}; {meant(str(key), known)}")

    def checked(self, content: Any, known: Sequence[str]) -> dict[str, Any]:
        """Check that a value is a mapping without unknown keys."""
        if not isinstance(content, dict):
            raise self.refusal(content, "a mapping")
        self.check_keys(content, known)
        return content

    def mapping(self, content: Mapping[str, Any], key: str) -> dict[Any, Any]:
        """Return the mapping at a key; empty by default."""
        value = content.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.at(key).refusal(value, "a mapping")
        return value or {}

    def texts(self, content: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """Return the list of texts at a key; empty by default."""
        value = content.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.at(key).refusal(value, "a list of texts")
        return tuple(value)

    def text(self, content: Mapping[str, Any], key: str, default: str = "") -> str:
        """Return the text at a key, with white space normalised."""
        value = content.get(key, default)
        if not isinstance(value, str):
            raise self.at(key).refusal(value, "a text")
        return " ".join(value.split())

    def name(self, name: Any) -> str:
        """Check the name of a row, a column or a study."""
        text = str(name)
        if not is_file_name(text) or not _NAME.fullmatch(text) or text in WORDS or number_in(text) is not None:
            raise self.error(
                f"{text!r} is not a valid name; it must be one word that is not a number, is not one of "
                f"{' '.join(WORDS)}, has no / \\ < > , : * ? and does not begin with . or -; use label for the rest"
            )
        return text

    def number(self, content: Mapping[str, Any], key: str) -> float | None:
        """Return the number at a key; None by default."""
        value = content.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.at(key).refusal(value, "a number")
        return value

    def choice(self, content: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
        """Return the choice at a key, by default the first."""
        choice: str = content.get(key, choices[0])
        if choice not in choices:
            raise self.at(key).refusal(choice, " or ".join(choices))
        return choice
