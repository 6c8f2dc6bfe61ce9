"""A command line, read once: one spelling for every option, each file's content, and additions for the parser.

The parser takes one option after the other. In two cases users expect more, and options are added: for settings of a
class that a later file names, and for optimizers and schedules that replace others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.command.reading.config_files import SECTIONS, ConfigFiles, is_name
from lit_fed.command.reading.replaced import TRAINED_BY, Mention, changes, plain
from lit_fed.command.reading.shipped import located
from lit_fed.command.reading.values import check_values
from lit_fed.command.reading.wrapping import plain_module
from lit_fed.command.roots import PARTS
from lit_fed.command.table import COMMANDS, asked
from lit_fed.errors import ConfigError
from lit_fed.parsing import taking

_CONFIG = ("-c", "--config")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # words that argparse takes for values although they begin with a dash


class CommandLine:
    """A command line and its configuration files.

    Args:
        words: The command line, from the command on.
        files: Files that are read already, where several command lines share some.

    Attributes:
        command: The command; None if there is none.
        words: The command line as the parser is to read it.

    Raises:
        ConfigError: For a file that cannot be read, and for settings that the parser would misread.
    """

    def __init__(self, words: Sequence[str], files: ConfigFiles | None = None) -> None:
        self.command = asked(words)
        self.words = list(words)
        self._files = ConfigFiles() if files is None else files
        self._said: list[Mention] = []
        if self.command is None or COMMANDS[self.command].own_files:
            return
        begin = self.words.index(self.command) + 1
        rest = list(_wrapped(_spelled(words[begin:])))
        for end, word in enumerate(rest, start=1):
            self._said += self._mentions(end, word)
        self.words = [*words[:begin], *_classes_first(self._said), *_begin_anew(rest, self._said)]

    def parse(self, parser: ArgumentParser, skip: int = 0) -> Any:
        """Settings that a parser reads.

        Args:
            parser: The parser.
            skip: Words to leave out: 1 for the command's own parser.

        Raises:
            ConfigError: For values that no setting can have; further errors come from the parser.
        """
        with taking(self._files.texts):
            found = parser.parse_args(self.words[skip:])
        check_values(found.get(str(self.command), found))
        return found

    @property
    def told(self) -> tuple[str, ...]:
        """Keys of the settings in options and files, without ``init_args``, most recent option first.

        Varied settings stand at the end of a command line, as in the cells of a study.
        """
        groups = [[key for one in group for key in one.keys] for _, group in groupby(self._said, lambda one: one.end)]
        return tuple(dict.fromkeys(key for group in reversed(groups) for key in group))

    @property
    def own_rate(self) -> str | None:
        """A line about the default learning rate of a named optimizer; None if the rate is set."""
        *_, last = (None, *changes(self._said, "optimizer"))
        if last is None or "lr" not in last.own:
            return None
        if any("lr" in one.settings("model", "optimizer") for one in self._said if one.end > last.end):
            return None
        name = last.name.rpartition(".")[2]
        return f"optimizer {name} takes its own learning rate, {last.own['lr']}; set model.optimizer.lr for another"

    def _mentions(self, end: int, word: str) -> Iterator[Mention]:
        """Settings in a word, or in the file that it names."""
        option, mark, value = word.partition("=")
        if option == "--config" and mark:
            for section, part in self._files.sections(value):
                yield Mention(end, False, (section,), part)
        elif mark and _is_setting(option):
            key = tuple(step for step in option.removeprefix("--").split(".") if step != "init_args")
            if key[:2] == ("trainer", "kinds") and len(key) > 3:  # the parser would drop the rest of the kind
                raise ConfigError(f"{option} sets a part of a kind; set all of it, as --trainer.kinds.{key[2]} '{{…}}'")
            yield Mention(end, True, key, self._files.value(option, value))


# ---------------------------------------------------------------------- one spelling


def _spelled(words: Sequence[str]) -> Iterator[str]:
    """Words with every configuration file and every setting as one word, ``--key=value``."""
    before = ""
    for word, after in pairwise((*words, "--")):
        takes = before in _CONFIG or _is_setting(before)
        if takes and _is_value(word):
            yield f"{before}={word}" if before not in _CONFIG else _config(word)
        elif word.startswith(("-c", "--config=")) and word != "-c":
            yield _config(word.removeprefix("--config=").removeprefix("-c").removeprefix("="))
        elif not ((word in _CONFIG or _is_setting(word)) and _is_value(after)):
            yield word
        before = word


def _config(value: str) -> str:
    """The option for a configuration file: a file that is not here is the package's own."""
    return f"--config={located(value) if is_name(value) else value}"


def _is_setting(option: str) -> bool:
    """Whether a word is an option for a section of a run, or a key in it, without a value."""
    return "=" not in option and option.partition(".")[0] in {f"--{section}" for section in SECTIONS}


def _is_value(word: str) -> bool:
    """Whether argparse takes a word for a value, not for an option."""
    return not word.startswith("-") or word == "-" or " " in word or _NUMBER.fullmatch(word) is not None


# ---------------------------------------------------------------------- additions for the parser


def _wrapped(words: Iterator[str]) -> Iterator[str]:
    """Put `Wrapped` around a plain LightningDataModule that an option names."""
    for word in words:
        option, _, value = word.partition("=")
        if option == "--data" and plain_module(value) is not None:
            yield from ("--data=Wrapped", f"--data.module={value}")
        else:
            yield word


def _classes_first(said: Sequence[Mention]) -> list[str]:
    """Name a part's class, the last one named, before a file that has settings of the part and no class."""
    named: dict[str, list[str | None]] = {}
    for one in said:
        if len(one.key) == 1 and one.key[0] in PARTS:
            named.setdefault(one.key[0], []).append(plain(one.value).get("class_path"))
    late = {key: [name for name in names if name] for key, names in named.items() if names[0] is None}
    return [f"--{key}={names[-1]}" for key, names in late.items() if names]


def _begin_anew(words: Sequence[str], said: Sequence[Mention]) -> list[str]:
    """Set another optimizer's, or schedule's, own defaults after it is named; see `changes`."""
    added: dict[int, list[str]] = {}
    for key in TRAINED_BY:
        for change in changes(said, key):
            value = json.dumps({"class_path": change.name, "init_args": change.own})
            added.setdefault(change.end, []).append(f"--model.init_args.{key}={value}")
    return [piece for end, word in enumerate(words, start=1) for piece in (word, *added.get(end, ()))]
