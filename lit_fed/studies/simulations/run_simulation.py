"""``lit-fed simulate -c …``: a paper's figure from simulations, as CSV and PNG."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from lit_fed.checks import check_range
from lit_fed.command.command import Call
from lit_fed.command.reading.config_files import read_settings
from lit_fed.command.reading.parts import instantiate
from lit_fed.command.reading.shipped import located
from lit_fed.command.reading.words import spelled
from lit_fed.command.refusals.explain import missing
from lit_fed.engine.storage.files import files_in_place, write_text
from lit_fed.errors import ConfigError
from lit_fed.studies.file.rounds import quantile
from lit_fed.studies.results.results import csv_text, head, line, verdict_text
from lit_fed.studies.running.environment import describe
from lit_fed.studies.simulations.jobs import Jobs
from lit_fed.studies.simulations.simulation import Point, Simulation, verdicts

_WIDE = 4  # panels side by side
_SHOWN = 12  # maximum number of printed values per line, besides the last


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-c", "--config", action="config", help="a file with the key simulate")
    parser.add_argument("--source", default="", help="the paper and the figure")
    parser.add_subclass_arguments(Simulation, "simulate", required=False, help="the figure, by class")
    parser.add_argument("--again", default="", help="the file whose claims it asks again, over other seeds")
    parser.add_argument("-o", "--output", type=Path | None, help="folder to write to; simulations/<file> if none")
    parser.add_argument("--processes", type=int, default=2, help="number of parallel jobs, each on one thread")


def run(call: Call) -> int:
    """Run the command."""
    options = call.settings
    if options.simulate is None:
        raise ConfigError(missing(["--simulate"], "simulate"))
    check_range("processes", options.processes, least=1)
    simulation: Simulation = instantiate(call.parser, options).simulate
    if options.again:
        check_again(options.again, simulation, settings_of(options))
    name = name_of(call)
    folder = options.output or Path("simulations") / name
    made_with, began, worked = describe(), time.monotonic(), sum(os.times()[:4])
    kept = None if "uncommitted" in made_with["commit"] else folder  # uncommitted code cannot be identified
    jobs = Jobs(options.processes, kept, repr(made_with), partial(print, flush=True))
    points = simulation.points(jobs)
    taken = {"seconds": time.monotonic() - began, "cpu_seconds": sum(os.times()[:4]) - worked}
    table = claims(simulation, points)
    with files_in_place(folder, ()) as temporary:
        write(points, temporary)
        draw(points, temporary / f"{name}.png", simulation)
        (temporary / "claims.md").write_text(table, encoding="utf-8")
        SimulationRecord(settings=settings_of(options), made_with=made_with, **taken).write(temporary)
        SimulationRecord.remove(folder)  # if the process is killed while files are replaced, the record must not remain
    print(summary(points))
    jobs.forget()
    print(f"\n{table}")
    print(f"written     {folder}")
    return 0


def read_file(path: Path) -> tuple[Simulation, Namespace]:
    """Read a file's simulation and settings; raise `ConfigError` if the file is not a simulation's."""
    file = located(path)
    if "simulate" not in read_settings(file, "simulation file"):
        raise ConfigError(f"{path} has no key simulate; name a simulation's file")
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    options = parser.parse_args(["-c", str(file)])
    simulation: Simulation = instantiate(parser, options).simulate
    return simulation, options


def check_again(file: str, simulation: Simulation, settings: Mapping[str, Any]) -> None:
    """Refuse to ask claims again that differ from the first file's, for another figure, or over the same seeds.

    Args:
        file: The file that asked first.
        simulation: The simulation that asks again.
        settings: Its settings; a grid may have fewer values.
    """
    first, options = read_file(Path(file))
    if options.again:
        raise ConfigError(f"again: {file} itself asks {options.again} again; name {options.again}")
    before = settings_of(options)
    theirs, ours = before["init_args"], settings["init_args"]
    if before["class_path"] != settings["class_path"]:
        raise ConfigError(
            f"again: {file} simulates {before['class_path']}, and this file {settings['class_path']}; use the same"
        )
    for key in sorted({*theirs, *ours} - {"seeds", "first_seed"}):
        was, now = theirs.get(key), ours.get(key)
        grid = isinstance(was, (list, tuple)) and isinstance(now, (list, tuple))
        if was != now and not (grid and all(value in was for value in now)):
            raise ConfigError(
                f"again: {key} is {now}, and {was} in {file}; only seeds may differ, and a grid may be smaller"
            )
    if common := sorted({*first.every_seed} & {*simulation.every_seed}):
        raise ConfigError(f"again: {file} has seed {common[0]}, too; choose other seeds with first_seed")
    known = [_sentence(content) for content in first.claims]
    for content in simulation.claims:
        if _sentence(content) not in known:
            raise ConfigError(f"again: {file} has no claim {_sentence(content)!r}; copy a claim from it")


def _sentence(content: Any) -> str:
    return " ".join(str(content["claim"] if isinstance(content, dict) else content).split())


def name_of(call: Call) -> str:
    """Return the name of a figure's folder and picture: its configuration file's, or its class's."""
    files = [value for option, value in spelled(call.words) if option == "--config" and value]
    return Path(files[-1]).stem if files else str(call.settings.simulate.class_path).rpartition(".")[2].lower()


def settings_of(options: Namespace) -> dict[str, Any]:
    """Return all settings that determine a figure's points, defaults included, claims excluded."""
    settings: dict[str, Any] = options.simulate.clone().as_dict()
    settings["init_args"].pop("claims", None)
    return settings


def write(points: Sequence[Point], folder: Path) -> None:
    """Write every seed's numbers to ``points.csv``, medians and quartiles to ``summary.csv``."""
    quartiles = ((*key, *three) for key, three in quartiles_of(points).items())
    for name, text in (
        ("points.csv", csv_text(Point._fields, points)),
        ("summary.csv", csv_text(("panel", "line", "x", "q25", "median", "q75"), quartiles)),
    ):
        write_text([text], folder / name)


def quartiles_of(points: Sequence[Point]) -> dict[tuple[str, str, float], tuple[float, float, float]]:
    """Return lower quartile, median and upper quartile over seeds; diverged values count as infinite."""
    values: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for point in points:
        values[point.panel, point.line, point.x].append(point.value if np.isfinite(point.value) else np.inf)
    return {key: (quantile(of, 0.25), quantile(of, 0.5), quantile(of, 0.75)) for key, of in values.items()}


def summary(points: Sequence[Point]) -> str:
    """Return the medians as lines of text."""
    return "\n".join(f"{panel} | {name} | {', '.join(numbers)}" for (panel, name), numbers in medians(points).items())


def medians(points: Sequence[Point]) -> dict[tuple[str, str], list[str]]:
    """Return the medians by panel and line; a long line is thinned out, and ``summary.csv`` has all."""
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (panel, name, x), (_, median, _) in quartiles_of(points).items():
        lines[panel, name].append(f"{x:g}: {median:.4g}")
    return {key: numbers[: -1 : -(-len(numbers) // _SHOWN)] + numbers[-1:] for key, numbers in lines.items()}


def claims(simulation: Simulation, points: Sequence[Point]) -> str:
    """Return the paper's claims and their verdicts as a Markdown table."""
    lines = head(("claim", "verdict", "difference, natural logarithm", "so for seeds"))
    for claim, verdict, seeds in verdicts(simulation, points):
        said = f"{claim.says} (`{claim.text}`)" if claim.says else f"`{claim.text}`"
        lines.append(line((said, verdict.outcome, verdict_text(verdict), f"{seeds} of {verdict.seeds}")))
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path, simulation: Simulation) -> None:
    """Draw medians as lines with shaded quartiles; a panel over warm-up and ρ as a heat map."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    quartiles = quartiles_of(points)
    panels = list(dict.fromkeys(point.panel for point in points))
    wide = min(_WIDE, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(4.2 * wide, 3.4 * tall), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(tall, wide, squeeze=False).flat
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(places, panels, strict=False):
        lines: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        for (where, name, x), numbers in quartiles.items():
            if where == panel:
                lines[name].append((x, *numbers))
        axes.set_title(panel, fontsize=10)
        if " and " in panel:
            _heat_map(axes, lines)
            continue
        for name, rows in lines.items():
            x, low, middle, high = np.array(sorted(rows)).T
            axes.plot(x, middle, marker="o" if len(x) < 15 else "", label=name)
            axes.fill_between(x, low, high, alpha=0.2)
        if not any(np.isfinite(row[2]) for rows in lines.values() for row in rows[1:]):
            axes.text(0.5, 0.5, "diverges", transform=axes.transAxes, ha="center")
        simulation.dress(axes, panel)
        if len(lines) > 1:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _heat_map(axes: Any, lines: dict[str, list[tuple[float, ...]]]) -> None:
    """Draw medians on a log10 scale, with a star on the best warm-up of each row."""
    x = [row[0] for row in sorted(next(iter(lines.values())))]
    values = np.array([[row[2] for row in sorted(rows)] for rows in lines.values()])
    with np.errstate(invalid="ignore"):
        scaled = np.log10(values)
    axes.imshow(np.where(np.isfinite(scaled), scaled, np.nan), aspect="auto", origin="lower", cmap="viridis")
    axes.set_xticks(range(len(x)), [f"{fraction:g}" for fraction in x])
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_xlabel("T_warm / T")
    for row, numbers in enumerate(scaled):
        for column, number in enumerate(numbers):
            star = " ★" if column == int(np.argmin(numbers)) else ""
            axes.text(column, row, f"{number:.2f}{star}", ha="center", va="center", color="white", fontsize=8)


# ---------------------------------------------------------------------- the record


_NAME = "simulation.json"


@dataclass(frozen=True)
class SimulationRecord:
    """A finished simulation.

    Args:
        settings: All settings that determine the points.
        made_with: Commit, versions and hardware, see `lit_fed.studies.running.environment.describe`.
        seconds: Duration.
        cpu_seconds: CPU time.
    """

    settings: dict[str, Any]
    made_with: dict[str, str]
    seconds: float
    cpu_seconds: float

    def write(self, folder: Path) -> None:
        """Write the record, after all other files of the simulation."""
        write_text([json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"], folder / _NAME)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the record, before any other file of the folder is replaced."""
        (folder / _NAME).unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read a folder's record; None if no simulation has finished; raise `ConfigError` if the file is malformed."""
        path = folder / _NAME
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} was not written by lit-fed simulate; run it again") from error

    def ran(self, settings: dict[str, Any]) -> bool:
        """Whether the simulation ran with these settings."""
        return bool(self.settings == json.loads(json.dumps(settings)))  # turns tuples into lists
