"""A federation's own means and standard deviations, from the file that ``lit-fed statistics`` writes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_fed.errors import ConfigError

FORMAT = 1
"""Version of the file."""

_KEY = "data.normalize"
_MOST_BYTES = 2**26


@dataclass(frozen=True)
class Figures:
    """Means and variances of the inputs of all clients.

    Args:
        path: The file.
        columns: Mean and variance of each column or channel by name, in order; None if they were withheld.
        is_noisy: Whether noise protects the clients' samples.
        targets: As `columns`, of each numerical target.
    """

    path: Path
    columns: dict[str, tuple[float, float] | None]
    is_noisy: bool
    targets: dict[str, tuple[float, float] | None] = field(default_factory=dict)

    def of_inputs(self, names: Sequence[str] | None = None) -> tuple[list[float], list[float]]:
        """Means and standard deviations of named columns, or of all; 1 in place of a deviation of 0."""
        wanted = list(self.columns) if names is None else list(names)
        if absent := [name for name in wanted if name not in self.columns]:
            has = ", ".join(list(self.columns)[:8])
            raise ConfigError(
                f"{_KEY} {self.path} has no column {absent[0]!r}, but {has}; take statistics of these data"
            )
        found = {name: self.columns[name] for name in wanted}
        if absent := [name for name, figures in found.items() if figures is None]:
            raise ConfigError(
                f"{_KEY} {self.path} withholds the mean of {absent[0]!r}; take statistics again with a smaller "
                "--least, or leave the column out"
            )
        flat = [name for name, figures in found.items() if figures is not None and not figures[1]]
        if self.is_noisy and flat:
            raise ConfigError(
                f"{_KEY} {self.path} has a variance of 0 for {flat[0]!r}, which the noise exceeds; take statistics "
                "again with a larger epsilon or a narrower range"
            )
        pairs = [figures for figures in found.values() if figures is not None]
        return [mean for mean, _ in pairs], [math.sqrt(variance) or 1.0 for _, variance in pairs]

    def of_targets(self, names: Sequence[str] | None = None) -> list[tuple[float, float]] | None:
        """As `of_inputs`, a pair for each numerical target; None without targets."""
        if not self.targets:
            return None
        return list(zip(*replace(self, columns=self.targets).of_inputs(names), strict=True))

    def exact(self) -> str | None:
        """Why the figures may not be in a private run; None if they are noisy."""
        if self.is_noisy:
            return None
        return f"{_KEY} {self.path} holds exact figures of all clients; take statistics with trainer.privacy"


def figures_instead_of(normalize: str | None, mean: object, std: object) -> Figures | None:
    """Read the figures of ``data.normalize``; None without it. Also check ``data.mean`` and ``data.std``."""
    if (mean is None) != (std is None):
        raise ConfigError("data.mean and data.std belong together; give both or neither")
    if normalize is None:
        return None
    if mean is not None:
        raise ConfigError(f"{_KEY} and data.mean exclude each other; leave one out")
    return read_figures(Path(normalize))


def check_channels(figures: Figures | None, given: int, channels: int) -> None:
    """Refuse figures, or a number of values `given` as ``data.mean``, that do not fit the inputs' channels."""
    if figures is not None and len(figures.columns) != channels:
        raise ConfigError(
            f"{_KEY} {figures.path} has {len(figures.columns)} channels, and inputs have {channels}; take statistics "
            "of these data"
        )
    if given not in (1, channels):
        raise ConfigError(
            f"data.mean has {given} values, but inputs have {channels} channels; give one value, or one per channel"
        )


def fingerprint(path: str) -> str:
    """The SHA-256 of a file's figures, by which all ends of a federation compare them, wherever each has the file."""
    figures = read_figures(Path(path))
    return hashlib.sha256(repr((figures.columns, figures.is_noisy)).encode()).hexdigest()


def read_figures(path: Path) -> Figures:
    """Read and check a file; raise `ConfigError` if it is missing, damaged or of another version."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        content = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise ConfigError(
            f"{_KEY} {path} cannot be read: {error.strerror}; write it with lit-fed statistics"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_KEY} {path} is not JSON ({error}); write it with lit-fed statistics") from error
    version = content.get("lit_fed_statistics") if isinstance(content, dict) else None
    if type(version) is not int:
        raise ConfigError(f"{_KEY} {path} holds no statistics; name a file that lit-fed statistics wrote")
    if version != FORMAT:
        raise ConfigError(f"{_KEY} {path} has format {version}, and this lit_fed reads {FORMAT}; take statistics again")
    try:
        columns, targets = dict[str, tuple[float, float] | None](), dict[str, tuple[float, float] | None]()
        for column in content["all"]["columns"]:
            if column["role"] in ("input", "target"):
                (columns if column["role"] == "input" else targets)[_text(column["name"])] = _moments(column)
        if not columns or len(columns) != sum(column["role"] == "input" for column in content["all"]["columns"]):
            raise ValueError("it has no inputs, or two of one name")
        if content["privacy"] is not None and not isinstance(content["privacy"], dict):
            raise ValueError("its privacy is malformed")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{_KEY} {path} is damaged ({reason}); write it with lit-fed statistics") from error
    return Figures(path, columns, content["privacy"] is not None, targets)


def _moments(column: dict[str, Any]) -> tuple[float, float] | None:
    mean, variance = column["mean"], column["variance"]
    if mean is None and variance is None:
        return None
    if not all(type(number) in (int, float) and math.isfinite(number) for number in (mean, variance)) or variance < 0:
        raise ValueError(f"the mean and variance of {column['name']!r} are {mean!r} and {variance!r}")
    return float(mean), float(variance)


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not a column's name")  # noqa: TRY004  # all are reported alike
    return name


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
