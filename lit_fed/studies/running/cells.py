"""The runs of a study: one ``fit`` command per cell, with its folder and record."""

from __future__ import annotations

import copy
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from lit_fed.callbacks.recorder import RoundTable
from lit_fed.command.cli import user_error
from lit_fed.command.federated_cli import resolve
from lit_fed.command.reading.config_files import ConfigFiles
from lit_fed.data.population.census import Contents
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.engine.storage.files import write_text
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.studies.file.promised import metric_names
from lit_fed.studies.file.rounds import guide_of, reported
from lit_fed.studies.file.study import ALONG, Measure, Place, Study

_SEED = "{seed}"
_FORMAT = 2  # of ``cell.json``; format 1 identified cells by their classes' import paths
_RECORD = (
    ("format", int),
    *(("status", str), ("error", str), ("made_with", dict), ("data", dict)),
    *(("seconds", int | float), ("cpu_seconds", int | float)),
)
_ANY = 1_827_364_591  # placeholder for any seed in a parsed command; nobody writes this number


@dataclass(frozen=True)
class Cell:
    """A run of a study.

    Args:
        row: Name of the row.
        column: Name of the column; columns that differ only in the metric share the first column's runs.
        seed: The seed.
        args: Arguments of ``fit`` without folder and checkpoint, which reproduce the cell anywhere.
        config: The resolved configuration.
        folder: The folder of its runs.
        draws: Whether its runs draw pictures, unless their settings say so.
    """

    row: str
    column: str
    seed: int
    args: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    folder: Path
    draws: bool = False

    @property
    def name(self) -> str:
        """Row, column and seed, in the format of ``--only``."""
        return f"{self.row}/{self.column}/{self.seed}"

    @property
    def command(self) -> list[str]:
        """Arguments of the run in its folder; a repeated run resumes after the last finished round."""
        pictures = f"--trainer.enable_pictures={json.dumps(self.draws)}"  # the first word: the study's settings win
        return ["fit", pictures, *self.args, f"--trainer.default_root_dir={self.folder}", "--ckpt_path=last"]

    @property
    def shell(self) -> str:
        """The command that reproduces the cell under ``lightning_logs``."""
        return shlex.join(["lit-fed", "fit", *self.args])

    @property
    def max_rounds(self) -> int:
        """The number of rounds."""
        return int(self.config["trainer"]["max_rounds"])

    @property
    def evaluations(self) -> int:
        """The number of rounds with an evaluation: every ``evaluate_every`` rounds, and the last."""
        every = int(self.config["trainer"]["evaluate_every"])
        return -(-self.max_rounds // every) if every else 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all settings, independent of folders, pictures, comments and the settings' files.

        Settings that are null or false do not count, because a setting that a later release adds, and that is off,
        changes no run. Classes count by their names, so that a class may move to another module.
        """
        config = copy.deepcopy(dict(self.config))
        for changes_no_result in ("default_root_dir", "enable_pictures"):
            config["trainer"].pop(changes_no_result, None)
        text = json.dumps(_what_is_on(config), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ on disk

    @property
    def run(self) -> Path | None:
        """The newest run's folder."""
        runs = [path for path in (self.folder / "lightning_logs").glob("version_*") if path.name[8:].isdecimal()]
        return max(runs, key=lambda path: int(path.name[8:]), default=None)

    def rows(self) -> list[dict[str, str]]:
        """The rows of the run's ``metrics.csv`` so far; raise `CheckpointError` if the file is malformed."""
        return [] if self.run is None else list(RoundTable(self.run / "metrics.csv").rows())

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Rounds and values of a metric, where it was evaluated.

        Raises:
            CheckpointError: If the run's file is malformed.
        """
        rows = [row for row in self.rows() if row.get(metric)]
        try:
            return [(int(row["round"]), float(row[metric])) for row in rows]
        except ValueError as error:
            raise CheckpointError(f"{self.run}/metrics.csv has a {metric} that is not a number ({error})") from error

    def spent(self, along: str) -> dict[int, float]:
        """Return the rounds, bytes or seconds of a run until the end of each round, see `ALONG`.

        Raises:
            CheckpointError: If the run has not logged them.
        """
        if not ALONG[along]:
            return {int(row["round"]): float(row["round"]) for row in self.rows()}
        each = self.curve(ALONG[along])
        if not each:
            raise CheckpointError(f"{self.run}/metrics.csv has no {ALONG[along]}; set the study's along to rounds")
        return dict(zip([round_idx for round_idx, _ in each], accumulate(value for _, value in each), strict=True))

    def record(self) -> dict[str, Any]:
        """The cell's record with ``status``, ``fingerprint``, ``seconds``, …; empty without one."""
        try:
            content = json.loads((self.folder / "cell.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # ours are written atomically, so a malformed file is not ours
            return {}
        ours = isinstance(content, dict) and all(
            isinstance(content[key], kind) for key, kind in _RECORD if key in content
        )
        return content if ours else {}

    def data_of_run(self) -> dict[str, Any]:
        """The fingerprint of the newest run's data, from ``partition.json``; empty without one."""
        try:
            content = json.loads((self.run / "partition.json").read_text(encoding="utf-8")) if self.run else {}
            data = content["data"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return data if isinstance(data, dict) else {}

    @property
    def contents(self) -> Contents | None:
        """The data's fingerprint in the record; None without one."""
        try:
            data = self.record()["data"]
            return Contents(data["sha256"], tuple(data["sums"]), tuple(data["sizes"]))
        except (KeyError, TypeError):
            return None

    def write_record(self, **changes: Any) -> None:
        """Change the record atomically."""
        mine = {"cell": self.name, "format": _FORMAT, "fingerprint": self.fingerprint, "fit": list(self.args)}
        write_text([json.dumps(self.record() | mine | changes, indent=1) + "\n"], self.folder / "cell.json")

    @property
    def changed(self) -> bool:
        """Whether the folder holds a run with different settings than the study's."""
        there = (self.folder / "lightning_logs").exists()
        return there and self.record().get("fingerprint") != self.fingerprint

    @property
    def change(self) -> str:
        """The reason why the folder's run is not this cell's."""
        if self.record() and self.record().get("format") != _FORMAT:
            return "an older lit_fed ran it, which identified classes by their paths"
        return "the settings have changed"

    @property
    def done(self) -> bool:
        """Whether the run is complete."""
        return not self.changed and self.record().get("status") == "done" and bool(self.rows())

    @property
    def failed(self) -> bool:
        """Whether the last run with these settings failed."""
        record = self.record()
        return record.get("status") == "failed" and record.get("fingerprint") == self.fingerprint

    def set_aside(self) -> Path:
        """Rename the folder, so that a run with different settings begins in a fresh one."""
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}.before_{number}")).exists():
            number += 1
        return self.folder.rename(aside)


@dataclass(frozen=True)
class CellGrid:
    """The runs of a study, and the map from the table to them.

    Args:
        study: The study.
        folder: The study's folder.
        cells: All runs without duplicates, row by row.
        runs: The run of every (place, seed).
    """

    study: Study
    folder: Path
    cells: tuple[Cell, ...]
    runs: Mapping[tuple[Place, int], Cell] = field(repr=False)

    def measure_of(self, place: tuple[str, str], metric: str | None = None, report: str | None = None) -> Measure:
        """Return the measure of a place: the study's metric, by default the metric that its runs monitor."""
        cells = [self.runs[Place(*place), seed] for seed in self.study.seeds if (Place(*place), seed) in self.runs]
        names = metric_names(cells[0].config) if cells else MetricNames()
        if names.monitor is None and not self.study.names_metric(Place(*place)):
            for cell in (cell for cell in cells if cell.done):
                names.see({name: 0.0 for row in cell.rows() for name, value in row.items() if value})
        return self.study.measure_of(Place(*place), names, metric, report)

    @property
    def partitions(self) -> str:
        """Which seeds the partitions of the runs have, as a sentence; empty for one seed."""
        study = self.study
        data = [[self.runs[place, seed].config["data"] for seed in study.seeds] for place in study.places]
        seeds = [[settings.get("init_args", {}).get("seed") for settings in each] for each in data]
        shared = [
            str(place)
            for place, of_place in zip(study.places, seeds, strict=True)
            if len(set(of_place)) < len(of_place)
        ]
        if len(study.seeds) == 1:
            return ""
        if len(shared) == len(seeds):
            return "All seeds share one partition (data.seed)."
        return f"Every seed also seeds the partition (data.seed){', except at ' if shared else ''}{', '.join(shared)}."

    def _finished(self, place: tuple[str, str], seed: int) -> Cell | None:
        cell = self.runs.get((Place(*place), seed))
        return cell if cell is not None and cell.done else None

    def value(
        self, place: tuple[str, str], seed: int, metric: str | None = None, report: str | None = None
    ) -> float | None:
        """Return the table's number for one seed; None if the run is unfinished or lacks the metric."""
        cell, measure = self._finished(place, seed), self.measure_of(place, metric, report)
        if cell is None:
            return None
        curve, by = cell.curve(measure.metric), guide_of(measure.report)
        guide = cell.curve(by) if by else curve
        lower = metric_names(cell.config).direction(by) == "min" if by else measure.lower
        reported_value = reported(measure.report, curve, guide, lower)
        return None if reported_value is None else measure.shown(reported_value)

    def curve(self, place: tuple[str, str], seed: int, metric: str | None = None) -> list[tuple[int, float]]:
        """Return the metric over rounds for one seed; empty if the run is unfinished."""
        cell, measure = self._finished(place, seed), self.measure_of(place, metric)
        return [(round_idx, measure.shown(value)) for round_idx, value in cell.curve(measure.metric)] if cell else []

    def way(self, place: tuple[str, str], seed: int) -> list[tuple[float, float]]:
        """Return METRIC over the table's number for one seed, where the report is ``first METRIC at NUMBER``."""
        cell, measure = self._finished(place, seed), self.measure_of(place)
        if cell is None:
            return []
        at = dict(cell.curve(measure.metric))
        return [
            (measure.shown(at[round_idx]), value)
            for round_idx, value in cell.curve(guide_of(measure.report))
            if round_idx in at
        ]


def lay_out(study: Study, output: Path) -> CellGrid:
    """Lay out a study's runs, and check each with the parser of its command.

    Args:
        study: The study.
        output: Folder of all studies.
    """
    folder = output / study.name / study.profile
    cells: dict[tuple[Any, ...], Cell] = {}
    at: dict[tuple[Place, int], Cell] = {}
    files = ConfigFiles()  # read once a study, and anew for the next
    for place in study.places:
        variants = (study.rows[place.row], study.columns[place.column])
        configs = (*study.configs, *variants[0].configs, *variants[1].configs)
        settings = {**study.set, **variants[0].set, **variants[1].set}
        words = [*(_option(study, key, value) for key, value in settings.items()), f"--trainer.seed={_SEED}"]
        commands = {
            seed: (*(word for path in configs for word in ("-c", path)), *(_filled(word, seed) for word in words))
            for seed in (_ANY, *study.seeds)
        }
        if any(commands[seed] not in cells for seed in study.seeds):
            resolved = _resolved(commands, files, f"{study.path}: {place.row}/{place.column}")
            each = study.partition_seed == "each" and "data.seed" not in _given(settings)
            for seed, config in resolved.items():
                if commands[seed] in cells:
                    continue
                args, data_settings = commands[seed], config["data"].get("init_args", {})
                if each and "seed" in data_settings:
                    args, data_settings["seed"] = (*args, f"--data.init_args.seed={seed}"), seed
                where = folder / place.row / place.column / f"seed_{seed}"
                draws = bool(study.pictures)
                cells[commands[seed]] = Cell(place.row, place.column, seed, args, config, where, draws)
        at |= {(place, seed): cells[commands[seed]] for seed in study.seeds}
    return CellGrid(study, folder, tuple(cells.values()), at)


def _given(value: Any, key: str = "") -> set[str]:
    """Return the dotted keys of all settings, however they are nested, without ``init_args``."""
    if not isinstance(value, Mapping):
        return {key}
    names = ((f"{key}.{name}".replace(".init_args", "").lstrip("."), item) for name, item in value.items())
    return {keys for name, item in names for keys in _given(item, name)}


def _what_is_on(value: Any) -> Any:
    """Drop settings that are null or false, and replace every class path by the class's name."""
    if isinstance(value, Mapping):
        on = {key: _what_is_on(item) for key, item in value.items() if item is not None and item is not False}
        path = on.get("class_path")
        return on | {"class_path": path.rpartition(".")[2]} if isinstance(path, str) else on
    return [_what_is_on(item) for item in value] if isinstance(value, list | tuple) else value


def _filled(value: Any, seed: int, mark: str | int = _SEED) -> Any:
    """Replace every mark in a setting or configuration by a seed."""
    if isinstance(value, dict):
        return {key: _filled(item, seed, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, seed, mark) for item in value]
    if isinstance(value, str):
        return value.replace(str(mark), str(seed))
    return type(value)(seed) if value == mark else value  # keep the parser's type


def _resolved(commands: Mapping[int, Sequence[str]], files: ConfigFiles, where: str) -> dict[int, dict[str, Any]]:
    """Resolve a command for several seeds; as a rule it is parsed once.

    Args:
        commands: The arguments by seed, the placeholder `_ANY` included.
        files: The files of the study.
        where: The place that errors name.
    """
    seeds = [seed for seed in commands if seed != _ANY]
    try:
        config = yaml.safe_load(resolve(["fit", *commands[_ANY]], files))
    except Exception:  # the command is invalid, or a setting does not accept the placeholder
        return {seed: _read_or_blame(commands[seed], files, where) for seed in seeds}
    return {seed: _filled(config, seed, _ANY) for seed in seeds}


def _read_or_blame(args: Sequence[str], files: ConfigFiles, where: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = yaml.safe_load(resolve(["fit", *args], files))
        return content
    except Exception as error:
        line = user_error(error)
        if line is None:
            raise
        raise ConfigError(f"{where}: {line}") from error


def _option(study: Study, key: Any, value: Any) -> str:
    """Format a setting as one word of the command line."""
    if not isinstance(key, str):
        raise ConfigError(
            f"{study.path}: set: {key!r} is not a key; write it as on the command line, such as trainer.max_rounds"
        )
    if key in ("trainer.seed", "trainer.default_root_dir"):
        raise ConfigError(f"{study.path}: set: {key} is set by the study; use seeds, or --output")
    return f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def chosen(grids: Sequence[CellGrid], only: Sequence[str]) -> Iterator[tuple[CellGrid, Cell]]:
    """Select the cells to run.

    Args:
        grids: The studies.
        only: Patterns ``row/column/seed``; a missing end and ``*`` match all. By default all cells.
    """
    patterns = [(word.strip("/").split("/") + ["*"] * 3)[:3] for word in only]
    every = [(grid, cell) for grid in grids for cell in grid.cells]
    for word, pattern in zip(only, patterns, strict=True):
        if not any(_matches(cell, pattern) for _, cell in every):
            names = ", ".join(cell.name for _, cell in every[:4])
            raise ConfigError(f"--only {word} matches no cell; cells are row/column/seed, such as {names}")
    for grid, cell in every:
        if not patterns or any(_matches(cell, pattern) for pattern in patterns):
            yield grid, cell


def _matches(cell: Cell, pattern: Sequence[str]) -> bool:
    return all(p in ("*", name) for p, name in zip(pattern, cell.name.split("/"), strict=True))
