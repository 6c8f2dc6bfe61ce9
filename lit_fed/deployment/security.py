"""How ends know each other: the server by its certificate, a node by its key."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fed.deployment.ends import is_loopback, split_address
from lit_fed.errors import ConfigError

_ANSWER_S = 10.0  # within which a server shakes hands


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
            address: Of the server.
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

    def authority(self) -> ssl.SSLContext:
        """Whom this end believes.

        Raises:
            ConfigError: If ``ca`` is no certificate.
        """
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--ca {self.ca} is no certificate: {_reason(error)}") from error

    def try_out(self, address: str) -> None:
        """Let the server shake hands with itself, as a node will with it.

        Args:
            address: By which nodes know it.

        Raises:
            ConfigError: If a node that believes ``ca`` would not take the server for what it is.
        """
        if not self.is_on:
            return
        node, server = self.authority(), self.server_context()
        here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            node.wrap_bio(here, there, server_hostname=split_address(address)[0]),
            server.wrap_bio(there, here, server_side=True),
        ]
        while ends:
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as error:
                    raise ConfigError(
                        f"no node that believes --ca {self.ca} takes --certificate {self.certificate}: "
                        f"{_reason(error)}; make another, see docs/deployment.md"
                    ) from error

    def server_context(self) -> ssl.SSLContext:
        """What the server says of itself.

        Raises:
            ConfigError: If certificate and key do not go together.
        """
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.set_alpn_protocols(["http/1.1"])
        try:
            # A key that asks for a password would else ask for it on the terminal.
            server.load_cert_chain(str(self.certificate), self.key, password="")
        except (ssl.SSLError, OSError) as error:
            words = f"--certificate {self.certificate} and --key {self.key} do not go together"
            raise ConfigError(f"{words}: {_reason(error)}") from error
        return server

    def greet(self, address: str) -> None:
        """Shake hands with the server, as every request of this node will.

        Args:
            address: Of the server, which is there.

        Raises:
            ConfigError: If ``ca`` does not vouch for who answers, or they speak TLS and there is no ``ca``.
        """
        host, port = split_address(address)
        context = self.authority()
        if not self.is_on:  # whoever it is: only whether they speak TLS is asked
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])  # a SuperLink may offer one of them alone
        try:
            with socket.create_connection((host, port), timeout=_ANSWER_S) as line:
                context.wrap_socket(line, server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(f"--ca {self.ca} does not vouch for the server at {address}: {_reason(error)}") from error
        except ssl.SSLError as error:
            if self.is_on:
                raise ConfigError(f"what listens at {address} speaks no TLS: {_reason(error)}") from error
        except OSError:  # it is being started again, or hangs up
            return
        else:
            if not self.is_on:
                raise ConfigError(f"the server at {address} speaks TLS: give --ca and --key; see docs/deployment.md")

    @property
    def is_on(self) -> bool:
        """Whether there is TLS."""
        return self.ca is not None


def _reason(error: OSError) -> str:
    """Why OpenSSL refuses, without where in its code that is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or "it cannot be read"
    return reason.lower().replace("_", " ")
