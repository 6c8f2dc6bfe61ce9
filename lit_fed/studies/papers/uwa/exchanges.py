"""A client's traffic in whole runs, parameters or predictions: the communication figures of UWA's Section 5.4."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from lit_fed.command.commands.cost import CostTable
from lit_fed.errors import ConfigError


class Exchanges(CostTable):
    """A client's traffic in whole runs, in one direction, from settings alone.

    Args:
        runs: By printed name, either ``rounds``, ``parameters`` and ``models`` (models sent per round), or ``rounds``,
            ``public`` samples and ``classes``; every number takes 4 bytes.
    """

    def __init__(self, runs: Mapping[str, Mapping[str, int]]) -> None:
        self.megabytes = {title: _megabytes(title, settings) for title, settings in runs.items()}

    @override
    def text(self) -> str:
        width = max(map(len, self.megabytes))
        return "\n".join(f"{title:{width}} {number:8.2f} MB" for title, number in self.megabytes.items())


def _megabytes(title: str, settings: Mapping[str, int]) -> float:
    if settings.keys() == {"rounds", "parameters", "models"}:
        numbers = settings["parameters"] * settings["models"]
    elif settings.keys() == {"rounds", "public", "classes"}:
        numbers = settings["public"] * settings["classes"]
    else:
        raise ConfigError(
            f"cost.runs {title!r} needs rounds, parameters and models, or rounds, public and classes; it has "
            f"{', '.join(settings)}"
        )
    return 4 * numbers * settings["rounds"] / 1e6
