"""``lit-fed submit``, ``runs`` and ``stop``: the queue of a server that was started with ``federate --queue``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lit_fed.command.command import Call
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import keep_private, proxy_of
from lit_fed.federation.keys.passphrase import read_passphrase
from lit_fed.federation.messages.operating import MOST_CONFIG, QueueRequest, pack, unpack
from lit_fed.federation.server.queue import act, check

_OPTIONS = {
    "queue": "folder of the queue, as of lit-fed federate; by default queue",
    "server": "address of a server elsewhere, in place of the folder",
    "ca": "certificate of the authority, for TLS",
    "certificate": "the operator's certificate, for TLS",
    "key": "private key of the operator's certificate",
    "key_passphrase_file": "file with the passphrase of an encrypted key",
    "proxy": "URL of an HTTP proxy, or environment for that of https_proxy",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what is submitted or stopped, and the queue's folder or server."""
    parser.add_argument("what", nargs="?", type=str, help="configuration file to submit, or run to stop")
    for name, what in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=str | None, help=what)


def run(call: Call) -> int:
    """Act on the folder, whether a server takes runs from it or not, or ask the server."""
    settings = call.settings
    is_here = settings.server is None
    odd = [name for name in _OPTIONS if settings[name] is not None and (name != "queue") == is_here]
    if odd:
        raise ConfigError(f"--{odd[0]} is given {'without' if is_here else 'with'} --server; correct one of them")
    keep_private()
    request = _request(call.words[0], settings.what)
    for line in act(Path(settings.queue or "queue"), request) if is_here else _ask(settings, request):
        print(line)
    return 0


def _request(verb: Any, what: str | None) -> QueueRequest:
    if verb == "runs":
        return QueueRequest(verb)
    if what is None:
        needed = "a configuration file; name one" if verb == "submit" else "a run; see lit-fed runs"
        raise ConfigError(f"lit-fed {verb} needs {needed}")
    if verb == "stop":
        return QueueRequest(verb, what)
    if not Path(what).is_file():
        raise ConfigError(f"lit-fed submit: {what} is not a file; correct the path")
    with open(what, "rb") as file:
        return QueueRequest(verb, Path(what).stem, file.read(MOST_CONFIG + 1))


def _ask(settings: Namespace, request: QueueRequest) -> list[str]:
    from lit_fed.federation.messages.wire import shown
    from lit_fed.federation.transport.operating import ask  # with gRPC and PyTorch
    from lit_fed.federation.transport.security import Security

    if request.verb == "submit":
        check(request, by="an operator")
    passphrase, proxy = read_passphrase(settings.key_passphrase_file), proxy_of(settings.proxy)
    security = Security(settings.ca, settings.certificate, settings.key, passphrase)
    return [shown(line, 1000) for line in unpack(ask(settings.server, security, pack(request), proxy), list[str])]
