"""A study as one self-contained HTML file, and an index of all studies' reports.

This module collects the content, ``templates/`` has the layout, and Jinja escapes all values.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fed.callbacks.boards import event_files
from lit_fed.command.reading.shipped import located
from lit_fed.studies.file.claims import HOW_DECIDED
from lit_fed.studies.file.study import PLAIN, Place
from lit_fed.studies.results.results import Results, caption
from lit_fed.studies.results.summary import Summary, headings, summary_of, tally_text
from lit_fed.studies.running.cells import Cell, CellGrid

if TYPE_CHECKING:
    from jinja2 import Environment

_PREFIX = "pictures/"
_SAYS = {
    "bars": "The table as bars: means, with standard deviations over seeds.",
    "curves": "Means over seeds, over {along}; the bands are {band}.",
    "lines": "The table over its axis: means, with standard deviations over seeds; dashed are the paper's values.",
}
_BANDS = {
    "standard error": "the standard error of the mean, s/√n, on either side",
    "interval": "95 % confidence intervals of the mean, two-sided, by Student's t",
}


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["base64"] = lambda content: base64.b64encode(content).decode("ascii")
    return made


def _page(template: str, **content: Any) -> str:
    return _templates().get_template(template).render(note=HOW_DECIDED, **content)


def report_html(results: Results, pictures: Iterable[Path]) -> str:
    """Return a study's report with inlined PNG files."""
    grid, study = results.grid, results.grid.study
    return _page(
        "report.html",
        title=study.title,
        study=study,
        summary=(summary := summary_of(results)),
        headings=headings([summary]),
        table=[
            (variant, [results.entries[Place(row, column)] for column in study.columns])
            for row, variant in study.rows.items()
        ],
        caption=" ".join(caption(results)),
        failures=[(cell, cell.record().get("error", "")) for cell in grid.cells if cell.failed],
        pictures=[
            (path.read_bytes(), path.stem, _SAYS.get(path.stem, "").format(along=study.along, band=_BANDS[study.band]))
            for path in pictures
        ],
        drawn=(drawn := _drawn(grid)),
        undrawn=[name for name in study.pictures if name not in {name for _, name, *_ in drawn}],
        made_with=_made_with([cell for cell in grid.cells if cell.done]),
        cells=[(cell, _state(cell), str(cell.run or cell.folder)) for cell in grid.cells],
        files=_files(grid),
        first=grid.cells[0],
        resolved=json.dumps(grid.cells[0].config, indent=1, default=str),
    )


def index_html(several: Sequence[Summary], profile: str) -> str:
    """Return an index of studies of one profile, with links to their reports and all claims."""
    title = "Studies" if profile == PLAIN else f"Studies, profile {profile}"
    return _page("index.html", title=title, several=several, tally=tally_text(several), headings=headings(several))


def _drawn(grid: CellGrid) -> list[tuple[bytes, str, Cell, str]]:
    """Return the pictures that the study selects from the first seed's runs, name by name."""
    study = grid.study
    first = [cell for cell in grid.cells if cell.seed == study.seeds[0] and cell.done]
    drawn = [(cell, pictures_of(cell)) for cell in first] if study.pictures else []
    return [
        (pictures[name], name, cell, study.rows[cell.row].label)
        for name in study.pictures
        for cell, pictures in drawn
        if name in pictures
    ]


def pictures_of(cell: Cell) -> dict[str, bytes]:
    """Return the last version of each picture as PNG by name; empty without events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if cell.run is None or not (files := event_files(cell.run)):
        return {}
    events = EventAccumulator(str(files[-1].parent), size_guidance={"images": 1}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith(_PREFIX)]
    return {tag.removeprefix(_PREFIX): events.Images(tag)[-1].encoded_image_string for tag in tags}


def _made_with(done: Sequence[Cell]) -> dict[str, list[str]]:
    """Return versions, commit and hardware; several values if they differ between cells."""
    counts_by_key = defaultdict[str, Counter[str]](Counter)
    for cell in done:
        for key, value in cell.record().get("made_with", {}).items():
            counts_by_key[key][value] += 1
    lines = {
        key: [f"{value} ({count} cells)" if len(counts) > 1 else str(value) for value, count in counts.items()]
        for key, counts in counts_by_key.items()
    }
    seconds = sum(cell.record().get("seconds", 0.0) for cell in done)
    return lines | {"time": [f"{seconds / 60:.1f} minutes in all, one cell after the other"]}


def _state(cell: Cell) -> str:
    if not cell.done:
        return "failed" if cell.failed else "not finished"
    record = cell.record()
    return "finished" + (f", {record['seconds']:.0f} s" if "seconds" in record else "")


def _files(grid: CellGrid) -> dict[str, str]:
    """Return the content of the study file and of every configuration file that a cell names."""
    named = [
        word for cell in grid.cells for before, word in zip(cell.args, cell.args[1:], strict=False) if before == "-c"
    ]
    names = dict.fromkeys([str(grid.study.path), *named])
    return {name: Path(located(name)).read_text(encoding="utf-8") for name in names}
