"""The parser of configurations, for the command line and for whatever reads its files."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser
from torch.optim.lr_scheduler import LRScheduler

ROUNDS = ("T_max", "total_steps", "total_iters")
"""How torch's schedules call their length; null stands for all rounds."""


class HelpFormatter(DefaultHelpFormatter):
    """Help without a list of every class of torch, and without the marks of docstrings."""

    def _expand_help(self, action: argparse.Action) -> str:
        text, known, classes = super()._expand_help(action).partition(", known subclasses: ")
        names = classes.count(",") + 1
        return (text + known + (classes if names <= 20 else f"{names} of them)")).replace("``", "")


class Parser(LightningArgumentParser):
    """A parser that passes its help format on to the parsers it makes for classes, and lets schedules be open-ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"formatter_class": HelpFormatter} | kwargs))

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Read arguments; a null for a setting of a class within a class arrives here as the text None."""
        if args is not None:
            args = [word.removesuffix("None") + "null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, *rest, **kwargs)

    def _add_signature_parameter(
        self, container: Any, nested_key: str | None, param: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Take null for a schedule's length, which torch declares as a number."""
        if param.name in ROUNDS and isinstance(param.parent, type) and issubclass(param.parent, LRScheduler):
            param = replace(param, annotation=int | None)
        return super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)
