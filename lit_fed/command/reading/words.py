"""What a command line says before a parser reads it: which settings come from which option or file, and in what order.

The parser reads one after the other. That is not what a reader expects in two places, where `prepared` adds options:
settings of a class that a later file names, and optimizers and schedules that take the place of others.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning import LightningModule
from torch import nn

from lit_fed.command.reading.config_files import check_config, check_value
from lit_fed.command.reading.wrapping import wrapped_settings, wrapped_words
from lit_fed.command.refusals.suggest import named_class
from lit_fed.command.roots import PARTS
from lit_fed.command.table import asked

_FILES = ("-c", "--config")
TRAINED_BY: dict[str, type] = {
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
}
"""Settings of a model that are classes of their own, which begin anew where another one is named."""


class Mention(NamedTuple):
    """Settings that one option, or one key of a file, gives.

    Args:
        end: Where the next word begins.
        option: Whether it is an option.
        key: The setting's keys without ``init_args``; of a file the first.
        value: What it is set to, as YAML says.
    """

    end: int
    option: bool
    key: tuple[str, ...]
    value: Any

    def settings(self, *key: str) -> dict[str, Any]:
        """What it says about the class at a key: its settings, and the class itself as ``class_path``."""
        if self.key[: len(key)] == key and len(self.key) > len(key):
            return {self.key[len(key)]: self.value}
        found = self.value if key[: len(self.key)] == self.key else None
        for step in key[len(self.key) :]:
            found = _plain(found).get(step)
        return _plain(found)


class _Change(NamedTuple):
    """A class that takes the place of another.

    Args:
        end: Where the next word begins.
        name: The class, as it was named.
        own: Those of its own defaults that the parser would leave as the other class had them.
    """

    end: int
    name: str
    own: dict[str, Any]


def _plain(value: Any) -> dict[str, Any]:
    """A class and its settings side by side; a lone text names a class."""
    if isinstance(value, dict):
        inner = value.get("init_args")
        return {k: v for k, v in value.items() if k != "init_args"} | (inner if isinstance(inner, dict) else {})
    if isinstance(value, str) and (path := Path(value)).suffix in (".yaml", ".yml") and path.is_file():
        return _plain(_content(path))
    return {"class_path": value} if isinstance(value, str) else {}


def mentions(words: Sequence[str]) -> Iterator[Mention]:
    """What options and files say about a run, in their order."""
    for end, option, value in _options(words):
        if option in _FILES:
            content = _content(Path(value))
            for key, part in content.items() if isinstance(content, dict) else ():
                yield Mention(end, False, (str(key),), part)
        elif option.startswith("--") and option.partition(".")[0].removeprefix("--") in PARTS:
            with suppress(yaml.YAMLError):
                key = tuple(step for step in option.removeprefix("--").split(".") if step != "init_args")
                yield Mention(end, True, key, yaml.safe_load(value))


def _options(words: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Every option with its value, and where the next word begins."""
    for end, (before, word) in enumerate(zip(("", *words), words, strict=False), start=1):
        option, _, value = word.partition("=") if word.startswith("-") and "=" in word else (before, "", word)
        if option.startswith("-") and "=" not in option:  # what follows `--key=value` is no value of it
            yield end, option, value


def _content(path: Path) -> Any:
    """What a file says, a plain data module wrapped; None where that is the parser's business."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return wrapped_settings(content)


def last_told_first(words: Sequence[str]) -> tuple[str, ...]:
    """The keys that options and files set, without ``init_args``: those of the last one first.

    What is being varied stands at the end of a command line, as in the cells of a study.
    """
    groups: list[list[str]] = []
    for _, option, value in _options(words):
        if option in _FILES:
            groups.append(list(_leaves(_content(Path(value)))))
        elif option.startswith("--"):
            groups.append([option.removeprefix("--").replace(".init_args", "")])
    return tuple(dict.fromkeys(key for group in reversed(groups) for key in group))


def _leaves(content: Any, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys of a file's settings."""
    for key, value in content.items() if isinstance(content, dict) else ():
        path = above if key == "init_args" else (*above, str(key))
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield ".".join(path)


def prepared(words: Sequence[str]) -> list[str]:
    """A command line as the parser is to read it.

    Raises:
        ConfigError: For settings that the parser would misread.
    """
    command = asked(words)
    if command is None or command == "study":
        return list(words)
    begin = words.index(command) + 1
    words = [*words[:begin], *wrapped_words(words[begin:])]
    for _, option, value in _options(words):
        if option in _FILES:
            check_config(Path(value))
        elif value.startswith("{"):
            check_value(option, value)
    first, rest = list(words[:begin]), list(words[begin:])
    said = list(mentions(rest))
    return [*first, *_classes_first(said), *_begin_anew(rest, said)]


def _classes_first(said: Sequence[Mention]) -> list[str]:
    """Name a part's class before the first file that has settings of it, where that file itself does not.

    The parser reads one file after the other, and settings without a class would be nobody's. The class is the one
    that it comes to in the end.
    """
    named: dict[str, list[str | None]] = {}
    for one in said:
        if len(one.key) == 1 and one.key[0] in PARTS:
            named.setdefault(one.key[0], []).append(one.settings(one.key[0]).get("class_path"))
    late = {key: [name for name in names if name] for key, names in named.items() if names[0] is None}
    return [f"--{key}={names[-1]}" for key, names in late.items() if names]


def over(below: Any, above: Any, base: type) -> Any:
    """One class with settings in the place of another: of the same class what is not set stays, another begins anew.

    Args:
        below: The class and its settings that hold so far, as a configuration has them.
        above: The same of what takes its place; without ``class_path`` the class stays.
        base: What both derive from.
    """
    old, new = _plain(below), _plain(above)
    before, named = (named_class(each.get("class_path"), [base]) for each in (old, new))
    if not new or before is None or (named is None and "class_path" in new):
        return above
    kept = old if named in (None, before) else {"class_path": new["class_path"], **_defaults(named)}
    merged = kept | new
    return {"class_path": merged.pop("class_path"), "init_args": merged}


def _begin_anew(words: Sequence[str], said: Sequence[Mention]) -> list[str]:
    """Give another optimizer, or schedule, its own defaults where it is named.

    The parser would keep of the one before whatever both know, even what nobody asked for. What options ask for stays,
    wherever they stand.
    """
    added: dict[int, list[str]] = {}
    for key in TRAINED_BY:
        for change in _changes(said, key):
            value = json.dumps({"class_path": change.name, "init_args": change.own})
            added.setdefault(change.end, []).append(f"--model.init_args.{key}={value}")
    return [piece for end, word in enumerate(words, start=1) for piece in (word, *added.get(end, ()))]


def own_rate(words: Sequence[str]) -> str | None:
    """A line about a learning rate that nobody asked for, where the optimizer that is named brings its own."""
    said = list(mentions(words))
    changes = list(_changes(said, "optimizer"))
    if not changes:
        return None
    last = changes[-1]
    if "lr" not in last.own or any("lr" in one.settings("model", "optimizer") for one in said if one.end > last.end):
        return None
    name = last.name.rpartition(".")[2]
    return f"optimizer {name} takes its own learning rate, {last.own['lr']}; set model.optimizer.lr for another"


def _changes(said: Sequence[Mention], key: str) -> Iterator[_Change]:
    """Where a class takes the place of another one."""
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
        yield _Change(one.end, settings["class_path"], own)
        current = named


def _default(model: type | None, key: str) -> type | None:
    """The class that a model's constructor takes where nothing is said."""
    for cls in model.__mro__ if model is not None else ():
        parameters = inspect.signature(cls).parameters if "__init__" in vars(cls) else {}
        if key in parameters:
            with suppress(Exception):  # a user's own code
                return type(parameters[key].default([nn.Parameter(torch.zeros(1))]))
            return None
    return None


def _defaults(made: type | None) -> dict[str, Any]:
    """What a class takes where nothing is said, by setting."""
    parameters = inspect.signature(made).parameters.values() if made is not None else ()
    return {one.name: one.default for one in parameters if _is_plain(one.default)}


def _is_plain(value: Any) -> bool:
    """Whether YAML can say a value."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
