"""The page and the lines of ``claims.csv`` of a finished simulation, without simulating anything."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.studies.claims_page import GENERATED, Finished, StudyRow, claim_lines, row_of
from lit_fed.studies.markdown import head, line
from lit_fed.studies.simulations.record import Record
from lit_fed.studies.simulations.run_simulation import check_again, medians, read_file, settings_of
from lit_fed.studies.simulations.simulation import Point, verdicts

_PROFILE = "simulation"


def finished_simulation(path: Path, simulations: Path) -> Finished | None:
    """Return the results of a file's simulation.

    Args:
        path: The file.
        simulations: Folder of all simulations.

    Returns:
        The results; None if the simulation has not finished, or ran with different settings.

    Raises:
        ConfigError: If the file is not a simulation's, or its points cannot be read.
    """
    folder = simulations / path.stem
    record = Record.read(folder)
    if record is None:
        return None
    simulation, options = read_file(path)
    if not record.ran(settings_of(options)):
        print(f"{path.stem}: ran with different settings and is skipped")
        return None
    if options.again:
        check_again(options.again, simulation, settings_of(options))
        if path.stem != f"{Path(options.again).stem}_again":  # the page's name, which must be unique
            raise ConfigError(f"{path} asks {options.again} again; rename it to {Path(options.again).stem}_again.yaml")
    points = _read(folder / "points.csv")
    found = [(claim, verdict) for claim, verdict, _ in verdicts(simulation, points)]
    minutes, cpu = (f"{seconds / 60:.1f}" for seconds in (record.seconds, record.cpu_seconds))
    name, profile = (Path(options.again).stem, f"{_PROFILE}_again") if options.again else (path.stem, _PROFILE)
    entry = StudyRow(name, profile, "–", str(simulation.seeds), minutes, cpu, _PROFILE if options.again else "")
    commit = record.made_with.get("commit", "unknown")
    claims = [
        row_of(claim, verdict, options.source, entry.setting, commit, claim.published) for claim, verdict in found
    ]
    lines = [f"# {path.stem}", "", GENERATED, "", f"{options.source}.", ""]
    lines += [f"- {key}: {record.made_with.get(key, 'unknown')}" for key in ("commit", "hardware", "versions")]
    lines += ["", f"![{options.source}]({name}-{profile}.png)", "", *_table(points), ""]
    lines += [
        f"Medians over {simulation.seeds} seeds, as in the picture, with quartiles; the table beside this page has "
        "every seed's numbers. Margins are natural logarithms: 0.69 is a factor of two."
    ]
    page = "\n".join([*lines, *claim_lines(found, claims)]) + "\n"
    table = (folder / "points.csv").read_text(encoding="utf-8")
    return Finished(entry, claims, page, table, folder / f"{path.stem}.png")


def _read(path: Path) -> list[Point]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        return [Point(panel, name, float(x), int(seed), float(value)) for panel, name, x, seed, value in lines[1:]]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} was not written by lit-fed simulate; run the simulation again") from error


def _table(points: Sequence[Point]) -> list[str]:
    rows = [(panel, name, ", ".join(numbers)) for (panel, name), numbers in medians(points).items()]
    return [*head(("panel", "line", "median by place on the axis")), *(line(row) for row in rows)]
