"""The run's record in plain files: ``config.yaml``, ``partition.json``, ``metrics.csv``, ``clients.csv``."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from lit_fed.callbacks.boards import flatten
from lit_fed.data import FederatedDataModule
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.engine.storage.files import cannot_write, unreadable_named, write_text
from lit_fed.errors import CheckpointError
from lit_fed.yaml_text import read_yaml

_CLIENT_COLUMNS = ["round", "client_id", "stage", "metric", "value"]
_UNTIL = re.compile(r"config\.until_round_([0-9]{1,9})\.yaml")
Line = tuple[int, list[str]]  # the round, and all cells


class Recorder(Callback):
    """Writes the files of a run's folder; a round is on disk before its checkpoint.

    ``metrics.csv`` has one row per round, with empty cells for metrics that the round did not evaluate. ``clients.csv``
    has one row per client, stage and metric; the last column holds the clients' names, if any. A resume removes rows of
    rounds that run again, so that each round appears once. Unreadable files are never rewritten: the resume is refused.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._names: list[str] | None = None
        self._rows = 0  # of ``clients.csv``

    def on_fit_start(self, run: Run) -> None:
        """Write the files of a fresh run, or cut existing files back to the checkpoint.

        Raises:
            CheckpointError: If a file is not a run's or cannot be written.
        """
        if not run.fabric.is_global_zero:
            return
        folder, start = run.log_dir, run.start_round
        self._names = run.federation.data.client_names
        columns = _CLIENT_COLUMNS if self._names is None else [*_CLIENT_COLUMNS, "client"]
        before = folder if run.resumed_from is None else run.resumed_from
        metrics, clients = (RoundTable(before / name) for name in ("metrics.csv", "clients.csv"))
        there, _ = metrics.check(start)
        _, num_rows = clients.check(start, columns)
        settings = ConfigHistory(before if start and run.settings.config else None)
        # All files are read; from here on they are replaced.
        if there < start:
            run.fabric.print(f"{metrics.path} lacks {start - there} of the {start} rounds before this one")
        if start and num_rows < self._rows:
            lost = f"{self._rows - num_rows} of the {self._rows} rows"
            run.fabric.print(f"{clients.path} lacks {lost} of the {start} rounds before this one")
        self._rows = num_rows
        self._columns = metrics.columns or ["round"]
        metrics.cut(folder / "metrics.csv", self._columns, start)
        clients.cut(folder / "clients.csv", columns, start)
        if run.settings.config and (changed := settings.write(folder, run.settings.config, start)):
            run.fabric.print(f"resumed with different settings from round {start} on: {', '.join(changed)}")
        if not run.withholds and not (folder / "partition.json").is_file():
            write_text(_partition(run.federation.data), folder / "partition.json")

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Append the round.

        Raises:
            CheckpointError: If a file cannot be written.
        """
        if not run.fabric.is_global_zero:
            return
        metrics, clients = run.log_dir / "metrics.csv", run.log_dir / "clients.csv"
        if new := [name for name in record.metrics if name not in self._columns]:
            self._columns += new
            RoundTable(metrics).cut(metrics, self._columns, record.round_idx)
        row = [record.round_idx, *(record.metrics.get(name, "") for name in self._columns[1:])]
        for path, text in ((metrics, _line(row)), (clients, "".join(self._lines(record)))):
            with cannot_write(path), open(path, "a", newline="", encoding="utf-8") as file:
                file.write(text)
        self._rows += len(record.rows)

    def state_dict(self) -> dict[str, Any]:
        """The number of rows of ``clients.csv``."""
        return {"rows": self._rows}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = int(state["rows"])

    def _lines(self, record: RoundRecord) -> list[str]:
        """The lines of ``clients.csv``: thousands per round, too many for a CSV writer; only names need quotes."""
        begin, rows = f"{record.round_idx},", record.rows
        quoted = {key: _line(key).rstrip("\n") for key in {(stage, metric) for _, stage, metric, _ in rows}}
        if (names := self._names) is None:
            return [f"{begin}{client_id},{quoted[what, metric]},{value}\n" for client_id, what, metric, value in rows]
        ends = {client_id: _line([names[client_id]]) for client_id in {row.client_id for row in rows}}
        return [f"{begin}{one},{quoted[what, metric]},{value},{ends[one]}" for one, what, metric, value in rows]


class RoundTable:
    """A CSV file of a run, with the round in its first column.

    Args:
        path: The file; it may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []  # empty for a missing or empty file

    def check(self, start_round: int, columns: Sequence[str] = ()) -> tuple[int, int]:
        """Count the rounds before a round, and their rows.

        Args:
            start_round: The round.
            columns: The expected header; empty accepts any.

        Raises:
            CheckpointError: If the header differs or a row is malformed.
        """
        rounds = Counter(round_idx for round_idx, _ in self._lines() if round_idx < start_round)
        if self.columns and list(columns or self.columns) != self.columns:
            raise self._unreadable(f"line 1 is not {','.join(columns)}")
        return len(rounds), rounds.total()

    def rows(self) -> Iterator[dict[str, str]]:
        """The complete rows by column name.

        Raises:
            CheckpointError: If the header or a row is malformed.
        """
        for _, cells in self._lines():
            yield dict(zip(self.columns, cells, strict=True))

    def cut(self, target: Path, columns: Sequence[str], start_round: int) -> None:
        """Write the rows before a round to a file, which may be the same one; new columns are empty."""

        def lines() -> Iterator[str]:
            yield _line(columns)
            for round_idx, cells in self._lines():
                if round_idx < start_round:
                    yield _line([*cells, *[""] * (len(columns) - len(cells))])

        write_text(lines(), target)

    def _lines(self) -> Iterator[Line]:
        """The complete rows, without a line that a killed process left unfinished."""
        with unreadable_named(self.path):
            if not self.path.is_file():
                return
        with unreadable_named(self.path), open(self.path, "rb") as file:
            rows = csv.reader(self._texts(file))
            try:
                self.columns = next(rows, [])
                if self.columns[:1] != ["round"] and self.path.stat().st_size:
                    raise self._unreadable("line 1 does not begin with round,")
                for cells in rows:
                    yield self._row(cells, rows.line_num)
            except (UnicodeDecodeError, csv.Error) as error:
                raise self._unreadable(f"line {rows.line_num + 1}: {error}") from error

    def _row(self, cells: list[str], line: int) -> Line:
        if len(cells) != len(self.columns):
            raise self._unreadable(f"line {line} has {len(cells)} cells and line 1 has {len(self.columns)}")
        if not re.fullmatch("[0-9]{1,18}", cells[0]):
            raise self._unreadable(f"line {line} begins with {cells[0][:20]!r}, not with a round")
        return int(cells[0]), cells

    @staticmethod
    def _texts(file: Iterable[bytes]) -> Iterator[str]:
        for number, line in enumerate(file):
            if line.endswith(b"\n"):
                yield line.decode("utf-8-sig" if number == 0 else "utf-8")  # spreadsheets write a byte order mark

    def _unreadable(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be read ({why}); repair it, or move it away to continue without its rows"
        )


class ConfigHistory:
    """The configurations of a run's rounds.

    ``config.yaml`` belongs to the rounds to come, ``config.until_round_<r>.yaml`` to the rounds up to r.

    Args:
        folder: The run's folder; None for a run without earlier rounds.

    Raises:
        CheckpointError: If a file is not a configuration.
    """

    def __init__(self, folder: Path | None) -> None:
        self._texts: dict[float, str] = {}  # by the last round trained with it; infinity for the newest
        for path in () if folder is None else folder.glob("config.*yaml"):
            named = _UNTIL.fullmatch(path.name)
            if named or path.name == "config.yaml":
                self._texts[int(named[1]) if named else float("inf")] = _configuration(path)

    def write(self, folder: Path, config: str, start_round: int) -> list[str]:
        """Write the configuration from `start_round` on, keep the earlier rounds'; returns changed keys."""
        last = start_round - 1
        # A configuration newer than the last round has no rounds left: they run again.
        trained = self._texts[min(rounds)] if (rounds := [r for r in self._texts if r >= last]) else config
        changed = [] if trained == config else _changed(trained, config)
        texts = {until: text for until, text in self._texts.items() if until < last}
        texts |= {last: trained} if changed else {}
        for until, text in texts.items():
            write_text([text], folder / f"config.until_round_{until}.yaml")
        for until in self._texts.keys() - texts.keys() - {float("inf")}:
            (folder / f"config.until_round_{until}.yaml").unlink(missing_ok=True)
        write_text([config], folder / "config.yaml")
        return changed


def _changed(before: str, after: str) -> list[str]:
    """Keys with another value in a later configuration."""
    old, new = flatten(read_yaml(before)), flatten(read_yaml(after))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _configuration(path: Path) -> str:
    """Return the text of a configuration file."""
    try:
        with unreadable_named(path):
            text = path.read_text(encoding="utf-8")
        if isinstance(read_yaml(text), dict):
            return text
    except (UnicodeDecodeError, yaml.YAMLError, ValueError):
        pass
    raise CheckpointError(f"{path} is not a configuration, and resuming would replace it; repair it, or move it away")


def _line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _partition(data: FederatedDataModule) -> Iterator[str]:
    """The partition as JSON, one client at a time: a large population's text may exceed memory."""
    contents = json.dumps(vars(data.record.contents))
    yield f'{{"sha256": {json.dumps(data.record.sha256)}, "data": {contents}, "clients": {{'
    for position, (client_id, row) in enumerate(data.record.rows()):
        yield f'{"," if position else ""}\n"{client_id}": {json.dumps(row)}'
    yield "\n}}\n"
