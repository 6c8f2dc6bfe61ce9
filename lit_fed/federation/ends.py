"""Server and nodes as processes: addresses, locked folders, lines of their logs."""

from __future__ import annotations

import os
import re
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from lit_fed.errors import ConfigError

_ANYWHERE = ("0.0.0.0", "::")
_MOST_ANSWER = 2**13  # of a proxy, bytes
_FIRST_LINE_S = 5.0  # of a wait


# ---------------------------------------------------------------------- addresses


def split_address(address: str, option: str = "--server") -> tuple[str, int]:
    """Split an address into host and port; raise `ConfigError` if it is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{option} is {address!r}; it must be a host and a port, such as 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address is on this machine's loopback interface."""
    host = split_address(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")


def check_secret(descriptor: int, where: str) -> None:
    """Refuse an open file with a secret to which every user of the machine has access; ``where`` names it."""
    if os.fstat(descriptor).st_mode & 0o007:
        raise ConfigError(f"{where} is accessible to every user; run chmod 600 on it")


def check_public(address: str) -> None:
    """Refuse a wildcard address, by which no node can reach the server; raise `ConfigError` for such an address."""
    if split_address(address)[0] in _ANYWHERE:
        raise ConfigError(
            f"--server {address} is a wildcard, which no node can reach; give the name or address by which nodes "
            f"reach the server, and --bind {address} to listen on all interfaces"
        )


def connect(address: str, proxy: str | None, seconds: float) -> socket.socket:
    """Connect to an address, through an HTTP proxy if there is one; raise `OSError` if this fails."""
    if proxy is None:
        return socket.create_connection(split_address(address), timeout=seconds)
    way = urlsplit(proxy)
    line = socket.create_connection((str(way.hostname), way.port or 80), timeout=seconds)
    try:
        lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
        if way.username is not None:
            word = f"{unquote(way.username)}:{unquote(way.password or '')}"
            lines.append(f"Proxy-Authorization: Basic {b64encode(word.encode()).decode()}")
        line.sendall("".join(f"{header}\r\n" for header in [*lines, ""]).encode())
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < _MOST_ANSWER and (more := line.recv(1)):
            answer += more
        if answer.split(b" ")[1:2] != [b"200"]:
            raise OSError(f"the proxy answers {answer[:100]!r}")
    except OSError:
        line.close()
        raise
    return line


def without_userinfo(text: str) -> str:
    """Return a text without the users and passwords of URLs that `proxy_of` accepts."""
    return re.sub(r"[^\s'\"]*@", "…@", text)


def proxy_of(proxy: str | None) -> str | None:
    """Return the URL of the proxy that ``--proxy`` selects; ``environment`` stands for ``https_proxy``."""
    where = "--proxy"
    if proxy == "environment":
        where, proxy = "https_proxy", os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY")
        if proxy is None:
            raise ConfigError("--proxy is environment, and https_proxy is not set; set it, or give the proxy's URL")
    try:
        way = None if proxy is None else urlsplit(proxy)
        good = way is None or (way.scheme == "http" and bool(way.hostname) and (way.port or 80) > 0)
        good = good and re.search(r"[\s'\"]", proxy or "") is None
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{where} is {re.sub('.*@', '…@', str(proxy), flags=re.DOTALL)!r}; it must be an HTTP proxy's URL, such as "
            "http://proxy.example.org:3128, with spaces, quotes and :/?#[]@ in a password as %-codes"
        )
    return proxy


def check_free(address: str, option: str) -> None:
    """Refuse an address at which no server can listen, and which ``option`` gave."""
    host, port = split_address(address, option)
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(place, family=family, dualstack_ipv6=host == "::").close()
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while attempting")[0].lower()
        advice = (
            "choose another port" if option != "--server" else "give an address of this machine with --bind, or free it"
        )
        raise ConfigError(f"the server cannot listen at {address}: {why}; {advice}") from error


# ---------------------------------------------------------------------- folders


@contextmanager
def sole_user(folder: Path, option: str) -> Iterator[None]:
    """Lock a folder that ``option`` gave, for this process, and make it readable for the user alone.

    The folder is created if missing. The operating system releases the lock when the process ends, however it ends.
    """
    writer = folder / ".user"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = FileLock(folder / ".lock", timeout=0, mode=0o600)
        lock.acquire()
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        writer.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}", encoding="utf-8")
    except Timeout:
        raise ConfigError(
            f"{option} {folder} is used by {_holder(writer)}; stop that process, or name another folder"
        ) from None
    except OSError as error:
        raise ConfigError(f"{option} {folder} is not writable ({error.strerror}); name another folder") from error
    try:
        yield
    finally:
        writer.unlink(missing_ok=True)
        lock.release()


def _holder(writer: Path) -> str:
    try:
        return writer.read_text(encoding="utf-8")[:200] or "another program"
    except (OSError, UnicodeDecodeError):  # it holds the lock and has not written the file yet
        return "another program"


def keep_private() -> None:
    """Make files that this process creates from now on readable for the user alone."""
    os.umask(0o077)


# ---------------------------------------------------------------------- log lines


class Alert(str):
    """A line that an operator should see: of level WARNING, where others are of level INFO."""


def next_line(lasted: float) -> float:
    """Return when a line about an outage is due again: a minute later, then at doubled intervals of up to four hours.

    Args:
        lasted: How long the outage has lasted, seconds.
    """
    return lasted + min(max(lasted, 60.0), 14_400.0)


class Wait:
    """A wait that begins now, about which a line is printed after 5 s, then at the intervals of `next_line`.

    Args:
        say: Prints a line.
        most: The longest wait, seconds.
    """

    def __init__(self, say: Callable[[str], object], most: float) -> None:
        self.say, self.most = say, most
        self._begun, self._next = time.monotonic(), _FIRST_LINE_S

    def go_on(self, awaited: str) -> None:
        """Print what is still awaited, if a line is due; cheap to call at any rate."""
        lasted = time.monotonic() - self._begun
        if lasted >= self._next:
            self._next = next_line(lasted)
            self.say(f"waiting for {awaited}: {lasted:.0f} s of at most {self.most:g} s")


def log_line(line: str) -> None:
    """Print ``<date> <time> <level> <text>``, a line of a server's or node's log, at once for a service manager too."""
    level = "WARNING" if isinstance(line, Alert) else "INFO"
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {level} {line}", flush=True)
