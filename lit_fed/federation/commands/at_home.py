"""``lit-fed predict``, ``test`` and ``validate`` with ``--state_dir``: the models of a node's clients, on the node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.table import Table
from rich.text import Text

from lit_fed.callbacks.progress import plain_console
from lit_fed.command.command import Call
from lit_fed.command.reading.own import add_clients, add_overwrite, chosen
from lit_fed.command.table import asked
from lit_fed.data.population.naming import called
from lit_fed.engine.evaluation.prediction import check_output
from lit_fed.engine.evaluation.protocols import EvalSubset
from lit_fed.errors import ConfigError
from lit_fed.federation.commands.deployed import add_run, make
from lit_fed.federation.node.home import Home


@dataclass(frozen=True)
class _Options:
    """Options of the commands on a node.

    Args:
        state_dir: folder that the node was started with
        output: file of predictions: .csv, .npz or, of poses, .json
        inputs: file or folder to predict on instead of the test data
    """

    state_dir: str
    output: str = "predictions.csv"
    inputs: str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, of clients, and the node's folder."""
    add_run(parser)
    add_clients(parser, "clients, by default all of this node")
    parser.add_class_arguments(_Options, as_group=False)
    add_overwrite(parser, "an existing file of predictions")


def run(call: Call) -> int:
    """Predict, test or validate, by the command's name."""
    settings, name = call.settings, asked(call.words)
    if name == "predict":
        check_output(Path(settings.output), settings.overwrite)
    trainer, parts = make(call)
    home = Home(trainer, *parts, chosen(parts.data, settings), Path(settings.state_dir) / "states", name)
    origin = f"of run {home.end.run_id} after round {home.end.round_idx}, as {settings.state_dir} keeps it"
    if name == "predict":
        output = Path(settings.output)
        if len(home.clients) > 1:
            there = ", ".join(called(parts.data, client_id) for client_id in home.clients)
            raise ConfigError(
                f"--output {output} holds the predictions of one client; name one of {there} with --client"
            )
        home.predict(home.clients[0], output, None if settings.inputs is None else Path(settings.inputs))
    else:
        subset: EvalSubset = "val" if name == "validate" else "test"
        _print({called(parts.data, client_id): row for client_id, row in sorted(home.evaluate(subset).items())}, subset)
    print(f"model      {origin}")
    return 0


def _print(found: dict[str, dict[str, float]], subset: EvalSubset) -> None:
    """Print a row per client, a column per metric."""
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    if not names:
        raise ConfigError(
            f"trainer.protocols has no protocol that asks these clients on the {subset} data; add ClientTest"
        )
    table = Table("client", *names)
    for client, row in found.items():
        table.add_row(Text(client), *(f"{row[name]:.6g}" if name in row else "" for name in names))
    plain_console(max(100, 30 * len(names))).print(table)
