"""Writes the run's checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_fed.callbacks.early_stopping import improves, unknown_metric
from lit_fed.engine.callback import Callback, RoundRecord
from lit_fed.engine.checkpoint import read_checkpoint, save_checkpoint
from lit_fed.engine.files import remove_half_written
from lit_fed.engine.strategy import on_first_process
from lit_fed.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lit_fed.engine.run import Run


class Checkpoint(Callback):
    """``last.ckpt`` every round, ``best.ckpt`` on a metric, and the last few rounds.

    It runs after every other callback, so what they wrote for a round is on disk before the round's checkpoint is.

    Args:
        monitor: The metric that names the best round; ``auto`` takes the most important one that the task declares
            (its ``metrics``), else the first that it logs when it is evaluated; null writes no ``best.ckpt``.
        mode: ``max``, ``min``, or ``auto``: as the task or the logged torchmetrics object says, else the smallest where
            the name says loss or error and the largest elsewhere.
        keep_last: Also keep this many rounds as ``round=<r>.ckpt``.
        every_n_rounds: Write only every so many rounds, and after the last.

    Raises:
        ConfigError: For a negative ``keep_last``, or ``every_n_rounds`` below 1.
    """

    keeps_checkpoints = True

    def __init__(
        self,
        monitor: str | None = "auto",
        mode: Literal["auto", "max", "min"] = "auto",
        keep_last: int = 0,
        every_n_rounds: int = 1,
    ) -> None:
        if keep_last < 0 or every_n_rounds < 1:
            raise ConfigError("Checkpoint needs keep_last of at least 0 and every_n_rounds of at least 1")
        self.monitor = monitor
        self.mode = mode
        self.keep_last = keep_last
        self.every_n_rounds = every_n_rounds
        self.best: float | None = None
        self.best_round = -1
        self._kept: dict[str, dict[str, int]] = {}  # file name -> the client states it needs

    def on_fit_start(self, run: Run) -> None:
        """Learn what earlier checkpoints of this run need, and finish what a killed process left half done.

        A new folder gets the checkpoint that the run starts from, so that it stands on its own: a run killed in its
        first round is resumed in its folder too, and a disk that cannot be written to is noticed before any training.
        """
        folder, start, first = self._folder(run), run.start_round, run.fabric.is_global_zero
        last = folder / "last.ckpt"
        if not start:
            self.best, self.best_round, self._kept = None, -1, {}
        if first:
            remove_half_written(folder)
        if on_first_process(run.fabric, lambda: not last.is_file()):
            run.federation.session.divide(max(start - 1, 0))  # as when the round ended
            save_checkpoint(run, last)
        if first:
            if start and self.best_round == start - 1:
                _link(last, folder / "best.ckpt")
            self._kept |= {path.name: read_checkpoint(path)["clients"] for path in folder.glob("*.ckpt")}

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write what is due."""
        monitor = self._monitored(run, record)
        improved = monitor is not None and improves(record.metrics[monitor], self.best, self._direction(run, monitor))
        if monitor is not None and improved:
            self.best, self.best_round = record.metrics[monitor], record.round_idx
        last_round = record.round_idx + 1 == run.max_rounds or run.should_stop
        if not (improved or last_round or (record.round_idx + 1) % self.every_n_rounds == 0):
            return
        folder = self._folder(run)
        save_checkpoint(run, folder / "last.ckpt")
        index = run.federation.store.state_dict()
        names = ["last.ckpt", *(["best.ckpt"] if improved else [])]
        names += [f"round={record.round_idx}.ckpt"] if self.keep_last else []
        if run.fabric.is_global_zero:
            for name in names[1:]:
                _link(folder / "last.ckpt", folder / name)
            self._kept |= dict.fromkeys(names, index)
            self._drop_old_rounds(folder)
        run.federation.store.collect_garbage(self._kept.values(), delete=run.fabric.is_global_zero)

    def _monitored(self, run: Run, record: RoundRecord) -> str | None:
        """The metric to judge this round by, None where there is none."""
        if self.monitor == "auto":
            chosen = run.names.monitor
            return chosen if chosen in record.metrics else None
        if self.monitor is None or self.monitor in record.metrics:
            return self.monitor
        if "time/eval_s" in record.metrics:
            raise ConfigError(unknown_metric("Checkpoint", self.monitor, record))
        return None

    def _direction(self, run: Run, monitor: str) -> Literal["max", "min"]:
        return run.names.direction(monitor) if self.mode == "auto" else self.mode

    def _drop_old_rounds(self, folder: Path) -> None:
        rounds = sorted((n for n in self._kept if n.startswith("round=")), key=lambda n: int(n[6:].split(".")[0]))
        for name in rounds[: len(rounds) - self.keep_last] if self.keep_last else []:
            (folder / name).unlink(missing_ok=True)
            del self._kept[name]

    def _folder(self, run: Run) -> Path:
        return run.log_dir / "checkpoints"

    def state_dict(self) -> dict[str, Any]:
        """Which round is best."""
        return {"best": self.best, "best_round": self.best_round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.best, self.best_round = state["best"], state["best_round"]


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, atomically; a copy where the file system has no links."""
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
    temporary.unlink(missing_ok=True)  # renaming one link of a file onto another leaves both
