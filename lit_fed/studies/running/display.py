"""Progress of a study: a live display on a terminal; one line per cell without a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lit_fed.callbacks.progress import clock, say
from lit_fed.studies.running.cells import Cell
from lit_fed.studies.running.jobs import FirstRound, Job

_LOOK_S = 1.0  # interval of reading the cells' files


class Display:
    """Counts finished cells, and shows running ones.

    Args:
        total: The number of cells.
        done: The number of cells that finished before.
        rounds: The rounds of the cells to run, summed.
        jobs: The number of parallel cells.
        console: The console.
    """

    def __init__(self, total: int, done: int, rounds: int, jobs: int, console: Console) -> None:
        self.total, self.done, self.failed, self.jobs, self.console = total, done, 0, jobs, console
        self._rounds_left, self._rounds_here = rounds, 0
        self._running: Sequence[Job] = ()
        self._rounds: dict[str, int] = {}
        self._began, self._looked = time.monotonic(), 0.0
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self, running: Sequence[Job]) -> None:
        """Update the running cells, at most once a second."""
        self._running = list(running)
        if self._live is not None and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._rounds = {job.cell.name: len(job.cell.rows()) for job in running}

    def ended(self, job: Job, reason: str, told: str) -> None:
        """Print a line about an ended cell.

        Args:
            job: The cell's process.
            reason: The reason of its failure; empty if it succeeded.
            told: The number to print, such as ``global/acc 0.95``.
        """
        self.done += not reason
        self.failed += bool(reason)
        self._rounds_here += job.cell.max_rounds
        width = len(str(self.total))
        what = f"FAILED: {reason}" if reason else told
        line = f"[{self.done + self.failed:>{width}}/{self.total}] {job.cell.name}  {what}  {job.seconds:.0f} s"
        say(self.console, line)

    def _render(self) -> RenderableType:
        ended = self.done + self.failed
        elapsed = time.monotonic() - self._began
        parts = [f"{ended}/{self.total}", f"{clock(elapsed)} elapsed"]
        if rounds := self._rounds_here + sum(self._rounds.get(job.cell.name, 0) for job in self._running):
            parts.append(f"about {clock(elapsed * (self._rounds_left / rounds - 1))} left")
        if self.failed:
            parts.append(f"{self.failed} failed")
        grid = Table.grid(padding=(0, 1))
        grid.add_row("cells", ProgressBar(max(self.total, 1), ended, width=30), Text(" · ".join(parts)))
        for job in self._running:
            rounds, most = self._rounds.get(job.cell.name, 0), job.cell.max_rounds
            words = f"{rounds}/{most} rounds · {job.cell.name}"
            grid.add_row("", ProgressBar(max(most, 1), rounds, width=30), Text(words, overflow="ellipsis"))
        return Group(grid)


def duration(seconds: float) -> str:
    """Format a rough duration: ``40 s``, ``3 min``, ``2.5 h``, ``4 days``."""
    for limit, unit, name in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            number = seconds / unit
            return f"{number:.1f} {name}" if name == "h" and number < 10 else f"{number:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def estimate(cells: Sequence[Cell], finished: Sequence[Cell], first: FirstRound | None) -> float | None:
    """Estimate the summed seconds of cells from finished cells of their row, or from one round.

    Args:
        cells: The cells to run.
        finished: The finished cells.
        first: The timing of a first round, if one ran.
    """
    taken: dict[str, list[float]] = {}
    for cell in finished:
        seconds = cell.record().get("seconds")
        if seconds:
            for key in (cell.row, ""):
                taken.setdefault(key, []).append(seconds / max(cell.max_rounds, 1))
    total = 0.0
    for cell in cells:
        rates = taken.get(cell.row) or taken.get("")
        if rates:
            total += cell.max_rounds * sum(rates) / len(rates)
        elif first is not None:
            total += first.seconds_of(cell)
        else:
            return None
    return total
