"""``lit-fed copy``: copy a configuration file of the package, to change it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.reading.shipped import close_name, name_of, shipped
from lit_fed.command.table import Call
from lit_fed.engine.storage.files import in_place_of
from lit_fed.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", help="a file that `lit-fed configs` lists, such as method/fedprox.yaml")
    parser.add_argument(
        "-o", "--output", type=Path | None, help="file to write; by default the same name in this folder"
    )


def run(call: Call) -> int:
    """Copy the file.

    Raises:
        ConfigError: If there is no such file, or a file would be overwritten.
    """
    name, output = name_of(call.settings.name), call.settings.output
    if name not in shipped():
        meant = close_name(name)
        raise ConfigError(
            f"there is no configuration file named {name!r}; "
            + (f"did you mean {meant}?" if meant else "`lit-fed configs` lists them")
        )
    target = output or Path(Path(name).name)
    if target.is_dir():
        target = target / Path(name).name
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already; name another file with --output")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}; name another file with --output")
    with in_place_of(target) as temporary:
        shutil.copyfile(shipped()[name], temporary)
    print(f"written     {target}; use it with -c {target}")
    return 0
