"""``lit-fed submit``, ``runs`` and ``stop``: the queue of a server that was started with ``federate --queue``."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import keep_private
from lit_fed.federation.server.queue import runs, submit


def add_arguments(parser: ArgumentParser) -> None:
    """Add the queue's folder, and what is submitted or stopped."""
    parser.add_argument("what", nargs="?", type=str, help="configuration file to submit, or run to stop")
    parser.add_argument("--queue", type=str, default="queue", help="folder of the queue, as of lit-fed federate")


def run(call: Call) -> int:
    """Act on the folder, whether a server takes runs from it or not."""
    name, what, folder = call.words[0], call.settings.what, Path(call.settings.queue)
    known = {run.folder.name: run for run in runs(folder)}
    keep_private()
    if name == "runs":
        for one in known.values():
            print(f"{one.folder.name}  {one.hash[:16]}  {' '.join(one.state)}")
    elif what is None:
        needed = "a configuration file; name one" if name == "submit" else "a run; see lit-fed runs"
        raise ConfigError(f"lit-fed {name} needs {needed}")
    elif name == "submit":
        if not Path(what).is_file():
            raise ConfigError(f"lit-fed submit: {what} is not a file; correct the path")
        made = submit(folder, Path(what))
        print(f"{made.folder.name} is queued, with configuration {made.hash}")
    else:
        if what not in known:
            raise ConfigError(f"--queue {folder} has no run {what!r}; see lit-fed runs")
        known[what].stop()
    return 0
