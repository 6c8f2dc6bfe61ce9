"""Configuration files of one command: each is read once, and more strictly than by YAML.

A file may name others: ``config:`` a whole one, a section such as ``model:`` one with the section's settings.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_fed.command.reading.settings import CLASSES, Place, place_of
from lit_fed.command.reading.shipped import close_name, is_file
from lit_fed.command.roots import PARTS
from lit_fed.errors import ConfigError
from lit_fed.file_names import shown
from lit_fed.yaml_text import Document, TooManyValues, read_document

SECTIONS = ("trainer", *PARTS)
"""Top-level keys of a run's configuration, which options too may set as a whole."""

_ENDINGS = (".yaml", ".yml")
_DEEPEST = 9  # a file that names itself has no end
_NEEDED = {"trainer": "settings, such as max_rounds"} | dict.fromkeys(PARTS, "class_path and init_args")
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_NO_SETTINGS = {f"tag:yaml.org,2002:{name}": name for name in ("set", "omap", "pairs", "binary")}


class FilePart(NamedTuple):
    """Settings from an option, or below one key of a file.

    Attributes:
        keys: The keys that lead to them.
        value: Their value, with the content of files in place of the files' names.
        origins: Files and lines of all settings in it, by place; empty for an option's text.
    """

    keys: Place
    value: Any
    origins: dict[Place, str]


class ConfigFiles:
    """The configuration files that a command has read so far."""

    def __init__(self) -> None:
        self._read = cache(read_file)

    def parts(self, value: str) -> Iterator[FilePart]:
        """Parts of a ``--config``, in order.

        Args:
            value: A path, or the settings themselves.
        """
        if not value:
            raise ConfigError("--config needs a value")
        if is_name(value):
            return self._file(Path(value))
        return self._parts(parse_text(value, "--config"), "--config", Path())

    def option(self, option: str, value: str) -> FilePart:
        """An option's value: null, a list or a mapping by YAML, else its text; or the content of the file it names."""
        keys, origins = tuple(option.removeprefix("--").split(".")), dict[Place, str]()
        if keys[:2] == ("trainer", "kinds") and len(keys) > 3:  # the rest of the kind would be dropped
            raise ConfigError(f"{option} sets a part of a kind; set all of it, as --trainer.kinds.{keys[2]} '{{…}}'")
        given: Any = value
        try:
            root, content = read_document("null" if value == "None" else value)
            if root is not None and isinstance(content, dict | list | None):
                given = content
        except yaml.constructor.ConstructorError as error:
            raise ConfigError(f"{option}: {error.problem}") from error
        except (yaml.YAMLError, ValueError):
            pass  # for the parser to judge
        return FilePart(keys, self._filled(place_of(keys), given, Path(), origins, 0), origins)

    def _file(self, path: Path, depth: int = 0) -> Iterator[FilePart]:
        if depth > _DEEPEST:
            raise ConfigError(f"loop detected: config file {brief(path)} names itself")
        return self._parts(self._read(path), f"config file {brief(path)}", path.parent, depth)

    def _parts(self, document: Document, where: str, folder: Path, depth: int = 0) -> Iterator[FilePart]:
        content = settings_of(document, where)
        _check(document, where)
        lines = _lines(document, where, ())
        for key, value in content.items():
            if key == "config" and isinstance(value, str):
                yield from self._file(folder / value, depth + 1)
            else:
                origins = {place: line for place, line in lines.items() if place[0] == key}
                yield FilePart((key,), self._filled((key,), value, folder, origins, depth), origins)

    def _filled(self, place: Place, value: Any, folder: Path, origins: dict[Place, str], depth: int) -> Any:
        """A value with the content of files in place of the names of files of sections and classes."""
        if isinstance(value, dict):
            fill = partial(self._filled, folder=folder, origins=origins, depth=depth)
            return {key: fill(place_of((*place, str(key))), item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(place, item, folder, origins, depth) for item in value]
        path, is_section = folder / str(value), place in [(section,) for section in SECTIONS]
        if not (isinstance(value, str) and value.endswith(_ENDINGS) and depth < _DEEPEST):
            return value
        if not (is_section or (is_file(str(path)) and (place in CLASSES or _holds_class(self._read(path))))):
            return value
        document, where = self._read(path), f"config file {brief(path)}"
        if is_section:
            settings_of(document, where)
            _check(document, where, place[-1])
        origins.update(_lines(document, where, place))
        return self._filled(place, document.content, path.parent, origins, depth + 1)


def _holds_class(document: Document) -> bool:
    return isinstance(document.content, dict) and "class_path" in document.content


def _lines(document: Document, where: str, above: Place) -> dict[Place, str]:
    lines = {(*above, *place_of(keys)): line for keys, line in document.lines() if keys[-1] != "init_args"}
    return {place: f"{where}, line {line}" for place, line in lines.items()}


def is_name(value: str) -> bool:
    """Whether a value of ``--config`` is a file's name rather than settings."""
    return not any(mark in value for mark in "{}\n") and ": " not in value


def _check(document: Document, where: str, section: str = "") -> None:
    """Refuse settings that the parser would misread; ``section`` is the one that the text holds, if only one."""
    for node, wrong in _odd(document.root, section, True):
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


# ---------------------------------------------------------------------- one YAML file


_MOST_BYTES = 10_000_000
_EMPTY = "holds no settings; write keys such as trainer:, model:, data: and algorithm:"


def read_settings(path: str | Path, kind: str = "config file", empty: str = _EMPTY) -> dict[str, Any]:
    """Mapping in a YAML file.

    Args:
        path: The file.
        kind: Name of such files in messages.
        empty: End of the message about a file without a mapping.
    """
    return settings_of(read_file(path, kind), f"{kind} {brief(path)}", empty)


def read_file(path: str | Path, kind: str = "config file") -> Document:
    """Open and parse a YAML file."""
    where = f"{kind} {brief(path)}"
    try:
        status = Path(path).stat()
        regular = stat.S_ISREG(status.st_mode)  # others, such as pipes, may block, and can be read only once
        text = Path(path).read_text(encoding="utf-8-sig") if regular and status.st_size <= _MOST_BYTES else ""
    except FileNotFoundError as error:
        meant = close_name(path)
        raise ConfigError(f"{where} does not exist" + (f"; did you mean {meant}?" if meant else "")) from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; save it as UTF-8"
        ) from error
    except ValueError as error:  # a path with NUL
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not regular:
        raise ConfigError(f"{where} is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}")
    if status.st_size > _MOST_BYTES:
        raise ConfigError(f"{where} has {status.st_size:,} bytes; a configuration has at most {_MOST_BYTES:,}")
    return parse_text(text, where)


def parse_text(text: str, where: str) -> Document:
    """Parse YAML.

    Args:
        text: The YAML text.
        where: File or option that it is from, for messages.
    """
    try:
        return read_document(text)
    except TooManyValues as error:
        raise ConfigError(f"{where} {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = "; put a text that begins with * in quotes" if "alias" in f"{error.context} {error.problem}" else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error
    except ValueError as error:  # a number or a name that YAML allows and Python does not
        raise ConfigError(f"{where} cannot be read: {str(error).partition(';')[0]}") from error


def settings_of(document: Document, where: str, empty: str = _EMPTY) -> dict[str, Any]:
    """Mapping in a YAML text."""
    content = document.content
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where} {empty}")
    if odd := [key for key in content if not isinstance(key, str)]:
        raise ConfigError(f"{where}: unknown key {odd[0]}; keys are names, such as trainer:")
    return content


def brief(path: str | Path) -> str:
    """A path for a message: printable, and no longer than a line."""
    text = shown(path) if str(path) else ""
    if not text or not text.isprintable():
        text = repr(text)
    return text if len(text) <= 120 else f"{text[:60]}…{text[-50:]}"
