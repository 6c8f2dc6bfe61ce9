"""With which settings, on what and for how long a simulation ran: ``simulation.json`` in its folder."""

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
    """A simulation that has run.

    Args:
        settings: All that decides its points.
        made_with: Commit, versions and hardware, as `lit_fed.studies.environment.describe` has them.
        seconds: How long it took.
        cpu_seconds: How long cores worked on it.
    """

    settings: dict[str, Any]
    made_with: dict[str, str]
    seconds: float
    cpu_seconds: float

    def write(self, folder: Path) -> None:
        """Write it, once all else that the simulation writes is there."""
        write_text([json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"], folder / _NAME)

    @staticmethod
    def remove(folder: Path) -> None:
        """Forget it, before anything else in the folder is replaced."""
        (folder / _NAME).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """That of a folder; None where no simulation has run to its end.

        Raises:
            ConfigError: If the file is not such a record.
        """
        path = folder / _NAME
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} was not written by lit-fed simulate; run it again") from error

    def ran(self, settings: dict[str, Any]) -> bool:
        """Whether it ran with these settings."""
        return bool(self.settings == json.loads(json.dumps(settings)))  # where a tuple is a list
