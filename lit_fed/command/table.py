"""Table of all commands: their help, their modules, and who reads their files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace


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
    """

    help: str
    room: str = ""
    at_home: str = ""
    own_files: bool = False

    def room_of(self, words: Sequence[str]) -> str:
        """Import path of the module that runs a command line; empty for a method of the trainer."""
        named = any(word.partition("=")[0] == "--state_dir" for word in words)
        return self.at_home if self.at_home and named else self.room

    def load(self, words: Sequence[str]) -> ModuleType:
        """Import the module that runs a command line."""
        return importlib.import_module(self.room_of(words))


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


_AT_HOME = "lit_fed.command.commands.at_home"


def _own(name: str) -> str:
    return f"lit_fed.command.commands.{name}"


COMMANDS = {
    "fit": Command("Train a federation."),
    "validate": Command("Run every protocol on the clients' validation data.", at_home=_AT_HOME),
    "test": Command("Run every protocol on the test data.", at_home=_AT_HOME),
    "predict": Command("Write predictions on the shared test data, or on a client's own, to a file.", at_home=_AT_HOME),
    "export": Command(
        "Write the trained network for use without lit_fed, with a card.", _own("export"), own_files=True
    ),
    "study": Command(
        "Run a grid of runs, and print a paper's table beside ours.", "lit_fed.studies.run_studies", own_files=True
    ),
    "results": Command(
        "Write the claims of all studies that have run on one page.", "lit_fed.studies.run_results", own_files=True
    ),
    "node": Command("Serve some clients of a federation, where their data are.", _own("node")),
    "federate": Command("Train a federation whose clients live on nodes.", _own("federate")),
    "provision": Command(
        "Write certificates, keys and a folder for each end of a federation.", _own("provision"), own_files=True
    ),
    "split": Command("Write a data set as one folder per client, to try a federation out.", _own("split")),
    "statistics": Command("Count and describe a federation's data, before any training.", _own("statistics")),
    "cost": Command("Count the bytes that a run will send, without running it.", _own("cost")),
    "simulate": Command("Draw a paper's figure from simulations.", "lit_fed.studies.simulations.run_simulation"),
    "configs": Command("List the configuration files of the package.", _own("list_configs"), own_files=True),
    "copy": Command(
        "Copy a configuration file or the examples of the package, to change them.", _own("copy_config"), own_files=True
    ),
    "schema": Command(
        "Print a JSON schema of configuration files, for editors.", "lit_fed.studies.print_schema", own_files=True
    ),
    "completion": Command("Print a script that completes commands in a shell.", _own("completion"), own_files=True),
}


def asked(words: Sequence[str]) -> str | None:
    """The command that a command line calls."""
    return next((word for word in words if word in COMMANDS), None)
