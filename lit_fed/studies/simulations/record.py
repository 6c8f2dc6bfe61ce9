"""The record of a simulation's settings, environment and duration: ``simulation.json`` in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lit_fed.engine.storage.files import write_text
from lit_fed.errors import ConfigError

_NAME = "simulation.json"


@dataclass(frozen=True)
class Record:
    """A finished simulation.

    Args:
        settings: All settings that determine the points.
        made_with: Commit, versions and hardware, see `lit_fed.studies.running.environment.describe`.
        seconds: Duration.
        cpu_seconds: CPU time.
    """

    settings: dict[str, Any]
    made_with: dict[str, str]
    seconds: float
    cpu_seconds: float

    def write(self, folder: Path) -> None:
        """Write the record, after all other files of the simulation."""
        write_text([json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"], folder / _NAME)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the record, before any other file of the folder is replaced."""
        (folder / _NAME).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read a folder's record; None if no simulation has finished; raise `ConfigError` if the file is malformed."""
        path = folder / _NAME
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} was not written by lit-fed simulate; run it again") from error

    def ran(self, settings: dict[str, Any]) -> bool:
        """Whether the simulation ran with these settings."""
        return bool(self.settings == json.loads(json.dumps(settings)))  # turns tuples into lists
