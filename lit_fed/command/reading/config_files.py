"""Configuration files, read more strictly than YAML asks for: what a reader would not expect is named with its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from lit_fed.errors import ConfigError
from lit_fed.parsing import compose

_PARTS = ("model", "data", "algorithm")  # the keys of `lit_fed.command.roots.PARTS`, without importing their classes
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_NO_SETTINGS = {f"tag:yaml.org,2002:{name}": name for name in ("set", "omap", "pairs", "binary")}


def check_value(option: str, text: str) -> None:
    """Refuse a value of an option that names a key twice.

    Raises:
        ConfigError: In one line with the option and the key.
    """
    try:
        compose(text)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{option}: {error.problem}") from error
    except yaml.YAMLError:  # the parser's business
        return


def check_config(path: Path) -> None:
    """Refuse settings that the parser would take for others, or for none, without a word.

    A file that cannot be read, or is no mapping, is the parser's business.

    Raises:
        ConfigError: In one line with the file, the line and the key.
    """
    try:
        root = compose(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return
    for key, wrong in (*_odd_tags(root), *_odd_sections(root)):
        raise ConfigError(f"config file {path}, line {key.start_mark.line + 1}: {wrong}")


def _odd_tags(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, str]]:
    """Values of YAML's that no setting has."""
    if node is not None and node.tag in _NO_SETTINGS:
        yield (
            node,
            f"!!{_NO_SETTINGS[node.tag]} is nothing that a setting can be; write a number, text, list or mapping",
        )
    for _, value in _entries(node):
        yield from _odd_tags(value)
    for item in node.value if isinstance(node, yaml.SequenceNode) else ():
        yield from _odd_tags(item)


def _odd_sections(root: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, str]]:
    for key, value in _entries(root):
        yield from _dotted(key, "")
        if key.value == "trainer" and not (isinstance(value, yaml.MappingNode) or value.tag == _TEXT):
            yield key, f"trainer is {_named(value)}; it must hold settings, such as max_rounds"
        if key.value in _PARTS and not (isinstance(value, yaml.MappingNode) or value.tag == _TEXT):
            yield key, f"{key.value}: a class is needed; give class_path and init_args, not {_named(value)}"
        if key.value in ("trainer", *_PARTS):
            yield from _odd_settings(value, key.value)
            for inner, _ in _entries(value):
                yield from _dotted(inner, key.value)


def _odd_settings(node: yaml.Node, path: str) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """What is wrong with the init_args of a section and of the classes in it."""
    for key, value in _entries(node):
        where = f"{path}.{key.value}"
        if key.value == "init_args":
            if not isinstance(value, yaml.MappingNode):
                yield key, f"{where} is {_named(value)}; it must hold settings of the class, or be left out"
            for inner, _ in _entries(value):
                yield from _dotted(inner, where)
        yield from _odd_settings(value, where)
    for item in node.value if isinstance(node, yaml.SequenceNode) else ():
        yield from _odd_settings(item, path)


def _dotted(key: yaml.ScalarNode, path: str) -> Iterator[tuple[yaml.ScalarNode, str]]:
    above, _, last = key.value.rpartition(".")
    if above and last and key.tag == _TEXT:
        inside = f" of {path}" if path else ""
        yield key, f"the key {key.value}{inside} has dots, as options have; write {last} in a line below {above}:"


def _entries(node: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            yield key, value


def _named(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "null" if node.tag == _NULL else str(node.value)
