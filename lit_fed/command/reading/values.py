"""Check of all values in a parsed configuration: finite, below 64 bits, without NUL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonargparse import Namespace

from lit_fed.command.refusals.suggest import imported, parameters_of
from lit_fed.errors import ConfigError

_LARGEST = 2**63 - 1  # the largest integer of tensors, arrays and loops


def check_values(settings: Any, key: str = "", where: Callable[[Sequence[str]], str] = lambda _keys: "") -> None:
    """Refuse NaN, infinity, whole numbers beyond 64 bits and texts with NUL, at any depth.

    Defaults of a class pass: a class may use infinity as its default.

    Args:
        settings: A configuration, or a part of one.
        key: Dotted key of that part.
        where: Prefix for messages, given a value's keys: the file that it is from.

    Raises:
        ConfigError: For the first such value, with its key.
    """
    if isinstance(settings, list | tuple | set):
        for value in settings:
            check_values(value, key, where)
        return
    settings = vars(settings) if isinstance(settings, Namespace) else settings
    if not isinstance(settings, Mapping):
        if wrong := _wrong(settings):
            raise ConfigError(f"{where(key.split('.'))}{key.replace('.init_args.', '.')} is {wrong}")
        return
    for name, value in settings.items():
        if name == "init_args" and isinstance(settings.get("class_path"), str):
            value = _set_anew(value, settings["class_path"])
        check_values(value, f"{key}.{name}" if key else str(name), where)


def _set_anew(init_args: Any, class_path: str) -> Any:
    """Settings of a class that differ from its defaults."""
    given = vars(init_args) if isinstance(init_args, Namespace) else init_args
    if not isinstance(given, Mapping):
        return given
    defaults = _defaults(class_path)
    return {name: value for name, value in given.items() if repr(defaults.get(name)) != repr(value)}


def _wrong(value: Any) -> str:
    """The mistake in a single value; empty if there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}; it must be a finite number"
    if isinstance(value, int) and abs(value) > _LARGEST:
        digits = str(value)
        shown = digits if len(digits) < 30 else f"{digits[:6]}… ({len(digits.lstrip('-'))} digits)"
        return f"{shown}; whole numbers must be below 2**63"
    if isinstance(value, str) and "\0" in value:
        return f"{value!r:.80}; a text cannot hold the character NUL"
    return ""


@lru_cache
def _defaults(class_path: str) -> Mapping[str, Any]:
    """Defaults of a class, or a function, by setting."""
    return {name: one.default for name, one in parameters_of(imported(class_path)).items()}
