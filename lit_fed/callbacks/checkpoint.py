"""Checkpoints of a run."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from typing_extensions import override

from lit_fed.callbacks.early_stopping import Mode, check_reported, direction_of, improves, is_of_another
from lit_fed.checks import check_range
from lit_fed.engine.lightning.metric_names import Direction
from lit_fed.engine.loop.checkpoint import apart_file, apart_of, read_checkpoint, save_checkpoint
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.engine.storage.files import remove_half_written
from lit_fed.engine.storage.packs import Version
from lit_fed.engine.storage.store import read_table
from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import CheckpointError, UnreadableFile

_OWN = re.compile(r"(last|best|round=[0-9]+)\.ckpt")  # other files belong to the user


class Checkpoint(Callback):
    """Writes ``last.ckpt`` every round, ``best.ckpt`` by a metric, and the last few rounds.

    Checkpoint is the last callback of a round: output of the others is on disk before the round's checkpoint.

    Args:
        monitor: The metric that selects the best round; ``auto`` takes the first metric that the task declares (its
            ``metrics``), else that of its first call of ``self.log`` in an evaluation, on validation data where there
            are any (``val/global/acc``); null writes no ``best.ckpt``.
        mode: ``max``, ``min``, or ``auto``: the direction that the task or the logged torchmetrics object declares,
            else ``min`` if the name contains loss or error, and ``max`` for any other name.
        keep_last: Also keep this many rounds as ``round=<r>.ckpt``.
        every_n_rounds: Interval of checkpoints, in rounds; the last round always gets one.
        keep_every: Also keep ``round=<r>.ckpt`` after every so many rounds, for `lit-fed forget`; null for none.

    Raises:
        ConfigError: As `EarlyStopping`.
    """

    keeps_checkpoints = True

    def __init__(
        self,
        monitor: str | None = "auto",
        mode: Mode = "auto",
        keep_last: int = 0,
        every_n_rounds: int = 1,
        keep_every: int | None = None,
    ) -> None:
        self.keep_last = check_range("Checkpoint.keep_last", keep_last, least=0)
        self.every_n_rounds = check_range("Checkpoint.every_n_rounds", every_n_rounds, least=1)
        self.keep_every = check_range("Checkpoint.keep_every", keep_every, least=1, null="for none")
        self.mode: Mode = mode
        self.monitor = monitor
        self.best: float | None = None
        self.best_round = -1
        self.by: str | None = None  # the metric of `best`
        self._announced = False
        self._used: dict[str, dict[str, Version]] = {}  # file name -> the client states that it needs
        self._apart: dict[str, str | None] = {}  # file name -> what a private run keeps apart from it
        self._unread = False  # whether an unreadable checkpoint may need further states

    def on_fit_start(self, run: Run) -> None:
        """Read which client states earlier checkpoints need, and complete files of a killed process.

        A new folder gets the checkpoint that the run starts from: a run killed in its first round resumes there, and an
        unwritable disk stops the run before training.
        """
        run.names.choose(self.monitor, self.mode)
        folder, start, first = self._folder(run), run.start_round, run.fabric.is_global_zero
        last = folder / "last.ckpt"
        self._unread = False
        if not start:
            self.best, self.best_round, self.by = None, -1, None
            self._used, self._apart, self._announced = {}, {}, False
        if first:
            remove_half_written(folder)
        if on_first_process(run.fabric, lambda: not last.is_file()):
            run.federation.session.divide(max(start - 1, 0))  # as at the end of the round
            save_checkpoint(run, last)
            on_first_process(run.fabric, lambda: read_checkpoint(last))  # a run that cannot be resumed ends here
        if first:
            if start and self.best_round == start - 1:
                _link(last, folder / "best.ckpt")
            for path in sorted(path for path in folder.glob("*.ckpt") if _OWN.fullmatch(path.name)):
                try:
                    content = read_checkpoint(path)
                    self._used[path.name] = read_table(apart_of(content, path)["clients"])
                    self._apart[path.name] = content.get("apart")
                except CheckpointError as error:  # the run resumes from another checkpoint
                    self._unread |= isinstance(error, UnreadableFile)
                    left = "left as it is, and no state of a client is deleted" if self._unread else "left as it is"
                    run.fabric.print(f"{left}: {error}")

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the checkpoints that are due."""
        improved = self._is_best(run, record)
        last_round = record.round_idx + 1 == run.max_rounds or run.should_stop
        stays = self._stays(record.round_idx)
        if not (improved or last_round or stays or (record.round_idx + 1) % self.every_n_rounds == 0):
            return
        folder = self._folder(run)
        apart = save_checkpoint(run, folder / "last.ckpt")
        index = run.federation.store.state_dict()
        names = ["last.ckpt", *(["best.ckpt"] if improved else [])]
        names += [f"round={record.round_idx}.ckpt"] if self.keep_last or stays else []
        if run.fabric.is_global_zero:
            for name in names[1:]:
                _link(folder / "last.ckpt", folder / name)
            before = {seal for seal in self._apart.values() if seal is not None}
            self._used |= dict.fromkeys(names, index)
            self._apart |= dict.fromkeys(names, apart)
            self._drop_old_rounds(folder)
            for seal in before.difference(self._apart.values()):
                apart_file(folder, seal).unlink(missing_ok=True)
        run.federation.store.collect_garbage(self._used.values(), delete=run.fabric.is_global_zero and not self._unread)

    def on_fit_end(self, run: Run) -> None:
        """Print why ``best.ckpt`` is missing."""
        if self.monitor is None or self.best is not None or not run.next_round:
            return
        name = run.names.choice if self.monitor == "auto" else self.monitor
        why = f"{name} was never a number"
        if name is None:
            why = "no metric of the global model or of clients was evaluated; name another in Checkpoint.monitor"
        run.fabric.print(f"there is no best.ckpt: {why}")

    def _is_best(self, run: Run, record: RoundRecord) -> bool:
        monitor = run.names.choice if self.monitor == "auto" else self.monitor
        if monitor is not None and self.monitor != "auto" and self.best is None:
            check_reported("Checkpoint.monitor", monitor, run, record)
        if monitor is None or monitor not in record.metrics:
            return False
        if is_of_another(run, "best.ckpt", self.best, self.by, monitor):
            self.best, self.best_round = None, -1
        self.by, direction = monitor, direction_of(run, monitor, self.mode)
        if not (self._announced or (record.round_idx and self.best is not None)):
            self._announce(run, monitor, direction)
        improved = improves(record.metrics[monitor], self.best, direction)
        if improved:
            self.best, self.best_round = record.metrics[monitor], record.round_idx
        return improved

    def _announce(self, run: Run, monitor: str, direction: Direction) -> None:
        """Print once which metric names the best round, unless the task or the user chose it."""
        self._announced = True
        if run.names.is_declared(monitor) or (self.monitor != "auto" and self.mode != "auto"):
            return
        which = "largest" if direction == "max" else "smallest"
        run.fabric.print(
            f"best.ckpt has the {which} {monitor}; to choose another, set monitor and mode of callback "
            "Checkpoint, or a mapping `metrics` in the model"
        )

    def _drop_old_rounds(self, folder: Path) -> None:
        rounds = sorted(int(name[6:].split(".")[0]) for name in self._used if name.startswith("round="))
        for round_idx in rounds[: max(len(rounds) - self.keep_last, 0)] if self.keep_last else []:
            if not self._stays(round_idx):
                (folder / (name := f"round={round_idx}.ckpt")).unlink(missing_ok=True)
                del self._used[name], self._apart[name]

    def _stays(self, round_idx: int) -> bool:
        return self.keep_every is not None and (round_idx + 1) % self.keep_every == 0

    def _folder(self, run: Run) -> Path:
        return run.log_dir / "checkpoints"

    def state_dict(self) -> dict[str, Any]:
        """The best value, its round and its metric."""
        return {"best": self.best, "best_round": self.best_round, "by": self.by}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_round, self.by = state["best"], state["best_round"], state.get("by")


def _link(source: Path, target: Path) -> None:
    """Link a file under a second name, atomically; copy it where the file system has no links."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        try:
            shutil.copyfile(source, temporary)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write {target}: {error}") from error
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # renaming a hard link onto another one of the same file keeps both
