"""Settings, pictures and histograms for the loggers of a run, by type of logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lit_fed.callbacks.hparams import Setting, hparams_of

if TYPE_CHECKING:
    from lit_fed.engine.loop.run import Run


@dataclass(frozen=True)
class Compared:
    """What a table of runs compares them by.

    Args:
        columns: The settings with a column, in order, with a value each.
        metrics: Names of metrics.
    """

    columns: Mapping[str, Setting]
    metrics: Sequence[str]


class Board:
    """Any Lightning logger: settings as hyperparameters, and pictures if it has ``log_image``."""

    resumes = False
    """Whether a resumed run continues an earlier process's log; else everything is logged again."""

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger

    @property
    def draws(self) -> bool:
        """Whether the logger accepts pictures."""
        return hasattr(self.logger, "log_image")

    def start(self, round_idx: int) -> None:
        """Prepare for a round and all later rounds."""

    def settings(self, settings: Mapping[str, Setting], compared: Compared) -> None:
        """Show the run's settings, and by which metrics runs are compared."""
        self.logger.log_hyperparams(dict(settings))

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Show a picture, shape (height, width, 3)."""
        self.logger.log_image(tag, [picture], step=round_idx)

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Show the distribution of values; a share is between 0 and 1."""

    def text(self, tag: str, text: str, round_idx: int) -> None:
        """Show a text in Markdown, where there is a place for it."""

    def flush(self) -> None:
        """Flush to the operating system, so that a kill loses nothing."""
        self.logger.save()

    def close(self, status: str) -> None:
        """Finish with the status ``success`` or ``failed``."""
        self.logger.finalize(status)


class TensorBoard(Board):
    """TensorBoard, written directly, because Lightning's logger adds files and scalars."""

    resumes = True
    draws = True

    @property
    def writer(self) -> SummaryWriter:
        """The writer of the event file."""
        writer: SummaryWriter = self.logger.experiment
        return writer

    def start(self, round_idx: int) -> None:
        """Make readers discard this and later rounds of older event files in the folder.

        These are the two events of ``SummaryWriter(purge_step=…)``, which only works before the writer is open. A fresh
        run needs them as well: the web page's reader takes the first start in a folder as the run's start, and discards
        rounds only from the second start on.
        """
        file_writer = self.writer._get_file_writer()
        file_writer.add_event(Event(step=round_idx, file_version="brain.Event:2"))
        file_writer.add_event(Event(step=round_idx, session_log=SessionLog(status=SessionLog.START)))

    def text(self, tag: str, text: str, round_idx: int) -> None:
        """On the page of texts."""
        self.writer.add_text(tag, text, round_idx)

    def settings(self, settings: Mapping[str, Setting], compared: Compared) -> None:
        """For the table of HParams; not ``add_hparams``, which adds a scalar a metric at step 0, in its own folder."""
        file_writer = self.writer._get_file_writer()
        metrics = dict.fromkeys(compared.metrics, 0.0)
        experiment, *_ = hparams(dict(compared.columns), metrics)
        _, *session = hparams(hparams_of(settings), metrics)  # whole: the columns may be those of another run
        for summary in (experiment, *session):
            file_writer.add_summary(summary)

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Under *Images*."""
        self.writer.add_image(tag, picture, round_idx, dataformats="HWC")

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Under *Histograms*."""
        # The writer's own bins grow by 10 % each: between 0.9 and 1, where accuracies are, there would be one.
        self.writer.add_histogram(tag, values, round_idx, np.linspace(0, 1, 51) if share else "tensorflow")

    def flush(self) -> None:
        """Flush at once, not after the writer's default of two minutes."""
        self.writer.flush()

    def close(self, status: str) -> None:
        """Close the writer; ``finalize`` would also write an empty hparams.yaml, next to our config.yaml."""
        self.writer.close()


class Wandb(Board):
    """Weights & Biases, online or offline; pictures and histograms are values of a round, like metrics."""

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Bins of a fiftieth for shares, else 50 over the values."""
        import wandb

        bins = np.histogram(values, bins=50, range=(0, 1) if share else None)
        # A separate name, because a W&B metric is one number, and `clients/acc` may be a metric of another logger.
        self.logger.log_metrics({f"histograms/{tag}": wandb.Histogram(np_histogram=bins)}, step=round_idx)


class MLflow(Board):
    """MLflow; each picture is an artifact, and histograms are not supported."""

    draws = True

    def settings(self, settings: Mapping[str, Setting], compared: Compared) -> None:
        """Those that the run has not yet: MLflow refuses to change one, and a given run may be gone on with."""
        known = self.logger.experiment.get_run(self.logger.run_id).data.params
        self.logger.log_hyperparams({name: value for name, value in settings.items() if name not in known})

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """As ``<tag>/round_<r>.png`` among the run's artifacts."""
        self.logger.experiment.log_image(self.logger.run_id, picture, f"{tag}/round_{round_idx}.png")


_BOARDS: dict[type[Logger], type[Board]] = {TensorBoardLogger: TensorBoard, WandbLogger: Wandb, MLFlowLogger: MLflow}


def boards(run: Run) -> list[Board]:
    """Return the loggers of a run; empty on all processes but the first."""
    return [_board(logger) for logger in run.loggers] if run.fabric.is_global_zero else []


def _board(logger: Logger) -> Board:
    return next((board for kind, board in _BOARDS.items() if isinstance(logger, kind)), Board)(logger)


def takes_pictures(run: Run) -> bool:
    """Whether this process has a logger for pictures."""
    return any(board.draws for board in boards(run))


def show_picture(run: Run, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
    """Show a picture to all loggers that accept pictures."""
    for board in boards(run):
        if board.draws:
            board.picture(tag, picture, round_idx)
