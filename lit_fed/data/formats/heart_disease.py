"""Heart disease in four hospitals, from the published files, as FLamby reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.data.formats.table import Table
from lit_fed.data.formats.table_file import TableFile, csv_rows
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.printing import counted

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
_NAMES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
_CELLS = 14  # of a row: the features, then slope, ca and thal, which are mostly missing, and the diagnosis
_LEVELS = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
FEATURES = (
    *(name for name in _NAMES if name not in _LEVELS),
    *(f"{name}_{level}" for name, levels in _LEVELS.items() for level in levels[1:]),
)


class HeartDisease(Table):
    """Whether a patient has a heart disease, by 13 features: ``<root>/processed.<centre>.data`` of four hospitals.

    They are Cleveland, Budapest (``hungarian``), Zurich and Basel (``switzerland``) and Long Beach (``va``), clients of
    303, 261, 46 and 130 patients. As in FLamby, the three features that are mostly missing are left out, then patients
    with a missing cell; two features of levels become 0 or 1 a level except the first, and any diagnosis above 0 is a
    disease.

    Janosi, Steinbrunn, Pfisterer, Detrano: "Heart Disease", UCI Machine Learning Repository, 1988; Ogier du Terrail et
    al., "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings", NeurIPS
    2022, arXiv:2210.04620.

    Args:
        root: The folder of the four files.
        test_fraction: Share of every hospital's patients to test on.
        mean: Shift of each feature; null for the mean of all hospitals' training patients.
        std: Scale of each feature; null for their standard deviation.
        partition: Cuts the patients into clients; null for the hospitals, `Natural`.
        kwargs: The population's other settings, see `FederatedDataModule`.

    Raises:
        ConfigError: A file is missing, or a cell is malformed.

    Note:
        FLamby holds out 34 % of each hospital's patients by scikit-learn's split, for classes in equal shares where it
        can. It standardises each hospital by its own training patients; its first version does not standardise.
    """

    def __init__(
        self,
        root: str = "data",
        test_fraction: float = 0.34,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path=root,
            target="diagnosis",
            features=list(FEATURES),
            test_fraction=test_fraction,
            class_names=["healthy", "disease"],
            mean=mean,
            std=std,
            partition=Natural() if partition is None else partition,
            root=root,
            **kwargs,
        )

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.root {self.root}, with a file per hospital,", "join the files to one for Table"

    @override
    def _files(self, path: Path, setting: str) -> list[tuple[TableFile, str | None]]:
        return [(_centre(path / f"processed.{centre}.data"), centre) for centre in CENTRES]


def _centre(path: Path) -> TableFile:
    """A hospital's patients without missing cells."""
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; set data.root to the folder of the files processed.<centre>.data of UCI's Heart "
            f"Disease, <centre> being {', '.join(CENTRES)}"
        )
    rows, lines, missing = list[list[float]](), list[int](), 0
    for line, cells in csv_rows(path):
        if not cells:
            continue
        if len(cells) != _CELLS:
            raise ConfigError(f"{path}, line {line} has {len(cells)} cells; it must have {_CELLS}")
        kept = [*cells[: len(_NAMES)], cells[-1]]
        if "?" in kept:
            missing += 1
            continue
        try:
            rows.append([float(cell) for cell in kept])
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: {error}; write numbers, or ? for a missing one") from error
        lines.append(line)
    if not rows:
        raise ConfigError(f"{path} has no patient without missing cells; fetch it anew")
    if missing:
        remark(f"{path}: left out {counted(missing, 'patient')} of {missing + len(rows)} with missing cells")
    table = dict(zip((*_NAMES, "diagnosis"), np.array(rows).T, strict=True))
    for name, levels in _LEVELS.items():
        values = table.pop(name)
        if len(wrong := np.flatnonzero(~np.isin(values, levels))):
            allowed = ", ".join(map(str, levels))
            raise ConfigError(f"{path}, line {lines[wrong[0]]}: {name} is {values[wrong[0]]:g}; it must be {allowed}")
        table |= {f"{name}_{level}": (values == level).astype(np.float64) for level in levels[1:]}
    table["diagnosis"] = np.where(table["diagnosis"] > 0, "disease", "healthy").astype(object)
    return TableFile(path, table, lambda row: f"line {lines[row]}")
