"""The lines of a finished simulation in the register of results, without simulating anything."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.studies.results.register_lines import Finished, Number, StudyRow, claim_texts, number_of, paper_of, row_of
from lit_fed.studies.simulations.run_simulation import SimulationRecord, check_again, read_file, settings_of
from lit_fed.studies.simulations.simulation import Point, verdicts

_PROFILE = "simulation"
_MOST_PLACES = 12  # on the axis of a line whose places are all entered; a longer line is a curve


def finished_simulation(path: Path, simulations: Path) -> Finished | None:
    """Return the results of a file's simulation.

    Args:
        path: The file.
        simulations: Folder of all simulations.

    Returns:
        The results; None if the simulation has not finished, or ran with different settings.
    """
    folder = simulations / path.stem
    record = SimulationRecord.read(folder)
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
    minutes, cpu = (f"{seconds / 60:.1f}" for seconds in (record.seconds, record.cpu_seconds))
    name, profile = (Path(options.again).stem, f"{_PROFILE}_again") if options.again else (path.stem, _PROFILE)
    commit, asked = record.made_with.get("commit", "unknown"), _PROFILE if options.again else ""
    entry = StudyRow(paper_of(path), name, profile, "–", str(simulation.seeds), minutes, cpu, asked, commit)
    decided = verdicts(simulation, points)
    texts = claim_texts(((claim.says, claim.sentence) for claim, _, _ in decided), options.source)
    ran = (simulation.network, simulation.data)
    claims = [
        row_of(text, claim, verdict, entry, options.source, claim.published, *ran)
        for text, (claim, verdict, _) in zip(texts, decided, strict=True)
    ]
    picture = None if options.again else folder / f"{path.stem}.png"
    return Finished(entry, claims, list(numbers_of(entry, points)), picture)


def numbers_of(entry: StudyRow, points: Sequence[Point]) -> Iterator[Number]:
    """Yield mean and quartiles of a figure's lines; of a line over more than 12 places the last alone."""
    values: dict[tuple[str, str], dict[float, list[float]]] = {}
    for point in points:
        values.setdefault((point.panel, point.line), {}).setdefault(point.x, []).append(point.value)
    for (panel, name), along in values.items():
        shown = along if len(along) <= _MOST_PLACES else {(last := max(along)): along[last]}
        for x, values_there in shown.items():
            yield number_of(entry, name, f"{panel}: {x:g}", "", values_there)


def _read(path: Path) -> list[Point]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        return [Point(panel, name, float(x), int(seed), float(value)) for panel, name, x, seed, value in lines[1:]]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} was not written by lit-fed simulate; run the simulation again") from error
