"""A check before any cell runs that the runs will report the study's metrics.

Most names follow from the configuration, see `lit_fed.studies.file.promised`. For names that only the code of a task, a
method or a protocol determines, one round of one cell runs in a temporary folder, and its ``metrics.csv`` lists them.
A metric that first appears in a later round cannot be used this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lit_fed.errors import ConfigError
from lit_fed.studies.file.claims import meant
from lit_fed.studies.file.promised import kind_of, known_names, names_with
from lit_fed.studies.file.rounds import guide_of
from lit_fed.studies.running.cells import Cell, CellGrid

Ask = Callable[[Cell], Sequence[str]]


def check_metrics(grid: CellGrid, cells: Iterable[Cell] = (), ask: Ask | None = None) -> None:
    """Refuse a study with a metric that its runs do not report.

    Args:
        grid: The study.
        cells: The cells to run.
        ask: Runs a round of a cell and returns the reported names; None relies on the configurations alone.
    """
    about_to_run = {cell.name for cell in cells}
    names_by_kind: dict[str, list[str]] = {}  # reported names by kind of run, as far as known
    for cell, metric in _wanted(grid):
        names, complete = names_with(cell.config, metric.partition("/")[0])
        if not complete and metric not in names:
            kind = kind_of(cell.config)
            if kind not in names_by_kind:
                done = next((c for c in grid.cells if c.done and kind_of(c.config) == kind), None)
                if done is not None:
                    names_by_kind[kind] = list(done.rows()[0])
                elif ask is None or cell.name not in about_to_run:
                    continue
                else:
                    names_by_kind[kind] = list(ask(cell))
            names = [name for name in names_by_kind[kind] if name != "round"]
        if metric not in names:
            every = list(dict.fromkeys([*names, *known_names(cell.config)]))
            where = f"{grid.study.path}: {cell.row}/{cell.column}"
            raise ConfigError(f"{where} does not report the metric {metric!r}; {meant(metric, every)}")


def _wanted(grid: CellGrid) -> list[tuple[Cell, str]]:
    """Return a cell of every place with each metric that the table or a claim reads there."""
    seed = grid.study.seeds[0]
    measures = [(place, grid.measure_of(place)) for place in grid.study.places]
    wanted = [(place, name) for place, m in measures for name in (m.metric, guide_of(m.report)) if name]
    for claim in grid.study.claims:
        wanted += [(p, claim.metric) for p in grid.study.places if claim.metric is not None and p in claim.places]
    return list({(c.name, metric): (c, metric) for c, metric in ((grid.at[p, seed], m) for p, m in wanted)}.values())
