"""Where a run leaves its files: the run folder and the loggers that write into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning import Fabric
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lit_fed.engine.checkpoint import find_checkpoint, restore, run_folder
from lit_fed.engine.strategy import on_first_process
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.engine.run import Run


def open_run(run: Run, ckpt_path: str | None) -> None:
    """Find the checkpoint to resume from, claim the run's folder, open its loggers.

    ``last.ckpt`` continues in its own folder; any other checkpoint starts a new one, so that the rounds after it are
    not lost. So does a run that writes no checkpoints, which would leave the old folder ahead of its ``last.ckpt``.

    Args:
        run: Assembled.
        ckpt_path: What the user gave; None starts anew, or goes on where this process has trained before.
    """
    fabric, store, settings = run.fabric, run.federation.store, run.settings
    checkpoint = find_checkpoint(ckpt_path, settings.logs) if ckpt_path is not None else None
    if ckpt_path is not None and checkpoint is None:
        fabric.print(f"no checkpoint under {settings.logs} yet; starting from round 0")
    source = run_folder(checkpoint) if checkpoint is not None else None
    if checkpoint is not None:
        restore(run, checkpoint, resume=True)
        run.resumed_from = source
    else:
        run.start_round = run.next_round  # 0, unless this run has trained before
        source = run.log_dir if run.start_round else None
    continues = checkpoint is None or (checkpoint.name == "last.ckpt" and run.keeps_checkpoints)
    resumed = source if continues else None
    run.log_dir = claim_run_folder(fabric, settings.logs, settings.logger, resumed)
    store.open(run.log_dir / "checkpoints" / "clients")
    if checkpoint is not None and source is not None:
        if source != run.log_dir and fabric.is_global_zero:
            store.adopt(source / "checkpoints" / "clients")
        store.find_leftovers()
    run.loggers = make_loggers(settings.logger, run.log_dir) if fabric.is_global_zero else []
    for loop in run.federation.loops.values():
        loop.trainer.log_dir = run.log_dir
        if fabric.is_global_zero:
            loop.trainer.loggers = run.loggers
    fabric.barrier()


def claim_run_folder(
    fabric: Fabric, logs: Path, choice: bool | Logger | list[Logger], resumed: Path | None = None
) -> Path:
    """The run's folder: the resumed one, a given logger's own, or the next free ``version_N``.

    Making the folder claims it, so that runs started at the same moment get different ones.

    Raises:
        ConfigError: If it cannot be made.
    """
    if resumed is not None:
        return resumed
    given = choice if isinstance(choice, list) else [choice]
    named = [lg for lg in given if isinstance(lg, Logger) and not isinstance(lg, CSVLogger)]  # see `check_loggers`
    own = next((lg.log_dir for lg in named if getattr(lg, "log_dir", None)), None)

    def claim() -> Path:
        try:
            folder = Path(own) if own is not None else _next_version(logs)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run's folder cannot be made under {logs}: {error.strerror}") from error
        return folder

    return on_first_process(fabric, claim)


def _next_version(logs: Path) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    taken = [int(run.name[8:]) for run in logs.glob("version_*") if run.name[8:].isdigit()]
    version = max(taken, default=-1) + 1
    while True:
        try:
            (logs / f"version_{version}").mkdir()
            return logs / f"version_{version}"
        except FileExistsError:
            version += 1


def check_loggers(choice: bool | Logger | list[Logger], logs: Path) -> None:
    """Refuse a ``CSVLogger`` that would write its ``metrics.csv`` over a run's own.

    Args:
        choice: True for TensorBoard, False for none, or Lightning loggers.
        logs: The folder of all runs.

    Raises:
        ConfigError: If it writes among the runs, or where another logger does, which is the run's folder then.
    """
    given = [logger for logger in (choice if isinstance(choice, list) else [choice]) if isinstance(logger, Logger)]
    for logger in given:
        if isinstance(logger, CSVLogger):
            others = [other.log_dir for other in given if other is not logger and other.log_dir]
            if Path(logger.root_dir).resolve() == logs.resolve() or logger.log_dir in others:
                raise ConfigError(
                    f"trainer.logger CSVLogger would write its metrics.csv over a run's own in {logger.log_dir}; give "
                    "it a name of its own, or leave it out: every run has metrics.csv without it"
                )


def make_loggers(choice: bool | Logger | list[Logger], log_dir: Path) -> list[Logger]:
    """The loggers of a run; True means TensorBoard in the run's folder."""
    if isinstance(choice, bool):
        return [TensorBoardLogger(save_dir=log_dir, name="", version="")] if choice else []
    return list(choice) if isinstance(choice, list) else [choice]
