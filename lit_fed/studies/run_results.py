"""``lit-fed results``: the claims of finished studies as pages and tables, without running anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_fed.command.command import Call
from lit_fed.command.reading.config_files import read_settings
from lit_fed.command.reading.shipped import located
from lit_fed.errors import ConfigError
from lit_fed.studies.file.study import PLAIN, read_study
from lit_fed.studies.pages.register import Register
from lit_fed.studies.results.register_lines import Finished, claim_texts, finished_study, texts_of
from lit_fed.studies.results.results import collect
from lit_fed.studies.running.cells import lay_out


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-c", "--config", nargs="+", action="extend", required=True, help="study or simulation files")
    parser.add_argument("--studies", default="studies_out", help="folder of all studies' runs")
    parser.add_argument("--simulations", default="simulations", help="folder of all simulations' runs")
    parser.add_argument(
        "--output",
        default="docs/results",
        help="folder of claims.csv, and a page and a table of numbers per paper; entries of other studies are kept",
    )


def run(call: Call) -> int:
    """Run the command, and return the exit status 0."""
    options = call.settings
    paths, register = [Path(path) for path in options.config], Register(Path(options.output))
    several = [finished_one for path in paths for finished_one in _finished(path, options)]
    for finished in several:
        register.enter(finished)
    explained = sum(
        register.explain(f"{path.stem}, {profile}", causes)
        for path in paths
        for profile, causes in _causes(path, register.profiles(path.stem))
    )
    if not several and not any(register.profiles(path.stem) for path in paths):
        raise ConfigError(
            f"no cell of these studies has finished in {options.studies}, and no simulation in {options.simulations}; "
            "name their folders with --studies and --simulations"
        )
    summary = f"{len(several)} entered; {explained} changed causes; by Holm, {register.write()}"
    print(f"{summary}; see {Path(options.output) / 'README.md'}")
    return 0


def _finished(path: Path, options: Namespace) -> Iterator[Finished]:
    """Yield the results of a finished simulation, or of a study's profiles with a finished cell."""
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
            print(f"{path.stem}, {profile}: {changed} cells ran with different settings and are skipped")
        if done:
            yield finished_study(collect(grid))


def _causes(path: Path, profiles: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the causes in the current file, by profile."""
    settings = read_settings(located(path), "study file")
    if "simulate" in settings:
        claims = [claim for claim in settings["simulate"]["init_args"].get("claims", ()) if isinstance(claim, dict)]
        worded = ((_plain(claim, "says"), _plain(claim, "claim")) for claim in claims)
        texts = claim_texts(worded, settings.get("source", ""))
        causes = [_plain(claim, "not_applicable") or _plain(claim, "cause") for claim in claims]
        yield from ((profile, dict(zip(texts, causes, strict=True))) for profile in profiles)
        return
    for profile in profiles:
        if profile in (settings.get("profiles") or (PLAIN,)):
            study = read_study(path, None if profile == PLAIN else profile)
            causes = [claim.not_applicable or claim.cause for claim in study.claims]
            yield profile, dict(zip(texts_of(study), causes, strict=True))


def _plain(claim: dict[str, str], key: str) -> str:
    return " ".join(claim.get(key, "").split())
