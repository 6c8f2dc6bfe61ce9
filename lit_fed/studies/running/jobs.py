"""Parallel processes of cells: start, watch, and stop them with the study."""

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
from lit_fed.studies.running.cell_process import CellProcess
from lit_fed.studies.running.cells import Cell

_POLL_S = 0.1
_GRACE_S = 10.0  # time that an interrupted cell may take to end
_LOG = "log.txt"


class CellFailure(LitFedError):
    """A cell's command failed."""


@dataclass(frozen=True)
class Slots:
    """The number of parallel cells, and the resources of each.

    Args:
        jobs: The number of parallel cells.
        threads: CPU threads per cell, unless its configuration sets them.
        gpus: GPUs, assigned in turn; empty does not restrict the cells.
    """

    jobs: int
    threads: int
    gpus: tuple[str, ...] = ()

    def env(self, slot: int) -> dict[str, str]:
        """Return the changes of the environment for the cell in a slot."""
        env = {"OMP_NUM_THREADS": str(self.threads)}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        root = Path(lit_fed.__file__).parents[1]
        if root.name not in ("site-packages", "dist-packages"):  # in a checkout, which the cell must find, too
            env["PYTHONPATH"] = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(root)) if part)
        return env


def share_machine(cells: Sequence[Cell], jobs: int | None) -> Slots:
    """Choose the number of parallel cells.

    The default uses all cores, with the threads that each configuration sets (by default one); on GPUs it is one cell
    per GPU.

    Args:
        cells: The cells that will run.
        jobs: The user's choice; None for the default.
    """
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
    """A running cell.

    Args:
        cell: The cell.
        process: Its process.
        slot: Its slot.
        started: The start on the monotonic clock, seconds.
    """

    cell: Cell
    process: CellProcess
    slot: int
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


def run_jobs(
    cells: Sequence[Cell],
    slots: Slots,
    locks: Sequence[int],
    on_end: Callable[[Job, str], None],
    on_tick: Callable[[Sequence[Job]], Any],
) -> None:
    """Run cells in parallel until all have ended; a failed cell does not stop the others.

    Args:
        cells: The cells, in order of their start.
        slots: The number of parallel cells and their resources.
        locks: Descriptors of the locks on the studies' folders.
        on_end: Called with every ended job and the reason of its failure, if any.
        on_tick: Called repeatedly with the running jobs.
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
    """Interrupt cells, and kill the cells that still run after a grace period."""
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
    """Metrics and timing of a cell's first round.

    Args:
        names: The reported metrics.
        training_s: Seconds of the round without its evaluation.
        evaluation_s: Seconds of the evaluation.
        rest_s: Seconds of start-up and shutdown.
    """

    names: list[str]
    training_s: float
    evaluation_s: float
    rest_s: float

    def seconds_of(self, cell: Cell) -> float:
        """Estimate the seconds that a cell takes if all rounds take as long as this one."""
        return self.rest_s + cell.max_rounds * self.training_s + cell.evaluations * self.evaluation_s


def one_round(cell: Cell, folder: Path, slots: Slots, locks: Sequence[int]) -> FirstRound:
    """Run a cell's first round in a temporary folder.

    Args:
        cell: The cell.
        folder: The study's folder.
        slots: The resources of cells.
        locks: Descriptors of the locks on the studies' folders.

    Raises:
        CellFailure: If the round fails.
    """
    aside = folder / ".first_round"
    shutil.rmtree(aside, ignore_errors=True)
    options = ("max_rounds=1", "logger=false", f"default_root_dir={aside}")  # a checkpoint's choice has metrics, too
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
    """Return why a command failed: the last line of its log, or the signal."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    error_line = next((line for line in reversed(lines) if line.startswith("lit-fed: error: ")), None)
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return (error_line or (lines[-1] if lines else f"exit status {code}")).removeprefix("lit-fed: error: ")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a study's folder, so that two studies, or cells of a killed study, never write into it together.

    Args:
        folder: The folder; created if missing.
    """
    import fcntl  # missing on Windows, where only studies need it

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
