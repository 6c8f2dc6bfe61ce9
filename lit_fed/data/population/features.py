"""Columns with missing numbers and categories: the settings by which they become inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.checks import check_range
from lit_fed.data.loaders.transforms import Encode, InTurn, Normalize
from lit_fed.errors import ConfigError

Impute = Literal["median"] | dict[str, float]
MEDIANS = "data.impute takes medians over all clients' rows; give a number for each column"
"""What ``data.impute: median`` reads off all clients' samples, for `FederatedDataModule.pooled`."""


class Features:
    """The numbers in place of missing ones, and the levels of categories.

    Args:
        impute: ``data.impute``.
        levels: ``data.levels``.
    """

    def __init__(self, impute: Impute | None, levels: Mapping[str, Sequence[str]] | None) -> None:
        self.has_medians, self._fill = impute == "median", dict(impute) if isinstance(impute, dict) else {}
        self._takes_gaps = self.has_medians  # of any column, until the medians are taken
        self.levels = {name: [level.strip() for level in names] for name, names in (levels or {}).items()}
        for name, number in self._fill.items():
            check_range(f"data.impute.{name}", number, least=-1e38, most=1e38)
        for name, names in self.levels.items():
            if not names or len({*names, ""}) <= len(names):
                raise ConfigError(f"data.levels.{name} is {names}; name one level or more, each once, and no empty one")

    def check(self, names: Collection[str], setting: str) -> None:
        """Refuse settings of columns that are not among the features, which `setting` names, or have two settings."""
        for key, named, others in (("levels", self.levels, self._fill), ("impute", self._fill, self.levels)):
            if wrong := sorted(name for name in named if name not in names or name in others):
                raise ConfigError(f"data.{key} names {wrong[0]!r}, which is not in {setting}, or in both; correct it")

    def keeps_missing(self, name: str) -> bool:
        """Whether a number of a column may be missing."""
        return self._takes_gaps or name in self._fill

    def encoding(self, names: Sequence[str], gaps: Collection[str], x: NDArray[Any]) -> Encode | None:
        """The step from stored rows to inputs; None if they are the same.

        Args:
            names: The features in order.
            gaps: Features of which a number is missing.
            x: The training rows, (n, features), of which ``data.impute: median`` takes medians.
        """
        for name in gaps if self._takes_gaps else ():
            column = x[:, names.index(name)]
            if np.isnan(column).all():
                raise ConfigError(f"{name} has no number in the training rows, and data.impute is median; leave it out")
            self._fill[name] = float(np.nanmedian(column))
        self._takes_gaps = False
        if not self._fill and not self.levels:
            return None
        return Encode(names, [self._fill.get(name) for name in names], [self.levels.get(name) for name in names])


def in_turn(encode: Encode | None, mean: Sequence[float], std: Sequence[float]) -> Normalize | InTurn:
    """Encode, then normalise the numbers, and leave indicators and levels as they are."""
    if encode is None:
        return Normalize(mean, std, max_value=1.0)
    marks = encode.width - len(mean)
    return InTurn(encode, Normalize([*mean, *[0.0] * marks], [*std, *[1.0] * marks], max_value=1.0))
