"""A plain LightningDataModule as ``data``, on a command line or in a configuration file: `Wrapped` goes around it."""

from __future__ import annotations

from typing import Any

from lightning import LightningDataModule

from lit_fed.command.reading.settings import content_of
from lit_fed.command.refusals.suggest import named_class, parameters_of
from lit_fed.command.roots import PARTS
from lit_fed.data import Wrapped

_CLASS = "Wrapped"


def wrapped(data: Any) -> Any:
    """``data`` with `Wrapped` around a plain LightningDataModule.

    Its ``init_args`` are the module's, except settings that only `Wrapped` has, such as ``num_clients``.

    Args:
        data: A class with its settings, its name, or both as an option's text.

    Returns:
        The same if it is anything else.
    """
    content = content_of(data)
    section: dict[str, Any] = content if isinstance(content, dict) else {"class_path": content}
    module = plain_module(section.get("class_path"))
    settings = section.get("init_args") or {}
    if module is None or not isinstance(settings, dict):
        return data
    population = parameters_of(Wrapped).keys() - parameters_of(module).keys()
    inside = {key: value for key, value in settings.items() if key not in population}
    rest = {key: value for key, value in settings.items() if key in population}
    inner = {"class_path": section["class_path"], **({"init_args": inside} if inside else {})}
    others = {key: value for key, value in section.items() if key not in ("class_path", "init_args")}
    return {"class_path": _CLASS, "init_args": {"module": {**inner, **others}, **rest}}


def plain_module(path: Any) -> type | None:
    """The class at a path if it is a LightningDataModule without clients; else None."""
    named = named_class(path, [PARTS["data"]])
    plain = named is not None and issubclass(named, LightningDataModule) and not issubclass(named, PARTS["data"])
    return named if plain else None
