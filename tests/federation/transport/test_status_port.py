"""The status port: who may read, from where, and what a reader can cause."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.transport.status_port import StatusPort, StatusSource, serving_status
from tests.federation.serving_support import free_address
from tests.federation.status_support import raw, read

TOKEN = "0123456789abcdef"
PATHS = ("/", "/status.json", "/metrics", "/readyz")


class Facts(StatusSource):
    """A source of little."""

    page = '<script nonce="NONCE">1</script>'

    def facts(self) -> dict[str, Any]:
        return {"round": 3}

    def is_ready(self) -> bool:
        return True


@contextmanager
def pages(token: Path | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    at = free_address()
    options = StatusPort(int(at.rpartition(":")[2]), host, None if token is None else str(token))
    with serving_status(options, Facts("seconds")):
        yield at


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def get(at: str, path: str, *headers: str) -> str:
    return raw(at, "\r\n".join([f"GET {path} HTTP/1.0", *headers, "", ""]))


def test_pages_on_loopback_are_for_reading_and_repeat_nothing() -> None:
    """Nothing that a reader sends comes back, and another site's page in a browser is refused."""
    with pages() as at:
        assert read(at, "/status.json") == '{"round": 3}\n'
        assert read(at, "/healthz") == "alive\n"
        for path in ("/<script>", "/../server.key", "/metrics/"):
            answer = get(at, path, f"Host: {at}")
            assert answer.startswith("HTTP/1.0 404")
            assert path not in answer
        for method in ("POST", "PUT", "DELETE", "<x>"):
            answer = raw(at, f"{method} / HTTP/1.0\r\nHost: {at}\r\n\r\n")
            assert answer.startswith("HTTP/1.0 501")
            assert "<x>" not in answer.partition("\r\n")[2]
        for path in PATHS:
            assert get(at, path, "Host: evil.example.org").startswith("HTTP/1.0 403")
            assert get(at, path).startswith("HTTP/1.0 403")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(at.partition(":")[2])), timeout=1)


def test_a_page_runs_its_own_script_alone() -> None:
    """Its nonce is another one each time, and the policy names no source but that."""
    nonces = set()
    with pages() as at:
        for _ in range(2):
            head, _, body = get(at, "/", f"Host: {at}").partition("\r\n\r\n")
            nonce = body.partition('nonce="')[2].partition('"')[0]
            nonces.add(nonce)
            policy = next(line for line in head.splitlines() if line.startswith("Content-Security-Policy: "))
            assert (
                f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
                in policy
            )
            assert "unsafe" not in policy
    assert len(nonces) == 2


def test_with_a_token_nothing_is_told_without_it(token: Path) -> None:
    """As a Bearer token, or as the password that a browser asks for; `/healthz` tells what an open port tells."""
    basic = b64encode(f"lit_fed:{TOKEN}".encode()).decode()
    with pages(token, "0.0.0.0") as at:
        for path in PATHS:
            for headers in ([], ["Authorization: Bearer 0123456789abcdeF"], [f"Authorization: Bearer {TOKEN}x"],
                            ["Authorization: Basic !"], [f"Authorization: {TOKEN}"], ["Authorization: Bearer "],
                            ["Authorization: Bearer \xe9"]):  # fmt: skip
                assert get(at, path, *headers).startswith("HTTP/1.0 401"), headers
            assert get(at, path, f"Authorization: Bearer {TOKEN}").startswith("HTTP/1.0 200")
            assert get(at, path, f"Authorization: Basic {basic}", "Host: fl.example.org").startswith("HTTP/1.0 200")
        assert get(at, "/healthz").startswith("HTTP/1.0 200")


def test_another_address_than_loopback_needs_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.0.2.7", "fl.example.org"):
        words = rf"--status_host is '{host}', .* give a file with a token by --status_token"
        with pytest.raises(ConfigError, match=words):
            serving_status(StatusPort(9093, host), Facts("seconds")).__enter__()
    for text in ("", "short", "two words of a token", "0123456789abcdé", None):
        odd = tmp_path / "odd"
        odd.unlink(missing_ok=True)
        if text is not None:
            odd.write_text(text)
            odd.chmod(0o600)
        with pytest.raises(
            ConfigError, match=r"--status_token .*odd is not a readable file with one word of at least 16"
        ):
            serving_status(StatusPort(9093, "0.0.0.0", str(odd)), Facts("seconds")).__enter__()


def test_a_token_that_every_user_can_read_is_refused(token: Path) -> None:
    token.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--status_token .*token is accessible to every user; run chmod 600 on it"):
        serving_status(StatusPort(9093, "0.0.0.0", str(token)), Facts("seconds")).__enter__()


def test_a_status_port_that_cannot_be_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: .*; choose another port"):
            serving_status(StatusPort(port), Facts("seconds")).__enter__()
    for odd in (0, 65536):
        with pytest.raises(ConfigError, match=f"--status_port is {odd}; it must be"):
            serving_status(StatusPort(odd), Facts("seconds")).__enter__()


def test_who_says_nothing_or_little_delays_others_and_no_more() -> None:
    """Two seconds each, also for one that sends a byte now and then."""
    with pages() as at:
        host, port = at.split(":")
        before, stop = threading.active_count(), threading.Event()
        silent, slow = (socket.create_connection((host, int(port))) for _ in range(2))

        def drip() -> None:
            while not stop.wait(0.2):
                try:
                    slow.send(b"x")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        begun = time.monotonic()
        assert read(at, "/status.json") == '{"round": 3}\n'  # after twice two seconds
        assert time.monotonic() - begun < 15
        stop.set()
        dripping.join()
        assert threading.active_count() == before
        silent.close()
        slow.close()


def test_a_request_without_end_is_cut() -> None:
    with pages() as at:
        assert "x" not in raw(at, "GET /" + "x" * 2**13)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(at, "/" + "x" * 2**12)
        assert read(at, "/healthz") == "alive\n"
