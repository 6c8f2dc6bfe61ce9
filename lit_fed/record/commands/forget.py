"""``lit-fed forget RUN --client NAME``: the run again, as if some clients had been lost in every round."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import ArgumentParser
from typing_extensions import override

from lit_fed.command.command import Call
from lit_fed.command.federated_cli import FederatedCLI
from lit_fed.command.reading.own import KEYS, add_clients, chosen
from lit_fed.command.reading.parts import build_parts, set_seed
from lit_fed.data.population.naming import called
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.loop.run import Run
from lit_fed.errors import ConfigError
from lit_fed.record.check import Check
from lit_fed.record.forget import Forgotten, beginning, obstacle
from lit_fed.record.lines import differences, facts_of
from lit_fed.trainer import FederatedTrainer
from lit_fed.yaml_text import read_yaml

_FORGOTTEN = f"{Forgotten.__module__}.{Forgotten.__name__}"
_MACHINE = ("machine", "versions")
_NODES = "Identity"  # a callback whose state only a federation's server has
_QUIET = {"devices": "1", "num_nodes": "1", "logger": "false", "enable_progress_bar": "false", "record": "false"}


class Joined(FederatedCLI):
    """A command line of ``fit`` whose parts are joined, and not trained.

    Attributes:
        run: The run.
    """

    @override
    def _run(self) -> None:
        settings, parser = self.config["fit"], self._parser("fit")
        set_seed(settings.trainer)
        parts, rest = build_parts(parser, settings)
        self.trainer = FederatedTrainer(**rest.trainer)
        self.run = self.trainer.assemble(parts.model, parts.data, parts.algorithm, "fit")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, help="folder of a run with record.jsonl")
    add_clients(parser, "clients to forget")


def run(call: Call) -> int:
    """Print what it costs, and run the rounds that depend on the clients again, in a new folder."""
    folder = Path(call.settings.run)
    check = Check(folder)
    if odd := next(check.run(), None):
        raise ConfigError(f"{folder} is not what its record says: {odd}; see lit-fed verify")
    text = _text(check)
    settings: dict[str, Any] = read_yaml(text)
    with TemporaryDirectory(prefix="lit-fed-") as made:
        file = Path(made) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        words = ["fit", "-c", str(file)]
        whole = _joined(words)
        clients = chosen(whole.federation.data, call.settings)
        if clients is None:
            raise ConfigError(f"{KEYS.name} is missing; name a client to forget")
        if (why := obstacle(whole, settings)) is not None:
            raise ConfigError(f"{folder} cannot forget a client exactly: {why}")
        old, here = check.starts[-1]["facts"], facts_of(whole)
        if old["data"] != here["data"]:
            raise ConfigError(f"the data are not those of {folder}, by the hashes of its record; restore them")
        words += _without(settings, clients, check)
        begin = beginning(check, whole, _joined(words), clients, settings)
        names = ", ".join(called(whole.federation.data, client_id) for client_id in clients)
        del whole
        if begin.round_idx > max(check.rounds):
            print(f"equal       {folder} depends on no sample of {names}")
            return 0
        round_idx, path = _checkpoint(check, begin.round_idx)
        for line in differences({key: old[key] for key in _MACHINE}, {key: here[key] for key in _MACHINE}):
            print(f"note        {line}, so that results may be rounded differently")
        last = settings["trainer"]["max_rounds"] - 1
        print(f"forget      {names}: the first round that depends on it is {begin.round_idx}, as {begin.why}")
        print(f"run again   rounds {round_idx} to {last}, from {path or 'the start'}")
        print(f"not undone  {folder}, and what was handed out or computed from it: remove these yourself")
        _fit([*words, *(["--ckpt_path", path] if path else [])])
    return 0


def _fit(words: list[str]) -> None:
    """Train by a command line, which is repeated where ``trainer.devices`` starts further processes."""
    before = sys.argv[1:]
    sys.argv[1:] = words
    try:
        FederatedCLI(words)
    finally:
        sys.argv[1:] = before


def _text(check: Check) -> str:
    """The configuration of a run's last rounds; refuse a run that no command repeats."""
    advice = "train anew with participation.absent"
    if not check.rounds:
        raise ConfigError(f"{check.folder} has no round to run again; {advice}")
    last, text = check.folder / "checkpoints" / "last.ckpt", check.starts[-1]["facts"]["config"]
    if not text:
        raise ConfigError(f"{check.folder} was started from Python, so that its settings are unknown; {advice}")
    if check.starts[0]["round"]:
        raise ConfigError(f"{check.folder} has a record from round {check.starts[0]['round']} on only; {advice}")
    if last.is_file() and _NODES in read_checkpoint(last)["callbacks"]:
        raise ConfigError(
            f"{check.folder} is of a federation on nodes, which only they repeat; start lit-fed federate with "
            "participation.absent by hand, and lit-fed clean on the client's node"
        )
    return str(text)


def _joined(words: list[str]) -> Run:
    """A run of a command line, without its files and on one process."""
    quiet = [word for key, value in _QUIET.items() for word in (f"--trainer.{key}", value)]
    with redirect_stdout(io.StringIO()):
        return Joined([*words, *quiet]).run


def _without(settings: dict[str, Any], clients: Sequence[int], check: Check) -> list[str]:
    """Words that make clients absent, and a new run beside the old one, which it names."""
    folder, participation = check.folder.resolve(), settings["trainer"]["participation"]
    words = [] if participation else ["--trainer.participation", "FullParticipation"]
    absent = {*(((participation or {}).get("init_args") or {}).get("absent_positions") or ()), *clients}
    words += ["--trainer.participation.absent_positions", str(sorted(absent))]
    names = f"{{run: {folder.name}, record: {check.last}}}"
    words += ["--trainer.callbacks+", f"{{class_path: {_FORGOTTEN}, init_args: {names}}}"]
    if folder.parent.name == "lightning_logs":
        words += ["--trainer.default_root_dir", str(folder.parents[1])]
    return words


def _checkpoint(check: Check, most: int) -> tuple[int, str]:
    """The newest kept checkpoint after at most so many rounds, and its rounds; from the start without one."""
    found = [(0, "")]
    for path in (check.folder / "checkpoints").glob("*.ckpt"):
        rounds = read_checkpoint(path)["round_idx"]
        found += [(rounds, str(path))] if 0 < rounds <= most and path.stem != "last" else []
    begin, newest = max(found)
    configs = [(start["round"], start["facts"]["config"]) for start in check.starts]
    for (_, before), (changed, after) in pairwise(configs):
        if changed > begin and after != before and after.count(_FORGOTTEN) == before.count(_FORGOTTEN):
            raise ConfigError(
                f"{check.folder} has other settings from round {changed} on, after the checkpoint to begin with;"
                " run it and resume it by hand with participation.absent"
            )
    return begin, newest
