"""The parser of configurations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lit_fed.yaml_text import read_yaml

ROUNDS = ("T_max", "total_steps", "total_iters")
"""Names of a schedule's length in torch; null stands for all rounds."""

PARSER_MODE = "strict_yaml"
"""The mode of parsers that read with `load`."""

_MERGE = "tag:yaml.org,2002:merge"


def load(text: str) -> Any:
    """Parse a YAML text for a parser.

    Raises:
        yaml.YAMLError: If it is not YAML, repeats a key, or has aliases that expand to too much.
    """
    if "*" in text and "&" in text:
        read_yaml(text)
    if text.count(":") > 1:  # a single value has no keys
        compose(text)
    return get_loader("yaml")(text)


set_loader(PARSER_MODE, load, (yaml.YAMLError,))


def compose(text: str) -> yaml.Node | None:
    """A YAML text as nodes with line numbers; None for an empty text.

    Raises:
        yaml.YAMLError: If it is not YAML, or a mapping repeats a key, of which YAML's readers keep the last.
    """
    root: yaml.Node | None = yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for path, mapping in _mappings(root, (), set()):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line
            if name in lines:
                first = "in this line too" if lines[name] == line else f"also in line {lines[name] + 1}"
                problem = f"{'.'.join((*path, key.value))} is there twice, {first}; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[name] = line
    return root


def _mappings(
    node: yaml.Node | None, path: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], yaml.MappingNode]]:
    """Each mapping of a tree, once, with its path of keys."""
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
    """Help without long lists of torch's classes, and without the marks of docstrings."""

    def _expand_help(self, action: argparse.Action) -> str:
        text, known, classes = super()._expand_help(action).partition(", known subclasses: ")
        names = classes.count(",") + 1
        return (text + known + (classes if names <= 20 else f"{names} of them)")).replace("``", "")


class Parser(LightningArgumentParser):
    """A parser that passes its help format and YAML reader to subparsers, and allows open-ended schedules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours: dict[str, Any] = {"formatter_class": HelpFormatter, "parser_mode": PARSER_MODE}
        super().__init__(*args, **(ours | kwargs))

    @override
    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse arguments; jsonargparse passes a nested class's null as the text None."""
        if args is not None:
            args = [word.removesuffix("None") + "null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, *rest, **kwargs)

    def _add_signature_parameter(
        self, container: Any, nested_key: str | None, param: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Allow null for a schedule's length, which torch declares as a number."""
        if param.name in ROUNDS and isinstance(param.parent, type) and issubclass(param.parent, LRScheduler):
            param = replace(param, annotation=int | None)
        return super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)
