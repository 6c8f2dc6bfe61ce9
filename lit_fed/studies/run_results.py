"""``python cli.py results``: all claims of what has run, as pages and one table; nothing is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_fed.command.readable import read_settings
from lit_fed.command.shipped import located
from lit_fed.command.table import Call
from lit_fed.errors import ConfigError
from lit_fed.studies.cells import lay_out
from lit_fed.studies.claims_page import Finished, finished_study
from lit_fed.studies.register import Register
from lit_fed.studies.results import collect
from lit_fed.studies.study import PLAIN, read_study


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-c", "--config", nargs="+", action="extend", required=True, help="study or simulation files")
    parser.add_argument("--studies", default="studies_out", help="folder of all studies, as they were run")
    parser.add_argument("--simulations", default="simulations", help="folder of all simulations, as they were run")
    parser.add_argument(
        "--output",
        default="docs/results",
        help="folder of claims.md, claims.csv and a page a study; what stands there of other studies is kept",
    )


def run(call: Call) -> int:
    """Run the command.

    Args:
        call: Its settings.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: If nothing of these files has finished, or the output is not such a command's.
    """
    options = call.settings
    several = [one for path in options.config for one in _finished(Path(path), options)]
    if not several:
        raise ConfigError(
            f"no cell of these studies has finished in {options.studies}, and no simulation in {options.simulations}; "
            "name their folders by --studies and --simulations"
        )
    register = Register(Path(options.output))
    for finished in several:
        register.enter(finished)
    register.write()
    print(f"{len(several)} entered; {register.tally}: {Path(options.output) / 'claims.md'}")
    return 0


def _finished(path: Path, options: Namespace) -> Iterator[Finished]:
    """A simulation that has run, or the profiles of a study of which a cell has finished; others are not laid out."""
    settings, studies = read_settings(located(path), "study file"), Path(options.studies)
    if "simulate" in settings:
        from lit_fed.studies.simulations.finished import finished_simulation

        finished = finished_simulation(path, Path(options.simulations))
        if finished:
            yield finished
        return
    for profile in settings.get("profiles") or (PLAIN,):
        folder = studies / path.stem / str(profile)
        if not any(folder.rglob("cell.json")):
            continue
        grid = lay_out(read_study(path, None if profile == PLAIN else profile), studies)
        done = sum(cell.done for cell in grid.cells)
        if changed := sum(cell.changed for cell in grid.cells):
            print(f"{path.stem}, {profile}: {changed} cells were run with other settings and are left out")
        if done:
            yield finished_study(collect(grid))
