"""Checks before any cell runs: its data and models can be built, and its run will report the study's metrics.

Most names of metrics follow from the configuration, see `lit_fed.studies.file.promised`. For names that only the code
of a task, a method or a protocol determines, one round of one cell runs in a temporary folder, and its ``metrics.csv``
lists them. A metric that first appears in a later round cannot be used this way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.command.cli import user_error
from lit_fed.command.reading.parts import ReadParts, add_parts, build_parts
from lit_fed.data.population.census import Contents
from lit_fed.engine.lightning import compatibility
from lit_fed.engine.lightning.metric_names import ON_VALIDATION
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser
from lit_fed.studies.file.claims import meant
from lit_fed.studies.file.promised import kind_of, known_names, names_with
from lit_fed.studies.file.rounds import guide_of
from lit_fed.studies.running.cells import Cell, CellGrid
from lit_fed.tracking import tracked


def check_parts(cells: Iterable[Cell]) -> None:
    """Build the parts of every cell once, to find missing files and invalid settings early.

    Data that differ only in the partition's seed are read once.

    Args:
        cells: The cells to run.
    """
    parser = Parser(exit_on_error=False)
    add_parts(parser)
    read: set[str] = set()
    made: set[str] = set()
    for cell in tracked(cells, "checking the parts of all cells"):
        if (key := _key(settings := _settings(cell))) in made:
            continue
        try:
            _make(parser, settings, read)
        except Exception as error:
            raise ConfigError(f"{cell.row}/{cell.column}: {_line(error)}") from error
        made.add(key)


def check_data(cells: Iterable[Cell], tell: Callable[[str], object]) -> None:
    """Refuse finished cells that ran on different data than the current files.

    Data that differ only in seeds are assumed equal and read once. If the data cannot be read, as on a machine with
    copied results only, nothing is compared, and a line says so.

    Args:
        cells: The finished cells.
        tell: Prints a line.
    """
    parser = Parser(exit_on_error=False)
    add_parts(parser)
    alike, exact = dict[str, Contents | str](), dict[str, Contents | str]()
    for cell in cells:
        if (before := cell.contents) is None:
            continue
        settings = _settings(cell)
        exact_key, key = json.dumps(settings, sort_keys=True, default=str), _key(settings)
        if key not in alike:
            now = alike[key] = exact[exact_key] = _contents(parser, settings)
            if isinstance(now, str):
                tell(f"{cell.name}: its data cannot be compared with those of the run: {now}")
        now = alike[key]
        if isinstance(now, Contents) and not now.is_of(before):
            if exact_key not in exact:
                exact[exact_key] = _contents(parser, settings)
            now = exact[exact_key]
        if isinstance(now, Contents) and not now.is_of(before):
            raise ConfigError(
                f"{cell.name} ran on different data than the current files; restore the old files, or move "
                f"{cell.folder} away to run it on the current ones"
            )


def _settings(cell: Cell) -> dict[str, Any]:
    """Return a cell's settings of its data, models and method."""
    kinds = {"kinds": cell.config["trainer"].get("kinds")}
    return {**{key: cell.config[key] for key in ("data", "model", "algorithm")}, "trainer": kinds}


def _line(error: Exception) -> str:
    """Return a user's mistake in one line; raise any other error again."""
    if (line := user_error(error)) is None:
        raise error
    return line


def _built(parser: ArgumentParser, settings: dict[str, Any]) -> ReadParts:
    """Build parts, and set aside from the data what the method asks for."""
    parts, _ = build_parts(parser, parser.parse_object(settings))
    parts.data.reserve(parts.algorithm.public_size, parts.algorithm.calibration_fraction)
    return parts


def _contents(parser: ArgumentParser, settings: dict[str, Any]) -> Contents | str:
    """Return the fingerprint of the current data, or why they cannot be read."""
    try:
        data = _built(parser, settings).data
        data.setup()
        found: Contents = data.record.contents
    except Exception as error:  # whatever a user's data raise
        return _line(error)
    return found


def _make(parser: ArgumentParser, settings: dict[str, Any], read: set[str]) -> None:
    """Build parts, check their compatibility, and read the data unless equal data were read before."""
    parts = _built(parser, settings)
    data, algorithm = parts.data, parts.algorithm
    for task in parts.model.values() if isinstance(parts.model, dict) else [parts.model]:
        task.configure_model()
        algorithm.adapt(task)
        compatibility.check_task(task, algorithm)
        compatibility.check_data(task, algorithm, data)
    key = _key([settings["data"], algorithm.public_size, algorithm.calibration_fraction])
    if key not in read:
        data.prepare_data()
        data.setup()
        read.add(key)


def _key(part: Any) -> str:
    """Return a key that is equal for parts that differ only in seeds."""
    return json.dumps(_without_seed(part), sort_keys=True, default=str)


def _without_seed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seed(item) for key, item in value.items() if key != "seed"}
    return [_without_seed(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------- metrics


Ask = Callable[[Cell], Sequence[str]]


def check_metrics(grid: CellGrid, cells: Iterable[Cell] = (), ask: Ask | None = None) -> None:
    """Refuse a study with a metric that its runs do not report.

    Args:
        grid: The study.
        cells: The cells to run.
        ask: Runs a round of a cell and returns the reported names; None relies on the configurations alone.
    """
    about_to_run = {cell.name for cell in cells}
    names_by_kind: dict[str, list[str]] = {}  # reported names by kind of run, as far as known
    for cell, metric in _wanted(grid):
        names, complete = names_with(cell.config, metric.partition("/")[0])
        if not complete and metric not in names:
            kind = kind_of(cell.config)
            if kind not in names_by_kind:
                done = next((c for c in grid.cells if c.done and kind_of(c.config) == kind), None)
                if done is not None:
                    names_by_kind[kind] = list(done.rows()[0])
                elif ask is None or cell.name not in about_to_run:
                    continue
                else:
                    names_by_kind[kind] = list(ask(cell))
            names = [name for name in names_by_kind[kind] if name != "round"]
        if metric not in names:
            held_out = metric.startswith(ON_VALIDATION)  # a metric on the test set does not replace it
            known = dict.fromkeys([*names, *known_names(cell.config)])
            every = [name for name in known if name.startswith(ON_VALIDATION) == held_out]
            instead = meant(metric, every) if every else "set data.init_args.val_fraction above 0"
            where = f"{grid.study.path}: {cell.row}/{cell.column}"
            raise ConfigError(f"{where} does not report the metric {metric!r}; {instead}")


def _wanted(grid: CellGrid) -> list[tuple[Cell, str]]:
    """Return a cell of every place with each metric that the table or a claim reads there."""
    seed = grid.study.seeds[0]
    measures = [(place, grid.measure_of(place)) for place in grid.study.places]
    wanted = [(place, name) for place, m in measures for name in (m.metric, guide_of(m.report)) if name]
    for claim in grid.study.claims:
        wanted += [(p, claim.metric) for p in grid.study.places if claim.metric is not None and p in claim.places]
    return list({(c.name, metric): (c, metric) for c, metric in ((grid.runs[p, seed], m) for p, m in wanted)}.values())
