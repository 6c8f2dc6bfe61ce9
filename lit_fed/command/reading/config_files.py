"""Configuration files of one command: each is read once, and more strictly than by YAML.

A file may name others: ``config:`` a whole one, a section such as ``model:`` one with the section's settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from lit_fed.command.reading.readable import brief, parse_text, read_text, settings_of
from lit_fed.command.reading.settings import CLASSES, Place, place_of
from lit_fed.command.reading.shipped import is_file
from lit_fed.command.roots import PARTS
from lit_fed.errors import ConfigError
from lit_fed.parsing import Text, parsed

SECTIONS = ("trainer", *PARTS)
"""Top-level keys of a run's configuration, which options too may set as a whole."""

_PARTS = [(section,) for section in SECTIONS]
_ENDINGS = (".yaml", ".yml")
_DEEPEST = 9  # a file that names itself has no end
_NEEDED = {"trainer": "settings, such as max_rounds"} | dict.fromkeys(PARTS, "class_path and init_args")
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_NO_SETTINGS = {f"tag:yaml.org,2002:{name}": name for name in ("set", "omap", "pairs", "binary")}


Part = tuple[Place, Any, dict[Place, str] | None]
"""Settings from an option, or below one key of a file: the keys that lead to them; their value, with files in place of
their names; and files and lines of all settings in it, by place, None for an option's text."""


class ConfigFiles:
    """The configuration files that a command has read so far."""

    def __init__(self) -> None:
        self._text = cache(read_text)

    def parts(self, value: str) -> Iterator[Part]:
        """Parts of a ``--config``, in order.

        Args:
            value: A path, or the settings themselves.
        """
        if not value:
            raise ConfigError("--config needs a value")
        if is_name(value):
            return self._file(Path(value))
        return self._parts(parse_text(value, "--config"), "--config", Path())

    def option(self, option: str, value: str) -> Part:
        """An option's text, or the content of the file that it names."""
        keys, origins = tuple(option.removeprefix("--").split(".")), dict[Place, str]()
        if keys[:2] == ("trainer", "kinds") and len(keys) > 3:  # the rest of the kind would be dropped
            raise ConfigError(f"{option} sets a part of a kind; set all of it, as --trainer.kinds.{keys[2]} '{{…}}'")
        filled = self._filled(place_of(keys), value, Path(), origins, 0)
        if origins:
            return keys, filled, origins
        try:
            parsed(value)
        except yaml.constructor.ConstructorError as error:
            raise ConfigError(f"{option}: {error.problem}") from error
        except (yaml.YAMLError, ValueError):
            pass  # for the parser to judge
        return keys, value, None

    def _file(self, path: Path, depth: int = 0) -> Iterator[Part]:
        if depth > _DEEPEST:
            raise ConfigError(f"loop detected: config file {brief(path)} names itself")
        return self._parts(self._text(path), f"config file {brief(path)}", path.parent, depth)

    def _parts(self, text: Text, where: str, folder: Path, depth: int = 0) -> Iterator[Part]:
        content = settings_of(text, where)
        _check(text, where)
        lines = _lines(text, where, ())
        for key, value in content.items():
            if key == "config" and isinstance(value, str):
                yield from self._file(folder / value, depth + 1)
            else:
                origins = {place: line for place, line in lines.items() if place[0] == key}
                yield (key,), self._filled((key,), value, folder, origins, depth), origins

    def _named(self, place: Place, path: Path, origins: dict[Place, str], depth: int = 0) -> Any:
        """Settings of a section, or of a class, from a separate file."""
        text, where = self._text(path), f"config file {brief(path)}"
        if place in _PARTS:
            settings_of(text, where)
            _check(text, where, place[-1])
        origins.update(_lines(text, where, place))
        return self._filled(place, text.content, path.parent, origins, depth)

    def _filled(self, place: Place, value: Any, folder: Path, origins: dict[Place, str], depth: int) -> Any:
        """A value with the content of files in place of the names of files of classes."""
        if isinstance(value, dict):
            fill = partial(self._filled, folder=folder, origins=origins, depth=depth)
            return {key: fill(place_of((*place, str(key))), item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(place, item, folder, origins, depth) for item in value]
        if isinstance(value, str) and value.endswith(_ENDINGS) and depth < _DEEPEST:
            path = folder / value
            if place in _PARTS or (is_file(str(path)) and (place in CLASSES or self._is_missed(path, folder))):
                return self._named(place, path, origins, depth + 1)
        return value

    def _is_missed(self, path: Path, folder: Path) -> bool:
        """Whether a file holds a class, and the parser would look for it in the working directory."""
        return folder != Path() and "class_path:" in self._text(path)


def _lines(text: Text, where: str, above: Place) -> dict[Place, str]:
    lines = {(*above, *place_of(keys)): line for keys, line in text.lines() if keys[-1] != "init_args"}
    return {place: f"{where}, line {line}" for place, line in lines.items()}


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
