"""A command line, read once: one spelling for every option, all settings merged for the parser, and values checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from inspect import Parameter
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import LightningDataModule

from lit_fed.command.reading.config_files import SECTIONS, ConfigFiles, FilePart, is_name
from lit_fed.command.reading.settings import Place, Settings, leaves, place_of
from lit_fed.command.reading.shipped import located
from lit_fed.command.refusals.explain import explain, explain_words
from lit_fed.command.refusals.suggest import imported, named_class, parameters_of
from lit_fed.command.roots import PARTS
from lit_fed.command.table import COMMANDS, asked
from lit_fed.data import Wrapped
from lit_fed.errors import ConfigError

_CONFIG = ("-c", "--config")
_ALSO = ("cost", "simulate")  # classes that a command of this name takes
_LARGEST = 2**63 - 1  # the largest integer of tensors, arrays and loops
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # words that argparse takes for values although they begin with a dash


class CommandLine:
    """A command line and its configuration files.

    Args:
        words: The command line, from the command on.
        files: Files that are read already, where several command lines share some.

    Attributes:
        command: The command; None if there is none.
        words: The command line without settings, files and requests to print: what argparse is to read.
        prints: Requests to print the configuration.
        settings: The settings of its files and options.
        given_keys: Keys of the settings, without ``init_args``, most recent option first. Varied settings stand at the
            end of a command line, as in the cells of a study.
    """

    def __init__(self, words: Sequence[str], files: ConfigFiles | None = None) -> None:
        self.command = asked(words)
        self.settings, self.given_keys = Settings(), tuple[str, ...]()
        self.words, self.prints = list[str](), list[str]()
        if self.command is None or words[0] != self.command:
            self.words += words
            return
        files, has_settings = files or ConfigFiles(), not COMMANDS[self.command].own_files
        for option, value in spelled(words) if has_settings else ((word, None) for word in words):
            if value is not None:
                self._put(files.parts(value) if option == "--config" else [files.option(option, value)])
            else:
                (self.prints if option.partition("=")[0] == "--print_config" else self.words).append(option)

    def parse(self, parser: ArgumentParser) -> Namespace:
        """Settings that the command's own parser reads."""
        try:
            own = parser.parse_args(self.words[1:], defaults=False)
        except ArgumentError as error:
            raise ConfigError(explain_words(error, parser, self.words[1:], self.command)) from error
        content = {**self.settings.finish(), **own.as_dict()}
        try:
            settings: Namespace = parser.parse_object(deepcopy(content))  # it writes into lists
        except ArgumentError as error:
            raise ConfigError(explain(error, parser, content, self.command, self.settings.origin)) from error
        check_values(settings, "", self.settings.given)
        return settings

    @property
    def own_rate(self) -> str | None:
        """A line about the default learning rate of a named optimizer; None if the rate is set."""
        optimizer = self.settings.class_at("model", "optimizer")
        if "lr" not in optimizer.get("init_args", {}) or self.settings.origin(("model", "optimizer", "lr")) is not None:
            return None
        name, rate = optimizer["class_path"].rpartition(".")[2], optimizer["init_args"]["lr"]
        return f"optimizer {name} takes its own learning rate, {rate}; set model.optimizer.lr for another"

    def _put(self, parts: Iterable[FilePart]) -> None:
        """Merge an option's value, or the content of a file."""
        places: list[Place] = []
        for keys, given, origins in parts:
            value = wrapped(given) if keys == ("data",) else given
            self.settings.put(keys, value, origins)
            places += leaves(value, place_of(keys)) if origins else [place_of(keys)]
        self.given_keys = tuple(dict.fromkeys((*(".".join(place) for place in places), *self.given_keys)))


# ---------------------------------------------------------------------- one spelling


def spelled(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each ``--config`` and each setting with its value; all other words with None.

    A configuration file that is not here is the package's own.
    """
    left = [*words]
    while left:
        word = left.pop(0)
        option, mark, value = word.partition("=")
        if word.startswith("-c") and word != "-c":
            option, mark, value = "-c", "=", word[2:].removeprefix("=")
        takes = option in _CONFIG or _is_setting(option)
        if takes and not mark and left and _is_value(left[0]):
            mark, value = "=", left.pop(0)
        if option in _CONFIG and mark:
            yield "--config", located(value) if is_name(value) else value
        elif takes and mark:
            yield option, value
        else:
            yield word, None


def _is_setting(option: str) -> bool:
    """Whether an option is for a section of a run, or a key in it; help about a class is not."""
    sections = {f"--{section}" for section in (*SECTIONS, *_ALSO)}
    return option.partition(".")[0] in sections and not option.endswith(".help")


def _is_value(word: str) -> bool:
    """Whether argparse takes a word for a value, not for an option."""
    return not word.startswith("-") or word == "-" or " " in word or _NUMBER.fullmatch(word) is not None


# ---------------------------------------------------------------------- values


def check_values(
    settings: Any,
    key: str = "",
    given: Callable[[Sequence[str]], Any] = lambda _keys: None,
    defaults: Mapping[str, Parameter] | None = None,
) -> None:
    """Refuse NaN, infinity, whole numbers beyond 64 bits, texts with NUL, and misread numbers, at any depth.

    Defaults of a class pass: a class may use infinity as its default.

    Args:
        settings: A configuration, or a part of one.
        key: Dotted key of that part.
        given: The value as the file or the option has it, given its keys.
        defaults: Parameters of the class whose settings they are.
    """
    if isinstance(settings, list | tuple | set):
        for value in settings:
            check_values(value, key, given)
        return
    settings = vars(settings) if isinstance(settings, Namespace) else settings
    if not isinstance(settings, Mapping):
        if refusal := _refusal(settings, key, given(key.split("."))):
            raise ConfigError(refusal)
        return
    for name, value in settings.items():
        if defaults and name in defaults and repr(defaults[name].default) == repr(value):
            continue
        path = settings.get("class_path")
        inner = parameters_of(imported(path)) if name == "init_args" and isinstance(path, str) else None
        check_values(value, f"{key}.{name}" if key else str(name), given, inner)


def _refusal(value: Any, key: str, given: Any) -> str:
    """The mistake in a single value, which a file or an option gave; empty if there is none."""
    name = key.replace(".init_args.", ".")
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} is {value}; it must be a finite number"
    if isinstance(value, int) and abs(value) > _LARGEST:
        digits = str(value)
        shown = digits if len(digits) < 30 else f"{digits[:6]}… ({len(digits.lstrip('-'))} digits)"
        return f"{name} is {shown}; whole numbers must be below 2**63"
    if isinstance(value, str) and "\0" in value:
        return f"{name} is {value!r:.80}; a text cannot hold the character NUL"
    if isinstance(given, str) and type(value) in (int, float) and value not in _numbers(given):
        return f"{key}: expected {'a number' if type(value) is float else 'a whole number'}, not {given}"
    return ""


def _numbers(text: str) -> Iterator[float]:
    """Numbers that a text may stand for; YAML 1.1 also reads 1:10 as 70 and 010 as 8, which nobody means."""
    for read in (int, float, lambda digits: int(digits, 0)):
        with suppress(ValueError):
            yield read(text)


# ---------------------------------------------------------------------- plain data modules


_CLASS = "Wrapped"


def wrapped(data: Any) -> Any:
    """``data`` with `Wrapped` around a plain LightningDataModule.

    Its ``init_args`` are the module's, except settings that only `Wrapped` has, such as ``num_clients``.

    Args:
        data: A class with its settings, or its name.

    Returns:
        The same if it is anything else.
    """
    section: dict[str, Any] = data if isinstance(data, dict) else {"class_path": data}
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
