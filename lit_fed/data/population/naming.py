"""Names of classes and clients: their order and numbers, and the client of a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.errors import ConfigError

_WHOLE = re.compile(r"[+-]?\d{1,4000}")  # Python's longest


def in_order(values: Iterable[Any]) -> list[str]:
    """The distinct names among values: in numerical order if all are whole numbers, else alphabetical.

    Equal numbers, such as 01 and 1, are in alphabetical order.
    """
    names = sorted({str(value) for value in values})
    return sorted(names, key=int) if all(map(_WHOLE.fullmatch, names)) else names


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no file of a run could hold, such as those of folders in Latin-1."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the name {name!r} is not UTF-8; rename its file or folder") from error


def numbered(values: Sequence[Any] | NDArray[Any], names: Sequence[str]) -> IntArray:
    """The number of each value's name, shape (n,); −1 for an unknown name."""
    number = {name: position for position, name in enumerate(names)}
    return np.fromiter((number.get(str(value), -1) for value in values), dtype=np.int64, count=len(values))


def ranked(train: Part, test: Part, source: str) -> Parts:
    """Clients numbered from 0 in the order of their ids in training samples; test samples of other clients get −1."""
    if train.clients is None:
        return Parts(train, replace(test, clients=None), source=source)
    ids, ranks = np.unique(train.clients, return_inverse=True)
    if test.clients is not None:
        places = np.searchsorted(ids, test.clients).clip(max=len(ids) - 1)
        test = replace(test, clients=np.where(ids[places] == test.clients, places, -1).astype(np.int64))
    return Parts(replace(train, clients=ranks.astype(np.int64)), test, source=source)


class NamedClients(Interface):
    """Clients with or without names."""

    @property
    def num_clients(self) -> int:
        """Clients in the population."""

    @property
    def client_names(self) -> list[str] | None:
        """The clients' names in their order; None if they have no names."""


class Keys(NamedTuple):
    """The settings that choose clients, for errors.

    Args:
        name: The setting that takes names.
        position: The setting that takes positions.
    """

    name: str
    position: str


def clients_of(
    data: NamedClients, keys: Keys, names: Iterable[Any] | None = None, positions: Iterable[Any] | None = None
) -> list[int] | None:
    """The positions of the clients that a user has chosen, by name or by position.

    "1" is the client named "1", whatever its position. Clients without names go by their positions, 0, 1, ….

    Args:
        data: The population.
        keys: The settings.
        names: Names; numbers only if clients have no names.
        positions: Positions from 0.

    Returns:
        A position per choice, in order; None without any choice.
    """
    if names is None and positions is None:
        return None
    known, count = data.client_names, data.num_clients
    places: dict[str, list[int]] = {}
    for place, name in enumerate(known or ()):
        places.setdefault(name, []).append(place)
    chosen = []
    for name in names or ():
        if known is None:
            chosen.append(_numbered(name, keys, count))
        elif not isinstance(name, str):
            raise ConfigError(
                f"{keys.name} {name!r} is a number, and these clients have names; write a name in quotes, or give "
                f"{keys.position}"
            )
        elif len(namesakes := places.get(name, [])) == 1:
            chosen.append(namesakes[0])
        elif namesakes:
            raise ConfigError(f"{keys.name}: {len(namesakes)} clients are named {name!r}; give {keys.position}")
        else:
            raise ConfigError(f"{keys.name}: there is no client named {name!r}; {_hint(name, keys, known)}")
    for position in positions or ():
        if type(position) is not int:
            raise ConfigError(f"{keys.position} is {position!r}; it must be a whole number")
        chosen.append(_in_range(position, keys.position, count))
    return chosen


def called(data: NamedClients, client_id: int) -> str:
    """A client's name, or its position if clients have no names."""
    names = data.client_names
    return str(client_id) if names is None else names[client_id]


def _numbered(name: Any, keys: Keys, count: int) -> int:
    """The position of a client without a name."""
    text = str(name) if type(name) is int else name
    if isinstance(text, str) and re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", text):
        return _in_range(int(text), keys.name, count)
    raise ConfigError(
        f"{keys.name}: there is no client named {name!r}; clients have no names here, and are numbered 0 to {count - 1}"
    )


def _in_range(position: int, key: str, count: int) -> int:
    if not 0 <= position < count:
        raise ConfigError(f"{key}: there is no client {position}; clients are 0 to {count - 1}")
    return position


def _hint(name: str, keys: Keys, known: Sequence[str]) -> str:
    listed = f"clients are {', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
    if name.isdecimal():
        return f"{listed}; {keys.position} takes positions"
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else listed
