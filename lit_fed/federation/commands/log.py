"""``lit-fed log``: check the audit log of a server or a node, and print it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_fed.command.command import Call
from lit_fed.engine.storage.chain import ChainReading
from lit_fed.errors import ConfigError
from lit_fed.federation.audit import NAME

_NARROW = ("at", "event", "round", "epsilon")
_COLUMNS = ("at", "event", "round", "clients", "asked", "left", "epsilon", "refused")
_LINKS = ("previous", "torn", "forgotten")
_TIME = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9]( [0-2][0-9]:[0-5][0-9](:[0-5][0-9])?)?")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", type=Path, help="folder of the log: lightning_logs/audit, or audit in --state_dir")
    parser.add_argument("--noted", type=str | None, help="SHA-256 of a line, noted elsewhere, that must be in the log")
    parser.add_argument("--since", type=str | None, help="first time to print, in UTC, such as 2026-11-29 04:30")


def run(call: Call) -> int:
    """Print a row a decision, without a terminal as values between tabs; then name the lines that were changed."""
    path, noted, since = call.settings.folder / NAME, call.settings.noted, call.settings.since or ""
    if since and not _TIME.fullmatch(since):
        raise ConfigError(f"--since is {since!r}; it must be a time in UTC, such as '2026-11-29 04:30'")
    reading = ChainReading(path)
    lines = dict(reading)
    if not reading.files:
        raise ConfigError(f"there is no {path}; name the folder of a log, such as state/audit")
    answered = {_round_of(line) for line in lines.values() if line.get("event") == "answered"}
    rows = [line for line in lines.values() if line.get("event") != "asked" or _round_of(line) not in answered]
    rows = [line for line in rows if str(line.get("at")) >= since]
    table, console = Table(), Console()
    columns = [name for name in _COLUMNS if not console.is_terminal or any(line.get(name) for line in rows)]
    cells = [[*(_cell(line.get(name)) for name in columns), _rest(line)] for line in rows]
    for name in (*columns, "more"):
        table.add_column(name, no_wrap=name in _NARROW, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    if console.is_terminal:
        console.print(table)
    else:
        print(*("\t".join(row) for row in ([*columns, "more"], *cells)), sep="\n")
    for where in reading.torn:
        print(f"torn        {where}: a kill or a loss of power cut the line off")
    print(f"last line   {reading.last}; note it elsewhere, and give it to --noted later")
    if noted is not None and noted not in lines:
        reading.faults.append(
            f"no line has the SHA-256 {noted}; it is mistyped, or the log was cut off or written anew"
        )
    if reading.faults:
        more = f", and {len(reading.faults) - 1} more" if reading.faults[1:] else ""
        raise ConfigError(f"{path} was changed: {reading.faults[0]}{more}")
    return 0


def _round_of(line: dict[str, Any]) -> str:
    return f"{line.get('run')} {line.get('round')}"


def _rest(line: dict[str, Any]) -> str:
    others = [key for key in line if key not in (*_COLUMNS, *_LINKS) and line[key] is not None]
    return "; ".join(f"{_cell(key)}: {_cell(line[key])}" for key in others)


def _cell(value: Any) -> str:
    """A value in printable words; a changed line may hold anything."""
    if isinstance(value, dict):
        value = [f"{name} ({count})" for name, count in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
