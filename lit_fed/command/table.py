"""All commands, each a line: what ``--help`` lists, what a typo is compared with, and who runs them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace


@dataclass(frozen=True)
class Command:
    """A line of the table.

    Args:
        help: What it does, in a line.
        room: Import path of the module that runs it, with ``add_arguments(parser)`` and ``run(call)``, which returns an
            exit status; none for a method of the trainer. It is a text, so that nothing above the command line is
            imported before it is asked for.
        at_home: Import path of the module that runs it where a node's folder is named, which then needs no checkpoint.
    """

    help: str
    room: str = ""
    at_home: str = ""

    def room_of(self, words: Sequence[str]) -> str:
        """The room that a command line asks for; empty for a method of the trainer."""
        named = any(word.partition("=")[0] == "--state_dir" for word in words)
        return self.at_home if self.at_home and named else self.room

    def load(self, words: Sequence[str]) -> ModuleType:
        """The module that runs a command line."""
        return importlib.import_module(self.room_of(words))


class Call(NamedTuple):
    """What a room is given.

    Args:
        settings: What the parser read.
        parser: The parser of the command.
        words: The whole command line.
    """

    settings: Namespace
    parser: ArgumentParser
    words: list[str]


_AT_HOME = "lit_fed.command.commands.at_home"

COMMANDS = {
    "fit": Command("Train a federation."),
    "validate": Command("Run every protocol on the clients' validation data.", at_home=_AT_HOME),
    "test": Command("Run every protocol on the test data.", at_home=_AT_HOME),
    "predict": Command("Write predictions on the shared test data, or on a client's own, to a file.", at_home=_AT_HOME),
    "export": Command(
        "Write the trained network for use without lit_fed, with a card.", "lit_fed.command.commands.export"
    ),
    "study": Command("Run a grid of runs, and print a paper's table beside ours.", "lit_fed.studies.run_studies"),
    "results": Command("Write the claims of all studies that have run on one page.", "lit_fed.studies.run_results"),
    "node": Command("Be some clients of a federation, where their data are.", "lit_fed.command.commands.node"),
    "federate": Command("Train a federation whose clients live on nodes.", "lit_fed.command.commands.federate"),
    "provision": Command(
        "Write certificates, keys and a folder for each end of a federation.", "lit_fed.command.commands.provision"
    ),
    "split": Command(
        "Write a data set as one folder a client, to try a federation out.", "lit_fed.command.commands.split"
    ),
    "cost": Command("Count the bytes that a run will send, without running it.", "lit_fed.command.commands.cost"),
    "simulate": Command("Draw a paper's figure from simulations.", "lit_fed.studies.simulations.run_simulation"),
    "configs": Command(
        "List the configuration files that come with the package.", "lit_fed.command.commands.list_configs"
    ),
    "copy": Command("Write one of them out, to change it.", "lit_fed.command.commands.copy_config"),
    "completion": Command("Print a script by which a shell completes commands.", "lit_fed.command.commands.completion"),
}


def asked(words: Sequence[str]) -> str | None:
    """The command that a command line asks for."""
    return next((word for word in words if word in COMMANDS), None)
