"""The folder of a run and the loggers that write into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning import Fabric
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lit_fed.engine.loop.checkpoint import find_checkpoint, restore, run_folder, runs_in, version_of
from lit_fed.engine.storage.files import remove_half_written
from lit_fed.engine.storage.run_lock import sole_writer
from lit_fed.engine.wire.payload import not_finite
from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.file_names import shown

if TYPE_CHECKING:
    from lit_fed.engine.loop.run import Run


@contextmanager
def open_run(run: Run, ckpt_path: str | None) -> Iterator[None]:
    """Restore a checkpoint, claim and lock the run's folder, open its loggers.

    ``last.ckpt`` continues in its own folder; any other checkpoint starts a new one, so that the rounds after it are
    not lost, and so does the ``last.ckpt`` of another trainer's run, which a test has loaded. So does a run without
    checkpoints, which would leave the old folder ahead of its ``last.ckpt``.

    Args:
        run: Assembled.
        ckpt_path: As given by the user; None starts a new run, or continues this process's run.

    Raises:
        CheckpointError: If the checkpoint does not exist, or is another run's.
    """
    fabric, store, settings = run.fabric, run.federation.store, run.settings
    is_foreign = False
    if ckpt_path is None and run.loaded is not None:  # a test has put another state in the place of the run's
        ckpt_path, is_foreign = str(run.loaded), run_folder(run.loaded) != run.folder
    elif ckpt_path in ("last", "best") and run.folder is not None:
        ckpt_path = str(find_checkpoint(ckpt_path, settings.logs, run.folder) or run.folder)
    checkpoint = checkpoint_to_continue(fabric, ckpt_path, settings.logs) if ckpt_path is not None else None
    run.start_round = run.next_round  # 0, unless this run has trained before
    source = run.log_dir if run.start_round else None
    if checkpoint is not None:
        source = run_folder(checkpoint)
    continues = checkpoint is None or (checkpoint.name == "last.ckpt" and run.keeps_checkpoints and not is_foreign)
    resumed = source if continues else None
    with ExitStack() as held:
        if resumed is not None:  # before reading its checkpoint, which a writer may replace
            held.enter_context(sole_writer(fabric, resumed))
        if checkpoint is not None:
            restore(run, checkpoint)
            run.resumed_from = source
            _check_clients(run, checkpoint)
        check_server(run, "this trainer" if checkpoint is None else str(checkpoint))
        run.log_dir = run.folder = resumed or claim_run_folder(fabric, settings.logs, settings.logger)
        run.loaded = None
        if resumed is None:
            held.enter_context(sole_writer(fabric, run.log_dir))
        store.open(run.log_dir / "checkpoints" / "clients")
        if checkpoint is not None:
            where = "" if resumed is not None else f", in the new folder {shown(run.log_dir)}"
            fabric.print(f"continuing from {shown(checkpoint)} with round {run.start_round}{where}")
        if checkpoint is not None and source is not None:
            if source != run.log_dir:
                on_first_process(fabric, lambda: store.adopt(source / "checkpoints" / "clients"))
            store.find_leftovers()
        on_first_process(fabric, lambda: remove_half_written(run.log_dir))
        run.origin = f"trained just now in {shown(run.log_dir)}"
        parts = [run.federation.algorithm, *run.federation.wrappers.stack, run.federation.data]
        run.loggers = make_loggers(settings.logger, run.log_dir, parts) if fabric.is_global_zero else []
        for loop in run.federation.loops.values():
            loop.trainer.log_dir = run.log_dir
            if fabric.is_global_zero:
                loop.trainer.loggers = run.loggers
        fabric.barrier()
        yield


def check_server(run: Run, holder: str) -> None:
    """Refuse a server that is not finite with a `CheckpointError` that names its holder."""
    if odd := not_finite(run.federation.server, run.federation.begun_infinite):
        raise CheckpointError(f"{holder} holds NaN or infinity in {odd[0]} of the server; take an earlier checkpoint")


def _check_clients(run: Run, checkpoint: Path) -> None:
    """Refuse client states that do not fit, before anything is written."""
    federation = run.federation
    if not any(True for _ in federation.store.clients()) or run.start_round >= run.max_rounds:
        return
    if run.resumed_from is None:
        raise CheckpointError(
            f"{checkpoint} lies outside of its run's folder, which holds the clients' states; name the file in the "
            "run's folder checkpoints"
        )
    federation.store.open(run.resumed_from / "checkpoints" / "clients")
    with federation.session.at_work():
        federation.executor.check_kept(federation.session, federation.broadcast(run.start_round))


def checkpoint_to_continue(fabric: Fabric, ckpt_path: str | Path, logs: Path) -> Path | None:
    """The checkpoint to continue from; None if no run has one yet.

    Runs without any checkpoint are skipped, with a printed line.

    Raises:
        CheckpointError: If the file does not exist, or ``last`` would skip a run that has other checkpoints.
    """
    name = f"{ckpt_path}.ckpt"
    if str(ckpt_path) not in ("last", "best"):
        path = find_checkpoint(ckpt_path, logs)
        if path is None or not path.is_file():
            raise CheckpointError(f"there is no checkpoint at {path}")
        return path
    without: list[Path] = []
    for run in runs_in(logs):
        folder = run / "checkpoints"
        if (folder / name).is_file():
            if without:
                newer = f"{without[0]} is newer" if len(without) == 1 else f"{len(without)} runs are newer"
                fabric.print(f"{newer}, but without a {name}; using that of {run}")
            return folder / name
        others = sorted(path.name for path in folder.glob("*.ckpt"))
        if others and str(ckpt_path) == "last":
            raise CheckpointError(
                f"{run} has no last.ckpt, but {', '.join(others)}; resume from --ckpt_path {folder / others[0]}, "
                "from an older run's folder, or start a new run without --ckpt_path"
            )
        without.append(run)
    fabric.print(f"no {name} under {logs} yet; starting from round 0")
    return None


def claim_run_folder(fabric: Fabric, logs: Path, choice: bool | Logger | list[Logger]) -> Path:
    """A new run's folder: a given logger's, or the next free ``version_N``.

    Creating the folder claims it: runs started at the same moment get different ones.
    """
    given = choice if isinstance(choice, list) else [choice]
    named = [lg for lg in given if isinstance(lg, Logger) and not isinstance(lg, CSVLogger)]  # see `RunSettings`
    log_dir = next((lg.log_dir for lg in named if getattr(lg, "log_dir", None)), None)

    def claim() -> Path:
        try:
            folder = Path(log_dir) if log_dir is not None else _next_version(logs)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run's folder cannot be created under {logs} ({error.strerror}); set trainer.default_root_dir"
            ) from error
        return folder

    return on_first_process(fabric, claim)


def _next_version(logs: Path) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    version = max((version_of(run) for run in logs.glob("version_*")), default=-1) + 1
    while True:
        try:
            (logs / f"version_{version}").mkdir()
            return logs / f"version_{version}"
        except FileExistsError:
            version += 1


def make_loggers(choice: bool | Logger | list[Logger], log_dir: Path, parts: Sequence[object]) -> list[Logger]:
    """The loggers of a run; True means TensorBoard, which calls a run after the folder of its events.

    This folder, in the run's folder, has the names of the classes of method, wrappers and data.
    """
    if isinstance(choice, bool):
        name = "-".join(type(part).__name__ for part in parts)
        return [TensorBoardLogger(save_dir=log_dir, name="", version="", sub_dir=name)] if choice else []
    return list(choice) if isinstance(choice, list) else [choice]
