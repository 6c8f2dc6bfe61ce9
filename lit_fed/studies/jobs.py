"""Processes of cells: started side by side, watched, and stopped with the study."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lit_fed
from lit_fed.errors import ConfigError, LitFedError
from lit_fed.machine import available_cores
from lit_fed.studies.cell_process import CellProcess
from lit_fed.studies.cells import Cell

_POLL_S = 0.1
_GRACE_S = 10.0  # how long an interrupted cell may take to say good-bye
_LOG = "log.txt"


class CellFailure(LitFedError):
    """A cell's command did not succeed."""


@dataclass(frozen=True)
class Slots:
    """How many cells run side by side, and what each may use.

    Args:
        jobs: How many.
        threads: CPU threads of each, where its configuration does not say.
        gpus: The GPUs that are dealt out in turn; none leaves every cell what it finds.
    """

    jobs: int
    threads: int
    gpus: tuple[str, ...] = ()

    def env(self, slot: int) -> dict[str, str]:
        """What is another in the environment of the cell in a slot."""
        env = {"OMP_NUM_THREADS": str(self.threads)}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        root = Path(lit_fed.__file__).parents[1]
        if root.name not in ("site-packages", "dist-packages"):  # run from a checkout, which the cell must find too
            env["PYTHONPATH"] = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(root)) if part)
        return env


def share_machine(cells: Sequence[Cell], jobs: int | None) -> Slots:
    """Decide how many cells run side by side.

    By default as many as there are cores for, each with the threads that its configuration asks for (one where it asks
    for none), and on GPUs one a GPU.

    Args:
        cells: Those that will run.
        jobs: What the user wants; None for the default.

    Raises:
        ConfigError: If `jobs` is below 1.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; it must be at least 1")
    cores = available_cores()
    trainers = [cell.config["trainer"] for cell in cells]
    gpus = _gpus() if any(trainer["accelerator"] not in ("cpu",) for trainer in trainers) else ()
    alone = any(trainer["devices"] not in (1, "1", "auto") for trainer in trainers)
    if jobs is None:
        if gpus:
            jobs = 1 if alone else len(gpus)
        else:
            processes = [t["devices"] if isinstance(t["devices"], int) else 1 for t in trainers]
            busy = max((n * (t["num_threads"] or 1) for n, t in zip(processes, trainers, strict=True)), default=1)
            jobs = max(1, cores // busy)
    return Slots(jobs, max(1, cores // jobs), () if alone or len(gpus) < 2 else gpus)


def _gpus() -> tuple[str, ...]:
    import torch

    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()  # asks the driver without claiming memory
    return tuple(visible[:count]) if visible else tuple(map(str, range(count)))


@dataclass
class Job:
    """A cell under way.

    Args:
        cell: The cell.
        process: Its process.
        slot: Where it runs.
        started: When, by this process's clock.
    """

    cell: Cell
    process: CellProcess
    slot: int
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.started


def run_jobs(
    cells: Sequence[Cell],
    slots: Slots,
    locks: Sequence[int],
    on_end: Callable[[Job, str], None],
    on_tick: Callable[[Sequence[Job]], Any],
) -> None:
    """Run cells, several side by side, until all have ended; a failed one stops no other.

    Args:
        cells: What to run, in this order.
        slots: How many side by side, and what each may use.
        locks: The descriptors of the locks on the studies' folders.
        on_end: Called with every job that has ended and, if it failed, why.
        on_tick: Called again and again with the jobs under way.
    """
    waiting, idle, running = list(reversed(cells)), list(range(slots.jobs)), list[Job]()
    try:
        while waiting or running:
            while waiting and idle:
                cell, slot = waiting.pop(), idle.pop(0)
                cell.write_record(status="running")
                process = CellProcess(cell.command, cell.folder / _LOG, slots.env(slot), locks)
                running.append(Job(cell, process, slot))
            on_tick(running)
            time.sleep(_POLL_S)
            for job, code in [(job, job.process.poll()) for job in running]:
                if code is not None:
                    running.remove(job)
                    idle.append(job.slot)
                    on_end(job, "" if code == 0 else why(job.cell.folder / _LOG, code))
    finally:
        stop_all([job.process for job in running])


def stop_all(running: Sequence[CellProcess]) -> None:
    """End cells: as Ctrl-C does, and for good if they have not ended by then."""
    left = [process for process in running if process.poll() is None]
    for process in left:
        process.stop(signal.SIGINT)
    deadline = time.monotonic() + _GRACE_S
    try:
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = [process for process in left if process.poll() is None]
    finally:  # a second Ctrl-C does not wait
        for process in left:
            process.close()


@dataclass(frozen=True)
class FirstRound:
    """What a cell's first round told.

    Args:
        names: The metrics that it reports.
        training_s: Seconds of the round without its evaluation.
        evaluation_s: Seconds of its evaluation.
        rest_s: Seconds of everything else: the start, the end.
    """

    names: list[str]
    training_s: float
    evaluation_s: float
    rest_s: float

    def seconds_of(self, cell: Cell) -> float:
        """How long a cell will take, if all of its rounds are like this one."""
        return self.rest_s + cell.max_rounds * self.training_s + cell.evaluations * self.evaluation_s


def one_round(cell: Cell, folder: Path, slots: Slots, locks: Sequence[int]) -> FirstRound:
    """Run a cell's first round beside the study.

    Args:
        cell: The cell.
        folder: The study's folder.
        slots: What it may use.
        locks: The descriptors of the locks on the studies' folders.

    Raises:
        CellFailure: If it fails.
    """
    aside = folder / ".first_round"
    shutil.rmtree(aside, ignore_errors=True)
    options = ("max_rounds=1", "logger=false", "enable_checkpointing=false", f"default_root_dir={aside}")
    probe = Cell(cell.row, cell.column, cell.seed, cell.args, cell.config, aside)
    command = ["fit", *cell.args, *(f"--trainer.{option}" for option in options)]
    began = time.monotonic()
    process = CellProcess(command, aside / _LOG, slots.env(0), locks)
    try:
        while (code := process.poll()) is None:
            time.sleep(_POLL_S)
    except BaseException:
        stop_all([process])
        raise
    if code != 0:
        raise CellFailure(f"{cell.name} cannot run: {why(aside / _LOG, code)}")
    row = probe.rows()[0]
    shutil.rmtree(aside, ignore_errors=True)
    of_round, of_evaluation = float(row["time/round_s"]), float(row.get("time/eval_s") or 0)
    rest_s = max(0.0, time.monotonic() - began - of_round)
    return FirstRound(list(row), of_round - of_evaluation, of_evaluation, rest_s)


def why(log: Path, code: int) -> str:
    """Why a command failed, in a line: its last one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if line.startswith("lit-fed: error: ")), None)
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return (told or (lines[-1] if lines else f"exit status {code}")).removeprefix("lit-fed: error: ")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a study's folder, so that two studies, or cells of a killed one, never write into it together.

    Args:
        folder: The folder; it is made.

    Raises:
        ConfigError: If somebody holds it.
    """
    import fcntl  # not there on Windows, which this is the only thing to need

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        deadline = time.monotonic() + _GRACE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another study is running in {folder}; wait for it or stop it") from None
            time.sleep(_POLL_S)
        yield file.fileno()
