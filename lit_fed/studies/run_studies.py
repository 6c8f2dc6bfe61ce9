"""``lit-fed study``: the command line and the stages of studies."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_fed.callbacks.progress import plain_console, say
from lit_fed.checks import check_range
from lit_fed.command.command import Call
from lit_fed.engine.storage.files import write_text
from lit_fed.errors import ConfigError
from lit_fed.studies.file.study import Place, read_study
from lit_fed.studies.pages.figures import draw_bars, draw_curves, draw_lines, has_lines
from lit_fed.studies.pages.report import index_html, report_html
from lit_fed.studies.results.results import (
    Entry,
    Results,
    collect,
    table_csv,
    table_latex,
    table_markdown,
)
from lit_fed.studies.results.summary import (
    claims_markdown,
    headings,
    summaries_in,
    summary_json,
    summary_of,
    tally_text,
)
from lit_fed.studies.running.cells import Cell, CellGrid, chosen, lay_out
from lit_fed.studies.running.display import Display, duration, estimate
from lit_fed.studies.running.environment import describe
from lit_fed.studies.running.jobs import Job, Slots, locked, one_round, run_jobs, share_machine
from lit_fed.studies.running.parts import check_data, check_metrics, check_parts
from lit_fed.tracking import tracked

_PLAIN_WIDTH = 140  # without a terminal, such as in a log file
_COLORS = {"holds": "green", "equal": "cyan", "fails": "red", "undecided": "yellow"}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-c", "--config", nargs="+", action="extend", required=True, help="study files")
    parser.add_argument(
        "--profile", type=str | None, help="such as pocket: embedded data, minutes; paper: full settings; see the file"
    )
    parser.add_argument(
        "--jobs", type=int | None, help="number of parallel cells; by default as many as cores or GPUs allow"
    )
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="ROW/COLUMN/SEED", help="run these cells; * for all"
    )
    parser.add_argument("--output", default="studies_out", help="folder of all studies")
    parser.add_argument("--dry_run", action="store_true", help="list the cells and an estimate of their duration")


def run(call: Call) -> int:
    """Run the command, and return the exit status: 0, 1 if a cell failed, 130 after Ctrl-C."""
    options = call.settings
    if options.jobs is not None:
        check_range("--jobs", options.jobs, least=1)
    grids = [lay_out(read_study(path, options.profile), Path(options.output)) for path in options.config]
    if twice := [str(g.folder) for i, g in enumerate(grids) if g.folder in [other.folder for other in grids[:i]]]:
        raise ConfigError(f"two studies would write into {twice[0]}; give their files different names")
    for grid in grids:
        check_metrics(grid)
    todo = [(grid, cell) for grid, cell in chosen(grids, options.only)]
    console = plain_console(_PLAIN_WIDTH)
    if options.dry_run:
        return _dry_run(grids, todo, options, console)
    with ExitStack() as stack, _terminable():
        locks = {grid.folder: stack.enter_context(locked(grid.folder)) for grid in grids}
        try:
            return _run(grids, todo, locks, options, console)
        except KeyboardInterrupt:
            done = sum(cell.done for grid in grids for cell in grid.cells)
            say(console, f"interrupted with {done} of {sum(len(g.cells) for g in grids)} cells finished; resume with")
            say(console, f"  {shlex.join(['lit-fed', *call.words])}")
            return 130


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM stop the cells as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # only the main thread can handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------- the stages


def _dry_run(grids: Sequence[CellGrid], todo: Sequence[tuple[CellGrid, Cell]], options: Any, console: Console) -> int:
    waiting = [cell for _, cell in todo if not cell.done]
    for grid in grids:
        study = grid.study
        table = Table(title=Text(study.called), title_justify="left")
        for heading in ("cell", "rounds", "state"):
            table.add_column(heading, overflow="fold")
        for _, cell in (pair for pair in todo if pair[0] is grid):
            table.add_row(cell.name, str(cell.max_rounds), Text(_state(cell)))
        console.print(table)
    try:
        _check_parts(grids, todo, console)
    except ConfigError as error:
        if not waiting:
            raise
        say(console, f"{len(waiting)} cells to run; they cannot run yet: {error}")
        return 0
    if not waiting:
        say(console, "all cells are finished")
        return 0
    slots = share_machine(waiting, options.jobs)

    def ask(grid: CellGrid, cell: Cell) -> Sequence[str]:
        with locked(grid.folder) as lock:
            return _ask(grid, slots, [lock], console, cell)

    for grid in grids:
        check_metrics(grid, waiting, partial(ask, grid))
    seconds = estimate(waiting, [cell for grid in grids for cell in grid.cells if cell.done], None)
    basis = "from finished cells"
    if seconds is None:
        grid, first = next(pair for pair in todo if not pair[1].done)
        say(console, f"timing one round of {first.name}…")
        with locked(grid.folder) as lock:
            seconds = estimate(waiting, [], one_round(first, grid.folder, slots, [lock]))
        basis = f"from one round of {first.name}"
    assert seconds is not None
    took = duration(seconds / min(slots.jobs, len(waiting)))
    say(console, f"{len(waiting)} cells to run, {slots.jobs} side by side: about {took}, {basis}")
    return 0


def _state(cell: Cell) -> str:
    if cell.changed:
        return "ran with different settings; will run in a new folder"
    if cell.done:
        return "finished"
    rounds = len(cell.rows())
    failed = f"failed: {cell.record().get('error', '')}; " if cell.record().get("status") == "failed" else ""
    return f"{failed}will resume after {rounds} rounds" if rounds else f"{failed}to run"


def _run(
    grids: Sequence[CellGrid],
    todo: Sequence[tuple[CellGrid, Cell]],
    locks: dict[Path, int],
    options: Any,
    console: Console,
) -> int:
    waiting = [cell for _, cell in todo if not cell.done]
    slots = share_machine(waiting, options.jobs)
    _check_parts(grids, todo, console)
    failures: list[tuple[CellGrid, Cell, str]] = []
    made_with = describe()
    held = list(locks.values())
    for grid in grids:
        check_metrics(grid, waiting, partial(_ask, grid, slots, held, console))
    results = []
    for grid in grids:
        mine = [cell for owner, cell in todo if owner is grid]
        failed = _run_grid(grid, mine, slots, held, made_with, console)
        results.append(collect(grid))
        _write_all(results[-1])
        _show(results[-1], console)
        failures += [(grid, cell, reason) for cell, reason in failed]
    _summarise(results, Path(options.output), console)
    for grid, cell, reason in failures:
        say(console, f"failed  {grid.study.name}: {cell.name}: {reason} (see {cell.folder / 'log.txt'})")
    return 1 if failures else 0


def _check_parts(grids: Sequence[CellGrid], todo: Sequence[tuple[CellGrid, Cell]], console: Console) -> None:
    for grid in grids:
        try:
            check_parts(cell for owner, cell in todo if owner is grid and not cell.done)
            finished = (cell for owner, cell in todo if owner is grid and cell.done)
            check_data(finished, partial(say, console))
        except ConfigError as error:
            raise ConfigError(f"{grid.study.path}: {error}") from error


def _ask(grid: CellGrid, slots: Slots, locks: Sequence[int], console: Console, cell: Cell) -> Sequence[str]:
    say(console, f"{grid.study.name}: running one round of {cell.name} to see which metrics it reports")
    rounds = (one_round(one, grid.folder, slots, locks) for one in [cell])
    return next(tracked(rounds, f"first round of {cell.name}")).names


def _run_grid(
    grid: CellGrid,
    cells: Sequence[Cell],
    slots: Slots,
    locks: Sequence[int],
    made_with: dict[str, str],
    console: Console,
) -> list[tuple[Cell, str]]:
    waiting = [cell for cell in cells if not cell.done]
    study, finished = grid.study, len(cells) - len(waiting)
    say(
        console,
        f"{study.called}: {len(cells)} cells"
        + (f", {finished} of them finished before" if finished else "")
        + (f"; {slots.jobs} side by side" if waiting else ""),
    )
    for cell in waiting:
        if cell.changed:
            say(console, f"{cell.name}: {cell.change}; the old run is now {cell.set_aside()}")
    if any(cell.config["trainer"]["num_threads"] is None for cell in waiting):
        say(console, "trainer.num_threads is not set: with another --jobs, numbers may differ in their last digits")
    failures: list[tuple[Cell, str]] = []

    def ended(job: Job, reason: str) -> None:
        cell = job.cell
        before = cell.record()
        taken = {
            "seconds": before.get("seconds", 0.0) + job.seconds,
            "cpu_seconds": before.get("cpu_seconds", 0.0) + job.process.cpu_seconds,
        }
        status = "failed" if reason else "done"
        record = {"run": str(cell.run), "made_with": made_with, "data": cell.data_of_run()}
        cell.write_record(status=status, error=reason, **taken, **record)
        if not reason and (lacking := _lacking(grid, cell)):
            reason = f"it ended without reporting {' and '.join(lacking)}"
            cell.write_record(status="failed", error=reason)
        if reason:
            failures.append((cell, reason))
        display.ended(job, reason, _contribution(grid, cell))

    rounds = sum(cell.max_rounds for cell in waiting)
    with Display(len(cells), finished, rounds, slots.jobs, console) as display:
        run_jobs(waiting, slots, locks, ended, display.tick)
    return failures


def _lacking(grid: CellGrid, cell: Cell) -> list[str]:
    """Return the metrics that the table needs and a finished cell lacks."""
    mine = [(place, seed) for (place, seed), owner in grid.runs.items() if owner is cell]
    lacking = [place for place, seed in mine if grid.value(place, seed) is None]
    return list(dict.fromkeys(grid.measure_of(place).metric or "a metric to show" for place in lacking))


def _contribution(grid: CellGrid, cell: Cell) -> str:
    """Return the numbers that a cell contributes to the table."""
    values_told = []
    for (place, seed), owner in grid.runs.items():
        value = grid.value(place, seed) if owner is cell else None
        if value is not None:
            measure = grid.measure_of(place)
            values_told.append(f"{measure.metric} {value:.{measure.decimals}f}")
    return ", ".join(dict.fromkeys(values_told))


def _write_all(results: Results) -> None:
    """Write a study's files."""
    folder = results.grid.folder
    pictures = []
    if any(entry.values for entry in results.entries.values()):
        pictures = [folder / "bars.png", folder / "curves.png"]
        draw_bars(results, pictures[0])
        draw_curves(results, pictures[1])
        if has_lines(results.grid.study):
            pictures.insert(0, folder / "lines.png")
            draw_lines(results, pictures[0])
    for name, text in (
        ("table.md", table_markdown(results)),
        ("table.tex", table_latex(results)),
        ("table.csv", table_csv(results)),
        ("claims.md", claims_markdown([summary_of(results)])),
        ("report.html", report_html(results, pictures)),
        ("summary.json", summary_json(summary_of(results))),
    ):
        write_text([text], folder / name)


def _show(results: Results, console: Console) -> None:
    study = results.grid.study
    table = Table(title=Text(study.title), title_justify="left")  # a text, or brackets would be taken for markup
    table.add_column("", overflow="fold")
    for column in study.columns.values():
        table.add_column(Text(column.label), justify="right", overflow="fold")
    for row, variant in study.rows.items():
        entries = [results.entries[Place(row, column)] for column in study.columns]
        table.add_row(Text(variant.label), *map(_shown, entries))
    console.print(table)
    if results.grid.partitions:
        say(console, results.grid.partitions)
    for name in ("table.md", "report.html"):
        say(console, f"{name:<12}{results.grid.folder / name}")


def _shown(entry: Entry) -> str:
    ours = f"[bold]{entry.ours}[/bold]" if entry.best else entry.ours
    return f"{ours}\n[dim]{entry.paper}[/dim]" if entry.paper else ours


def _summarise(results: Sequence[Results], output: Path, console: Console) -> None:
    """Show the claims of these studies on the terminal, and write all claims of the folder to files and a page."""
    if any(result.verdicts for result in results):
        bounds = "±: a two-sided 95 % confidence interval"
        several = [summary_of(result) for result in results]
        for heading in headings(several):
            table = Table(title=heading, title_justify="left", caption=bounds, caption_justify="left")
            for column in ("study", "claim", "verdict", "difference", "seeds"):
                table.add_column(column, overflow="fold", justify="right" if column == "seeds" else "left")
            for summary in several:
                for claim in summary.claims_under(heading):
                    words = (summary.name, claim.text, claim.outcome, claim.difference, str(claim.seeds))
                    style = {2: _COLORS.get(claim.outcome, "")}
                    table.add_row(*(Text(word, style.get(place, "")) for place, word in enumerate(words)))
            console.print(table)
        say(console, tally_text(several))
    for profile in dict.fromkeys(result.grid.study.profile for result in results):
        every = summaries_in(output, profile)
        for name, text in (
            (f"claims.{profile}.md", claims_markdown(every)),
            (f"index.{profile}.html", index_html(every, profile)),
        ):
            write_text([text], output / name)
            say(console, f"{name.partition('.')[0]:<12}{output / name}")
