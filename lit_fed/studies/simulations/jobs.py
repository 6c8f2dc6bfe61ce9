"""A simulation's jobs: some at a time, and those that are done kept until the whole is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from lit_fed.engine.storage.files import in_place_of

JobT = TypeVar("JobT")
OutcomeT = TypeVar("OutcomeT")
_FOLDER = "jobs"


@dataclass(frozen=True)
class Jobs:
    """Runs jobs.

    Args:
        processes: So many at a time.
        folder: A simulation's, in which each job's outcome is kept, so that one that was stopped goes on; None keeps
            nothing.
        made_with: What outcomes depend on beside their jobs, such as the commit.
        tell: Told how many are done.
    """

    processes: int = 1
    folder: Path | None = None
    made_with: str = ""
    tell: Callable[[str], object] | None = None

    def run(self, work: Callable[[JobT], OutcomeT], jobs: Sequence[JobT], kinds: Sequence[type] = ()) -> list[OutcomeT]:
        """What jobs give, in their order.

        Args:
            work: Does a job.
            jobs: What there is to do; their ``repr`` tells them apart.
            kinds: The named tuples that outcomes consist of, beside lists, dictionaries, numbers and tensors.
        """
        do = partial(_do, work, tuple(kinds), None if self.folder is None else self.folder / _FOLDER, self.made_with)
        if self.processes < 2 or len(jobs) < 2:
            return self._collected(map(do, jobs), len(jobs))
        with ProcessPoolExecutor(min(self.processes, len(jobs)), mp_context=get_context("spawn")) as pool:
            return self._collected(pool.map(do, jobs), len(jobs))

    def _collected(self, outcomes: Iterable[OutcomeT], count: int) -> list[OutcomeT]:
        found: list[OutcomeT] = []
        for outcome in outcomes:
            found.append(outcome)
            if self.tell is not None:
                self.tell(f"{len(found)} of {count} jobs done")
        return found

    def forget(self) -> None:
        """Remove what was kept."""
        if self.folder is not None:
            shutil.rmtree(self.folder / _FOLDER, ignore_errors=True)


ALONE = Jobs()
"""One job after the other, nothing kept."""


def _do(
    work: Callable[[JobT], OutcomeT], kinds: tuple[type, ...], folder: Path | None, made_with: str, job: JobT
) -> OutcomeT:
    """A job's outcome: the one that was kept, or by doing it."""
    if folder is None:
        return work(job)
    path = folder / f"{sha256(repr((made_with, work.__qualname__, job)).encode()).hexdigest()[:24]}.pt"
    with torch.serialization.safe_globals(list(kinds)):
        if path.is_file():
            kept: OutcomeT = torch.load(path, weights_only=True)
            return kept
    outcome = work(job)
    with in_place_of(path) as temporary:
        torch.save(outcome, temporary)
    return outcome
