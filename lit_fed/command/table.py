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
    """

    help: str
    room: str = ""

    def load(self) -> ModuleType:
        """The module that runs it."""
        return importlib.import_module(self.room)


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


COMMANDS = {
    "fit": Command("Train a federation."),
    "validate": Command("Run every protocol on the clients' validation data."),
    "test": Command("Run every protocol on the test data."),
    "predict": Command("Write predictions on the shared test data, or on a client's own, to a file."),
    "study": Command("Run a grid of runs, and print a paper's table beside ours.", "lit_fed.studies.run_studies"),
    "results": Command("Write the claims of all studies that have run on one page.", "lit_fed.studies.run_results"),
    "node": Command("Be some clients of a federation, where their data are.", "lit_fed.command.node"),
    "federate": Command("Train a federation whose clients live on nodes.", "lit_fed.command.federate"),
    "cost": Command("Count the bytes that a run will send, without running it.", "lit_fed.command.cost"),
    "simulate": Command(
        "Draw a paper's figure from simulations.", "lit_fed.studies.simulations.run_simulation"
    ),
}  # fmt: skip


def asked(words: Sequence[str]) -> str | None:
    """The command that a command line asks for."""
    return next((word for word in words if word in COMMANDS), None)
