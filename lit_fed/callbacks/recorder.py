"""The run's record in plain files: ``config.yaml``, ``partition.json``, ``metrics.csv``, ``clients.csv``."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lit_fed.callbacks.dashboard import flatten
from lit_fed.engine.callback import Callback, RoundRecord

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.run import Run

_CLIENT_COLUMNS = ("round", "client_id", "stage", "metric", "value")


class Recorder(Callback):
    """Writes the files of a run's folder; every round is on disk before its checkpoint is.

    ``metrics.csv`` has one row a round; a metric that is not evaluated every round leaves its cell empty.
    ``clients.csv`` has one row a client, stage and metric. After a resume, rows of rounds that will be run again are
    removed, so no round is missing or there twice.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []

    def on_fit_start(self, run: Run) -> None:
        """Write what is known before the first round, or cut the files back to the checkpoint."""
        if not run.fabric.is_global_zero:
            return
        folder = run.log_dir
        if run.resumed_from is not None and run.resumed_from != folder:
            for name in ("metrics.csv", "clients.csv"):
                if (run.resumed_from / name).is_file():
                    shutil.copyfile(run.resumed_from / name, folder / name)
        self._columns = _cut(folder / "metrics.csv", ["round"], run.start_round)
        _cut(folder / "clients.csv", list(_CLIENT_COLUMNS), run.start_round)
        if run.settings.config:
            self._write_config(run, folder / "config.yaml")
        if not (folder / "partition.json").is_file():
            _write(folder / "partition.json", _partition(run.federation.data))

    def _write_config(self, run: Run, path: Path) -> None:
        """Write the configuration; where a resumed run has another than before, keep both and say what changed."""
        before = path.read_text() if run.start_round and path.is_file() else run.settings.config
        old, new = flatten(yaml.safe_load(before)), flatten(yaml.safe_load(run.settings.config))
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if changed:
            path.replace(path.with_name(f"config.until_round_{run.start_round - 1}.yaml"))
            run.fabric.print(f"resumed with other settings from round {run.start_round} on: {', '.join(changed)}")
        _write(path, [run.settings.config])

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Append the round."""
        if not run.fabric.is_global_zero:
            return
        metrics, clients = run.log_dir / "metrics.csv", run.log_dir / "clients.csv"
        if new := [name for name in record.metrics if name not in self._columns]:
            self._columns += new
            _rewrite(metrics, self._columns, list(_rows(metrics)))
        _append(metrics, [[record.round_idx, *(record.metrics.get(name, "") for name in self._columns[1:])]])
        _append(clients, ([record.round_idx, r.client_id, r.stage, r.metric, r.value] for r in record.rows))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """The complete rows of a CSV file; a line that a killed process left unfinished is none."""
    if not path.is_file():
        return
    with open(path, newline="") as file:
        for row in csv.DictReader(line for line in file if line.endswith("\n")):
            if row.get("round", "").isdigit() and None not in row.values():
                yield row


def _cut(path: Path, columns: list[str], start_round: int) -> list[str]:
    """Keep the rows before a round; returns the columns."""
    if path.is_file():
        with open(path, newline="") as file:
            columns = next(csv.reader(file), columns)
    _rewrite(path, columns, (row for row in _rows(path) if int(row["round"]) < start_round))
    return columns


def _rewrite(path: Path, columns: Sequence[str], rows: Iterable[dict[str, str]]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def _append(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _partition(data: FederatedDataModule) -> Iterator[str]:
    """The partition as JSON, a client at a time: the text of a large population need not fit into memory."""
    yield f'{{"sha256": {json.dumps(data.partition_sha256())}, "clients": {{'
    for position, (client_id, row) in enumerate(data.partition_rows()):
        yield f'{"," if position else ""}\n"{client_id}": {json.dumps(row)}'
    yield "\n}}\n"


def _write(path: Path, parts: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.writelines(parts)
    temporary.replace(path)
