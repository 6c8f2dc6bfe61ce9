"""The parser of configurations, for the command line and for other readers of its files."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_loader
from jsonargparse._loaders_dumpers import get_yaml_default_loader
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim.lr_scheduler import LRScheduler

from lit_fed.yaml_text import read_nodes, read_yaml

ROUNDS = ("T_max", "total_steps", "total_iters")
"""Parameters by which torch's schedules take their length; null stands for all rounds."""

PARSER_MODE = "strict_yaml"
"""Mode of parsers that read with `load`."""

_OLD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers of YAML 1.1 in base 8 and base 60, 010 and 1:10, which nobody means: they stay text."""

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Takes the same scalars for numbers as the parser: 1e-3 is one, and a date stays text."""

    yaml_implicit_resolvers = get_yaml_default_loader().yaml_implicit_resolvers

    def construct_document(self, node: yaml.Node) -> Any:
        """Refuse duplicate keys, before merges add theirs."""
        _refuse_repeats(node)
        return super().construct_document(node)


def _construct_number(loader: Any, node: yaml.ScalarNode) -> Any:
    """A number, or the text of one that YAML 1.2 does not know."""
    if _OLD_NUMBER.fullmatch(node.value):
        return node.value
    return loader.construct_yaml_int(node) if node.tag.endswith("int") else loader.construct_yaml_float(node)


for _reader in (_Loader, get_yaml_default_loader()):  # the parser reads a text for a number once more by its own
    for _tag in ("int", "float"):
        _reader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct_number)


class Text(str):
    """A YAML text that has been parsed, so that the parser takes its content and does not parse it again.

    Attributes:
        root: Its nodes, which know their lines; None for an empty text.
        content: Its content.
    """

    root: yaml.Node | None = None
    content: Any

    def lines(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Keys that lead to each setting, with its line."""
        for path, mapping in _mappings(self.root, (), set()):
            for key, _ in mapping.value:
                yield (*path, str(key.value)), key.start_mark.line + 1


def parsed(text: str) -> Text:
    """Parse a YAML text once.

    Raises:
        yaml.YAMLError: If it is not YAML, or its aliases expand to too many values; a mapping with the same key twice
            is an error too: YAML's own readers keep the last.
        ValueError: See `lit_fed.yaml_text.read_nodes`.
    """
    text_read = Text(text)
    text_read.root, text_read.content = read_nodes(text, _Loader)
    return text_read


def load(text: str) -> Any:
    """Content of a YAML text, for the parser.

    Raises:
        yaml.YAMLError: If it is not YAML, a mapping has the same key twice, or its aliases expand to too many values.
    """
    if isinstance(text, Text):
        return copy.deepcopy(text.content)  # the parser modifies its input
    if "*" in text and "&" in text:
        read_yaml(text)
    if text.count(":") > 1:  # a single value has no keys
        _refuse_repeats(yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    return get_loader("yaml")(text)


set_loader(PARSER_MODE, load, (yaml.YAMLError,))


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


class HelpFormatter(DefaultHelpFormatter):
    """Help without long lists of classes and without reStructuredText marks."""

    def _expand_help(self, action: argparse.Action) -> str:
        text, known, classes = super()._expand_help(action).partition(", known subclasses: ")
        names = classes.count(",") + 1
        return (text + known + (classes if names <= 20 else f"{names} of them)")).replace("``", "")


class Parser(LightningArgumentParser):
    """A parser that passes its help format and its mode on to parsers it makes; a schedule's length may be null."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # argparse would take --trainer.max for --trainer.max_rounds
        ours: dict[str, Any] = {"formatter_class": HelpFormatter, "parser_mode": PARSER_MODE, "allow_abbrev": False}
        super().__init__(*args, **(ours | kwargs))

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse arguments; jsonargparse passes a null for a nested class's setting on as the text None."""
        if args is not None:
            args = [word.removesuffix("None") + "null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, *rest, **kwargs)

    def _add_signature_parameter(
        self, container: Any, nested_key: str | None, param: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Accept null for a schedule's length, which torch annotates as a number."""
        if param.name in ROUNDS and isinstance(param.parent, type) and issubclass(param.parent, LRScheduler):
            param = replace(param, annotation=int | None)
        return super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)
