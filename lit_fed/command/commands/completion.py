"""``lit-fed completion``: a script that completes commands, options, classes and configuration files in a shell."""

from __future__ import annotations

from typing import Literal

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.reading.shipped import shipped_folder


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("shell", type=Literal["bash", "zsh", "tcsh"], help="shell to print the script for")


def run(call: Call) -> int:
    """Print the script, which ``make generated`` has written."""
    print(shipped_folder("generated").joinpath(f"completion.{call.settings.shell}").read_text(encoding="utf-8"), end="")
    return 0
