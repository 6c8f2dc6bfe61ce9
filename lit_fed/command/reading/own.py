"""Options of several commands: clients, and permission to replace a file."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_fed.data import FederatedDataModule
from lit_fed.data.population.naming import Keys, clients_of
from lit_fed.errors import ConfigError

KEYS = Keys("--client", "--client_position")


def names(value: Any) -> Any:
    """Names of clients, from a list in brackets or one name; text stays text, so that 01 is not 1.

    Raises:
        ArgumentTypeError: For other values.
    """
    named = value
    try:
        if isinstance(value, str):
            named = yaml.load(value, yaml.BaseLoader) if value[:1] == "[" and value[-1:] == "]" else [value]
        elif type(value) is int:
            named = [value]
    except yaml.YAMLError:
        named = None
    if not isinstance(named, list) or not all(isinstance(name, str) or type(name) is int for name in named):
        raise ArgumentTypeError(f"expected a name, or a list of names in brackets, not {value}")
    return named


def add_clients(parser: ArgumentParser, what: str) -> None:
    """Add the options that choose clients.

    Args:
        parser: The command's parser.
        what: The clients' role, for ``--help``.
    """
    parser.add_argument(
        "--client",
        type=names,
        default=None,
        help=f"{what}: a name, or a list of names; 0, 1, … where clients have no names",
    )
    parser.add_argument(
        "--client_position", type=int | list[int] | None, default=None, help="the same by positions, from 0"
    )


def chosen(data: FederatedDataModule, settings: Any) -> list[int] | None:
    """Positions of the clients that the options choose; None without these options."""
    given = settings.client_position
    positions = clients_of(data, KEYS, settings.client, [given] if isinstance(given, int) else given)
    if positions == []:
        raise ConfigError(f"{KEYS.name} is an empty list; name at least one client, or leave it out")
    return positions


def add_overwrite(parser: ArgumentParser, what: str) -> None:
    """Add the option that lets a command replace a file."""
    parser.add_argument("--overwrite", type=bool, nargs="?", const=True, default=False, help=f"replace {what}")
