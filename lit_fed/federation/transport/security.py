"""Mutual authentication by certificates: both ends show one before the first byte of a message."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lit_fed.errors import ConfigError
from lit_fed.federation.ends import Alert, connect, is_loopback, split_address
from lit_fed.federation.keys.changes import Changes
from lit_fed.federation.keys.passphrase import unlocked
from lit_fed.federation.transport import frames  # before grpc, which it sets up
from lit_fed.federation.transport.frames import HANDSHAKE_S

import grpc  # isort: skip

_FILES = ("ca", "certificate", "key")
T = TypeVar("T")


@dataclass(frozen=True)
class Security:
    """Files of certificates and keys: all of them, or, on loopback only, none.

    Args:
        ca: The authority's certificate, or those of a root and of intermediate authorities.
        certificate: This end's certificate, which those of intermediate authorities may follow.
        key: The certificate's private key.
        passphrase: The private key's passphrase; None for a key that is not encrypted.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    passphrase: bytes | None = field(default=None, repr=False)

    @property
    def is_on(self) -> bool:
        """Whether TLS is used."""
        return self.ca is not None

    def check(self, address: str) -> None:
        """Refuse a missing file, and an address beyond loopback without TLS."""
        given = {name: getattr(self, name) for name in _FILES}
        for name, path in given.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--{name} {path} is not a file; correct the path")
        absent = [name for name, path in given.items() if path is None]
        if absent and not is_loopback(address):
            raise ConfigError(f"--{absent[0]} is missing, and {address} is not on this machine; see docs/deployment.md")
        if absent and len(absent) < len(given):
            raise ConfigError(f"--{absent[0]} is missing; give certificates and keys together, or neither on loopback")
        if self.key is not None:
            unlocked(Path(self.key), self.passphrase)

    def of_server(self, address: str, say: Callable[[str], object]) -> grpc.ServerCredentials:
        """Return gRPC's credentials of a server, which refuses nodes without a certificate of the authority.

        New connections get renewed files.
        """

        def made() -> grpc.ServerCertificateConfiguration:
            ca, certificate, key = self._contents()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

        renewed = self.renewed(made, say, address)
        return grpc.dynamic_ssl_server_credentials(made(), renewed, require_client_authentication=True)

    def of_node(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials of a node or an operator."""
        ca, certificate, key = self._contents()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def dial(self, address: str, proxy: str | None = None) -> grpc.Channel:
        """Return a channel to the server; the environment's proxies are for the web, and only an option selects one."""
        through: tuple[str, object] = ("grpc.enable_http_proxy", 0) if proxy is None else ("grpc.http_proxy", proxy)
        options = [*frames.options(), through, ("grpc.use_local_subchannel_pool", 1)]
        if self.is_on:
            return grpc.secure_channel(address, self.of_node(), options)
        return grpc.insecure_channel(address, options)

    def _contents(self) -> list[bytes]:
        ca, certificate = (Path(str(file)).read_bytes() for file in (self.ca, self.certificate))
        return [ca, certificate, unlocked(Path(str(self.key)), self.passphrase)]

    def renewed(
        self, make: Callable[[], T], say: Callable[[str], object], address: str | None = None
    ) -> Callable[[], T | None]:
        """Return a function that makes something anew when the files have changed, and else returns None.

        While the files do not belong together, it prints why.

        Args:
            make: Reads the files.
            say: Prints a line.
            address: The server's address, if this end is the server.
        """
        changes = Changes(file for file in (self.ca, self.certificate, self.key) if file is not None)

        def made_anew() -> T | None:
            if not changes.noticed():
                return None
            try:
                self.try_out(address)
                made = make()
            except (ConfigError, OSError) as error:
                say(Alert(f"{error}; until then the certificate and the key stay as they were"))
                return None
            say(f"read {self.certificate} again, for new connections")
            return made

        return made_anew

    # ------------------------------------------------------------------ errors before the first message

    def context(self, server: bool) -> ssl.SSLContext:
        """Return an end's TLS context; raise `ConfigError` if its files do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        try:
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--ca {self.ca} is not a certificate ({_reason(error)}); correct the path") from error
        try:
            # An empty password prevents a prompt on the terminal.
            context.load_cert_chain(str(self.certificate), self.key, password=self.passphrase or "")
        except (ssl.SSLError, OSError) as error:
            words = f"--certificate {self.certificate} and --key {self.key} do not match"
            raise ConfigError(
                f"{words} ({_reason(error)}); correct one of them, or give the key's passphrase"
            ) from error
        return context

    def try_out(self, address: str | None = None) -> None:
        """Test in memory that an end that trusts ``ca`` will accept this end's certificate.

        Args:
            address: The server's address, if this end is the server.
        """
        if not self.is_on:
            return
        here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        node, server = self.context(server=False), self.context(server=True)
        if address is None:
            node.check_hostname, node.verify_mode = False, ssl.CERT_NONE
        else:
            server.verify_mode = ssl.CERT_NONE
        host = None if address is None else split_address(address)[0]
        ends = [
            node.wrap_bio(here, there, server_hostname=host), server.wrap_bio(there, here, server_side=True),
        ]  # fmt: skip
        while ends:
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as error:
                    raise ConfigError(
                        f"an end that trusts --ca {self.ca} will reject --certificate {self.certificate} "
                        f"({_reason(error)}); make another, see docs/deployment.md"
                    ) from error

    def greet(self, address: str, proxy: str | None = None) -> None:
        """Test a TLS handshake with the running server."""
        if self.is_on:
            context = self.context(server=False)
        else:  # test only whether the server uses TLS
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            host = split_address(address)[0]
            context.wrap_socket(connect(address, proxy, HANDSHAKE_S), server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"--ca {self.ca} does not verify the server at {address} ({_reason(error)}); correct one of them"
            ) from error
        except ssl.SSLError as error:
            if self.is_on:
                raise ConfigError(
                    f"the server at {address} does not use TLS 1.3 ({_reason(error)}); see docs/deployment.md"
                ) from error
        except OSError:  # the server is restarting, or closed the connection
            return
        else:
            if not self.is_on:
                raise ConfigError(
                    f"the server at {address} uses TLS; give --ca, --certificate and --key, see docs/deployment.md"
                )


def _reason(error: OSError) -> str:
    """Return OpenSSL's reason without its source location."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or "it cannot be read"
    return reason.lower().replace("_", " ")
