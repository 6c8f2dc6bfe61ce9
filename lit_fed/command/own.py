"""Options that several commands have beside those of a run: who is meant, and whether a file may be replaced."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_fed.data import FederatedDataModule
from lit_fed.data.naming import Keys, clients_of

KEYS = Keys("--client", "--client_position")


def names(value: Any) -> Any:
    """The names of clients: a list in brackets, or one name; a text stays what it is, so that 01 is not 1.

    Raises:
        ValueError: For anything else.
    """
    found = value
    if isinstance(value, str):
        is_list = value.startswith("[") and value.endswith("]")
        try:
            found = yaml.load(value, yaml.BaseLoader) if is_list else [value]
        except yaml.YAMLError as error:
            raise ValueError(value) from error
    elif type(value) is int:
        found = [value]
    if not isinstance(found, list) or not all(isinstance(one, str) or type(one) is int for one in found):
        raise ValueError(value)
    return found


def add_clients(parser: ArgumentParser, what: str) -> None:
    """Add the options that choose clients.

    Args:
        parser: Of the command.
        what: What is done with them, for ``--help``.
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
    """The positions of the clients that the options choose; None where they choose nobody.

    Raises:
        ConfigError: There is no such client.
    """
    given = settings.client_position
    return clients_of(data, KEYS, settings.client, [given] if isinstance(given, int) else given)


def add_overwrite(parser: ArgumentParser, what: str) -> None:
    """Add the option that lets a command replace what is there."""
    parser.add_argument("--overwrite", type=bool, nargs="?", const=True, default=False, help=f"replace {what}")
