"""The parser of configurations, for the command line and for other readers of its files."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_loader

from lit_fed.yaml_text import read_document

ROUNDS = ("T_max", "total_steps", "total_iters")
"""Parameters by which torch's schedules take their length; null stands for all rounds."""


def load(text: str) -> Any:
    """Content of a YAML text, for the parser; errors as `lit_fed.yaml_text.read_document`."""
    return read_document(text).content


set_loader("yaml", load, (yaml.YAMLError, ValueError))


class HelpFormatter(DefaultHelpFormatter):
    """Help without long lists of classes, functions' addresses and reStructuredText marks."""

    def _expand_help(self, action: argparse.Action) -> str:
        text, known, classes = super()._expand_help(action).partition(", known subclasses: ")
        names = classes.count(",") + 1
        text = (text + known + (classes if names <= 20 else f"{names} of them)")).replace("``", "")
        return re.sub(r"type: <function \w+ at 0x\w+>, ", "", text)


class Parser(ArgumentParser):
    """A parser that passes its help format on to parsers it makes; a schedule's length may be null."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # argparse would take --trainer.max for --trainer.max_rounds
        super().__init__(*args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **kwargs})

    def _add_signature_parameter(
        self, container: Any, nested_key: str | None, param: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Accept null for a schedule's length, which torch annotates as a number."""
        if param.name in ROUNDS and isinstance(param.parent, type):
            from torch.optim.lr_scheduler import LRScheduler  # not at the top: the command line prints help without it

            if issubclass(param.parent, LRScheduler):
                param = replace(param, annotation=int | None)
        return super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)
