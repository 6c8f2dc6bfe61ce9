"""Optimizers and schedules that replace others: each starts with its defaults, without settings of the replaced one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from torch import nn

from lit_fed.command.refusals.suggest import named_class, parameters_of

TRAINED_BY: dict[str, type] = {
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
}
"""Settings of a model that are classes: a different class starts afresh."""


class Mention(NamedTuple):
    """Settings from one option, or from one top-level key of a file.

    Args:
        end: Number of words up to the option's end.
        option: Whether it is an option rather than a file.
        key: Keys of the setting without ``init_args``; of a file the first.
        value: Its value, as YAML has it, with files in place of their names.
    """

    end: int
    option: bool
    key: tuple[str, ...]
    value: Any

    def settings(self, *key: str) -> dict[str, Any]:
        """Settings of the class at a key, and the class itself as ``class_path``."""
        if self.key[: len(key)] == key and len(self.key) > len(key):
            return {self.key[len(key)]: self.value}
        found = self.value if key[: len(self.key)] == self.key else None
        for step in key[len(self.key) :]:
            found = plain(found).get(step)
        return plain(found)

    @property
    def keys(self) -> list[str]:
        """Dotted keys of all settings."""
        return [".".join(self.key)] if self.option else list(_leaves(self.value, self.key))


class Change(NamedTuple):
    """A class that replaces another.

    Args:
        end: Number of words up to the end of the option that names it.
        name: The class, as it was named.
        own: The new class's defaults that the parser would otherwise overwrite.
    """

    end: int
    name: str
    own: dict[str, Any]


def plain(value: Any) -> dict[str, Any]:
    """A class and its settings side by side; a lone text names a class."""
    if isinstance(value, dict):
        inner = value.get("init_args")
        return {k: v for k, v in value.items() if k != "init_args"} | (inner if isinstance(inner, dict) else {})
    return {"class_path": value} if isinstance(value, str) else {}


def _leaves(value: Any, above: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, above if key == "init_args" else (*above, str(key)))
    else:
        yield ".".join(above)


def over(below: Any, above: Any, base: type) -> Any:
    """Merge a class with settings into another: the same class keeps other settings, a new one starts afresh.

    Args:
        below: Class and settings so far, as a configuration has them.
        above: Class and settings that replace them; without ``class_path`` the class stays.
        base: Base of both classes.
    """
    old, new = plain(below), plain(above)
    before, named = (named_class(each.get("class_path"), [base]) for each in (old, new))
    if not new or before is None or (named is None and "class_path" in new):
        return above
    kept = old if named in (None, before) else {"class_path": new["class_path"], **_defaults(named)}
    merged = kept | new
    return {"class_path": merged.pop("class_path"), "init_args": merged}


def changes(said: Sequence[Mention], key: str) -> Iterator[Change]:
    """Classes that replace others at a key of the model.

    The parser would keep the earlier class's values of all parameters that both have, even defaults. Settings from
    options stay, wherever the options stand.
    """
    given = [(one, settings) for one in said if (settings := one.settings("model", key))]
    by_option = {name for one, settings in given if one.option for name in settings}
    models = [name for one in said if (name := one.settings("model").get("class_path"))]
    current = _default(named_class(models[-1], [LightningModule]), key) if given and models else None
    for one, settings in given:
        named = named_class(settings.get("class_path"), [TRAINED_BY[key]])
        if named is None or named is current:
            continue
        known, asked_for = _defaults(current), by_option | settings.keys()
        own = {name: value for name, value in _defaults(named).items() if name in known and name not in asked_for}
        yield Change(one.end, settings["class_path"], own)
        current = named


def _default(model: type | None, key: str) -> type | None:
    """The class that a model takes by default."""
    with suppress(Exception):  # a user's own code
        return type(parameters_of(model)[key].default([nn.Parameter(torch.zeros(1))]))
    return None


def _defaults(made: type | None) -> dict[str, Any]:
    """Defaults of a class that YAML can represent, by setting."""
    return {name: one.default for name, one in parameters_of(made).items() if _is_plain(one.default)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
