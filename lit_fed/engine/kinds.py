"""Which client has which network."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning import LightningModule

from lit_fed.errors import ConfigError

ONLY = "model"
"""The kind of every client where all have the same network."""


class Kinds:
    """The kinds of network in a population, and whose they are.

    Args:
        names: The kinds; clients take them in turn (client i the i-th, then from the start), unless they are named.
        clients: The clients of each kind by name, all of them; None for turns.

    Raises:
        ConfigError: If there is no kind, or a client has two.
    """

    def __init__(self, names: Sequence[str] = (ONLY,), clients: Mapping[str, Collection[int]] | None = None) -> None:
        self.names = list(names)
        if not self.names:
            raise ConfigError("trainer.kinds is empty; name at least one kind of network, or set it to null")
        self._named: dict[int, str] = {}
        for name, client_ids in (clients or {}).items():
            for client_id in client_ids:
                if client_id in self._named:
                    raise ConfigError(f"trainer.kinds gives client {client_id} to {self._named[client_id]} and {name}")
                self._named[client_id] = name
        self._in_turn = clients is None

    def check(self, num_clients: int) -> None:
        """Refuse a population in which some client has no network, or some kind no client.

        Raises:
            ConfigError: If one has none, or a network is for a client that does not exist.
        """
        if self._in_turn:
            if num_clients < len(self.names):
                raise ConfigError(
                    f"trainer.kinds {self.names[-1]!r} has no client: there are {len(self.names)} kinds and "
                    f"{num_clients} clients"
                )
            return
        missing = next((client_id for client_id in range(num_clients) if client_id not in self._named), None)
        if missing is not None:
            raise ConfigError(f"trainer.kinds names no network for client {missing}; name one for each client")
        beyond = next((client_id for client_id in self._named if not 0 <= client_id < num_clients), None)
        if beyond is not None:
            raise ConfigError(f"trainer.kinds names client {beyond}, but clients are 0 to {num_clients - 1}")
        used = set(self._named.values())
        if unused := [name for name in self.names if name not in used]:
            raise ConfigError(f"trainer.kinds {unused[0]!r} has no client; name some, or leave it out")

    def __getitem__(self, client_id: int) -> str:
        """The kind of a client."""
        if len(self.names) == 1:
            return self.names[0]
        return self.names[client_id % len(self.names)] if self._in_turn else self._named[client_id]


def assign(tasks: Mapping[str, LightningModule], options: Mapping[str, Mapping[str, Any]] | None) -> Kinds:
    """Which client has which of several models.

    Args:
        tasks: The models by kind.
        options: ``trainer.kinds``, of which only ``clients`` is looked at; None for turns.

    Raises:
        ConfigError: If the models and the options name different kinds, two models share a parameter, or only some
            kinds name their clients.
    """
    owners: dict[int, str] = {}
    for name, task in tasks.items():
        for parameter in task.parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise ConfigError(
                    f"the models of kinds {owners[id(parameter)]!r} and {name!r} share parameters; make one for each"
                )
    if options is None:
        return Kinds(tuple(tasks))
    if odd := sorted(options.keys() ^ tasks.keys()):
        raise ConfigError(f"trainer.kinds and the models differ in {odd[0]!r}; give a model for each kind")
    named: dict[str, Collection[int]] = {}
    for name, own in options.items():
        clients = own.get("clients")
        if clients is None:
            continue
        if not isinstance(clients, list | tuple | set | range) or not all(type(one) is int for one in clients):
            raise ConfigError(f"trainer.kinds.{name}.clients is {clients!r}; it must be a list of client ids")
        named[name] = clients
    if named and len(named) < len(options):
        missing = next(name for name in options if name not in named)
        raise ConfigError(f"trainer.kinds {missing!r} names no clients, and others do; name them for each, or none")
    return Kinds(tuple(options), named or None)
