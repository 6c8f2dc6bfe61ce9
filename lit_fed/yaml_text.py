"""YAML from untrusted sources, read in time and memory that the text's length bounds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

_MOST_BYTES = 10_000_000
_MOST_VALUES = 100_000  # aliases of aliases could expand to billions

_MERGE = "tag:yaml.org,2002:merge"


class TooManyValues(yaml.YAMLError, ValueError):
    """A text whose aliases expand to more values than any configuration has."""


class Document(NamedTuple):
    """A YAML text that has been read.

    Attributes:
        root: Its nodes, which know their lines; None for an empty text.
        content: Its content.
    """

    root: yaml.Node | None
    content: Any

    def lines(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Keys that lead to each setting, with its line."""
        for path, mapping in _mappings(self.root, (), set()):
            for key, _ in mapping.value:
                yield (*path, str(key.value)), key.start_mark.line + 1


def read_yaml(text: str) -> Any:
    """Content of a YAML text; errors as `read_document`."""
    return read_document(text, yaml.SafeLoader).content


def read_document(text: str, kind: type[yaml.SafeLoader] | None = None) -> Document:
    """Nodes of a YAML text, which know their lines, and its content, from one pass.

    Args:
        text: The YAML text.
        kind: Class of the loader, by default that of settings: it decides which scalars are numbers. Loaders written
            in Python report errors in more detail than loaders in C, and deep nesting does not overflow their stack.

    Raises:
        yaml.YAMLError: If the text is not YAML; of settings also where a mapping has the same key twice.
        TooManyValues: If its aliases and merges expand to too many values, or a value contains itself.
        ValueError: If the text is too long, is nested too deeply, has a number or a date that Python cannot hold, or
            a lone surrogate, which no file can hold.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text):,} characters, which no configuration has")
    loader = (kind or SettingsLoader)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, None)
        if _count(node, {}) > _MOST_VALUES:  # before merges are expanded
            raise TooManyValues(f"stands for more than {_MOST_VALUES:,} values, or holds itself; write fewer aliases")
        return Document(node, loader.construct_document(node))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values in a node with aliases expanded, each checked; above the limit if the node contains itself."""
    if isinstance(node, yaml.ScalarNode):
        try:
            os.fsencode(node.value)
        except UnicodeEncodeError as error:
            raise ValueError(f"{node.value!r:.80} holds a lone surrogate, half of a character") from error
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # while it is being counted: a node that contains itself has no end
        parts = [part for pair in node.value for part in pair[1:]] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]


# ---------------------------------------------------------------------- settings


class SettingsLoader(yaml.SafeLoader):
    """Takes the same scalars for numbers as the parser: 1e-3 is one, and a date stays text.

    Numbers of YAML 1.1 in base 8 and base 60, 010 and 1:10, which nobody means, stay text too.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        """Refuse duplicate keys, before merges add theirs."""
        _refuse_repeats(node)
        return super().construct_document(node)


SettingsLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in {
    "int": r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?[0-9][0-9_]*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9_]+([eE][-+][0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    SettingsLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"({_pattern})$"), [*"-+.0123456789"])


def _refuse_repeats(root: yaml.Node | None) -> None:
    for path, mapping in _mappings(root, (), set()):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line
            if name in lines:
                first = "in this line too" if lines[name] == line else f"also in line {lines[name] + 1}"
                problem = f"{'.'.join((*path, key.value))} is given twice, {first}; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[name] = line


def _mappings(
    node: yaml.Node | None, path: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], yaml.MappingNode]]:
    """Every mapping of a tree once, however many aliases refer to it, with the keys that lead to it."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield path, node
        for key, value in node.value:
            yield from _mappings(value, (*path, str(key.value)), seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value, path, seen)
