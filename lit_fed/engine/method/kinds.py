"""Kinds of network, and their clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning import LightningModule

from lit_fed.data.population.naming import Keys, NamedClients, called, clients_of
from lit_fed.errors import ConfigError

ONLY = "model"
"""The kind of every client where all have the same network."""
CHOSEN_BY = ("clients", "client_positions")
"""Settings of a kind that name its clients; the others are the model's."""


class Choice(NamedTuple):
    """Clients of a kind, as configured.

    Args:
        names: Clients by name.
        positions: Clients by position.
    """

    names: Sequence[Any] = ()
    positions: Sequence[Any] = ()


class Kinds:
    """The kinds of network in a population, and their clients.

    Args:
        names: The kinds; by default client i has the i-th, cyclically.
        clients: All clients of each kind; None for the default. Resolved by `check`.
    """

    def __init__(self, names: Sequence[str] = (ONLY,), clients: Mapping[str, Choice] | None = None) -> None:
        self.names = list(names)
        if not self.names:
            raise ConfigError("trainer.kinds is empty; name at least one kind of network, or set it to null")
        self._chosen = clients
        self._named: dict[int, str] = {}

    def check(self, data: NamedClients) -> None:
        """Resolve the clients; refuse a population where a client has no network or two, or a kind has no client."""
        num_clients = data.num_clients
        if self._chosen is None:
            if num_clients < len(self.names):
                raise ConfigError(
                    f"trainer.kinds {self.names[-1]!r} has no client, because there are {len(self.names)} kinds and "
                    f"{num_clients} clients; name fewer kinds"
                )
            return
        self._named = {}
        for name, choice in self._chosen.items():
            keys = Keys(f"trainer.kinds.{name}.clients", f"trainer.kinds.{name}.client_positions")
            for client_id in clients_of(data, keys, choice.names, choice.positions) or ():
                if client_id in self._named:
                    raise ConfigError(
                        f"trainer.kinds gives client {called(data, client_id)} to {self._named[client_id]} and {name}; "
                        "name it once"
                    )
                self._named[client_id] = name
        missing = next((client_id for client_id in range(num_clients) if client_id not in self._named), None)
        if missing is not None:
            raise ConfigError(
                f"trainer.kinds names no network for client {called(data, missing)}; name one for each client"
            )
        used = set(self._named.values())
        if unused := [name for name in self.names if name not in used]:
            raise ConfigError(f"trainer.kinds {unused[0]!r} has no client; name some, or leave it out")

    def __getitem__(self, client_id: int) -> str:
        """The kind of a client."""
        if len(self.names) == 1:
            return self.names[0]
        return self.names[client_id % len(self.names)] if self._chosen is None else self._named[client_id]


def assign(tasks: Mapping[str, LightningModule], options: Mapping[str, Mapping[str, Any]] | None) -> Kinds:
    """The kinds of several models.

    Args:
        tasks: The models by kind.
        options: ``trainer.kinds``, read for ``clients`` and ``client_positions``; None for the default.
    """
    owners: dict[int, str] = {}
    for name, task in tasks.items():
        for parameter in task.parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise ConfigError(
                    f"the models of kinds {owners[id(parameter)]!r} and {name!r} share parameters; create one for each"
                )
    if options is None:
        return Kinds(tuple(tasks))
    if odd := sorted(options.keys() ^ tasks.keys()):
        raise ConfigError(f"trainer.kinds and the models differ in {odd[0]!r}; give a model for each kind")
    named: dict[str, Choice] = {}
    for name, options_of_kind in options.items():
        lists = [options_of_kind.get(key) for key in CHOSEN_BY]
        if lists == [None, None]:
            continue
        for key, clients in zip(CHOSEN_BY, lists, strict=True):
            takes = "clients' names" if key == CHOSEN_BY[0] else "positions from 0"
            if not isinstance(clients, list | tuple | set | range | None):
                raise ConfigError(f"trainer.kinds.{name}.{key} is {clients!r}; it must be a list of {takes}")
        named[name] = Choice(*(list(clients or ()) for clients in lists))
    if named and len(named) < len(options):
        missing = next(name for name in options if name not in named)
        raise ConfigError(
            f"trainer.kinds {missing!r} names no clients, and other kinds do; name clients of every kind, or of none"
        )
    return Kinds(tuple(options), named or None)
