"""How ends know each other: certificates, keys, and what Flower's own command line is told of them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lit_fed.deployment.processes import environment, is_loopback, program
from lit_fed.errors import ConfigError

_AT_ONCE = 4  # keys that are registered at a time


@dataclass(frozen=True)
class Security:
    """How ends know each other.

    Args:
        ca: Certificate of the authority that signed the server's; none only on this machine.
        certificate: The server's certificate, on the server.
        key: The key of the server's certificate on the server, the node's own on a node.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self, address: str, wanted: Sequence[str]) -> None:
        """Refuse an address that others can hear, without what protects it.

        Args:
            address: Of the SuperLink.
            wanted: The files that this end needs.

        Raises:
            ConfigError: For a file that is missing.
        """
        given = {name: getattr(self, name) for name in wanted}
        for name, path in given.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--{name} {path} is no file")
        absent = [name for name, path in given.items() if path is None]
        if absent and not is_loopback(address):
            raise ConfigError(
                f"{address} is not on this machine, so --{absent[0]} must be given; see docs/deployment.md"
            )
        if absent and len(absent) < len(given):
            raise ConfigError(f"--{absent[0]} is missing: TLS and keys are used together, or on loopback not at all")

    @property
    def is_on(self) -> bool:
        """Whether there is TLS."""
        return self.ca is not None


def connection_file(address: str, security: Security, home: Path) -> str:
    """Write down, for Flower's own command line, how the SuperLink is reached; the name under which it stands."""
    secure = f'root-certificates = "{Path(security.ca).resolve()}"' if security.ca else "insecure = true"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(f'[superlink.lit_fed]\naddress = "{address}"\n{secure}\n', encoding="utf-8")
    return "lit_fed"


def register(address: str, security: Security, home: Path, node_keys: Sequence[str]) -> None:
    """Let the nodes in that have one of some keys; those that are known already stay so.

    Args:
        address: Of the SuperLink.
        security: The authority's certificate.
        home: Flower's folder.
        node_keys: Files of public keys.

    Raises:
        ConfigError: If a key is none.
    """
    name = connection_file(address, security, home)

    def register_one(path: str) -> str | None:
        words = [program("flwr"), "supernode", "register", path, name]
        done = subprocess.run(words, env=environment(home), capture_output=True, text=True, check=False)
        said = " ".join((done.stdout + done.stderr).split())
        return said[-200:] if done.returncode and "already" not in said else None

    with ThreadPoolExecutor(_AT_ONCE) as pool:  # each is a process that takes seconds to start
        for path, odd in zip(node_keys, pool.map(register_one, node_keys), strict=True):
            if odd is not None:
                raise ConfigError(f"--node_keys {path} is not taken by the SuperLink: {odd}")
