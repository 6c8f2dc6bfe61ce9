"""The wings beside the core, which imports none of them: it loads by name what they add.

A wing's ``table`` has its commands; the modules of `WITH_CLASSES` have the classes that configurations name.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

WITH_COMMANDS = ("federation", "record", "studies")
WITH_CLASSES = ("poses", "record.contribution")


def of_wing(path: str) -> ModuleType:
    """Import a module of a wing: ``poses.networks``."""
    return import_module(f"lit_fed.{path}")
