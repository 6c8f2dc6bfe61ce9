"""Readers of a status port."""

from __future__ import annotations

import socket
import urllib.request


def read(address: str, path: str = "/") -> str:
    """A page of a status port."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return str(answer.read().decode())


def raw(address: str, request: str) -> str:
    """The answer to a request, byte by byte."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(request.encode("latin-1"))
        return b"".join(iter(lambda: line.recv(2**16), b"")).decode()
