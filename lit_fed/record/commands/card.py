"""``lit-fed card RUN``: write one page about a run, which follows from the files that its record names."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.storage.files import write_text
from lit_fed.handover.card import facts_of, run_sections, table
from lit_fed.record.check import Check
from lit_fed.record.lines import NAME

FILE = "card.md"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, help="folder of a run with record.jsonl")


def run(call: Call) -> int:
    """Write the page into the run's folder; an older one is replaced."""
    check = Check(call.settings.run)
    write_text([card_of(check)], check.folder / FILE)
    print(f"written     {check.folder / FILE}")
    return 0


def card_of(check: Check) -> str:
    """The page of a run after its newest checkpoint, in Markdown.

    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    path = check.folder / "checkpoints" / "last.ckpt"
    facts, start = facts_of(read_checkpoint(path), path), check.starts[-1]["facts"]
    models = check.rounds.get(facts.rounds - 1, {}).get("global", {})
    hashes = {"configuration": sha256(start["config"].encode()).hexdigest()}
    hashes |= {f"global model, {kind}": found for kind, found in models.items()} | {f"end of {NAME}": check.last}
    lines = [f"# A run of {facts.method} on {facts.data[0]}", ""]
    lines += run_sections(replace(facts, versions=start["versions"] | start["machine"]))
    lines += ["## Hashes", "", f"`lit-fed verify` compares these SHA-256 and this page with `{NAME}`.", ""]
    return "\n".join([*lines, *table(hashes), ""])
