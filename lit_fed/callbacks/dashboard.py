"""What a run writes to its loggers: every metric of every round, and for TensorBoard histograms and pictures too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lit_fed.callbacks.pictures import participation_map, predictions_picture, views_picture
from lit_fed.data.pictures import even_subset, render
from lit_fed.engine.callback import Callback, RoundRecord
from lit_fed.engine.compatibility import overrides
from lit_fed.engine.ledger import ClientRow
from lit_fed.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lit_fed.engine.federation import Federation
    from lit_fed.engine.run import Run

_HISTOGRAMS = {  # stage of a row: protocol in tags
    "test": "clients",
    "global": "clients_global",
    "local": "local",
    "personal": "personal",
    "unseen": "unseen",
}
_NO_HPARAMS = ("trainer.enable_", "trainer.logger", "trainer.default_root_dir", "trainer.num_threads")
_MOST_IMAGES = 16
_LARGEST = 1e19  # TensorBoard's own bins end a little further out


class Dashboard(Callback):
    """Writes metrics to every logger, and histograms, pictures and hyperparameters to TensorBoard.

    Everything of a round is on disk when `on_round_end` returns, before the round's checkpoint is written: a process
    that is killed afterwards has lost nothing. What a killed process wrote beyond the checkpoint is dropped, by
    TensorBoard's readers, when the run is resumed.

    Args:
        picture_every: Draw the participation map, and what the algorithm draws, every so many rounds; 0 for only at the
            end.

    Raises:
        ConfigError: If `picture_every` is negative.
    """

    def __init__(self, picture_every: int = 0) -> None:
        if picture_every < 0:
            raise ConfigError(f"Dashboard.picture_every is {picture_every}; give a number of rounds, or 0 for the end")
        self.picture_every = picture_every
        self._mapped_round = -1
        self._of_views: dict[str, float] = {}

    def on_fit_start(self, run: Run) -> None:
        """Drop what a killed process wrote; in a new run folder write what is known before the first round."""
        self._mapped_round, self._of_views = -1, {}
        with _naming_the_file(run):
            writers = tensorboard_writers(run)
            for writer in writers:
                start_session(writer, run.start_round)
            if writers and not _continues(run):
                for writer in writers:
                    _add_hparams(writer, run.settings.config, run.settings.told, _hparam_metrics(run))
                if (picture := run.federation.data.picture()) is not None:
                    _add_picture(writers, "pictures/partition", picture, run.start_round)
            _flush(run)

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the round's metrics and histograms, and see them to the disk.

        Raises:
            CheckpointError: If they cannot be written.
        """
        if run.fabric.is_global_zero:
            with _naming_the_file(run):
                self._write(run, record)
                _flush(run)

    def _write(self, run: Run, record: RoundRecord) -> None:
        best = run.names.monitor
        found = {view: record.metrics.get(f"{best}_{view}") for view in run.federation.data.views()}
        self._of_views = {view: value for view, value in found.items() if value is not None} or self._of_views
        for logger in run.loggers:
            logger.log_metrics(record.metrics, step=record.round_idx)
        if writers := tensorboard_writers(run):
            for tag, values in _values_over_clients(record.rows).items():
                # The writer's own bins grow by 10 % each: between 0.9 and 1, where accuracies are, there would be one.
                share = run.names.direction(tag) == "max" and values.min() >= 0 and values.max() <= 1
                bins = np.linspace(0, 1, 51) if share else "tensorflow"
                for writer in writers:
                    writer.add_histogram(tag, values, record.round_idx, bins)
            if self.picture_every and (record.round_idx + 1) % self.picture_every == 0:
                self._draw(run, writers, record.round_idx)

    def on_fit_end(self, run: Run) -> None:
        """Draw the participation map, sample predictions and what the task draws, and close the loggers."""
        with _naming_the_file(run):
            if (writers := tensorboard_writers(run)) and run.next_round:
                last = run.next_round - 1
                if self._mapped_round != last:
                    self._draw(run, writers, last)
                picture = _sample_predictions(run.federation, last)
                if picture is not None:
                    _add_picture(writers, "pictures/predictions", picture, last)
                if self._of_views and run.names.monitor:
                    figure = views_picture(self._of_views, run.names.monitor)
                    _add_picture(writers, "pictures/views", render(figure), last)
                for name, figure in _test_figures(run.federation, last):
                    _add_picture(writers, f"pictures/{name}", render(figure), last)
            _close(run, "success")

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Close the loggers, so that nothing that was logged is lost."""
        with suppress(OSError):  # the disk is full, which the error says
            _close(run, "failed")

    def _draw(self, run: Run, writers: list[SummaryWriter], round_idx: int) -> None:
        participation = run.federation.participation
        figure = participation_map(
            participation.plan, round_idx + 1, participation.num_clients, participation.nominal_cohort_size
        )
        _add_picture(writers, "pictures/participation", render(figure), round_idx)
        for name, figure in run.federation.algorithm.figures(run.federation.server).items():
            _add_picture(writers, f"pictures/{name}", render(figure), round_idx)
        self._mapped_round = round_idx


@contextmanager
def _naming_the_file(run: Run) -> Iterator[None]:
    """Name what cannot be written: TensorBoard's events, where there are any."""
    try:
        yield
    except Exception as error:
        full = error if isinstance(error, OSError) else error.__cause__  # Lightning's loggers blame the value
        if not isinstance(full, OSError):
            raise
        events = sorted(run.log_dir.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
        where = events[-1] if events else run.log_dir
        raise CheckpointError(f"cannot write {where}: {full.strerror or full}") from error


def start_session(writer: SummaryWriter, round_idx: int) -> None:
    """Make TensorBoard's readers forget what older event files of the folder say of this round and later ones.

    These are the two events of ``SummaryWriter(purge_step=…)``, which only works for a writer that is not open yet.
    A fresh run needs them as well: the web page's reader takes the first start in a folder for the run's own, and
    forgets rounds only from the second start on.

    Args:
        writer: The writer of the new event file, before its first summary.
        round_idx: The first round to forget.
    """
    file_writer = writer._get_file_writer()
    file_writer.add_event(Event(step=round_idx, file_version="brain.Event:2"))
    file_writer.add_event(Event(step=round_idx, session_log=SessionLog(status=SessionLog.START)))


def flatten(config: Any, prefix: str = "") -> dict[str, str | float | int]:
    """A nested configuration as numbers and strings by dotted name; what is null is left out."""
    if isinstance(config, Mapping):
        entries: Iterable[tuple[Any, Any]] = config.items()
    elif isinstance(config, list) and any(isinstance(entry, Mapping | list) for entry in config):
        entries = enumerate(config)
    else:
        if config is None or not prefix:
            return {}
        # TensorBoard would show a bool as 1.0, and takes no lists.
        plain = isinstance(config, int | float | str) and not isinstance(config, bool)
        return {prefix: config if plain else json.dumps(config, default=str)}
    flat: dict[str, str | float | int] = {}
    for key, value in entries:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _continues(run: Run) -> bool:
    """Whether the run folder has events of an earlier process; a checkpoint may also be the start of a new folder."""
    before, now = run.resumed_from, run.log_dir
    return run.start_round > 0 and (before is None or before.resolve() == now.resolve())


def _hparam_metrics(run: Run) -> list[str]:
    """What is compared beside the settings: what the task calls important, else the losses."""
    names = list(run.names.directions) or ["loss"]
    return [f"global/{name}" for name in names] + [f"clients/{names[0]}_mean"]


def _add_hparams(writer: SummaryWriter, config: str, told: Sequence[str], metrics: list[str]) -> None:
    settings = flatten(yaml.safe_load(config) if config else {})
    found = {
        name.replace(".init_args", ""): value for name, value in settings.items() if not name.startswith(_NO_HPARAMS)
    }
    if not found:
        return

    def rank(name: str) -> int:
        return next((place for place, key in enumerate(told) if f"{name}.".startswith(f"{key}.")), len(told))

    params = {name: found[name] for name in sorted(found, key=rank)}  # TensorBoard's columns have this order
    file_writer = writer._get_file_writer()
    # Not `SummaryWriter.add_hparams`, which adds a scalar at step 0 for every metric, in a folder of its own.
    for summary in hparams(params, dict.fromkeys(metrics, 0.0)):
        file_writer.add_summary(summary)


def tensorboard_writers(run: Run) -> list[SummaryWriter]:
    """The TensorBoard writers of a run; none on other processes than the first."""
    if not run.fabric.is_global_zero:
        return []
    return [logger.experiment for logger in run.loggers if isinstance(logger, TensorBoardLogger)]


def _flush(run: Run) -> None:
    """Hand everything logged to the operating system, which keeps it when the process is killed."""
    if not run.fabric.is_global_zero:
        return
    for logger in run.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
        else:
            logger.save()


def _close(run: Run, status: str) -> None:
    if not run.fabric.is_global_zero:
        return
    for logger in run.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.close()  # `finalize` would also write an empty hparams.yaml; ours is config.yaml
        else:
            logger.finalize(status)


def _values_over_clients(rows: Iterable[ClientRow]) -> dict[str, NDArray[np.float64]]:
    """What clients were evaluated at, by tag, such as ``clients/acc``; scalars end in ``_mean`` and so on.

    Values that no histogram can show, of a run that diverges, are left out.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.stage in _HISTOGRAMS and abs(row.value) < _LARGEST:
            values.setdefault(f"{_HISTOGRAMS[row.stage]}/{row.metric}", []).append(row.value)
    return {tag: np.asarray(column) for tag, column in values.items()}


def _add_picture(writers: list[SummaryWriter], tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
    for writer in writers:
        writer.add_image(tag, picture, round_idx, dataformats="HWC")


def _sample_predictions(federation: Federation, round_idx: int) -> NDArray[np.uint8] | None:
    """Some test images with the global model's classes; None without such a model, without classes or images."""
    models, num_classes = federation.global_models(round_idx), federation.data.num_classes
    if not models or num_classes is None:
        return None
    kind, state = next(iter(models.items()))
    loop = federation.loops[kind]
    has_step = overrides(loop.model.task, "predict_step")
    shape = federation.data.input_shape
    if not has_step or len(shape) != 3 or shape[0] not in (1, 3):
        return None
    batch = next(iter(federation.data.test_loader()), None)
    if not isinstance(batch, list | tuple) or len(batch) != 2 or batch[1].ndim != 1:
        return None
    chosen = torch.from_numpy(even_subset(len(batch[1]), _MOST_IMAGES)).to(batch[1].device)
    images, labels = batch[0][chosen], batch[1][chosen]
    with loop.model.preserved():
        loop.model.load(state)
        _, output = next(iter(loop.predict([(images, labels)])))
    classes = _classes(output, len(labels), num_classes)
    if classes is None:
        return None
    return render(predictions_picture(images.float().cpu().numpy(), classes, labels.tolist()))


def _test_figures(federation: Federation, round_idx: int) -> Iterator[tuple[str, Figure]]:
    """What the task draws of the global model on test data, for each group of views that the data name."""
    data, models = federation.data, federation.global_models(round_idx)
    if not models:
        return
    kind, state = next(iter(models.items()))
    loop = federation.loops[kind]
    if loop.model.split.personal:  # nobody trained the server's part of that
        return
    with loop.model.preserved():
        loop.model.load(state)
        for group, views in data.pictured().items():
            figures = loop.figures({view: data.test_loader(view=view) for view in views})
            for name, figure in figures.items():
                yield f"{group}_{name}", figure


def _classes(output: Any, count: int, num_classes: int) -> list[int] | None:
    """Predicted classes from scores, shape (n, num_classes), or classes, shape (n,), bare or in a dictionary."""
    candidates = output.values() if isinstance(output, Mapping) else [output]
    tensors = [value for value in candidates if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.shape == (count, num_classes):
            return [int(entry) for entry in tensor.argmax(dim=1).tolist()]
    for tensor in tensors:
        if tensor.shape == (count,) and not tensor.is_floating_point():
            return [int(entry) for entry in tensor.tolist()]
    return None
