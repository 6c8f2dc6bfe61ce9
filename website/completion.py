"""Scripts that complete commands, options, classes and configuration files in a shell."""

from __future__ import annotations

import shlex
from argparse import Action, _StoreAction
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import shtab
from jsonargparse import ArgumentParser
from typing_extensions import override

from lit_fed.command.federated_cli import Reading
from lit_fed.command.reading.shipped import shipped
from lit_fed.command.refusals.suggest import settings_of_classes, subclasses
from lit_fed.command.roots import PARTS, import_named
from lit_fed.command.table import COMMANDS

_CONFIGS = "_lit_fed_configs"  # the shell's function that completes the word after -c
_STARTED: dict[str, Any] = {"bash": _CONFIGS, "zsh": "_files", "tcsh": "f"}


def script(shell: str) -> str:
    """Script for a shell, of all commands with all of their options.

    jsonargparse's own takes minutes: it goes through all settings of all nested classes.
    """
    import_named()
    whole = _Whole()
    for name in COMMANDS:
        parser = whole._parser(name)
        parser._actions.extend(_of_classes(parser))
        for action in parser._actions:
            if "--config" in action.option_strings:
                action.complete = _STARTED  # type: ignore[attr-defined]  # read by shtab
            else:
                action.choices = action.choices or _choices(action)
    names = shlex.quote(" ".join(shipped()))
    configs = f'{_CONFIGS}() {{ compgen -f -- "$1"; compgen -W {names} -- "$1"; }}'
    written: str = shtab.complete(whole.parser, shell, preamble=configs if shell == "bash" else "")
    return written


def _of_classes(parser: ArgumentParser) -> Iterator[Action]:
    """Options of all classes that can be named, if the parser takes parts of a run."""
    known = {option for action in parser._actions for option in action.option_strings}
    if "--algorithm" in known:
        for setting in settings_of_classes():
            if (option := f"--{setting.replace('.init_args', '')}") not in known:
                yield _StoreAction([option], dest=setting)


def _choices(action: Action) -> list[str] | None:
    """Values of an option: classes by their short names, true and false, or the words that its type lists."""
    part = action.option_strings[0].removeprefix("--") if action.option_strings else ""
    if part in PARTS:
        return [cls.__name__ for cls in subclasses([PARTS[part]])]
    hint = getattr(action, "_typehint", None)
    words: list[str] = []
    for kind in get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,):
        if kind is bool:
            words += ["true", "false"]
        elif get_origin(kind) is Literal:
            words += [str(value) for value in get_args(kind)]
        elif kind is not NoneType:
            return None
    return words or None


class _Whole(Reading):
    """Command line with the options of every command; it runs none."""

    def __init__(self) -> None:
        super().__init__(["completion", "bash"])

    @override
    def _has_options(self, name: str) -> bool:
        return True
