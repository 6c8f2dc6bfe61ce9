"""An operator's end: one request to the server, and its answer."""

from __future__ import annotations

import sys
from contextlib import suppress

from lit_fed.errors import ConfigError
from lit_fed.federation.ends import without_userinfo
from lit_fed.federation.messages.wire import shown
from lit_fed.federation.transport import frames  # before grpc, which it sets up
from lit_fed.federation.transport.security import Security

import grpc  # isort: skip

_AT_ONCE_S = 3.0  # time without an answer that is not reported
_PATIENCE_S = 120.0  # between two runs the port is closed, while the next one's process starts
_TOLD = {
    grpc.StatusCode.DEADLINE_EXCEEDED: f"did not answer within {_PATIENCE_S:.0f} s; start it, or correct --server",
    grpc.StatusCode.UNAVAILABLE: "was lost before it answered; see lit-fed runs for what it did",
    grpc.StatusCode.UNIMPLEMENTED: "takes no operators; run the same lit_fed on both ends, or correct --server",
}


def ask(address: str, security: Security, blob: bytes, proxy: str | None = None) -> bytes:
    """Send a request, and return the answer; raise `ConfigError` if the server refuses it or does not answer."""
    security.check(address)
    security.try_out()
    security.greet(address, proxy)
    with security.dial(address, proxy) as channel:
        method = f"/{frames.SERVICE}/{frames.OPERATE}"
        reply = channel.unary_unary(method).future(blob, timeout=_PATIENCE_S, wait_for_ready=True)
        with suppress(grpc.FutureTimeoutError):
            reply.exception(_AT_ONCE_S)
        if not reply.done():
            print(f"waiting for the server at {address}, which may be between two runs", file=sys.stderr)
        try:
            return bytes(reply.result())
        except grpc.RpcError as error:
            said = f"refuses: {shown(without_userinfo(error.details() or ''), 1000)}"
            raise ConfigError(f"the server at {address} {_TOLD.get(error.code(), said)}") from None
