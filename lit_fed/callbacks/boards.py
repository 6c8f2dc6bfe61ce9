"""Settings, pictures and histograms for each kind of Lightning logger, and TensorBoard's table of HParams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams

from lit_fed.callbacks.layout import OF_ONE_CLIENT, Layout
from lit_fed.engine.loop.run import Run
from lit_fed.yaml_text import read_yaml

Setting = str | float | int
Settings = dict[str, Setting]

METHOD = "_method"
"""The name of the column ``method``: TensorBoard sorts columns by name, and every other begins with a letter."""

_FIRST = 5  # columns that TensorBoard shows until a user chooses others
_EQUAL_RUNS = ("trainer.enable_", "trainer.logger", "trainer.default_root_dir", "trainer.num_threads")
_MOST_RUNS = 100  # compared at the start of a run: about 5 ms each


def flatten(config: Any, prefix: str = "") -> Settings:
    """A nested configuration as numbers and strings by dotted name, without null values."""
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
    flat: Settings = {}
    for key, value in entries:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def settings_of(config: str) -> Settings:
    """A configuration file's settings by dotted name, without settings that do not change a run's results."""
    flat = flatten(read_yaml(config))
    return {name.replace(".init_args", ""): value for name, value in flat.items() if not name.startswith(_EQUAL_RUNS)}


def hparams_of(settings: Mapping[str, Setting]) -> Settings:
    """Settings by the names of HParams: the algorithm's class as `METHOD`, every class by its last name."""
    hparams: Settings = {METHOD: ""} if "algorithm.class_path" in settings else {}
    for name, value in settings.items():
        if name.endswith(".class_path"):
            hparams[_class_key(name)] = str(value).rpartition(".")[2]
        else:
            hparams[name] = value
    return hparams


class Column(NamedTuple):
    """A column of HParams.

    Args:
        value: A value of the setting, for the column's type.
        leads: Whether the column comes before the others.
    """

    value: Setting
    leads: bool


def columns_of(own: Settings, given_keys: Sequence[str], others: Sequence[Settings]) -> dict[str, Column]:
    """The columns of HParams: the method, settings that differ between runs, settings that the user asked for.

    The method and the differing settings come first; if they fill fewer than the five columns that TensorBoard shows,
    the settings asked for last come first, too. A setting with the same value in all runs that have it needs to be
    asked for.

    Args:
        own: The run's HParams.
        given_keys: The keys that its user asked for, most recent first.
        others: The HParams of the runs beside it.
    """
    keys = [_class_key(key) for key in given_keys]
    merged: Settings = {}
    for settings in (*others, own):
        merged |= settings

    def rank(name: str) -> int:
        for place, key in enumerate(keys):
            if name == key or (key not in merged and name.startswith(f"{key}.")):  # a class is not its settings
                return place
        return len(keys)

    asked = {name for name in own if rank(name) < len(keys)}
    differing = {
        name for name, value in merged.items() if any(other.get(name, value) != value for other in (*others, own))
    }
    chosen = sorted({METHOD} & own.keys() | differing | asked, key=list({**own, **merged}).index)
    chosen.sort(key=lambda name: (name != METHOD, name not in differing, rank(name)))
    leading = differing | set(chosen[:_FIRST])
    return {name: Column(merged[name], name in leading) for name in chosen}


def runs_beside(log_dir: Path) -> Iterator[Settings]:
    """The HParams of the newest runs in the folder of a run's folder; an unreadable configuration is left out."""
    siblings = [path for path in log_dir.parent.glob("*/config.yaml") if path.parent != log_dir]
    for path in sorted(siblings, key=_modified)[-_MOST_RUNS:]:
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, ValueError):
            yield hparams_of(settings_of(path.read_text(encoding="utf-8")))


def _class_key(name: str) -> str:
    key = name.replace(".init_args", "").removesuffix(".class_path")
    return METHOD if key == "algorithm" else key


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since it was listed
        return 0.0


COLUMNS_FILE = "events.out.tfevents.0000000000.columns"
"""The event file with the columns of HParams, in the folder of the newest run alone."""


def event_files(run_dir: Path) -> list[Path]:
    """The event files in a run's folder and in the folder of its name there, the newest last."""
    return sorted([*run_dir.glob("events.out.tfevents.*"), *run_dir.glob("*/events.out.tfevents.*")], key=_modified)


class Board:
    """A Lightning logger: settings as hyperparameters, pictures where it has ``log_image``.

    Args:
        logger: The logger.
    """

    resumes = False
    """Whether a resumed run appends to the output of an earlier process; if not, settings are sent again."""

    of_one_client = ""
    """Prefix of the metrics of single clients."""

    def __init__(self, logger: Logger) -> None:
        self.logger: Any = logger

    @property
    def draws(self) -> bool:
        """Whether the logger takes pictures."""
        return hasattr(self.logger, "log_image")

    def start(self, round_idx: int) -> None:
        """Prepare for a round and the rounds after it."""

    def settings(self, settings: Mapping[str, Setting], columns: Mapping[str, Column], metrics: Sequence[str]) -> None:
        """Log the run's settings, and the columns and the metrics by which a table compares runs."""
        self.logger.log_hyperparams(dict(settings))

    def layout(self, layout: Layout) -> None:
        """Log the charts to show first, if the logger has a place for them."""

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Log a picture, shape (height, width, 3)."""
        self.logger.log_image(tag, [picture], step=round_idx)

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Log the distribution of values; a share lies between 0 and 1.

        Its tag begins with ``histograms/``: in W&B a metric is one number, and another logger may log `clients/acc` as
        one; TensorBoard sorts tags by their first word, and would open on histograms.
        """

    def text(self, tag: str, text: str, round_idx: int) -> None:
        """Log a text in Markdown, if the logger has a place for texts."""

    def flush(self) -> None:
        """Hand all data to the operating system, so that a killed process loses nothing."""
        self.logger.save()

    def close(self, status: str) -> None:
        """Write buffered data; status is ``success`` or ``failed``."""
        self.logger.finalize(status)


class TensorBoard(Board):
    """TensorBoard, without Lightning's logger, which adds its own files and scalars."""

    resumes = True
    draws = True
    of_one_client = OF_ONE_CLIENT

    def start(self, round_idx: int) -> None:
        """Make readers drop older events of this round and later ones.

        The two events are the same as from ``SummaryWriter(purge_step=…)``, which needs a writer that is not open yet.
        A fresh run writes them too: TensorBoard drops rounds only from the second session start in a folder on.
        """
        file_writer = self.logger.experiment._get_file_writer()
        file_writer.add_event(Event(step=round_idx, file_version="brain.Event:2"))
        file_writer.add_event(Event(step=round_idx, session_log=SessionLog(status=SessionLog.START)))

    def text(self, tag: str, text: str, round_idx: int) -> None:
        """Log under *Text*."""
        self.logger.experiment.add_text(tag, text, round_idx)

    def layout(self, layout: Layout) -> None:
        """Write *Custom Scalars*; of several layouts of a run TensorBoard takes the last."""
        self.logger.experiment.add_custom_scalars(layout)

    def settings(self, settings: Mapping[str, Setting], columns: Mapping[str, Column], metrics: Sequence[str]) -> None:
        """Write HParams without ``add_hparams``, which adds a scalar per metric at step 0 in another folder."""
        file_writer, zeros = self.logger.experiment._get_file_writer(), dict.fromkeys(metrics, 0.0)
        _, *session = hparams(hparams_of(settings), zeros)  # all: another run writes the columns
        for summary in session:
            file_writer.add_summary(summary)
        experiment, *_ = hparams({name: column.value for name, column in columns.items()}, zeros)
        data = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        for info in content.experiment.hparam_infos:
            info.differs = columns[info.name].leads
            info.display_name = "method" if info.name == METHOD else ""
        data.content = content.SerializeToString()
        self._write_columns(experiment)

    def _write_columns(self, experiment: Summary) -> None:
        """Write the columns for all runs beside this one, in place of theirs.

        TensorBoard takes the columns of any of several runs. The newest run knows the others and replaces their file.
        The file's name sorts before the run's events: TensorBoard reads event files in order, and never goes back.
        """
        folder = Path(self.logger.log_dir)
        runs = Path(str(folder).removesuffix(self.logger.sub_dir or "")).parent
        for older in [*runs.glob(f"*/{COLUMNS_FILE}"), *runs.glob(f"*/*/{COLUMNS_FILE}")]:
            with suppress(OSError):
                older.unlink()
        with open(folder / COLUMNS_FILE, "wb") as file:
            for event in (Event(file_version="brain.Event:2"), Event(summary=experiment)):
                RecordWriter(file).write(event.SerializeToString())

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Log under *Images*."""
        self.logger.experiment.add_image(tag, picture, round_idx, dataformats="HWC")

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Log under *Histograms*."""
        # The default bins grow by 10 % each, so accuracies between 0.9 and 1 would share one bin.
        self.logger.experiment.add_histogram(tag, values, round_idx, np.linspace(0, 1, 51) if share else "tensorflow")

    def flush(self) -> None:
        """Flush now; by default the writer flushes every two minutes."""
        self.logger.experiment.flush()

    def close(self, status: str) -> None:
        """Close the writer without ``finalize``, which writes an empty hparams.yaml."""
        self.logger.experiment.close()


class Wandb(Board):
    """Weights & Biases, online or offline."""

    def histogram(self, tag: str, values: NDArray[np.float64], round_idx: int, share: bool) -> None:
        """Log 50 bins, over 0 to 1 for shares."""
        import wandb

        bins = np.histogram(values, bins=50, range=(0, 1) if share else None)
        self.logger.log_metrics({tag: wandb.Histogram(np_histogram=bins)}, step=round_idx)


class MLflow(Board):
    """MLflow; each picture is an artifact, and histograms are left out."""

    draws = True

    def settings(self, settings: Mapping[str, Setting], columns: Mapping[str, Column], metrics: Sequence[str]) -> None:
        """Log settings that the run lacks: MLflow refuses changes, and a given run may continue."""
        known = self.logger.experiment.get_run(self.logger.run_id).data.params
        self.logger.log_hyperparams({name: value for name, value in settings.items() if name not in known})

    def picture(self, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
        """Log as artifact ``<tag>/round_<r>.png``."""
        self.logger.experiment.log_image(self.logger.run_id, picture, f"{tag}/round_{round_idx}.png")


_BOARDS: dict[type[Logger], type[Board]] = {TensorBoardLogger: TensorBoard, WandbLogger: Wandb, MLFlowLogger: MLflow}


def boards(run: Run) -> list[Board]:
    """The loggers of a run, on the first process only."""
    return [
        next((board for kind, board in _BOARDS.items() if isinstance(logger, kind)), Board)(logger)
        for logger in (run.loggers if run.fabric.is_global_zero else ())
    ]


def takes_pictures(run: Run) -> bool:
    """Whether the run draws pictures, and a logger of this process takes them."""
    return bool(_drawing(run))


def show_picture(run: Run, tag: str, picture: NDArray[np.uint8], round_idx: int) -> None:
    """Log a picture to all loggers that take pictures."""
    for board in _drawing(run):
        board.picture(tag, picture, round_idx)


def _drawing(run: Run) -> list[Board]:
    return [board for board in boards(run) if board.draws] if run.settings.enable_pictures else []
