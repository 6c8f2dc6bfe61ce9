"""YAML from untrusted sources, read in time and memory that the text's length bounds."""

from __future__ import annotations

import os
from typing import Any

import yaml

_MOST_BYTES = 10_000_000
_MOST_VALUES = 100_000  # aliases of aliases could expand to billions


class TooManyValues(yaml.YAMLError, ValueError):
    """A text whose aliases expand to more values than any configuration has."""


def read_yaml(text: str) -> Any:
    """Content of a YAML text; errors as `read_nodes`."""
    return read_nodes(text, yaml.SafeLoader)[1]


def read_nodes(text: str, kind: type[yaml.SafeLoader]) -> tuple[yaml.Node | None, Any]:
    """Nodes of a YAML text, which know their lines, and its content, from one pass.

    Args:
        text: The YAML text.
        kind: Class of the loader: it decides which scalars are numbers. Loaders written in Python report errors in more
            detail than loaders in C, and deep nesting does not overflow their stack.

    Raises:
        yaml.YAMLError: If the text is not YAML.
        TooManyValues: If its aliases and merges expand to too many values, or a value contains itself.
        ValueError: If the text is too long, is nested too deeply, has a number or a date that Python cannot hold, or
            a lone surrogate, which no file can hold.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text):,} characters, which no configuration has")
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        if _count(node, {}) > _MOST_VALUES:  # before merges are expanded
            raise TooManyValues(f"stands for more than {_MOST_VALUES:,} values, or holds itself; write fewer aliases")
        return node, loader.construct_document(node)
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
