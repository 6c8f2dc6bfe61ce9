"""Table of all commands, those of the wings included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lit_fed.command.command import Command
from lit_fed.wings import WITH_COMMANDS, of_wing


def _own(name: str) -> str:
    return f"lit_fed.command.commands.{name}"


def _of_wings() -> dict[str, Command]:
    """Commands of the wings, and the trainer's that run elsewhere with ``--state_dir``."""
    found: dict[str, Command] = {}
    for name in WITH_COMMANDS:
        table = of_wing(f"{name}.table")
        found |= table.COMMANDS
        found |= {key: replace(_TRAINERS[key], at_home=room) for key, room in getattr(table, "AT_HOME", {}).items()}
    return found


_TRAINERS = {
    "fit": Command("Train a federation."),
    "validate": Command("Run every protocol on the clients' validation data."),
    "test": Command("Run every protocol on the test data."),
    "predict": Command("Write predictions on the shared test data, or on a client's own, to a file."),
}

COMMANDS = {
    **_TRAINERS,
    "export": Command(
        "Write the trained network for use without lit_fed, with a card.", _own("export"), own_files=True
    ),
    "cost": Command("Count the bytes that a run will send, without running it.", _own("cost")),
    "configs": Command(
        "List the configuration files of the package.", _own("list_configs"), own_files=True, light=True
    ),
    "copy": Command(
        "Copy a configuration file or the examples of the package, to change them.",
        _own("copy_config"),
        own_files=True,
        light=True,
    ),
    "completion": Command(
        "Print a script that completes commands in a shell.", _own("completion"), own_files=True, light=True
    ),
    **_of_wings(),
}


def asked(words: Sequence[str]) -> str | None:
    """The command that a command line calls."""
    return next((word for word in words if word in COMMANDS), None)
