"""Public modules that re-export the engine's classes under stable names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def live_here(names: Mapping[str, Any]) -> None:
    """Set ``__module__`` of the engine's classes that a module exports to that module.

    Reprs, pickles and configurations then have the public path, wherever a class moves.

    Args:
        names: The module's globals.
    """
    for name in names["__all__"]:
        thing = names[name]
        if isinstance(thing, type) and thing.__module__.startswith("lit_fed.engine."):
            thing.__module__ = names["__name__"]
