"""Authentication: of the server by its certificate, of a node by its key."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fed.deployment.ends import is_loopback, split_address
from lit_fed.errors import ConfigError

_ANSWER_S = 10.0  # time-out of a TLS handshake


@dataclass(frozen=True)
class Security:
    """Files of certificates and keys.

    Args:
        ca: The authority's certificate; optional on loopback only.
        certificate: On the server, the server's certificate.
        key: On the server, the certificate's private key; on a node, the node's private key.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self, address: str, wanted: Sequence[str]) -> None:
        """Refuse a missing file among those ``wanted``, and an address beyond loopback without TLS.

        Raises:
            ConfigError: Naming the option.
        """
        given = {name: getattr(self, name) for name in wanted}
        for name, path in given.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--{name} {path} is not a file; correct the path")
        absent = [name for name, path in given.items() if path is None]
        if absent and not is_loopback(address):
            raise ConfigError(f"--{absent[0]} is missing, and {address} is not on this machine; see docs/deployment.md")
        if absent and len(absent) < len(given):
            raise ConfigError(f"--{absent[0]} is missing; give TLS and keys together, or neither on loopback")

    def authority(self) -> ssl.SSLContext:
        """Return a TLS context that trusts ``ca``; raise `ConfigError` if ``ca`` is not a certificate."""
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--ca {self.ca} is not a certificate ({_reason(error)}); correct the path") from error

    def try_out(self, address: str) -> None:
        """Test a TLS handshake in memory, as a node will do it at this address.

        Raises:
            ConfigError: If a node that trusts ``ca`` would reject the server's certificate.
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
                        f"nodes that trust --ca {self.ca} will reject --certificate {self.certificate} "
                        f"({_reason(error)}); make another, see docs/deployment.md"
                    ) from error

    def server_context(self) -> ssl.SSLContext:
        """Return the server's TLS context; raise `ConfigError` if the certificate and the key do not match."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.set_alpn_protocols(["http/1.1"])
        try:
            # An empty password prevents a prompt on the terminal.
            server.load_cert_chain(str(self.certificate), self.key, password="")
        except (ssl.SSLError, OSError) as error:
            words = f"--certificate {self.certificate} and --key {self.key} do not match"
            raise ConfigError(f"{words} ({_reason(error)}); correct one of them") from error
        return server

    def greet(self, address: str) -> None:
        """Test a TLS handshake with the running server.

        Raises:
            ConfigError: If ``ca`` did not sign the server's certificate, or only one end uses TLS.
        """
        host, port = split_address(address)
        context = self.authority()
        if not self.is_on:  # test only whether the server uses TLS
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])  # a SuperLink may offer one of them alone
        try:
            with socket.create_connection((host, port), timeout=_ANSWER_S) as line:
                context.wrap_socket(line, server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"--ca {self.ca} does not verify the server at {address} ({_reason(error)}); correct one of them"
            ) from error
        except ssl.SSLError as error:
            if self.is_on:
                raise ConfigError(
                    f"the server at {address} does not use TLS ({_reason(error)}); see docs/deployment.md"
                ) from error
        except OSError:  # the server is restarting, or closed the connection
            return
        else:
            if not self.is_on:
                raise ConfigError(f"the server at {address} uses TLS; give --ca and --key, see docs/deployment.md")

    @property
    def is_on(self) -> bool:
        """Whether TLS is used."""
        return self.ca is not None


def _reason(error: OSError) -> str:
    """Return OpenSSL's reason without its source location."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or "it cannot be read"
    return reason.lower().replace("_", " ")
