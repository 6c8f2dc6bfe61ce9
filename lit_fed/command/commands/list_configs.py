"""``lit-fed configs``: list the configuration files of the package, each with its first line."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.reading.shipped import first_line, name_of, shipped
from lit_fed.command.refusals.spelling import close
from lit_fed.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "folder", nargs="?", default="", help="list the files of one folder, such as method or papers/uwa"
    )


def run(call: Call) -> int:
    """Print a line per file."""
    folder = name_of(f"{call.settings.folder or '.'}/").removesuffix("configs").strip("./")
    chosen = {name: path for name, path in shipped().items() if not folder or name.startswith(f"{folder}/")}
    if not chosen:
        folders = list(dict.fromkeys(part for name in shipped() for part in _folders(name)))
        meant = close(folder, folders) or ", ".join(part for part in folders if "/" not in part)
        raise ConfigError(f"there is no folder of configurations named {folder!r}; choose {meant}")
    width = max(map(len, chosen))
    for name, path in chosen.items():
        print(f"{name:<{width}}  {first_line(path)}")
    return 0


def _folders(name: str) -> list[str]:
    """Folders that a file lies in, outermost first."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
