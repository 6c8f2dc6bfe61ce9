"""The state of a running federation for its operator: JSON and Prometheus text, on loopback, for reading only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.checks import check_range
from lit_fed.data.partitions.cut import named
from lit_fed.engine.loop.run import Run
from lit_fed.federation.ends import check_free
from lit_fed.federation.transport.serving import RpcGrid

_HOST = "127.0.0.1"
_SLOW_S = 2.0  # time-out of a reader, because one is served after the other
_MEANINGS = {
    "round": "Completed rounds",
    "rounds": "Rounds of the run",
    "nodes": "Connected nodes",
    "bytes": "Bytes of messages to and from nodes",
    "failures": "Updates of clients that failed",
    "last_answers": "Time of a node's last answer, seconds since 1970",
}


class Status(Callback):
    """The facts that the pages show: numbers of the server's own, and nothing that a node says.

    Under ``trainer.privacy.withhold``, and before the run knows whether it withholds, the facts tell neither who takes
    part nor how many clients.
    """

    def __init__(self, grid: RpcGrid) -> None:
        self.grid = grid
        self._run: Run | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        self._run = run

    def facts(self) -> dict[str, Any]:
        """Return the facts by name; last answers by the node's clients, or by its number without keys."""
        run, answered, keys = self._run, self.grid.answered(), self.grid.keys
        facts: dict[str, Any] = {
            "round": 0 if run is None else run.next_round,
            "rounds": None if run is None else run.max_rounds,
            "nodes": len(answered),
        }
        if run is None or run.withholds:
            return facts
        names = {node: f"node {node}" for node, *_ in answered}
        if keys is not None:
            names |= {node: named(keys[key].clients) for node, key, _ in answered if key in keys}
        last = {names[node]: round(at, 3) for node, _, at in answered if at}
        return facts | {"bytes": self.grid.num_bytes, "failures": run.failures.count, "last_answers": last}


def prometheus(facts: dict[str, Any]) -> str:
    """Format facts as Prometheus's text, version 0.0.4."""
    lines = list[str]()
    for name, value in facts.items():
        lines += [f"# HELP lit_fed_{name} {_MEANINGS[name]}", f"# TYPE lit_fed_{name} gauge"]
        if isinstance(value, dict):
            lines += [f"lit_fed_{name}{{node={json.dumps(node)}}} {at}" for node, at in value.items()]
        elif value is not None:
            lines.append(f"lit_fed_{name} {value}")
    return "\n".join([*lines, ""])


@contextmanager
def status_page(port: int, grid: RpcGrid) -> Iterator[Status]:
    """Serve the state of a federation: ``/`` as JSON, ``/metrics`` as Prometheus text."""
    check_range("--status_port", port, least=1, most=2**16 - 1)
    check_free(f"{_HOST}:{port}", "--status_port")
    status = Status(grid)

    class Page(BaseHTTPRequestHandler):
        timeout = _SLOW_S
        server_version, sys_version = "lit_fed", ""
        error_message_format = "%(code)d\n"  # what a reader asked for is not repeated
        error_content_type = "text/plain"

        def do_GET(self) -> None:
            if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
                self.send_error(403)  # a web page whose name resolves to loopback reads nothing
            elif self.path == "/":
                self._send("application/json", json.dumps(status.facts()) + "\n")
            elif self.path == "/metrics":
                self._send("text/plain; version=0.0.4", prometheus(status.facts()))
            else:
                self.send_error(404)

        def _send(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        @override
        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: what a reader asks for does not belong into the log."""

    class Server(TCPServer):
        allow_reuse_address = True

        @override
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Drop a reader that hung up or was too slow."""

    with Server((_HOST, port), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="status")
        thread.start()
        try:
            yield status
        finally:
            server.shutdown()
            thread.join(_SLOW_S)
