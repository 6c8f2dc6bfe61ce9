"""``lit-fed copy``: copy a configuration file or an example of the package, to change it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.reading.shipped import close_name, examples, name_of, shipped
from lit_fed.engine.storage.files import in_place_of
from lit_fed.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    kinds = "a file that `lit-fed configs` lists, such as method/fedprox.yaml; examples; or skill, of coding agents"
    parser.add_argument("name", help=kinds)
    parser.add_argument(
        "-o", "--output", type=Path | None, help="file to write; by default the same name in this folder"
    )


def run(call: Call) -> int:
    """Copy the file."""
    name, output = name_of(call.settings.name), call.settings.output
    if name == "skill":
        skill = examples("examples/skill")["examples/skill/SKILL.md"]
        return _copy_all({(output or Path("lit-fed")) / skill.name: skill})
    if files := examples(name):
        return _copy_all({(output or Path()) / file: path for file, path in files.items()})
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


def _copy_all(files: Mapping[Path, Path]) -> int:
    """Copy files to their targets, which keep the folder `examples`: their class paths begin with it."""
    if there := [target for target in files if os.path.lexists(target)]:
        raise ConfigError(f"{there[0]} exists already; name another folder with --output")
    for target, path in files.items():
        with in_place_of(target) as temporary:
            shutil.copyfile(path, temporary)
        print(f"written     {target}")
    return 0
