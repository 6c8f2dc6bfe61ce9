"""Commands of the record of a run."""

from __future__ import annotations

from lit_fed.command.command import Command

_ROOM = "lit_fed.record.commands"
COMMANDS = {
    "verify": Command(
        "Check a run's files by its record, and run its rounds again.", f"{_ROOM}.verify", own_files=True
    ),
    "card": Command("Write a page about a run: settings, data, results, hashes.", f"{_ROOM}.card", own_files=True),
    "forget": Command("Run a run again without some of its clients.", f"{_ROOM}.forget", own_files=True),
}
