"""File that describes a federation for ``lit-fed provision``: the server, sites with their clients, and operators."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from lit_fed.command.reading.config_files import read_settings
from lit_fed.command.reading.shipped import name_of, shipped
from lit_fed.command.refusals.spelling import close
from lit_fed.errors import ConfigError
from lit_fed.federation.messages.settings import OWN_DATA

SERVER = "server"
"""Name of the server among the ends; no site has it."""

_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # used in paths, shell commands and names of services
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_KEYS = ("server", "config", "sites")
_MOST_NAME = 253  # characters of a host name, by RFC 1035
_KINDS = {str: "a text", bool: "true or false", int: "a whole number"}
_EMPTY = "holds no federation; write the keys server:, config: and sites:"


@dataclass(frozen=True)
class Site:
    """Clients at one place.

    Args:
        name: Name of the site's folder, key and service.
        clients: Ids of its clients.
        data: The site's own settings of the data, such as ``root``.
        most_samples: Maximum number of training samples that each client may report; None for any.
    """

    name: str
    clients: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    most_samples: int | None = None


@dataclass(frozen=True)
class FederationFile:
    """Content of the file.

    Args:
        path: The file.
        names: Host names and addresses of the server; nodes connect to the first.
        port: Port at which the server listens.
        listen: Address at which the server listens; None for the one that nodes connect to.
        configs: The run's configuration files.
        server_data: The server's own settings of the data.
        sites: The sites, in order.
        operators: Names of those who may submit runs to the server's queue and stop them.
    """

    path: Path
    names: tuple[str, ...]
    port: int
    listen: str | None
    configs: tuple[str, ...]
    server_data: Mapping[str, Any]
    sites: tuple[Site, ...]
    operators: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Address of the server for nodes."""
        return self._at(self.names[0])

    @property
    def bind(self) -> str | None:
        """Address at which the server listens, if it differs from `address`."""
        return None if self.listen is None else self._at(self.listen)

    def _at(self, host: str) -> str:
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def read_federation(path: Path) -> FederationFile:
    """Read the file and check it, except against the run's configuration."""
    where = f"federation file {path}"
    content = _known(read_settings(path, "federation file", _EMPTY), where, (*_KEYS, "operators"), _KEYS)
    server = _known(content["server"], f"{where}: server", ("names", "port", "listen", "data"), ("names", "port"))
    names = _names(server["names"], f"{where}: server.names")
    sites = [_site(*item, f"{where}: site") for item in _mapping(content["sites"], f"{where}: sites").items()]
    return FederationFile(
        path,
        names,
        _port(server["port"], f"{where}: server.port"),
        _listen(server.get("listen"), names[0], f"{where}: server.listen"),
        _configs(content["config"], path.parent, f"{where}: config"),
        _data(server, f"{where}: server"),
        _apart(sites, where),
        _operators(content.get("operators"), [site.name for site in sites], f"{where}: operators"),
    )


def check_everybody(file: FederationFile, num_clients: int) -> None:
    """Compare the sites' clients with the population.

    Args:
        file: Content of the file.
        num_clients: Number of clients in the population.
    """
    where, last = f"federation file {file.path}", num_clients - 1
    for site in file.sites:
        if odd := [client_id for client_id in site.clients if client_id > last]:
            raise ConfigError(f"{where}: site {site.name} has client {odd[0]}; data.num_clients is {num_clients}")
    homeless = sorted(set(range(num_clients)) - {client_id for site in file.sites for client_id in site.clients})
    if homeless:
        more = f" and {len(homeless) - 1} others have" if len(homeless) > 1 else " has"
        raise ConfigError(f"{where}: client {homeless[0]}{more} no site; data.num_clients is {num_clients}")


def _known(value: Any, where: str, known: Collection[str], needed: Collection[str]) -> dict[Any, Any]:
    content = _mapping(value, where)
    for key in content:
        if key not in known:
            meant = close(str(key), known)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    for key in needed:
        if content.get(key) is None:
            raise ConfigError(f"{where}: {key} is missing; see docs/deployment.md")
    return content


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{where} is {value!r:.80}; it must be a mapping, such as key: value")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} is {value!r:.80}; it must be a list of host names and addresses")
    for name in value:
        if (why := _no_host(name)) is not None:
            raise ConfigError(f"{where}: {name!r:.80} {why}")
    names = tuple(str(_address(name) or name.lower()) for name in value)  # as certificates have them
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ConfigError(f"{where} has {twice[0]} twice; remove one")
    return names


def _address(text: Any) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(text) if isinstance(text, str) else None
    return None


def _no_host(name: Any) -> str | None:
    """Reason why nodes cannot reach a server by this name or address; None if they can."""
    if not isinstance(name, str):
        return "is not text; write a host name or an address, in quotes"
    labels, address = name.split("."), _address(name)
    if address is not None:
        there = not (address.is_unspecified or address.is_multicast or getattr(address, "scope_id", None))
        return None if there else "is not an address at which nodes can reach a server; write the one that they see"
    if labels[-1].isdecimal() or len(name) > _MOST_NAME or not all(map(_LABEL.fullmatch, labels)):
        return "is neither a host name nor an address; write one such as server.example.org or 192.0.2.7"
    return None


def _port(value: Any, where: str) -> int:
    if type(value) is not int or not 0 < value < 2**16:
        raise ConfigError(f"{where} is {value!r:.80}; it must be a whole number from 1 to 65535")
    return value


def _listen(value: Any, name: str, where: str) -> str | None:
    """Address to listen at: by default all, because another machine may forward the name; for loopback, itself."""
    if value is None:
        address = _address(name)
        on_loopback = name == "localhost" if address is None else address.is_loopback
        return None if on_loopback else "::" if ":" in name else "0.0.0.0"
    if (address_given := _address(value)) is None:
        raise ConfigError(f"{where} is {value!r:.80}; it must be an address of the server's machine")
    return str(address_given)


def _configs(value: Any, folder: Path, where: str) -> tuple[str, ...]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not files or not all(isinstance(file, str) and file for file in files):
        raise ConfigError(f"{where} is {value!r:.80}; it must be a file, or a list of files")
    return tuple(
        str(folder / file if (folder / file).exists() else shipped().get(name_of(file), folder / file))
        for file in files
    )


def _data(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings = _mapping(content["data"], f"{where}.data") if content.get("data") is not None else {}
    for key, value in settings.items():
        if key not in OWN_DATA:
            raise ConfigError(
                f"{where}: data.{key} must be the same everywhere; write it in the run's configuration, "
                f"because an end sets only {', '.join(OWN_DATA)}"
            )
        if type(value) is not OWN_DATA[key]:
            raise ConfigError(f"{where}: data.{key} is {value!r:.80}; it must be {_KINDS[OWN_DATA[key]]}")
    return settings


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _SITE.fullmatch(name):
        raise ConfigError(
            f"{where} {name!r:.80} has an invalid name; write up to 63 of A-Z, a-z, 0-9, _ and -, "
            "in quotes if YAML reads another type"
        )
    if name.lower() == SERVER:
        raise ConfigError(f"{where} {name} has the server's name; choose another name")


def _operators(value: Any, sites: list[str], where: str) -> tuple[str, ...]:
    if value is not None and (not isinstance(value, list) or not value):
        raise ConfigError(f"{where} is {value!r:.80}; it must be a list of names")
    taken = {name.lower() for name in sites}
    for name in value or ():
        _check_name(name, f"{where}:")
        if name.lower() in taken:  # --revoke and --new_key name both
            raise ConfigError(f"{where} has {name}, which is taken by a site or another operator; choose another name")
        taken.add(name.lower())
    return tuple(value or ())


def _site(name: Any, value: Any, where: str) -> Site:
    _check_name(name, where)
    content = _known(value, f"{where} {name}", ("clients", "data", "most_samples"), ("clients",))
    clients = content["clients"]
    whole = isinstance(clients, list) and all(type(client_id) is int for client_id in clients)
    if not whole or not clients or min(clients) < 0:
        raise ConfigError(f"{where} {name}: clients is {clients!r:.80}; it must be a list of client ids, from 0")
    if len(set(clients)) < len(clients):
        twice = next(client_id for client_id in clients if clients.count(client_id) > 1)
        raise ConfigError(f"{where} {name} has client {twice} twice; remove one")
    most = content.get("most_samples")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{where} {name}: most_samples is {most!r:.80}; it must be a whole number from 1")
    return Site(name, tuple(sorted(clients)), _data(content, f"{where} {name}"), most)


def _apart(sites: list[Site], where: str) -> tuple[Site, ...]:
    """The sites, if they share no client and, on file systems that ignore case, no folder."""
    homes: dict[int, str] = {}
    names: dict[str, str] = {}
    for site in sites:
        other = names.setdefault(site.name.lower(), site.name)
        if other != site.name:
            raise ConfigError(f"{where}: sites {other} and {site.name} differ by case only; choose another name")
        for client in site.clients:
            if (home := homes.setdefault(client, site.name)) != site.name:
                raise ConfigError(f"{where}: client {client} is at both {home} and {site.name}; remove one")
    return tuple(sites)
