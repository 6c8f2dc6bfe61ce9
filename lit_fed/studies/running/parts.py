"""Checks before any cell runs that the data and models of cells can be built."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.command.cli import user_error
from lit_fed.command.reading.parts import ReadParts, add_parts, build_parts
from lit_fed.data.population.census import Contents
from lit_fed.engine.lightning import compatibility
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser
from lit_fed.studies.running.cells import Cell


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
    for cell in cells:
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
    if (line := user_error(error, [])) is None:
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
    except Exception as error:
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
