"""A federation's ends as programs: their addresses, their folders, the signals that end them."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from lit_fed.errors import ConfigError

_ANYWHERE = ("0.0.0.0", "::")


def check_installed() -> None:
    """Refuse to begin without flwr.

    Raises:
        ConfigError: If it is not installed.
    """
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError(
            "a federation over several machines needs flwr, which is not installed; "
            "pip install -c requirements/flower.txt 'lit-fed[flower]'"
        )


# ---------------------------------------------------------------------- addresses


def split_address(address: str, option: str = "--superlink") -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: If it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{option} is {address!r}; it must be a host and a port, such as 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address never leaves this machine."""
    host = split_address(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")


def check_public(address: str) -> None:
    """Refuse an address by which no node can reach the server.

    Raises:
        ConfigError: If it stands for every address of a machine.
    """
    if split_address(address)[0] in _ANYWHERE:
        raise ConfigError(
            f"--superlink {address} is no address that a node can reach: give the name or address by which nodes know "
            f"the server, and --bind {address} to listen everywhere"
        )


def listen(address: str, option: str) -> socket.socket:
    """Listen at an address.

    Args:
        address: Host and port.
        option: Where it was given.

    Raises:
        ConfigError: If somebody else does, or it is not of this machine.
    """
    host, port = split_address(address, option)
    try:
        family, kind, proto, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        door = socket.socket(family, kind, proto)  # asyncio sends small answers at once only where this is TCP by name
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "::":
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            door.bind(place)
            door.listen(1024)
        except OSError:
            door.close()
            raise
        return door
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        advice = (
            "choose another port" if option == "--bind" else "give an address of this machine by --bind, or free it"
        )
        raise ConfigError(f"the server cannot listen at {address}: {why}; {advice}") from error


# ---------------------------------------------------------------------- folders


@contextmanager
def sole_user(folder: Path, option: str) -> Iterator[None]:
    """Hold a folder that one program at a time may use, and that its user alone may read.

    The system frees the lock when its holder ends, however it ends.

    Args:
        folder: The folder; it is made where there is none.
        option: Where it was given.

    Raises:
        ConfigError: If another program holds it, or it cannot be written to.
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
            f"{option} {folder} is used by {_holder(writer)}; end that one, or name a folder of its own"
        ) from None
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be written to: {error.strerror}; name another") from error
    try:
        yield
    finally:
        writer.unlink(missing_ok=True)
        lock.release()


def _holder(writer: Path) -> str:
    try:
        return writer.read_text(encoding="utf-8")[:200] or "another program"
    except (OSError, UnicodeDecodeError):  # it has only just taken the lock
        return "another program"


def keep_private() -> None:
    """Let nobody but this program's user read what it writes from now on: states, checkpoints and logs."""
    os.umask(0o077)


# ---------------------------------------------------------------------- signals


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does, so that it takes its leave."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, _interrupt) for one in wanted]
    try:
        yield
    finally:
        for one, handler in zip(wanted, before, strict=True):
            signal.signal(one, handler)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does; SIGINT itself is ignored where a shell started this program in the background."""
    raise KeyboardInterrupt
