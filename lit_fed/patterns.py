"""Dotted names by pattern, and suggestions for names that do not exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate

from lit_fed.errors import ConfigError

_MOST = 3


def chosen_names(
    patterns: Collection[str], names: Collection[str], key: str, what: str = "parameter is called or begins so"
) -> tuple[str, ...]:
    """Return the names that match one of the patterns, in their order.

    Args:
        patterns: Names of parameters; of modules, for all below (``network.head``); or patterns of either, in which
            ``*`` stands for any text and ``?`` for one character (``*lora_B*``, ``classifier.*``).
        names: Dotted names of parameters, or of modules.
        key: The setting, such as ``algorithm.personal``.
        what: Clause after "no" in the error.

    Raises:
        ConfigError: For a pattern without a match; the error suggests similar names.
    """
    for pattern in patterns:
        if not any(_chooses(pattern, name) for name in names):
            known = dict.fromkeys(part for name in names for part in accumulate(name.split("."), "{}.{}".format))
            raise unknown_name(key, pattern, what, known)
    return tuple(name for name in names if any(_chooses(wanted, name) for wanted in patterns))


def unknown_name(key: str, word: str, what: str, names: Iterable[str]) -> ConfigError:
    """Return an error for an unknown name, with similar names.

    Args:
        key: The setting.
        word: Its value.
        what: Clause after "no", such as "parameter is called or begins so".
        names: All names; a dotted name may be similar by its last part.
    """
    by_part: dict[str, str] = {}
    for name in names:
        by_part.setdefault(name.rpartition(".")[2], name)
    whole, core = list(by_part.values()), word.strip("*?.")
    close = dict.fromkeys(
        [
            *get_close_matches(core, list(names), n=_MOST),
            *(by_part[part] for part in get_close_matches(core.rpartition(".")[2], by_part, n=_MOST)),
        ]
    )
    if close:
        hint = f"did you mean {' or '.join(list(close)[:_MOST])}?"
    else:
        hint = f"there are {', '.join(whole[:_MOST])}{', …' if len(whole) > _MOST else ''}"
    return ConfigError(f"{key} is {word!r}, and no {what}; {hint}")


def _chooses(pattern: str, name: str) -> bool:
    if name == pattern or name.startswith(f"{pattern}."):
        return True
    return any(mark in pattern for mark in "*?[") and any(
        fnmatchcase(name, candidate) for candidate in (pattern, f"{pattern}.*")
    )
