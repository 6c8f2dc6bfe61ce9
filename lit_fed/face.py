"""Faces: modules under whose names classes are known that live in rooms of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def live_here(names: Mapping[str, Any]) -> None:
    """Let a module's exported classes of the engine say that they live in it.

    What is printed, pickled and written into configurations then has the path that users import from, whichever room a
    class moves to.

    Args:
        names: The module's globals.
    """
    for name in names["__all__"]:
        thing = names[name]
        if isinstance(thing, type) and thing.__module__.startswith("lit_fed.engine."):
            thing.__module__ = names["__name__"]
