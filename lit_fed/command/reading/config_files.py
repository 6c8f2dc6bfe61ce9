"""Configuration files of one command: each is read once, for us and for the parser, and more strictly than by YAML.

A file may name others: ``config:`` a whole one, a section such as ``model:`` one with the section's settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lit_fed.command.reading.readable import brief, parse_text, read_text, settings_of
from lit_fed.command.reading.shipped import is_file
from lit_fed.command.reading.wrapping import wrapped_settings
from lit_fed.command.roots import PARTS
from lit_fed.errors import ConfigError
from lit_fed.parsing import Text, parsed

SECTIONS = ("trainer", *PARTS)
"""Top-level keys of a run's configuration, which options too may set as a whole."""

_ENDINGS = (".yaml", ".yml")
_DEEPEST = 9  # a file that names itself has no end; the parser refuses it
_NEEDED = {"trainer": "settings, such as max_rounds"} | dict.fromkeys(PARTS, "class_path and init_args")
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_NO_SETTINGS = {f"tag:yaml.org,2002:{name}": name for name in ("set", "omap", "pairs", "binary")}


class ConfigFiles:
    """The configuration files that a command has read so far.

    Attributes:
        texts: The files by their resolved paths.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Text] = {}

    def sections(self, value: str) -> Iterator[tuple[str, Any]]:
        """Top-level keys and values of a ``--config``, in order, with files that it names in place of their names.

        Args:
            value: A path, or the settings themselves.

        Raises:
            ConfigError: If a file cannot be read, or the parser would misread a setting silently.
        """
        if not value:
            raise ConfigError("--config needs a value")
        if is_name(value):
            return self._file(Path(value))
        return self._sections(parse_text(value, "--config"), "--config", Path())

    def value(self, option: str, value: str) -> Any:
        """Content of an option's value, or of the file that it names.

        Raises:
            ConfigError: If a file cannot be read, or the value has a key twice.
        """
        key = option.removeprefix("--")
        if value.endswith(_ENDINGS) and (key in SECTIONS or is_file(value)):
            return self._part(key, Path(value))
        try:
            return parsed(value).content
        except yaml.constructor.ConstructorError as error:
            raise ConfigError(f"{option}: {error.problem}") from error
        except (yaml.YAMLError, ValueError):
            return value  # for the parser to judge

    def _text(self, path: Path) -> Text:
        if not is_file(str(path)):
            return read_text(path)  # which raises
        key = os.path.realpath(path)
        if key not in self.texts:
            self.texts[key] = text = read_text(path)
            text.content = wrapped_settings(text.content)
        return self.texts[key]

    def _file(self, path: Path, depth: int = 0) -> Iterator[tuple[str, Any]]:
        return self._sections(self._text(path), f"config file {brief(path)}", path.parent, depth)

    def _sections(self, text: Text, where: str, folder: Path, depth: int = 0) -> Iterator[tuple[str, Any]]:
        content = settings_of(text, where)
        _check(text, where)
        for key, value in content.items():
            names_file = isinstance(value, str) and depth < _DEEPEST
            if key == "config" and names_file:
                yield from self._file(folder / value, depth + 1)
            elif key in SECTIONS and names_file and value.endswith(_ENDINGS):
                yield key, self._part(key, folder / value, depth + 1)
            else:
                yield key, self._filled(value, folder, depth)

    def _part(self, key: str, path: Path, depth: int = 0) -> Any:
        """Settings of a section, or of a class, from a separate file."""
        text, where = self._text(path), f"config file {brief(path)}"
        if key in SECTIONS:
            settings_of(text, where)
            _check(text, where, key)
        return self._filled(text.content, path.parent, depth)

    def _filled(self, value: Any, folder: Path, depth: int) -> Any:
        """A value with the content of files in place of their names, unless a file cannot be read."""
        if isinstance(value, dict):
            return {key: self._filled(item, folder, depth) for key, item in value.items()}
        if isinstance(value, str) and value.endswith(_ENDINGS) and is_file(str(folder / value)) and depth < _DEEPEST:
            with suppress(ConfigError):
                return self._part("", folder / value, depth + 1)
        return value


def is_name(value: str) -> bool:
    """Whether a value of ``--config`` is a file's name rather than settings."""
    return not any(mark in value for mark in "{}\n") and ": " not in value


def _check(text: Text, where: str, section: str = "") -> None:
    """Refuse settings that the parser would misread; ``section`` is the one that the text holds, if only one."""
    for node, wrong in _odd(text.root, section, True):
        raise ConfigError(f"{where}, line {node.start_mark.line + 1}: {wrong}")


def _odd(node: yaml.Node | None, path: str, holds_settings: bool) -> Iterator[tuple[yaml.Node, str]]:
    """Nodes that would be misread, each with its mistake; ``path`` leads to the node."""
    if node is not None and node.tag in _NO_SETTINGS:
        yield node, f"!!{_NO_SETTINGS[node.tag]} cannot be a setting; write a number, text, list or mapping"
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _odd(item, path, False)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            continue
        inside = f"{path}.{key.value}".removeprefix(".")
        above, _, last = key.value.rpartition(".")
        if holds_settings and above and last and key.tag == _TEXT:
            of = f" of {path}" if path else ""
            yield key, f"the key {key.value}{of} has dots, as options have; write {last} in a line below {above}:"
        needed = _NEEDED.get(inside, "settings of the class, or be left out" if key.value == "init_args" else "")
        named = inside in SECTIONS and value.tag == _TEXT  # a class, or a file
        if needed and not (named or isinstance(value, yaml.MappingNode)):
            shown = "a list" if isinstance(value, yaml.SequenceNode) else "null" if value.tag == _NULL else value.value
            yield key, f"{inside} is {shown}; it must hold {needed}"
        yield from _odd(value, inside, bool(needed))
