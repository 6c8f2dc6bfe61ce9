"""Commands of a federation over machines."""

from __future__ import annotations

from lit_fed.command.command import Command


def _own(name: str) -> str:
    return f"lit_fed.federation.commands.{name}"


COMMANDS = {
    "node": Command(
        "Serve some clients of a federation, where their data are.", _own("node"), serves=True, admits=True
    ),
    "federate": Command("Train a federation whose clients live on nodes.", _own("federate"), serves=True),
    "provision": Command(
        "Write certificates, keys and a folder for each end of a federation.", _own("provision"), own_files=True
    ),
    "split": Command("Write a data set as one folder per client, to try a federation out.", _own("split")),
    "clean": Command("List and remove the folders of runs that a node holds.", _own("clean"), own_files=True),
    "statistics": Command("Count and describe a federation's data, before any training.", _own("statistics")),
    "log": Command("Check the audit log of a server or a node, and print it.", _own("log"), own_files=True, light=True),
    "submit": Command("Append a run to the queue of a server.", _own("queued"), own_files=True, light=True),
    "runs": Command("List the runs of a queue, and why one failed.", _own("queued"), own_files=True, light=True),
    "stop": Command("Stop a run of a queue.", _own("queued"), own_files=True, light=True),
}
AT_HOME = dict.fromkeys(("validate", "test", "predict"), _own("at_home"))
"""Modules that run a command of the trainer with a node's folder, ``--state_dir``, instead of a checkpoint."""
