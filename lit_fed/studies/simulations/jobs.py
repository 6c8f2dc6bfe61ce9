"""A simulation's jobs, run in parallel, with their outcomes cached until all are done."""

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
from lit_fed.errors import CheckpointError
from lit_fed.tensors import check_bytes

JobT = TypeVar("JobT")
OutcomeT = TypeVar("OutcomeT")
_FOLDER = "jobs"


@dataclass(frozen=True)
class Jobs:
    """Runs jobs.

    Args:
        processes: The number of parallel processes.
        folder: The simulation's folder, where outcomes are cached, so that a stopped simulation can resume; None turns
            the cache off.
        made_with: Further dependencies of outcomes, such as the commit.
        tell: Prints the progress.
    """

    processes: int = 1
    folder: Path | None = None
    made_with: str = ""
    tell: Callable[[str], object] | None = None

    def run(self, work: Callable[[JobT], OutcomeT], jobs: Sequence[JobT], kinds: Sequence[type] = ()) -> list[OutcomeT]:
        """Return the outcomes of jobs, in order.

        Args:
            work: Does a job.
            jobs: The jobs, identified by their ``repr``.
            kinds: The named tuples in outcomes, besides lists, dictionaries, numbers and tensors.
        """
        do = partial(_do, work, tuple(kinds), None if self.folder is None else self.folder / _FOLDER, self.made_with)
        if self.processes < 2 or len(jobs) < 2:
            return self._collected(map(do, jobs), len(jobs))
        with ProcessPoolExecutor(min(self.processes, len(jobs)), mp_context=get_context("spawn")) as pool:
            return self._collected(pool.map(do, jobs), len(jobs))

    def _collected(self, outcomes: Iterable[OutcomeT], count: int) -> list[OutcomeT]:
        collected: list[OutcomeT] = []
        for outcome in outcomes:
            collected.append(outcome)
            if self.tell is not None:
                self.tell(f"{len(collected)} of {count} jobs done")
        return collected

    def forget(self) -> None:
        """Remove the cache."""
        if self.folder is not None:
            shutil.rmtree(self.folder / _FOLDER, ignore_errors=True)


ALONE = Jobs()
"""Runs jobs sequentially, without a cache."""


def _do(
    work: Callable[[JobT], OutcomeT], kinds: tuple[type, ...], folder: Path | None, made_with: str, job: JobT
) -> OutcomeT:
    """Return a job's outcome, from the cache if it is there."""
    if folder is None:
        return work(job)
    path = folder / f"{sha256(repr((made_with, work.__qualname__, job)).encode()).hexdigest()[:24]}.pt"
    with torch.serialization.safe_globals(list(kinds)):
        if path.is_file():
            try:
                kept: OutcomeT = torch.load(path, weights_only=True)
                check_bytes(path)
            except Exception as error:  # damaged bytes raise many exceptions
                raise CheckpointError(f"{path} is damaged; remove it, and its job runs again") from error
            return kept
    outcome = work(job)
    with in_place_of(path) as temporary:
        torch.save(outcome, temporary)
    return outcome
