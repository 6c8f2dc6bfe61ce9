"""Progress of long work: a bar on a terminal while the work lasts, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lightning.fabric.utilities.rank_zero import rank_zero_only

T = TypeVar("T")

displays: list[Callable[[str], object]] = []
"""Displays of a run: the last one shows the words of all work, which then shows nothing by itself; ``str`` is mute."""


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield items, and show how many are done: on standard error, by the first process alone.

    Args:
        items: The items, each the result of some work.
        what: The work, such as ``writing clients``.
        total: Number of items; None if it is unknown.
    """
    alone = not displays and not getattr(rank_zero_only, "rank", 0)
    if bar := alone and sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        items = track(items, what, total, console=Console(stderr=True), transient=True)
    told = time.monotonic()
    for done, item in enumerate(items, start=1):
        words = f"{what}: {done:,} of {total:,}" if total else what
        if displays:
            displays[-1](words)
        elif alone and not bar and time.monotonic() - told > 10:  # seconds
            told = time.monotonic()
            print(words, file=sys.stderr, flush=True)
        yield item
