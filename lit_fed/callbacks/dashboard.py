"""Settings, metrics, histograms and pictures of a run for its loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.callbacks.boards import (
    Column,
    Settings,
    boards,
    columns_of,
    event_files,
    hparams_of,
    runs_beside,
    settings_of,
    show_picture,
    takes_pictures,
)
from lit_fed.callbacks.layout import OF_ONE_CLIENT, layout_of
from lit_fed.callbacks.pictures import participation_map, predictions_picture, schedule_picture, views_picture
from lit_fed.checks import check_range
from lit_fed.data.population.pictures import even_subset, render
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import ClientRow
from lit_fed.engine.lightning.compatibility import overrides
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HISTOGRAMS = {  # stage of a row: protocol in tags
    "test": "clients",
    "global": "clients_global",
    "local": "local",
    "personal": "personal",
    "unseen": "unseen",
}
_MOST_CLIENTS = 20  # whose scalars TensorBoard still shows side by side
_MOST_IMAGES = 16
_LARGEST = 1e19  # TensorBoard's own bins end a little further out


class Dashboard(Callback):
    """Writes metrics and settings to all loggers, histograms and pictures to loggers that take them.

    A round is on disk when `on_round_end` returns, before its checkpoint is written, so a killed process loses nothing.
    After a resume, TensorBoard's readers drop rounds that a killed process wrote after the checkpoint.

    Args:
        picture_every: Rounds between two participation maps and pictures of the algorithm; 0 draws at the end only.
        client_scalars: Whether the metrics of single clients are scalars, too, such as ``clients/acc/3``; at most 20.

    Raises:
        ConfigError: If `picture_every` is negative; for scalars of more clients.
    """

    def __init__(self, picture_every: int = 0, client_scalars: bool = False) -> None:
        self.picture_every = check_range("Dashboard.picture_every", picture_every, least=0, why=" rounds")
        self.client_scalars = client_scalars
        self._mapped_round = -1
        self._of_views: dict[str, float] = {}
        self._names = set[str]()  # of this process's metrics

    def on_fit_start(self, run: Run) -> None:
        """Drop rounds after the checkpoint; in a new run folder write settings and the partition."""
        if self.client_scalars and (count := run.federation.data.num_clients) > _MOST_CLIENTS:
            raise ConfigError(
                f"Dashboard.client_scalars is true, and there are {count} clients; leave it out above {_MOST_CLIENTS}: "
                "clients.csv has every client's metrics"
            )
        self._mapped_round, self._of_views, self._names = -1, {}, set()
        with _naming_the_file(run):
            shown = boards(run)
            for board in shown:
                board.start(run.start_round)
            new = [board for board in shown if not (board.resumes and _continues(run))]
            settings = settings_of(run.settings.config)
            for board in new if settings else ():
                board.settings(settings, *_compared(run, settings))
            drawing = [board for board in new if board.draws] if takes_pictures(run) and not run.withholds else []
            if drawing and (picture := run.federation.data.record.picture()) is not None:
                for board in drawing:
                    board.picture("pictures/partition", picture, run.start_round)
            for board in shown:
                board.flush()

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the round's metrics and histograms to disk.

        Raises:
            CheckpointError: If they cannot be written.
        """
        if run.fabric.is_global_zero:
            with _naming_the_file(run):
                self._write(run, record)
                for board in boards(run):
                    board.flush()

    def _write(self, run: Run, record: RoundRecord) -> None:
        best = run.names.monitor
        by_view = {view: record.metrics.get(f"{best}_{view}") for view in run.federation.data.views()}
        self._of_views = {view: value for view, value in by_view.items() if value is not None} or self._of_views
        of_clients = _scalars(record.rows, run) if self.client_scalars else {}
        shown = boards(run)
        for board in shown:
            single = {f"{board.of_one_client}{tag}": value for tag, value in of_clients.items()}
            board.logger.log_metrics(record.metrics | single, step=record.round_idx)
        # A round without evaluation lacks metrics that a resumed run has reported before.
        if best in (None, *record.metrics) and (new := record.metrics.keys() - self._names):
            self._names |= new
            layout = layout_of([*sorted(self._names), *(f"{OF_ONE_CLIENT}{tag}" for tag in of_clients)], run.names)
            for board in shown:
                board.layout(layout)
        for tag, values in _values_over_clients(record.rows).items() if shown else ():
            share = run.names.direction(tag) == "max" and values.min() >= 0 and values.max() <= 1
            for board in shown:
                board.histogram(f"histograms/{tag}", values, record.round_idx, bool(share))
        if takes_pictures(run) and self.picture_every and (record.round_idx + 1) % self.picture_every == 0:
            self._draw(run, record.round_idx)

    def on_fit_end(self, run: Run) -> None:
        """Draw the participation map, sample predictions and the task's figures, and close the loggers."""
        with _naming_the_file(run):
            if takes_pictures(run) and run.next_round:
                last = run.next_round - 1
                if self._mapped_round != last:
                    self._draw(run, last)
                picture = _sample_predictions(run.federation, last)
                if picture is not None:
                    show_picture(run, "pictures/predictions", picture, last)
                if self._of_views and run.names.monitor:
                    figure = views_picture(self._of_views, run.names.monitor)
                    show_picture(run, "pictures/views", render(figure), last)
                for name, figure in _test_figures(run.federation, last):
                    show_picture(run, f"pictures/{name}", render(figure), last)
            _close(run, "success")

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Close the loggers without losing data."""
        with suppress(OSError):  # a full disk, which the error reports
            _close(run, "failed")

    def _draw(self, run: Run, round_idx: int) -> None:
        if run.withholds:
            return
        participation = run.federation.participation
        drawn: dict[str, Callable[..., Figure]] = {"participation": participation_map}
        if not participation.one_model:
            drawn["schedule"] = partial(schedule_picture, at_work=participation.at_work(round_idx))
        for name, draw in drawn.items():
            figure = draw(
                participation.plan,
                round_idx + 1,
                participation.num_clients,
                participation.nominal_cohort_size,
                run.federation.data.client_names,
            )
            show_picture(run, f"pictures/{name}", render(figure), round_idx)
        for name, figure in run.federation.algorithm.figures(run.federation.server).items():
            show_picture(run, f"pictures/{name}", render(figure), round_idx)
        self._mapped_round = round_idx


@contextmanager
def _naming_the_file(run: Run) -> Iterator[None]:
    """Name the file that cannot be written: the newest event file, else the run's folder."""
    try:
        yield
    except Exception as error:
        full = error if isinstance(error, OSError) else error.__cause__  # Lightning's loggers wrap it
        if not isinstance(full, OSError):
            raise
        *_, where = run.log_dir, *event_files(run.log_dir)
        raise CheckpointError(f"cannot write {where}: {full.strerror or full}") from error


def _continues(run: Run) -> bool:
    """Whether the run folder has events of an earlier process; a fork from a checkpoint starts a new folder."""
    before, now = run.resumed_from, run.log_dir
    return run.start_round > 0 and (before is None or before.resolve() == now.resolve())


def _compared(run: Run, settings: Settings) -> tuple[dict[str, Column], list[str]]:
    """Columns for the settings that tell runs apart, and for the metrics that the task declares, else the losses."""
    names = list(run.names.directions) or ["loss"]
    columns = columns_of(hparams_of(settings), run.settings.given_keys, list(runs_beside(run.log_dir)))
    return columns, [f"global/{name}" for name in names] + [f"clients/{names[0]}_mean"]


def _close(run: Run, status: str) -> None:
    for board in boards(run):
        board.close(status)


def _scalars(rows: Iterable[ClientRow], run: Run) -> dict[str, float]:
    """Each client's metrics by tag and client: its name, where the data set has names, else its position."""
    names = run.federation.data.client_names
    return {
        f"{_HISTOGRAMS[row.stage]}/{row.metric}/{row.client_id if names is None else names[row.client_id]}": row.value
        for row in rows
        if row.stage in _HISTOGRAMS
    }


def _values_over_clients(rows: Iterable[ClientRow]) -> dict[str, NDArray[np.float64]]:
    """Clients' values by tag, such as ``clients/acc``, without values too large for a histogram."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.stage in _HISTOGRAMS and abs(row.value) < _LARGEST:
            values.setdefault(f"{_HISTOGRAMS[row.stage]}/{row.metric}", []).append(row.value)
        elif row.metric == "staleness":  # of training, in an asynchronous federation
            values.setdefault("clients/staleness", []).append(row.value)
    return {tag: np.asarray(column) for tag, column in values.items()}


def _sample_predictions(federation: Federation, round_idx: int) -> NDArray[np.uint8] | None:
    """Test images with the global model's classes; None without a global model, classes or images."""
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
    names = federation.data.class_names
    return render(predictions_picture(images.float().cpu().numpy(), classes, labels.tolist(), names))


def _test_figures(federation: Federation, round_idx: int) -> Iterator[tuple[str, Figure]]:
    """The task's figures of the global model on test data, for each group of views of the data."""
    data, models = federation.data, federation.global_models(round_idx)
    if not models:
        return
    kind, state = next(iter(models.items()))
    loop = federation.loops[kind]
    if federation.is_partly_personal(round_idx, kind):  # the server's copy of these parts is untrained
        return
    with loop.model.preserved():
        loop.model.load(state)
        for group, views in data.pictured().items():
            figures = loop.figures({view: data.test_loader(view=view) for view in views})
            for name, figure in figures.items():
                yield f"{group}_{name}", figure


def _classes(output: Any, count: int, num_classes: int) -> list[int] | None:
    """Extract predicted classes from scores (n, num_classes) or classes (n,), bare or in a dictionary."""
    candidates = output.values() if isinstance(output, Mapping) else [output]
    tensors = [value for value in candidates if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.shape == (count, num_classes):
            return [int(entry) for entry in tensor.argmax(dim=1).tolist()]
    for tensor in tensors:
        if tensor.shape == (count,) and not tensor.is_floating_point():
            return [int(entry) for entry in tensor.tolist()]
    return None
