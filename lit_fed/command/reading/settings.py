"""Settings of a command: its files and options, merged into one nested dictionary that the parser reads once.

What comes later wins. A class that replaces another keeps the settings that both take; an optimizer or a schedule
begins with its own defaults, and keeps only settings that options name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from lightning import LightningModule
from torch import nn

from lit_fed.command.refusals.suggest import named_class, parameters_of
from lit_fed.command.roots import PLACES
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser
from lit_fed.protocols import DEFAULT_PROTOCOLS

Place = tuple[str, ...]
"""Keys that lead to a setting, without ``init_args``."""

TRAINED: dict[Place, tuple[type, ...]] = {
    ("model", "optimizer"): (torch.optim.Optimizer,),
    ("model", "lr_scheduler"): (torch.optim.lr_scheduler.LRScheduler,),
}
"""Bases of a model's classes that begin anew where they replace others, by place."""

_GROUPS: tuple[Place, ...] = ((), ("trainer",))
_OF_CLASS = {"class_path", "init_args", "dict_kwargs"}


def place_of(keys: Sequence[str]) -> Place:
    """Keys without ``init_args``."""
    return tuple(key for key in keys if key != "init_args")


CLASSES = {place_of(key.split(".")): bases for key, bases in PLACES.items() if key != "trainer"} | TRAINED
"""Bases of the classes whose place is known."""


class Settings:
    """Merged settings.

    Attributes:
        content: The settings in the parser's form; a value from an option may be its text.
        origins: Origin of each setting by place: a file and its line; empty for an option, None for a class's default.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self.origins: dict[Place, str | None] = {}

    def put(self, keys: Sequence[str], value: Any, origins: Mapping[Place, str]) -> None:
        """Merge a value over the settings so far.

        Args:
            keys: Keys that lead to it.
            value: The value.
            origins: Origins of its settings; empty for an option's.
        """
        place = place_of(keys)
        whole = not origins and len(place) == 2 and isinstance(value, list)
        self.content = self._over(self.content, _inside(place, _Whole(value) if whole else value), ())
        origins_of = {place: "", **origins}
        for leaf in leaves(value, place):
            origins_of.setdefault(leaf, origins_of[place])
            origins_of.setdefault((*leaf, "class_path"), origins_of[leaf])  # a lone text is a class
        self.origins.update({tuple(key.removesuffix("+") for key in keys): where for keys, where in origins_of.items()})

    def origin(self, keys: Sequence[str]) -> str | None:
        """Origin of a setting, or of what holds it; None for a default."""
        place = place_of(keys)
        owners = (place[:n] for n in range(len(place), 0, -1))
        return next((self.origins[owner] for owner in owners if owner in self.origins), None)

    def given(self, keys: Sequence[str]) -> Any:
        """The value of a setting, in a list that of the last item; None if it has none."""
        value: Any = self.content
        for key in place_of(keys):
            section = _class(value[-1] if isinstance(value, list) and value else value, True) or {"init_args": {}}
            inside = section["init_args"] | section
            value = inside.get(key, inside.get(f"{key}+"))
        return value

    def class_at(self, *place: str) -> dict[str, Any]:
        """The class at a place, with its settings; empty if there is none."""
        return _class(self.given(place), True) or {}

    def located(self, refusal: str) -> str:
        """A refusal that begins with a setting, or with a class, with the setting's key, its file and its line.

        Args:
            refusal: The line; a class may name its setting after itself, as in ``Krum.attackers is …``.
        """
        word = refusal.partition(" ")[0].rstrip(":")
        places = [place for place in self.origins if word.replace(".init_args", "") in self._names_of(*place)]
        if len(places) != 1:
            return refusal
        if places[0][-1] != "class_path" and ".init_args" not in word:
            refusal = refusal.replace(word, ".".join(places[0]), 1)
        return f"{where}: {refusal}" if (where := self.origins[places[0]]) else refusal

    def _names_of(self, *place: str) -> tuple[str, ...]:
        """Names by which a refusal may call a setting; of a class's own place, the class's name."""
        *owner, name = place
        cls = str(self.given((*owner, "class_path"))).rpartition(".")[2]
        if name == "class_path" and owner[-1:] != [name]:
            return (cls,)
        return f"{'.'.join(owner)}.{name}", f"{''.join(owner[-1:])}.{name}", f"{cls}.{name}"

    def finish(self) -> dict[str, Any]:
        """The content, with an optimizer's own settings in place of the default optimizer's."""
        made = named_class(self.class_at("model").get("class_path"), [LightningModule])
        for place, bases in TRAINED.items():
            given = self.class_at(*place)
            named, default = named_class(given.get("class_path"), bases), _default(made, place[-1])
            if None not in (named, default) and named is not default:
                inside = self._begun(named, default, given["init_args"], place)
                self.content = self._over(self.content, _inside(place, {**given, "init_args": inside}), ())
        trainer = self.content.get("trainer")
        if isinstance(trainer, dict) and (added := trainer.pop("protocols+", None)) is not None:
            trainer["protocols"] = [*(protocol.__name__ for protocol in DEFAULT_PROTOCOLS), *added]
        return self.content

    def _over(self, old: Any, new: Any, place: Place) -> Any:
        """A new value over an old one; in a list, an option's keys lead into the last item."""
        inside = isinstance(new, _Inside)
        if isinstance(old, list) and old and inside:
            return [*old[:-1], self._over(old[-1], new, place)]
        if isinstance(new, _Whole):
            return [*new]
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            return [self._over(*pair, place) for pair in zip(old, new, strict=True)]
        if place in _GROUPS:
            if not isinstance(new, dict):
                raise ConfigError(f"{'.'.join(place)} is {new}; it must hold settings, such as max_rounds")
            return self._merged(old, new, place)
        known = place in CLASSES or inside or (isinstance(new, dict) and "init_args" in new and "class_path" not in new)
        below = _class(old, known) or ({"init_args": {}} if inside else None)
        above = _class(new, known or (below is not None and named_class(new, [object]) is not None))
        if below is None or above is None:
            return new
        before, name = below.get("class_path"), above.get("class_path") or below.get("class_path")
        settings = below["init_args"]
        if before and name != before:
            replaced, named = (named_class(each, CLASSES.get(place, (object,))) for each in (before, name))
            settings = settings if replaced is named else self._kept(settings, replaced, named, place)
        settings = self._merged(settings, above["init_args"], place)
        if not name or (not settings and isinstance(new, str)):
            return new if name else settings
        return {"class_path": name, **below, **above, "init_args": settings}

    def _merged(self, old: Any, new: dict[str, Any], place: Place) -> dict[str, Any]:
        """New settings over old ones; a key with a plus adds to a list, to the default where there is none."""
        merged = dict(old) if isinstance(old, dict) else {}
        for key, value in new.items():
            name = key.removesuffix("+")
            if key == name and not isinstance(value, _Inside):
                merged.pop(f"{name}+", None)
            slot = f"{name}+" if name not in merged and (f"{name}+" in merged or key != name) else name
            if key == name:
                merged[slot] = self._over(merged.get(slot), value, (*place, name))
            else:
                before = merged.get(slot)
                before = before if isinstance(before, list) else [before] * isinstance(before, dict | str)
                merged[slot] = [*before, *(value if isinstance(value, list) else [value])]
        return merged

    def _kept(self, inside: dict[str, Any], replaced: type | None, named: type | None, place: Place) -> dict[str, Any]:
        """Settings of a class that another one keeps; unknown ones stay, for the parser to refuse."""
        took, takes, trained = _settings_of(replaced), _settings_of(named), place in TRAINED
        kept = {}
        for key, value in inside.items():
            name = key.removesuffix("+")
            of_option = self.origins.get((*place, name)) == ""
            if name not in took or (name in takes and (of_option or not trained)):
                kept[key] = value
        return self._begun(named, replaced, kept, place) if trained else kept

    def _begun(self, named: type | None, replaced: type | None, inside: dict[str, Any], place: Place) -> dict[str, Any]:
        """Settings with the class's own defaults where the parser would take the replaced class's."""
        known = _defaults(replaced)
        defaults = {key: value for key, value in _defaults(named).items() if key in known and key not in inside}
        self.origins.update(dict.fromkeys(((*place, key) for key in defaults), None))
        return defaults | inside


def leaves(value: Any, above: Place) -> Iterator[Place]:
    """Places of all settings in a value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, above if key == "init_args" else (*above, str(key)))
    else:
        yield above


class _Whole(list[Any]):
    """A list of an option, which takes the place of another; of files, items at one place are merged."""


class _Inside(dict[str, Any]):
    """A setting with the keys that lead to it: what else their owners hold stays."""


def _inside(keys: Sequence[str], value: Any) -> Any:
    for key in reversed(keys):
        value = _Inside({key: value})
    return value


def _class(value: Any, known: bool) -> dict[str, Any] | None:
    """A class with its settings; None for other values.

    Args:
        value: The value; where a class is known to be, a lone text names it.
        known: Whether it must be one, so that a plain mapping holds its settings.
    """
    if isinstance(value, str):
        return {"class_path": value, "init_args": {}} if known else None
    if not isinstance(value, dict) or (_OF_CLASS.isdisjoint(value) and not known):
        return None
    section = {"init_args": value} if _OF_CLASS.isdisjoint(value) else value
    settings = section.get("init_args")
    if not isinstance(settings, dict | None):
        raise ConfigError(f"init_args is {settings}; it must hold settings of a class")
    return {**section, "init_args": settings or {}}


@cache
def _settings_of(made: Any) -> set[str]:
    """Settings of a class, by the parser, which follows keywords beyond constructors."""
    with suppress(Exception):  # an object that is not a class, or a class that the parser refuses
        return set(Parser().add_class_arguments(made, fail_untyped=False))
    return set()


def _default(model: type | None, key: str) -> type | None:
    """The class that a model takes by default."""
    with suppress(Exception):  # a user's own code
        return type(parameters_of(model)[key].default([nn.Parameter(torch.zeros(1))]))
    return None


def _defaults(made: type | None) -> dict[str, Any]:
    """Defaults of a class that YAML can represent, by setting."""
    return {name: parameter.default for name, parameter in parameters_of(made).items() if _is_plain(parameter.default)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
