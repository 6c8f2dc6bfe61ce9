"""What the loggers of a run can be shown beside metrics: settings, pictures, histograms, each in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lit_fed.callbacks.hparams import METHOD, Column, Setting, hparams_of

if TYPE_CHECKING:
    from lit_fed.engine.loop.run import Run


COLUMNS_FILE = "events.out.tfevents.0000000000.columns"
"""The event file with the columns of HParams, in the folder of the newest run alone."""


@dataclass(frozen=True)
class Compared:
    """What a table of runs compares them by.

    Args:
        columns: The settings with a column.
        metrics: Names of metrics.
    """

    columns: Mapping[str, Column]
    metrics: Sequence[str]


class Board:
    """Any logger of Lightning's: settings as its hyperparameters, and pictures where it has ``log_image``.

    Args:
        logger: The logger.
    """

    resumes = False
    """Whether a resumed run goes on in what an earlier process wrote; else it is told everything again."""

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger

    @property
    def draws(self) -> bool:
        """Whether it takes pictures."""
        return hasattr(self.logger, "log_image")

    def start(self, round_idx: int) -> None:
        """Get ready for a round and those after it."""

    def settings(self, settings: Mapping[str, Setting], compared: Compared) -> None:
        """Show the run's settings, and by which metrics runs are compared."""
        self.logger.log_hyperparams(dict(settings))

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Show a picture, shape (height, width, 3)."""
        self.logger.log_image(tag, [picture], step=round_idx)

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Show how values are spread; a share is between 0 and 1."""

    def flush(self) -> None:
        """Hand everything to the operating system, which keeps it when the process is killed."""
        self.logger.save()

    def close(self, status: str) -> None:
        """Write what is left; the run ended with ``success``, or has ``failed``."""
        self.logger.finalize(status)


class TensorBoard(Board):
    """TensorBoard, past Lightning's logger, which would add files and scalars of its own."""

    resumes = True
    draws = True

    @property
    def writer(self) -> SummaryWriter:
        """What writes the event file."""
        writer: SummaryWriter = self.logger.experiment
        return writer

    def start(self, round_idx: int) -> None:
        """Make readers forget what older event files of the folder say of this round and later ones.

        These are the two events of ``SummaryWriter(purge_step=…)``, which only works for a writer that is not open yet.
        A fresh run needs them as well: the web page's reader takes the first start in a folder for the run's own, and
        forgets rounds only from the second start on.
        """
        file_writer = self.writer._get_file_writer()
        file_writer.add_event(Event(step=round_idx, file_version="brain.Event:2"))
        file_writer.add_event(Event(step=round_idx, session_log=SessionLog(status=SessionLog.START)))

    def settings(self, settings: Mapping[str, Setting], compared: Compared) -> None:
        """For the table of HParams; not ``add_hparams``, which adds a scalar a metric at step 0, in its own folder."""
        file_writer, metrics = self.writer._get_file_writer(), dict.fromkeys(compared.metrics, 0.0)
        _, *session = hparams(hparams_of(settings), metrics)  # whole: the columns may be those of a later run
        for summary in session:
            file_writer.add_summary(summary)
        experiment, *_ = hparams({name: column.value for name, column in compared.columns.items()}, metrics)
        data = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        for info in content.experiment.hparam_infos:
            info.differs = compared.columns[info.name].leads
            info.display_name = "method" if info.name == METHOD else ""
        data.content = content.SerializeToString()
        self._write_columns(experiment)

    def _write_columns(self, experiment: Summary) -> None:
        """Write the columns for all runs beside this one, in place of theirs.

        TensorBoard takes the columns of any of several runs. The newest run knows the others and replaces their file.
        The file's name sorts before the run's events: TensorBoard reads event files in order, and never goes back.
        """
        folder = Path(self.writer.log_dir)
        for older in folder.parent.glob(f"*/{COLUMNS_FILE}"):
            with suppress(OSError):
                older.unlink()
        with open(folder / COLUMNS_FILE, "wb") as file:
            for event in (Event(file_version="brain.Event:2"), Event(summary=experiment)):
                RecordWriter(file).write(event.SerializeToString())

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Under *Images*."""
        self.writer.add_image(tag, picture, round_idx, dataformats="HWC")

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Under *Histograms*."""
        # The writer's own bins grow by 10 % each: between 0.9 and 1, where accuracies are, there would be one.
        self.writer.add_histogram(tag, values, round_idx, np.linspace(0, 1, 51) if share else "tensorflow")

    def flush(self) -> None:
        """Without waiting for the writer's own two minutes."""
        self.writer.flush()

    def close(self, status: str) -> None:
        """Not ``finalize``, which would also write an empty hparams.yaml; ours is config.yaml."""
        self.writer.close()


class Wandb(Board):
    """Weights & Biases, online or offline; a picture and a histogram are values of a round as metrics are."""

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Bins of a fiftieth for shares, else 50 over the values."""
        import wandb

        bins = np.histogram(values, bins=50, range=(0, 1) if share else None)
        # Under a name of its own: a metric is one number in W&B, and `clients/acc` may be one of another logger's.
        self.logger.log_metrics({f"histograms/{tag}": wandb.Histogram(np_histogram=bins)}, step=round_idx)


class MLflow(Board):
    """MLflow; pictures are artifacts, a file each, and histograms it has none."""

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
    """The loggers of a run; none on other processes than the first."""
    return [_board(logger) for logger in run.loggers] if run.fabric.is_global_zero else []


def _board(logger: Logger) -> Board:
    return next((board for kind, board in _BOARDS.items() if isinstance(logger, kind)), Board)(logger)


def takes_pictures(run: Run) -> bool:
    """Whether this process has a logger to draw for."""
    return any(board.draws for board in boards(run))


def show_picture(run: Run, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
    """Show a picture to all loggers that take one."""
    for board in boards(run):
        if board.draws:
            board.picture(tag, picture, round_idx)
