"""Whether the data and models of cells can be made, found out before any cell runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.command.cli import user_error
from lit_fed.command.reading.parts import add_parts, build_parts
from lit_fed.data.population.contents import Contents
from lit_fed.engine.lightning import compatibility
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser
from lit_fed.studies.cells import Cell


def check_parts(cells: Iterable[Cell]) -> None:
    """Make the parts of every cell once, so that missing files and impossible settings are known now.

    Data that differ in the partition's seed alone are read once.

    Args:
        cells: The cells that are to run.

    Raises:
        ConfigError: If one cannot be made, or they do not fit.
    """
    parser = Parser(exit_on_error=False)
    add_parts(parser)
    read: set[str] = set()
    made: set[str] = set()
    for cell in cells:
        settings = {key: cell.config[key] for key in ("data", "model", "algorithm")}
        settings["trainer"] = {"kinds": cell.config["trainer"].get("kinds")}
        if (key := _key(settings)) in made:
            continue
        try:
            _make(parser, settings, read)
        except Exception as error:
            line = user_error(error, [])
            if line is None:
                raise
            raise ConfigError(f"{cell.row}/{cell.column}: {line}") from error
        made.add(key)


def check_data(cells: Iterable[Cell], tell: Callable[[str], object]) -> None:
    """Refuse finished cells that were run on other data than lie in their place now.

    Data that differ in seeds alone are as a rule the same, and read once. Where they cannot be read, as on a machine to
    which only results were copied, nothing is compared, and this is told.

    Args:
        cells: Finished.
        tell: Takes a line.

    Raises:
        ConfigError: If there is such a cell.
    """
    parser = Parser(exit_on_error=False)
    add_parts(parser)
    alike, exact = dict[str, Contents | str](), dict[str, Contents | str]()
    for cell in cells:
        if (before := cell.contents) is None:
            continue
        settings = {key: cell.config[key] for key in ("data", "model", "algorithm")}
        settings["trainer"] = {"kinds": cell.config["trainer"].get("kinds")}
        own, key = json.dumps(settings, sort_keys=True, default=str), _key(settings)
        if key not in alike:
            now = alike[key] = exact[own] = _contents(parser, settings)
            if isinstance(now, str):
                tell(f"{cell.name}: whether its data are still the same cannot be seen: {now}")
        now = alike[key]
        if isinstance(now, Contents) and not now.is_of(before):
            if own not in exact:
                exact[own] = _contents(parser, settings)
            now = exact[own]
        if isinstance(now, Contents) and not now.is_of(before):
            raise ConfigError(
                f"{cell.name} was run on other data than lie in their place now; put those back, or move "
                f"{cell.folder} away to run it on these"
            )


def _contents(parser: ArgumentParser, settings: dict[str, Any]) -> Contents | str:
    """The fingerprint of data as they lie there now; why not, where they cannot be read."""
    try:
        parts, _ = build_parts(parser, parser.parse_object(settings))
        data, algorithm = parts.data, parts.algorithm
        data.reserve(algorithm.public_size, algorithm.calibration_fraction)
        data.setup()
        found: Contents = data.contents()
    except Exception as error:
        line = user_error(error, [])
        if line is None:
            raise
        return line
    return found


def _make(parser: ArgumentParser, settings: dict[str, Any], read: set[str]) -> None:
    """Make parts, see whether they fit, and read the data unless the like of them were read before."""
    parts, _ = build_parts(parser, parser.parse_object(settings))
    data, algorithm = parts.data, parts.algorithm
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
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
    """What makes two parts the same but for their seed."""
    return json.dumps(_without_seed(part), sort_keys=True, default=str)


def _without_seed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seed(item) for key, item in value.items() if key != "seed"}
    return [_without_seed(item) for item in value] if isinstance(value, list) else value
