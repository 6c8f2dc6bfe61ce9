"""Whether the data and models of cells can be made, found out before any cell runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_fed.algorithm import Algorithm
from lit_fed.client import ClientModule
from lit_fed.command.cli import fill_from_data, user_error
from lit_fed.errors import ConfigError
from lit_fed.studies.cells import Cell


def check_parts(cells: Iterable[Cell]) -> None:
    """Read every data set and make every model once, so that missing files and impossible settings are known now.

    Data that differ in the partition's seed alone are read once.

    Args:
        cells: The cells that are to run.

    Raises:
        ConfigError: If one cannot be made.
    """
    from lit_fed.data import FederatedDataModule

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data", required=True)
    parser.add_subclass_arguments(ClientModule, "model", required=True)
    parser.add_subclass_arguments(Algorithm, "algorithm", required=True)
    read: dict[str, Any] = {}
    made: set[str] = set()
    for cell in cells:
        parts = {key: cell.config[key] for key in ("data", "model", "algorithm")}
        data_key, key = (_key(part) for part in (parts["data"], parts))
        if key in made:
            continue
        try:
            parsed = parser.parse_object(parts)
            if data_key not in read:
                read.clear()  # one data set in memory at a time
                data = parser.instantiate(Namespace(data=parsed.data)).data
                data.prepare_data()
                data.setup()
                read[data_key] = data
            fill_from_data(parsed.model, read[data_key])
            parser.instantiate(Namespace(model=parsed.model, algorithm=parsed.algorithm))
        except Exception as error:
            line = user_error(error, [])
            if line is None:
                raise
            raise ConfigError(f"{cell.row}/{cell.column}: {line}") from error
        made.add(key)


def _key(part: Any) -> str:
    """What makes two parts the same but for their seed."""
    return json.dumps(_without_seed(part), sort_keys=True, default=str)


def _without_seed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seed(item) for key, item in value.items() if key != "seed"}
    return [_without_seed(item) for item in value] if isinstance(value, list) else value
