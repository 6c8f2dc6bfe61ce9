"""``lit-fed schema``: a JSON schema of configuration files, by which editors check and complete them."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.reading.shipped import shipped_folder


def add_arguments(parser: ArgumentParser) -> None:
    """Add no options."""


def run(call: Call) -> int:
    """Print the schema, which ``make generated`` has written."""
    print(shipped_folder("generated").joinpath("lit_fed.schema.json").read_text(encoding="utf-8"), end="")
    return 0
