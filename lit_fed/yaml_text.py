"""YAML of anybody's: read so that no text, however it was made up, takes longer than it is long."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_BYTES = 10_000_000
_MOST_VALUES = 100_000  # aliases of aliases could stand for billions


class TooManyValues(yaml.YAMLError, ValueError):
    """A text that stands for more values than anybody writes."""


def read_yaml(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: If it is none.
        TooManyValues: If its aliases and merges stand for too much, or for what holds itself.
        ValueError: If it is too long, is nested too deeply, or has a number or a date that Python does not.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text):,} characters, which no configuration has")
    loader = yaml.SafeLoader(text)  # says more about what is wrong than the faster one, and is no stack of C's
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > _MOST_VALUES:  # before merges are written out
            raise TooManyValues(f"stands for more than {_MOST_VALUES:,} values, or holds itself; write fewer aliases")
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The values in a node, written out in full; more than there may be where it holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # while it is being counted: what holds itself has no end
        parts = [part for pair in node.value for part in pair[1:]] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]
