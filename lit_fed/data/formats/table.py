"""Tables: measurements in the columns of CSV or Parquet files, a sample per row; errors name the line."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.formats.table_file import ENDINGS, FEATURES, Notation, TableFile, is_table, read_table
from lit_fed.data.loaders.transforms import Encode, InTurn, Normalize
from lit_fed.data.partitions.cut import Part, Parts, joined
from lit_fed.data.partitions.partition import Partition
from lit_fed.data.population.features import MEDIANS, Features, Impute, in_turn
from lit_fed.data.population.figures import figures_instead_of
from lit_fed.data.population.files import NewInputs, is_arrays
from lit_fed.data.population.naming import in_order, numbered
from lit_fed.data.population.source import Columns, TensorSource, check_classes, check_few, check_roles
from lit_fed.data.population.targets import quantile_strata
from lit_fed.data.population.views import viewed
from lit_fed.data.remarks import is_hidden, remark, remark_left_out
from lit_fed.errors import ConfigError
from lit_fed.printing import counted

Kind = Literal["classes", "numbers"]
_MOST_NAMED = 20


class Table(TensorSource):
    """Rows of a CSV or Parquet file, or of one such file per client: features, a target, and the client of each row.

    The first row of a CSV file names the columns. Features are numbers, standardised by `mean` and `std`, or by the
    statistics of all clients' training rows, which become part of the checkpoint's preprocessing. A target of texts or
    whole numbers is a class, named as in the file; classes are in numerical or alphabetical order. Other numbers are
    the targets of a regression. Under `trainer.privacy` all of this must be set.

    A feature of `levels` is a category: an input for each level, 1 or 0, and a last one for other and empty cells. A
    missing number (an empty cell, or ``NA``, ``N/A``, ``NaN``, ``null``, ``None``) is replaced as `impute` says, and a
    further input is 1 where it is missing, else 0. Neither kind of input is standardised.

    Without `features` a line names the features found, and a column of whole numbers that differs in every row, or
    counts the rows of every file, is refused as an identifier.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file; or a folder of them, one per client, named after the file.
        target: The target's column, or several columns of numbers.
        features: The features' columns; null for all others, none of which may identify a row.
        client: The column of each row's client; null for the files of a folder, or for none in a single file.
        test_path: Rows to test on, a file or a folder like `path`; null holds out `test_fraction`.
        test_fraction: Share of every client's rows (of all rows without clients) to test on, without a `test_path`.
        kind: ``classes`` or ``numbers``, if whole numbers are not classes or other numbers are.
        class_names: The classes in their order; null for the training rows' classes.
        strata: Number of strata by the first target of a regression, for partitions to cut by.
        impute: Number in place of a missing one by feature; or ``median``, that of all clients' training rows for each
            feature with gaps; null refuses gaps.
        levels: Levels of each feature that is a category, as in the file.
        standardise: Whether to shift and scale numbers.
        mean: Shift of each number, in the features' order; null for the mean of the training rows.
        std: Scale of each number; null for the standard deviation of the training rows.
        normalize: File of ``lit-fed statistics``, whose means and standard deviations take the place of `mean` and
            `std`.
        partition: Cuts the rows into clients; null for the file's own clients, `Natural`, or else `IID`.
        kwargs: The population's other settings, see `FederatedDataModule`.

    Raises:
        ConfigError: A file or a column is missing, or a cell is malformed.

    Note:
        Without `mean` and `std` clients would in practice have to share these statistics of their rows.
    """

    drawn_as = "table"
    too_few = "has too few rows to hold out {} of every client's; raise data.test_fraction or set data.test_path"

    def __init__(
        self,
        path: str,
        target: str | list[str],
        features: list[str] | None = None,
        client: str | None = None,
        test_path: str | None = None,
        test_fraction: float = 0.2,
        kind: Kind | None = None,
        class_names: list[str] | None = None,
        strata: int | None = None,
        impute: Impute | None = None,
        levels: dict[str, list[str]] | None = None,
        standardise: bool = True,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        normalize: str | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        self._path, self._test_path = Path(path), None if test_path is None else Path(test_path)
        self.names_clients = client is not None or self._path.is_dir()
        super().__init__(test_fraction=test_fraction, class_names=class_names, partition=partition, **kwargs)
        check_range("data.strata", strata, least=1, null="for none")
        self.target_names = [target] if isinstance(target, str) else list(target)
        check_roles("features", features, self.target_names, client)
        self._single, self._features_given, self._client = isinstance(target, str), features, client
        self._strata, self._standardise = strata, standardise
        self.features, self.fills_missing = Features(impute, levels), impute is not None
        self._figures = figures_instead_of(normalize, mean, std)
        if (mean is not None or normalize is not None) and not standardise:
            given = "mean" if normalize is None else "normalize"
            raise ConfigError(f"data.standardise is False, and data.{given} is given; leave one out")
        if class_names is not None and kind == "numbers":
            raise ConfigError("data.class_names are for classes, and data.kind is numbers; leave one out")
        self._scale_given = None if mean is None or std is None else (mean, std)
        self._kind_given = "classes" if class_names is not None else kind
        self._feature_names: list[str] = []

    @property
    def feature_names(self) -> list[str]:
        """The features' columns, in the order of the stored inputs."""
        _ = self.columns
        return self._feature_names

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return super().input_shape if self._encode is None else (self._encode.width,)

    @override
    def own_clients_are(self) -> tuple[str, str]:
        if self._client is not None:
            return f"data.client {self._client!r}", "leave data.client out and name data.features"
        return f"data.path {self._path}, with a file per client,", "join the files to one"

    @override
    def pooled(self) -> str | None:
        if self._figures is not None and (why := self._figures.exact()) is not None:
            return why
        if self._standardise and self._scale_given is None and self._figures is None:
            return (
                "data.standardise takes mean and deviation over all clients' rows; give data.mean and data.std, or set "
                "it to false"
            )
        if self.features.has_medians:
            return MEDIANS
        if self._kind_given != "numbers" and self._names_given is None:
            return "data.class_names are read off all clients' rows; give them, or set data.kind to numbers"
        if self._strata is not None:
            return "data.strata cuts by quantiles of all clients' targets; leave it out"
        if self._features_given is None:
            return "data.features are checked for identifiers in all clients' rows; name them"
        return None

    @override
    def normalization(self) -> Normalize | InTurn:
        return in_turn(self._encode, *self._scale_of(self.columns.x))

    @cached_property
    def gaps(self) -> list[str]:
        """Features of which a number is missing in a training or test row."""
        assert self.columns.test is not None
        missing = np.isnan(self.columns.x).any(axis=0) | np.isnan(self.columns.test.x).any(axis=0)
        return [name for name, is_gap in zip(self._feature_names, missing.tolist(), strict=True) if is_gap]

    @cached_property
    def _encode(self) -> Encode | None:
        """The step from stored features to inputs; None if they are the same."""
        return self.features.encoding(self.feature_names, self.gaps, self.columns.x)

    @override
    def load_arrays(self) -> Parts:
        parts = super().load_arrays()
        if self._strata is None:
            return parts
        if self.num_classes is not None:
            raise ConfigError("data.strata needs numerical targets, and these are classes; leave it out")
        first = [np.reshape(part.y, (len(part), -1))[:, 0] for part in (parts.train, parts.test)]
        strata = quantile_strata(first[0], first[1], self._strata)
        return replace(parts, train=replace(parts.train, strata=strata[0]), test=replace(parts.test, strata=strata[1]))

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        """Rows of a file with the features' columns; batches are (x, y) if the file has the target too."""
        if is_arrays(path):
            return super().new_inputs(path)
        file = read_table(path)
        x = torch.from_numpy(self.read_features(file))
        if not set(self.target_names) <= file.cells.keys():
            return NewInputs(viewed(self._loader_of(x, torch.zeros(len(x))), lambda batch: batch[0]))
        y = self._targets(file, self.class_names is not None)
        if self.class_names is not None:
            check_classes(y.tolist(), self.class_names, str(path))
            return NewInputs(self._loader_of(x, torch.from_numpy(numbered(y, self.class_names))))
        return NewInputs(self._loader_of(x, torch.from_numpy(y.astype(np.float32))))

    # The files; they are read once.

    @override
    def read(self) -> Columns:
        files = self._files(self._path, "data.path")
        first = files[0][0]
        self._feature_names = self._features_of(first)
        if self._features_given is None:
            self._check_identifiers([file for file, _ in files])
        self.features.check(self._feature_names, FEATURES)
        if self.keeps_missing:
            self._find_levels([file for file, _ in files])
        kind = self._kind_given
        is_class = kind == "classes" or (kind is None and self._is_class([file for file, _ in files]))
        if is_class and not self._single:
            raise ConfigError(
                f"data.target names {len(self.target_names)} columns, as for a regression, and {first.path} has whole "
                "numbers or texts there; name one column, or set data.kind to numbers"
            )
        whole, test = self._rows(files, is_class, self._path), None
        if is_class and kind is None:
            check_few(whole.y.names, len(whole), f"{self._path}: {self.target_names[0]}")
        if self._test_path is not None:
            test = self._rows(self._files(self._test_path, "data.test_path"), is_class, self._test_path)
            known = set() if whole.clients is None else set(whole.clients.names)
            if untrained := sorted(set() if test.clients is None else set(test.clients.names) - known):
                more = f" and {len(untrained) - 1} others" if len(untrained) > 1 else ""
                remark(
                    f"{self._test_path} has rows of client {untrained[0]}{more} without training rows; they are in the "
                    "shared test set only"
                )
        if self._features_given is None:
            more = ", …" if len(self._feature_names) > _MOST_NAMED else ""
            named = ", ".join(self._feature_names[:_MOST_NAMED])
            remark(f"{self._path}: {counted(len(self._feature_names), 'feature')}, {named}{more} (data.features)")
        return replace(whole, test=test)

    def _files(self, path: Path, setting: str) -> list[tuple[TableFile, str | None]]:
        """The files, each with the client that it is named after."""
        if not path.is_dir():
            return [(read_table(path), None)]
        there = sorted(file for file in path.iterdir() if not is_hidden(file))
        files = [file for file in there if is_table(file)]
        if not files:
            raise ConfigError(
                f"{path} holds no {', '.join(ENDINGS)} file; set {setting} to a folder of them, one per client"
            )
        remark_left_out(path, [file for file in there if not is_table(file)], len(files), ENDINGS)
        return [(read_table(file), _owner(file)) for file in files]

    def _features_of(self, file: TableFile) -> list[str]:
        for name in self.target_names:
            file.raw(name, "data.target")
        if self._client is not None:
            file.raw(self._client, "data.client")
        taken = {*self.target_names, self._client}
        features = self._features_given or [name for name in file.cells if name not in taken]
        if not features:
            raise ConfigError(
                f"{file.path} has no column beside the target and the client; add a feature to learn from"
            )
        return features

    def _check_identifiers(self, files: list[TableFile]) -> None:
        """Refuse whole numbers that identify a row."""
        may_have_gaps = self.keeps_missing or self.fills_missing
        for name in self._feature_names:
            given = [file.given(name, FEATURES)[1] for file in files] if may_have_gaps else files
            cells = [file.raw(name, FEATURES).tolist() for file in given]
            if len({cell for values in cells for cell in values}) == sum(map(len, cells)):
                does = "differs in every row"
            elif len(files) > 1 and all(map(_counts, cells)):
                does = "counts the rows of every file"
            else:
                continue
            if all(file.notations(name, FEATURES).keys() == {"whole"} for file in given):
                raise ConfigError(
                    f"{files[0].path}: {name!r} is a whole number that {does}, as an identifier does; name the "
                    "features in data.features, with it if it is a measurement"
                )

    def _find_levels(self, files: list[TableFile]) -> None:
        """Take the texts of features as levels, for statistics."""
        for name in self._feature_names:
            if name not in self.features.levels and any(file.is_category(name, FEATURES) for file in files):
                texts = [text for file in files for text in file.given(name, FEATURES)[1].texts(name, FEATURES)]
                levels = self.features.levels[name] = in_order(texts)
                check_few(levels, len(texts), f"{self._path}: {name}", f"levels; leave it out of {FEATURES}")
                remark(f"{self._path}: {name} is a category of {counted(len(levels), 'level')} (data.levels)")

    def _is_class(self, files: list[TableFile]) -> bool:
        """Whether the target is a class, by its notation in the files."""
        if not self._single:
            return False
        name, cells = self.target_names[0], dict[Notation, str]()
        for file in files:
            for notation, row in file.notations(name, "data.target").items():
                cell = file.raw(name, "data.target").tolist()[row]
                cells.setdefault(notation, f"{str(cell).strip()!r} in {file.path}, {file.place(row)}")
        if cells.keys() == {"whole", "decimal"}:
            raise ConfigError(
                f"{name} is {cells['decimal']}, and {cells['whole']}; write all as whole numbers, or set data.kind to "
                "classes or to numbers"
            )
        return cells.keys() == {"whole"} or "text" in cells

    def _rows(self, files: list[tuple[TableFile, str | None]], is_class: bool, path: Path) -> Columns:
        rows = list[Part]()
        for file, owner in files:
            clients = None if owner is None else np.full(len(file), owner, dtype=object)
            if self._client is not None:
                clients = np.array(file.texts(self._client, "data.client"), dtype=object)
            x = self.read_features(file)
            rows.append(Part(x, self._targets(file, is_class), clients))
        whole = joined(rows)
        return Columns(whole.x, whole.y, whole.clients, source=str(path))

    def _targets(self, file: TableFile, is_class: bool) -> NDArray[Any]:
        """Names of classes or numbers, (n,) or (n, k)."""
        if is_class:
            return np.array(file.texts(self.target_names[0], "data.target"), dtype=object)
        y = np.stack([file.numbers(name, "data.target") for name in self.target_names], axis=1)
        return y[:, 0] if self._single else y

    def read_features(self, file: TableFile) -> NDArray[np.float64]:
        """The stored features of a file's rows, shape (n, number of features): numbers, and codes of levels.

        Raises:
            ConfigError: A column is missing, or a cell is not a number.
        """
        x = np.full((len(file), len(self._feature_names)), np.nan)
        for place, name in enumerate(self._feature_names):
            levels, rows, given = self.features.levels.get(name), np.arange(len(file)), file
            if levels is not None or self.keeps_missing or self.features.keeps_missing(name):
                rows, given = file.given(name, FEATURES, levels or ())
            if levels is None:
                x[rows, place] = given.numbers(name, FEATURES)
            else:
                x[:, place] = -1
                x[rows, place] = numbered(given.texts(name, FEATURES), levels)
        return x

    def _scale_of(self, x: NDArray[np.float64]) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of the numbers that are not missing; 0 and 1 without `standardise`."""
        numbers = [place for place, name in enumerate(self._feature_names) if name not in self.features.levels]
        width = len(numbers)
        if self._figures is not None:
            return self._figures.of_inputs([self._feature_names[place] for place in numbers])
        if self._scale_given is not None:
            for name, values in zip(("mean", "std"), self._scale_given, strict=True):
                if len(values) != width:
                    what = "features" if width == x.shape[1] else "features that are numbers"
                    raise ConfigError(f"data.{name} has {len(values)} values for {width} {what}; give one each")
            return self._scale_given
        if not self._standardise:
            return [0.0] * width, [1.0] * width
        mean, deviation = np.zeros(width), np.ones(width)
        for place, column in enumerate(numbers):
            given = x[~np.isnan(x[:, column]), column]
            if len(given):  # from the first one on, as sums of large numbers are rounded
                apart = given - given[0]
                mean[place] = given[0] + apart.mean()
                deviation[place] = apart.std() or 1.0
        return mean.tolist(), deviation.tolist()


def _owner(file: Path) -> str:
    """The client that a file is named after."""
    name = file.name
    return name[: -len(next(ending for ending in (".csv.gz", ".csv", ".parquet") if name.lower().endswith(ending)))]


def _counts(cells: list[Any]) -> bool:
    """Whether every cell of a file is a whole number, one more than the cell before."""
    try:
        first = int(cells[0])
        return all(int(cell) == first + row for row, cell in enumerate(cells))
    except (TypeError, ValueError):
        return False
