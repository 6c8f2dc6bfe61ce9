"""The status port of a server or a node: HTTP for its operator, for reading only."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import check_free, check_secret, is_loopback

_SLOW_S = 2.0  # time for a request, and for its answer, because one is served after the other
_MOST_BYTES = 2**13  # of a request, and of a file with a token
_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
LABELS = ("run", "method")
_POLICY = (
    "default-src 'none'; script-src 'nonce-NONCE'; style-src 'nonce-NONCE'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_COUNTERS = ("rounds", "bytes", "failures")  # other numbers may fall


@dataclass(frozen=True)
class StatusPort:
    """Options of the pages with a server's or a node's state.

    Args:
        status_port: port of pages with the state: /metrics, /status.json, /healthz, /readyz, and of a server / to watch
        status_host: address of these pages; one that is not loopback needs --status_token
        status_token: file with the token of their readers: a Bearer token, or in a browser the password of lit_fed
    """

    status_port: int | None = None
    status_host: str = "127.0.0.1"
    status_token: str | None = None

    @classmethod
    def of(cls, settings: Any) -> StatusPort:
        """Take them from a command's settings."""
        return cls(settings.status_port, settings.status_host, settings.status_token)

    def accepted(self) -> list[bytes]:
        """Read the token, and return the headers ``Authorization`` that it makes; none on loopback without a token."""
        if self.status_token is None:
            if is_loopback(f"{self.status_host or '?'}:1"):
                return []
            raise ConfigError(
                f"--status_host is {self.status_host!r}, which others may reach; give a file with a token by "
                "--status_token, or leave --status_host out"
            )
        token = b""
        with suppress(OSError), open(self.status_token, "rb") as file:
            check_secret(file.fileno(), f"--status_token {self.status_token}")
            token = file.read(_MOST_BYTES).strip()
        if not re.fullmatch(rb"[!-~]{16,}", token):
            raise ConfigError(
                f"--status_token {self.status_token} is not a readable file with one word of at least 16 ASCII "
                "characters; write one, as by openssl rand -hex 32"
            )
        return [b"Bearer " + token, b"Basic " + b64encode(b"lit_fed:" + token)]


class StatusSource(Collector):
    """The facts that a status port shows, by name; numbers among them are metrics too."""

    page = ""
    """The page at ``/``, in which ``nonce="NONCE"`` stands for that of its script and style; empty for none."""

    def __init__(self, what: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.seconds = Histogram(f"lit_fed_{what}", "Seconds", LABELS, buckets=_BUCKETS, registry=self.registry)

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the content of ``/status.json``."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether ``/readyz`` answers with 200."""

    @override
    def collect(self) -> Iterator[Metric]:
        facts = self.facts()
        labels = [facts.get(name, "") for name in LABELS]
        for name, value in facts.items():
            if isinstance(value, int | float) and name != "now":
                kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
                metric = kind(f"lit_fed_{name}", name.replace("_", " "), labels=LABELS)
                metric.add_metric(labels, value)
                yield metric
        last = GaugeMetricFamily("lit_fed_last_answer_timestamp_seconds", "Last answer", labels=(*LABELS, "node"))
        for site in facts.get("sites", ()):
            last.add_metric([*labels, site["name"]], site["answered"] or 0)
        yield last


@contextmanager
def serving_status(options: StatusPort, source: StatusSource) -> Iterator[None]:
    """Serve the pages of a source, if there is a port for them."""
    host, port, accepted = options.status_host, options.status_port, options.accepted()
    if port is None:
        yield
        return
    check_range("--status_port", port, least=1, most=2**16 - 1)
    check_free(f"{host}:{port}", "--status_port")
    names = {f"{name}:{port}" for name in (host, f"[{host}]", "localhost")}

    class Reader(BaseHTTPRequestHandler):
        server_version, sys_version = "lit_fed", ""
        error_message_format = "%(code)d\n"  # what a reader asked for is not repeated
        error_content_type = "text/plain"

        @override
        def setup(self) -> None:
            """Read the request within `_SLOW_S`, however its bytes come."""
            super().setup()
            request, end, last = b"", time.monotonic() + _SLOW_S, b"\r\n\r\n"
            while last not in request and len(request) < _MOST_BYTES and (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                request += self.connection.recv(_MOST_BYTES) or last
            self.connection.settimeout(_SLOW_S)
            self.rfile = BytesIO(request)

        def do_GET(self) -> None:
            word = self.headers.get("Authorization", "").encode()
            if self.path == "/healthz":  # as much as an open port tells
                self._send("alive\n")
            elif accepted and not any(compare_digest(word, one) for one in accepted):
                self._send("401\n", status=401)
            elif not accepted and self.headers.get("Host") not in names:
                self.send_error(403)  # a web page whose name resolves to loopback reads nothing
            elif self.path == "/readyz":
                self._send(*(("ready\n",) if source.is_ready() else ("not ready\n", "text/plain", 503)))
            elif self.path == "/status.json":
                self._send(json.dumps(source.facts()) + "\n", "application/json")
            elif self.path == "/metrics":
                self._send(generate_latest(source.registry).decode(), CONTENT_TYPE_LATEST)
            elif self.path == "/" and source.page:
                self._send(source.page, "text/html; charset=utf-8")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str = "text/plain", status: int = 200) -> None:
            nonce = secrets.token_urlsafe(16)
            headers = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
            headers["Content-Security-Policy"] = _POLICY.replace("NONCE", nonce)
            if status == 401:
                headers["WWW-Authenticate"] = "Basic"  # a browser asks for the password
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.replace('nonce="NONCE"', f'nonce="{nonce}"').encode())

        @override
        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: what a reader asks for does not belong into the log."""

    class Server(TCPServer):
        allow_reuse_address = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        @override
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Drop a reader that hung up or was too slow."""

    with Server((host, port), Reader) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="status")
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(_SLOW_S)
