"""What a study shows while it runs: a live display on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lit_fed.studies.cells import Cell
from lit_fed.studies.jobs import FirstRound, Job

_PLAIN_WIDTH = 140  # where there is no terminal to ask, such as in a log file
_LOOK_S = 1.0  # how often the cells' files are read


class Display:
    """Counts cells and shows those under way.

    Args:
        total: How many cells there are in all.
        done: How many had been finished before.
        rounds: Rounds of the cells to run, all together.
        jobs: How many run side by side.
        console: Where to show it.
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
        """Look at the cells under way, once a second."""
        self._running = list(running)
        if self._live is not None and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._rounds = {job.cell.name: len(job.cell.rows()) for job in running}

    def ended(self, job: Job, reason: str, told: str) -> None:
        """Print a line about a cell that has ended.

        Args:
            job: The cell's process.
            reason: Why it failed; empty where it did not.
            told: Its number, such as ``global/acc 0.95``.
        """
        self.done += not reason
        self.failed += bool(reason)
        self._rounds_here += job.cell.max_rounds
        width = len(str(self.total))
        what = f"FAILED: {reason}" if reason else told
        line = f"[{self.done + self.failed:>{width}}/{self.total}] {job.cell.name}  {what}  {job.seconds:.0f} s"
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _render(self) -> RenderableType:
        ended = self.done + self.failed
        elapsed = time.monotonic() - self._began
        parts = [f"{ended}/{self.total}", f"{_clock(elapsed)} elapsed"]
        if self._rounds_here:
            parts.append(f"about {_clock(elapsed * (self._rounds_left / self._rounds_here - 1))} left")
        if self.failed:
            parts.append(f"{self.failed} failed")
        grid = Table.grid(padding=(0, 1))
        grid.add_row("cells", ProgressBar(max(self.total, 1), ended, width=30), Text(" · ".join(parts)))
        for job in self._running:
            rounds, most = self._rounds.get(job.cell.name, 0), job.cell.max_rounds
            words = f"{rounds}/{most} rounds · {job.cell.name}"
            grid.add_row("", ProgressBar(max(most, 1), rounds, width=30), Text(words, overflow="ellipsis"))
        return Group(grid)


def plain_console() -> Console:
    """The standard output; wide where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def say(console: Console, line: str) -> None:
    """A line that stays one line, so that paths can be copied and logs searched."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def duration(seconds: float) -> str:
    """A rough time: ``40 s``, ``3 min``, ``2.5 h``, ``4 days``."""
    for limit, unit, name in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            number = seconds / unit
            return f"{number:.1f} {name}" if name == "h" and number < 10 else f"{number:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def estimate(cells: Sequence[Cell], finished: Sequence[Cell], first: FirstRound | None) -> float | None:
    """Seconds that cells will take one after the other, from what others of their row took, or from one round.

    Args:
        cells: What is to be run.
        finished: What has been.
        first: What a first round told, where one was run.
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


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
