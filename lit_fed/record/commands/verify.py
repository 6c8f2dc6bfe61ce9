"""``lit-fed verify RUN``: check a run's files by its record, and run its rounds again."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.checks import check_range
from lit_fed.command.command import Call
from lit_fed.command.federated_cli import FederatedCLI
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.errors import ConfigError
from lit_fed.federation.keys.statements import read_certificates
from lit_fed.record.check import Check
from lit_fed.record.commands.card import card_faults
from lit_fed.record.lines import differences, leaves
from lit_fed.record.signed import Authorities, Signatures, SiteReceipts
from lit_fed.yaml_text import read_yaml

_ALONE = {
    "devices": "1", "num_nodes": "1", "record": "true", "logger": "false", "enable_progress_bar": "false",
    "enable_checkpointing": "true", "max_time": "null",
}  # fmt: skip
_BELIEVED = ", by the certificates beside them, which --ca would check"
_FACTS = ("machine", "versions", "data")
_COMPARED = ("broadcast", "cohort", "updates", "server", "global", "metrics")


@dataclass(frozen=True)
class _Options:
    """Options of a check.

    Args:
        rounds: rounds to run again on the data, from 0: 3, 2-5 or all
        against: another machine's checkpoint of the same run, to compare with
        within: with --rounds or --against, compare numbers of checkpoints, which may differ by so much, and not bits
        receipts: a site's receipts.jsonl, to check by the record, or alone without a run
        ca: certificate of the authority that issued the certificates of a federation
    """

    rounds: str | None = None
    against: Path | None = None
    within: float | None = None
    receipts: Path | None = None
    ca: Path | None = None


class Until(Callback):
    """Ends a run after a round.

    Args:
        last: The round.
    """

    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """End the run."""
        run.should_stop = run.should_stop or record.round_idx == self.last


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run with record.jsonl, or this file alone")
    parser.add_class_arguments(_Options, as_group=False)


def run(call: Call) -> int:
    """Print what was found.

    Returns:
        The exit status: 1 if anything differs.
    """
    options = call.settings
    check_range("--within", options.within, least=0, null="for equal bits")
    on_data = options.rounds is not None or options.against is not None
    if on_data and (options.run is None or options.run.is_file()):
        raise ConfigError("--rounds and --against are without the folder of a run; give it")
    authorities = None if options.ca is None else read_certificates("--ca", options.ca)
    if options.run is None:
        found = _receipts(options.receipts, None, authorities)
    else:
        check = Check(options.run)
        found = _without_data(check, options.receipts, authorities)
    if not found and options.against is not None:
        content = read_checkpoint(options.against)
        if content["round_idx"] - 1 not in check.rounds:
            raise ConfigError(
                f"--against {options.against} is of round {content['round_idx'] - 1}, which is not recorded"
            )
        odd = [f"round {content['round_idx'] - 1}: {one}" for one in check.unlike(content)]
        found += _judged(check, content, odd, options.within, str(options.against))
    if not found and options.rounds is not None:
        found += _again(check, *_rounds(options.rounds, check), options.within)
    for line in found:
        print(f"differs     {line}")
    return int(bool(found))


def _without_data(check: Check, receipts: Path | None, authorities: Authorities) -> list[str]:
    """What is wrong with a record, the run's files, signatures, the page and a site's receipts."""
    signatures = Signatures(check, authorities)
    found = [*check.run(), *signatures.faults()]
    found += [] if found or check.is_alone else card_faults(check, authorities)
    if not found:
        print(f"whole       {len(check.rounds)} rounds; SHA-256 of the last line {check.last}")
        if signatures.count or authorities is not None:
            print(f"signed      {signatures.count} statements of nodes{_BELIEVED * (authorities is None)}")
    return found if found or receipts is None else _receipts(receipts, signatures, authorities)


def _receipts(path: Path | None, record: Signatures | None, authorities: Authorities) -> list[str]:
    """What is wrong with a site's receipts."""
    if path is None:
        raise ConfigError("the folder of a run is missing; give it, or --receipts alone")
    site = SiteReceipts(path, authorities)
    if not (found := list(site.faults(record))):
        print(f"whole       {len(site.receipts)} receipts in {path}{_BELIEVED * (authorities is None)}")
    return found


def _rounds(text: str, check: Check) -> tuple[int, int]:
    least, most = min(check.rounds, default=0), max(check.rounds, default=0)
    match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", f"{least}-{most}" if text == "all" else text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not least <= first <= last <= most:
        raise ConfigError(f"--rounds is {text}; the record has {least}-{most}: give one, a range, or all")
    return first, last


def _judged(check: Check, content: dict[str, Any], odd: list[str], within: float | None, name: str) -> list[str]:
    """What differs, by numbers too where the run keeps a checkpoint of the same round."""
    if not odd:
        print(f"equal       {name}")
        return []
    own = next((one for _, one in _kept(check) if one["round_idx"] == content["round_idx"]), None)
    most, tensor = (math.inf, "") if own is None else _largest(own["server"], content["server"])
    if most <= (-1.0 if within is None else within):
        print(f"within      {name}: the bits differ, and no number of the server by more than {most:.3g}")
        return []
    least = "no checkpoint of it is kept" if own is None else f"most in {tensor} of the server, by {most:.3g}"
    kinds = {one.partition(".")[0]: one for one in reversed(odd)}  # the first of each round and field
    return [f"{name}: {'; '.join([*kinds.values()][:-4:-1])}; after round {content['round_idx'] - 1}, {least}"]


def _kept(check: Check) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted((check.folder / "checkpoints").glob("*.ckpt")):
        yield path, read_checkpoint(path)


def _largest(one: Any, other: Any) -> tuple[float, str]:
    """The largest absolute difference of a tensor's numbers, and the tensor's name."""
    there, found = dict(leaves(other)), [(0.0, "")]
    for name, tensor in leaves(one):
        if isinstance(tensor, Tensor) and tensor.numel():
            theirs, moved = there.get(name), torch.tensor(math.inf)
            if isinstance(theirs, Tensor) and theirs.shape == tensor.shape:
                moved = (tensor.double() - theirs.double()).abs().nan_to_num(math.inf).max()
            found.append((float(moved), name))
    return max(found)


def _again(check: Check, first: int, last: int, within: float | None) -> list[str]:
    """Run rounds again, from the newest checkpoint before them or from the start, and compare every line."""
    kept = [(one["round_idx"], str(path)) for path, one in _kept(check) if path.stem != "last" and one["round_idx"]]
    begin, path = max((one for one in kept if one[0] <= first), default=(0, ""))
    if begin < check.starts[0]["round"]:
        raise ConfigError(f"--rounds is {first}-{last}, and the run keeps no checkpoint from before them to begin with")
    where = f"rounds {first} to {last}, run again from {path or 'the start'}"
    with TemporaryDirectory(prefix="lit-fed-") as folder:
        ends = [*(start["round"] - 1 for start in check.starts[1:]), last]
        for start, end in zip(check.starts, ends, strict=True):
            if begin <= end and start["round"] <= last:
                _run(start["facts"], Path(folder), min(end, last), path)
                path = "last"
        there = Check(Path(folder) / "lightning_logs" / "version_0")
        content = read_checkpoint(there.folder / "checkpoints" / "last.ckpt")
    facts, here = ({key: one.starts[-1]["facts"][key] for key in _FACTS} for one in (check, there))
    for line in differences(facts, here):
        print(f"note        {line}, so that results may be rounded differently")
    odd = []
    for round_idx in range(begin, last + 1):
        told, now = ({key: one.rounds.get(round_idx, {}).get(key) for key in _COMPARED} for one in (check, there))
        odd += [f"round {round_idx}: {one}" for one in differences(told, now, bits=False)]
    return _judged(check, content, odd, within, where)


def _run(facts: dict[str, Any], folder: Path, last: int, ckpt_path: str) -> None:
    """Run the rounds of recorded settings up to a last one, in a folder of its own, with as many threads."""
    config = facts["config"]
    privacy = ((read_yaml(config) or {}).get("trainer", {}).get("privacy") or {}).get("init_args") or {}
    if not config or privacy.get("key_file"):
        why = "another outcome would be another release" if config else "the run was started from Python"
        raise ConfigError(f"its rounds are not run again: {why}; leave --rounds out")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    until = f"{{class_path: {Until.__module__}.Until, init_args: {{last: {last}}}}}"
    words = [word for key, value in _ALONE.items() for word in (f"--trainer.{key}", value)]
    words += ["--trainer.default_root_dir", str(folder), "--trainer.callbacks+", until]
    words += ["--trainer.num_threads", str(facts["machine"]["threads"])]
    with redirect_stdout(io.StringIO()):
        FederatedCLI(
            ["fit", "-c", str(folder / "config.yaml"), *words, *(["--ckpt_path", ckpt_path] if ckpt_path else [])]
        )
