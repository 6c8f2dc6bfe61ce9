"""Checks of a setting's value: the range of a number, the choices of a word, each in one wording."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from lit_fed.errors import ConfigError

ValueT = TypeVar("ValueT")

_URL = re.compile("[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # not a drive of Windows


def check_range(
    key: str,
    value: ValueT,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    null: str | None = None,
    infinite: bool = False,
    why: str = "",
) -> ValueT:
    """Return a number; refuse one that is not finite or lies outside its bounds.

    Args:
        key: The setting as its user writes it, such as ``trainer.max_rounds``.
        value: Its value.
        least: Inclusive lower bound.
        above: Exclusive lower bound.
        most: Inclusive upper bound.
        below: Exclusive upper bound.
        null: The meaning of ``None``, such as ``for no limit``; without it, ``None`` is refused.
        infinite: Whether infinity is a value like any other.
        why: Text after the bounds: a unit, a reason or an example, such as `` pixels`` or ``, such as 0.5``.
    """
    if value is None and null is not None:
        return value
    inside = (
        isinstance(value, (int, float))
        and (math.isfinite(value) or (infinite and not math.isnan(value)))
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if inside:
        return value
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    named = " and ".join(f"{word} {_figure(bound)}" for word, bound in bounds.items() if bound is not None)
    unless = "" if null is None else f", or null {null}"
    raise ConfigError(f"{key} is {value!r}; it must be {named or 'a finite number'}{why}{unless}")


def check_choice(key: str, value: ValueT, choices: Sequence[object]) -> ValueT:
    """Return a value; refuse one that is not one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigError(f"{key} is {value!r}; it must be {', '.join(others)} or {last}")
    return value


def _figure(bound: float) -> str:
    """A bound without a needless exponent: ``4294967296``, not ``4.29497e+09``."""
    return str(int(bound)) if bound == int(bound) else str(bound)


def check_local(key: str, path: str | Path) -> None:
    """Refuse a URL such as ``s3://bucket/runs`` or ``file:///runs`` where files are locked, renamed and rewritten."""
    if _URL.match(str(path)):
        raise ConfigError(
            f"{key} is {str(path)!r}; files are locked and renamed in place there, which remote storage cannot do; "
            "name a local folder, and copy it when it is written"
        )
