"""Read untrusted YAML in linear time."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_BYTES = 10_000_000
_MOST_VALUES = 100_000  # aliases of aliases could stand for billions


class TooManyValues(yaml.YAMLError, ValueError):
    """A text whose aliases expand to too many values."""


def read_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        yaml.YAMLError: If the text is not YAML.
        TooManyValues: If its aliases and merges expand to too many values, or to themselves.
        ValueError: If it is too long, nested too deeply, or has a number or date that Python lacks.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text):,} characters, which no configuration has")
    loader = yaml.SafeLoader(text)  # clearer errors than the C loader, and no overflow of C's stack
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > _MOST_VALUES:  # before merges expand
            raise TooManyValues(f"stands for more than {_MOST_VALUES:,} values, or holds itself; write fewer aliases")
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values of an expanded node; above the limit for a node that holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # until counted: a node that holds itself exceeds the limit
        parts = [part for pair in node.value for part in pair[1:]] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]
