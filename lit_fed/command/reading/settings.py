"""Settings of a command: its files and options, merged into one nested dictionary that the parser reads once.

What comes later wins. A class that replaces another keeps the settings that both take; an optimizer or a schedule
begins with its own defaults, and keeps only settings that options name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import yaml
from lightning import LightningModule
from torch import nn

from lit_fed.command.refusals.suggest import named_class, parameters_of
from lit_fed.command.roots import PLACES
from lit_fed.errors import ConfigError
from lit_fed.parsing import parsed

Place = tuple[str, ...]
"""Keys that lead to a setting, without ``init_args``."""

TRAINED_BY: dict[str, type] = {
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
}
"""Settings of a model that are classes: a different class starts afresh."""

_GROUPS: tuple[Place, ...] = ((), ("trainer",))
_TRAINED = {("model", key): (base,) for key, base in TRAINED_BY.items()}


def place_of(keys: Sequence[str]) -> Place:
    """Keys without ``init_args``."""
    return tuple(key for key in keys if key != "init_args")


CLASSES = {place_of(key.split(".")): bases for key, bases in PLACES.items() if key != "trainer"} | _TRAINED
"""Bases of the classes whose place is known."""


class Settings:
    """Merged settings.

    Attributes:
        content: The settings in the parser's form; a value from an option is the option's text.
        origins: Origin of each setting by place: a file and its line; empty for an option, None for a class's default.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self.origins: dict[Place, str | None] = {}

    def put(self, keys: Sequence[str], value: Any, origins: Mapping[Place, str] | None = None) -> None:
        """Merge a value over the settings so far.

        Args:
            keys: Keys that lead to it.
            value: The value.
            origins: Origins of its settings; None for an option's.
        """
        self._put(self.content, tuple(keys), value, ())
        if origins is None:
            origins = dict.fromkeys((place_of(keys), *leaves(content_of(value), place_of(keys))), "")
        self.origins.update(origins)

    def origin(self, keys: Sequence[str]) -> str | None:
        """Origin of a setting, or of what holds it; None for a default."""
        place = place_of(keys)
        known = next((place[:n] for n in range(len(place), 0, -1) if place[:n] in self.origins), None)
        return None if known is None else self.origins[known]

    def finish(self) -> dict[str, Any]:
        """The content, with an optimizer's own settings in place of those of the model's default optimizer."""
        model = _class(self.content.get("model"), True, ("model",)) or {}
        made = named_class(model.get("class_path"), [LightningModule])
        for place, bases in _TRAINED.items():
            given = _class(model.get("init_args", {}).get(place[-1]), True, place) or {}
            named, default = named_class(given.get("class_path"), bases), _default(made, place[-1])
            if None not in (named, default) and named is not default:
                own = self._begun(named, default, given["init_args"], place)
                model["init_args"] = {**model["init_args"], place[-1]: {**given, "init_args": own}}
                self.content["model"] = model
        return self.content

    def _put(self, inside: dict[str, Any], keys: Place, value: Any, place: Place) -> None:
        key, *rest = keys
        name = key.removesuffix("+")
        slot = f"{name}+" if name not in inside and (f"{name}+" in inside or key != name) else name
        if rest:
            inside[slot] = self._within(inside.get(slot), tuple(rest), value, (*place, name))
        elif key != name:
            inside[slot] = [*_items(inside.get(slot)), *_items(value, new=True)]
        else:
            inside.pop(f"{name}+", None)
            inside[name] = self._over(inside.get(name), value, (*place, name))

    def _within(self, old: Any, keys: Place, value: Any, place: Place) -> Any:
        """An old value with a new one at keys inside it; in a list they lead into the last item."""
        old = content_of(old)
        if isinstance(old, list) and old:
            return [*old[:-1], self._within(old[-1], keys, value, place)]
        of_class = keys[0] in ("class_path", "init_args", "dict_kwargs")
        below = None if place in _GROUPS else _class(old, of_class or place in CLASSES, place)
        if below is None and not of_class and place not in CLASSES:
            inside = dict(old) if isinstance(old, dict) else {}
            self._put(inside, keys, value if place in _GROUPS else content_of(value, scalars=False), place)
            return inside
        if of_class and (keys[0] != "init_args" or len(keys) == 1):
            for key in reversed(keys):
                value = {key: value}
            return self._over(old, value, place)
        above = keys[1:] if of_class else keys
        spec = below or {"init_args": {}}
        inside = dict(spec["init_args"])
        self._put(inside, above, value, place)
        return {**spec, "init_args": inside} if "class_path" in spec else inside

    def _over(self, old: Any, new: Any, place: Place) -> Any:
        """A new value over an old one."""
        if place in _GROUPS:
            new = content_of(new)
            if not isinstance(new, dict):
                raise ConfigError(f"{'.'.join(place)} is {new}; it must hold settings, such as max_rounds")
            inside = dict(old or {})
            for key, value in new.items():
                self._put(inside, (key,), value, place)
            return inside
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            return [self._over(*pair, place) for pair in zip(old, new, strict=True)]
        known = place in CLASSES
        below = _class(old, known, place)
        above = _class(new, known or below is not None, place)
        if (
            below is None
            or above is None
            or not (known or isinstance(content_of(old), dict) or "class_path" not in above)
        ):
            return new
        if not known and isinstance(content_of(new), str) and named_class(new, [object]) is None:
            return new  # a text
        before, name = below.get("class_path"), above.get("class_path") or below.get("class_path")
        inside = below["init_args"]
        if before and name != before:
            bases = CLASSES.get(place, (object,))
            replaced, named = named_class(before, bases), named_class(name, bases)
            inside = inside if replaced is named else self._kept(inside, replaced, named, place)
        inside = dict(inside)
        for key, value in above["init_args"].items():
            self._put(inside, (key,), value, place)
        if not name or (not inside and isinstance(new, str)):
            return new if name else inside
        return {**below, **above, "class_path": name, "init_args": inside}

    def _kept(self, inside: dict[str, Any], replaced: type | None, named: type | None, place: Place) -> dict[str, Any]:
        """Settings of a class that another one keeps; unknown ones stay, for the parser to refuse."""
        took, takes, trained = parameters_of(replaced), parameters_of(named), place in _TRAINED
        kept = {
            key: value
            for key, value in inside.items()
            if key.removesuffix("+") not in took
            or (key.removesuffix("+") in takes and not (trained and self.origins.get((*place, key)) != ""))
        }
        return self._begun(named, replaced, kept, place) if trained else kept

    def _begun(self, named: type | None, replaced: type | None, inside: dict[str, Any], place: Place) -> dict[str, Any]:
        """Settings with the class's own defaults where the parser would take those of the class that it replaces."""
        known = _defaults(replaced)
        own = {key: value for key, value in _defaults(named).items() if key in known and key not in inside}
        self.origins.update(dict.fromkeys(((*place, key) for key in own), None))
        return own | inside


def leaves(value: Any, above: Place) -> Iterator[Place]:
    """Places of all settings in a value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, above if key == "init_args" else (*above, str(key)))
    else:
        yield above


def content_of(value: Any, scalars: bool = True) -> Any:
    """Content of an option's text; other values, and texts that are not YAML, as they are.

    Args:
        value: The value.
        scalars: Whether to take a text for a number, true, false or null too.
    """
    if not isinstance(value, str):
        return value
    with suppress(yaml.YAMLError, ValueError):
        found = parsed(value).content
        return found if scalars or isinstance(found, dict | list) else value
    return value


def _class(value: Any, known: bool, place: Place) -> dict[str, Any] | None:
    """A class with its settings; None for other values.

    Args:
        value: The value; a lone text names a class.
        known: Whether a class must be there, so that a plain mapping holds its settings.
        place: The place.
    """
    value = content_of(value)
    if isinstance(value, str):
        return {"class_path": value, "init_args": {}}
    if not isinstance(value, dict) or not (known or "class_path" in value or "init_args" in value):
        return None
    if "class_path" not in value and "init_args" not in value:
        return {"init_args": value}
    inside = content_of(value.get("init_args"))
    if not isinstance(inside, dict | None):
        raise ConfigError(f"{'.'.join(place)}.init_args is {inside}; it must hold settings of the class")
    return {**value, "init_args": inside or {}}


def _items(value: Any, new: bool = False) -> list[Any]:
    """Items of a list to which more are added; a single class is one."""
    found = content_of(value, scalars=not new)
    return found if isinstance(found, list) else [found] if new or isinstance(found, dict | str) else []


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
