"""Values that no option of a kind can have, and values that few can."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

HUGE = str(10**30)
TEXTS = ("x", "é²½", "1 2", "--", "None", "nul\tl", "１２x", "'", "a" * 300)
SHAPES = ("[[1], {a: 2}]", "{nobody: 1}", "[x, y]", "[", "{a", "!!python/object/apply:os.getcwd []", "&a [*a]")
NOT_FINITE = (".nan", ".inf", "-.inf", "1e400", "nan")
WRONG: dict[str, tuple[str, ...]] = {
    "int": (*TEXTS, *SHAPES, *NOT_FINITE, HUGE, f"-{HUGE}", str(2**63), "1.5", "1e-3", "true", "0x1g", ""),
    "float": (*TEXTS, *SHAPES, *NOT_FINITE, "true", "1,5", ""),
    "bool": (*TEXTS, *SHAPES, *NOT_FINITE, "2", "-1", "1.5", "yess", ""),
    "choice": (*TEXTS, *SHAPES, "-1", "1.5", ""),
    "class": (
        *TEXTS,
        *SHAPES,
        "1",
        "1.5",
        ".nan",
        "os.system",
        "builtins.object",
        "no.such.module.Cls",
        "torch.nn",
        "",
    ),
    "list": (*TEXTS[:4], "{a", "[", "[[[1]]]", "[{a: 1}]", "[.nan]", f"[{HUGE}]", "[x, y]", "1.5"),
    "mapping": (*TEXTS[:4], "[1, 2]", "1", "1.5", "[", "{a", "{1: 2, x: [}", ".nan"),
}
"""By kind of option: values of another type, not finite, beyond 64 bits, empty, in other scripts, or torn."""
EDGES = ("-1", "0", "-0.001", "-1e30")
"""Signs and zeros: whether they mean something is the option's own business."""
ENORMOUS = "1000000000000"
"""More than any machine has, of what it takes memory for."""


def kinds(hint: Any) -> set[str]:
    """What values an annotation takes: keys of `WRONG`, and ``text`` and ``none``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(kinds(arg) for arg in args))
    if origin is Literal:
        return {"choice"}
    if hint in (None, type(None)):
        return {"none"}
    simple = {int: "int", float: "float", bool: "bool", str: "text"}
    if hint in simple:
        return {simple[hint]}
    outer = origin or hint
    if isinstance(outer, type):
        if issubclass(outer, dict | typing.Mapping):  # type: ignore[arg-type]
            return {"mapping"}
        if issubclass(outer, (list, tuple, set)) or outer.__name__ in ("Sequence", "Iterable"):
            return {"list"}
        if "Path" in outer.__name__:
            return {"text"}
        if outer.__module__ not in ("builtins", "typing"):
            return {"class"}
    return {"text"}


def wrong(hint: Any) -> list[str]:
    """Values that a setting with this annotation cannot have; none where it takes any text."""
    found = kinds(hint) - {"none"}
    if not found or "text" in found:
        return []
    values = set.intersection(*(set(WRONG[kind]) for kind in found))
    if found <= {"int", "float"}:
        values |= {"[x, y]"}
    return sorted(values - ({"None"} if "none" in kinds(hint) else set()))  # an option's word for null


def edges(hint: Any) -> list[str]:
    """Values of a number's type that may mean nothing."""
    found = kinds(hint)
    if "float" in found:
        return list(EDGES)
    return [value for value in EDGES if value.lstrip("-").isdigit()] if "int" in found else []
