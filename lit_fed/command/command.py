"""A command: its help, its module, and who reads its files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from lit_fed.checks import check_local


class Call(NamedTuple):
    """Arguments of a module's ``run``.

    Args:
        settings: Settings that the parser has read.
        parser: The command's parser.
        words: The whole command line.
    """

    settings: Namespace
    parser: ArgumentParser
    words: list[str]


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        help: One line for ``--help``.
        room: Import path of the module that runs the command, with ``add_arguments(parser)`` and ``run(call)``, which
            returns an exit status; empty for a method of the trainer. As text, so that a module is imported only when
            its command is called.
        at_home: Import path of the module that runs the command with a node's folder, ``--state_dir``, instead of a
            checkpoint.
        own_files: Whether the command has no ``--config`` with settings: it reads other files itself, or none.
        light: Whether its module imports neither PyTorch nor Lightning, so that it answers at once.
        serves: Whether it is a service, for which SIGTERM is a good end, with status 0.
        admits: Whether its module decides if classes in the working directory can be imported.
    """

    help: str
    room: str = ""
    at_home: str = ""
    own_files: bool = False
    light: bool = False
    serves: bool = False
    admits: bool = False

    def room_of(self, words: Sequence[str]) -> str:
        """Import path of the module that runs a command line; empty for a method of the trainer."""
        named = any(word.partition("=")[0] == "--state_dir" for word in words)
        return self.at_home if self.at_home and named else self.room

    def load(self, words: Sequence[str]) -> ModuleType:
        """Import the module that runs a command line."""
        return importlib.import_module(self.room_of(words))

    def admit(self, words: Sequence[str], files: Any, parser: ArgumentParser) -> None:
        """Let the module of a command line refuse settings before any class that they name is imported."""
        if self.room_of(words) and (admit := getattr(self.load(words), "admit", None)):
            admit(words, files, parser)

    def run(self, call: Call) -> int:
        """Run the module of a command line; return its exit status."""
        for key in ("output", "state_dir"):
            check_local(f"--{key}", call.settings.get(key) or "")
        status: int = self.load(call.words).run(call)
        return status
