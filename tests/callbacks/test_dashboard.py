"""What lands in event files, read back with TensorBoard's own readers."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lit_fed.callbacks.base import RoundRecord
from lit_fed.callbacks.dashboard import Dashboard, flatten
from lit_fed.callbacks.pictures import even_subset, participation_map, partition_picture, predictions_picture, render
from lit_fed.errors import ConfigError
from lit_fed.metrics.ledger import ClientRow
from lit_fed.participation import Fate, Participant, UniformParticipation

CONFIG = """
model: {class_path: lit_fed.FedAvg, init_args: {lr: 0.1, nesterov: true, milestones: [1, 2], name: null}}
trainer: {max_rounds: 3, protocols: [{class_path: A}, {class_path: B}]}
"""


class Module(LightningModule):
    """Says class ``pixel 0 of the image``, or nothing but zeros without its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        classes = (batch[0][:, 0, 0, 0] * self.weight.detach()).long()
        return torch.nn.functional.one_hot(classes, 10).float()

    def preserved(self) -> Any:
        return torch.no_grad()

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.load_state_dict(tensors)


class Data:
    num_classes, num_clients, input_shape = 10, 4, (1, 8, 8)

    def class_histogram(self) -> Any:
        return np.arange(40).reshape(4, 10)

    def test_loader(self) -> list[Any]:
        labels = torch.arange(100) % 10
        return [(labels.float().reshape(-1, 1, 1, 1).expand(-1, *self.input_shape), labels)]


def a_federation(**more: Any) -> Any:
    participation = UniformParticipation(count=2, dropout_after=0.3)
    participation.setup(4, lambda client_id: 10, seed=0)
    module = Module()
    loop = SimpleNamespace(predict=lambda loader: ((batch, module.predict_step(batch, 0)) for batch in loader))
    parts = {
        "module": module,
        "loop": loop,
        "data": Data(),
        "participation": participation,
        "algorithm": SimpleNamespace(global_state=lambda: {"weight": torch.ones(())}, figures=dict),
    }
    return SimpleNamespace(**parts | more)


def a_trainer(folder: Path, start_round: int = 0, rank_zero: bool = True, **more: Any) -> Any:
    settings = {
        "loggers": [TensorBoardLogger(folder, name="", version="")],
        "log_dir": folder,
        "resumed_from": folder if start_round else None,
        "config": CONFIG,
        "federation": a_federation(),
        "next_round": start_round,
        "max_rounds": 3,
    }
    return SimpleNamespace(fabric=SimpleNamespace(is_global_zero=rank_zero), start_round=start_round, **settings | more)


def rows(offset: float = 0.0) -> list[ClientRow]:
    found = [ClientRow(client, stage, "acc", 0.25 * client) for client in range(4) for stage in ("test", "personal")]
    found += [ClientRow(client, "test", "loss", client + offset) for client in range(4)]
    return [*found, ClientRow(0, "train", "uplink_bytes", 8.0), ClientRow(3, "unseen", "loss", float("nan"))]


def run_rounds(dashboard: Dashboard, trainer: Any, start: int, stop: int, offset: float = 0.0) -> None:
    for round_idx in range(start, stop):
        trainer.next_round = round_idx + 1
        metrics = {"global/acc": round_idx + offset, "clients/acc_mean": 0.5, "train/loss": 1.0}
        dashboard.on_round_end(trainer, RoundRecord(round_idx, metrics, rows(offset), []))


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance=dict.fromkeys(("scalars", "images", "histograms"), 0)).Reload()


def steps(events: list[Any]) -> list[int]:
    return [event.step for event in events]


def test_a_round_is_on_disk_when_the_hook_returns(tmp_path: Path) -> None:
    dashboard, trainer = Dashboard(), a_trainer(tmp_path)
    dashboard.on_fit_start(trainer)
    for stop in (1, 2, 3):
        run_rounds(dashboard, trainer, stop - 1, stop)
        events = read(tmp_path)  # the writer is still open: this is what a SIGKILL would leave
        assert steps(events.Scalars("global/acc")) == list(range(stop))
        assert steps(events.Histograms("clients/acc")) == list(range(stop))
    assert [event.value for event in events.Scalars("global/acc")] == [0.0, 1.0, 2.0]


def test_histograms_hold_the_clients_values_under_tags_of_their_own(tmp_path: Path) -> None:
    dashboard, trainer = Dashboard(), a_trainer(tmp_path)
    run_rounds(dashboard, trainer, 0, 1)
    tags = read(tmp_path).Tags()
    assert sorted(tags["histograms"]) == ["clients/acc", "clients/loss", "personal/acc"], "no NaN, no training rows"
    assert not set(tags["histograms"]) & set(tags["scalars"])
    histogram = read(tmp_path).Histograms("clients/acc")[0].histogram_value
    # 0, 0.25, 0.5, 0.75
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (4, 0, 0.75, 1.5)


def test_a_round_without_evaluation_has_no_histogram(tmp_path: Path) -> None:
    dashboard, trainer = Dashboard(), a_trainer(tmp_path)
    dashboard.on_round_end(trainer, RoundRecord(0, {"train/loss": float("nan")}, [], []))
    assert read(tmp_path).Tags()["histograms"] == []


@pytest.mark.parametrize("cut", [0, 7])
def test_a_resumed_run_has_every_round_once(tmp_path: Path, cut: int) -> None:
    killed, trainer = Dashboard(picture_every=1), a_trainer(tmp_path)
    killed.on_fit_start(trainer)
    run_rounds(killed, trainer, 0, 5)
    trainer.loggers[0].experiment.close()
    (first,) = tmp_path.glob("events*")
    if cut:
        first.write_bytes(first.read_bytes()[:-cut])
    # Readers go by the name, which holds the second in which the file was made.
    first.rename(tmp_path / "events.out.tfevents.0000000001.host.1.0")
    if not cut:
        assert steps(read(tmp_path).Scalars("global/acc")) == [0, 1, 2, 3, 4]

    resumed, again = Dashboard(picture_every=1), a_trainer(tmp_path, start_round=3)
    resumed.on_fit_start(again)
    events = read(tmp_path)
    assert steps(events.Scalars("global/acc")) == [0, 1, 2], "before the first new round, too"
    run_rounds(resumed, again, 3, 4, offset=0.5)
    events = read(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("global/acc")] == [(0, 0), (1, 1), (2, 2), (3, 3.5)]
    for tag in ("clients/acc", "clients/loss", "personal/acc"):
        assert steps(events.Histograms(tag)) == [0, 1, 2, 3]
    assert steps(events.Images("pictures/participation")) == [0, 1, 2, 3]
    assert steps(events.Images("pictures/partition")) == [0]

    # What the web page reads with; it differs: the first start of a session in a folder forgets nothing.
    modern = PluginAccumulator(str(tmp_path), tensor_size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    modern.Reload()
    for tag in ("global/acc", "clients/acc", "pictures/participation"):
        assert steps(modern.Tensors(tag)) == [0, 1, 2, 3], tag


def test_a_whole_fit_leaves_pictures_once(tmp_path: Path) -> None:
    dashboard, trainer = Dashboard(picture_every=3), a_trainer(tmp_path)
    dashboard.on_fit_start(trainer)
    run_rounds(dashboard, trainer, 0, 3)
    dashboard.on_fit_end(trainer)
    events = read(tmp_path)
    expected = {"pictures/partition": [0], "pictures/participation": [2], "pictures/predictions": [2]}
    assert {tag: steps(events.Images(tag)) for tag in events.Tags()["images"]} == expected
    for tag in expected:
        event = events.Images(tag)[0]
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert image.size == (event.width, event.height)
        assert image.width >= 500
    assert not list(tmp_path.glob("hparams.yaml"))


def test_predictions_are_those_of_the_global_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def spy(images: Any, predicted: Any, true: Any) -> Any:
        drawn.append((predicted, true))
        return predictions_picture(images, predicted, true)

    monkeypatch.setattr("lit_fed.callbacks.dashboard.predictions_picture", spy)
    Dashboard().on_fit_end(a_trainer(tmp_path, next_round=1))
    ((predicted, true),) = drawn
    assert len(true) == 16
    assert predicted == true, "with the global weight of 1; the module's own weight of 0 predicts class 0"
    assert len(set(true)) > 3


@pytest.mark.parametrize("case", ["no global model", "no images", "no predict_step", "odd output"])
def test_predictions_are_left_out_where_they_make_no_sense(tmp_path: Path, case: str) -> None:
    federation = a_federation()
    if case == "no global model":
        federation.algorithm = SimpleNamespace(global_state=dict, figures=dict)
    elif case == "no images":
        federation.data.input_shape = (20,)
    elif case == "no predict_step":
        federation.module = LightningModule()
    else:
        federation.loop = SimpleNamespace(predict=lambda loader: iter([(None, {"text": "seven"})]))
    Dashboard().on_fit_end(a_trainer(tmp_path, federation=federation, next_round=1))
    assert read(tmp_path).Tags()["images"] == ["pictures/participation"]


def read_hparams(folder: Path) -> dict[str, Any]:
    """What the hyperparameter plugin finds: parameters of the session, and names of metrics."""
    accumulator = PluginAccumulator(str(folder))
    accumulator.Reload()
    try:
        contents = accumulator.PluginTagToContent("hparams")
    except KeyError:
        return {}
    parsed = {tag: HParamsPluginData.FromString(content) for tag, content in contents.items()}
    session = parsed["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: value.string_value or value.number_value for name, value in session.items()}
    infos = parsed["_hparams_/experiment"].experiment.metric_infos
    return {"params": values, "metrics": [info.name.tag for info in infos]}


def test_hparams_come_from_the_config_without_scalars_of_their_own(tmp_path: Path) -> None:
    Dashboard().on_fit_start(a_trainer(tmp_path))
    found = read_hparams(tmp_path)
    assert found["params"] == {
        "model.class_path": "lit_fed.FedAvg",
        "model.lr": 0.1,
        "model.nesterov": "true",
        "model.milestones": "[1, 2]",
        "trainer.max_rounds": 3,
        "trainer.protocols.0.class_path": "A",
        "trainer.protocols.1.class_path": "B",
    }
    assert found["metrics"] == ["global/acc", "global/loss", "clients/acc_mean"]
    assert read(tmp_path).Tags()["scalars"] == []


def test_hparams_only_on_a_fresh_start_and_with_a_config(tmp_path: Path) -> None:
    Dashboard().on_fit_start(a_trainer(tmp_path / "resumed", start_round=1))
    assert read_hparams(tmp_path / "resumed") == {}
    Dashboard().on_fit_start(a_trainer(tmp_path / "python", config=""))
    assert read_hparams(tmp_path / "python") == {}
    assert read(tmp_path / "python").Tags()["images"] == ["pictures/partition"]
    # A checkpoint such as best.ckpt starts a new folder, in which nothing has been written yet.
    Dashboard().on_fit_start(a_trainer(tmp_path / "fork", start_round=1, resumed_from=tmp_path / "resumed"))
    assert read_hparams(tmp_path / "fork")["params"]["trainer.max_rounds"] == 3
    assert steps(read(tmp_path / "fork").Images("pictures/partition")) == [1]


def test_flatten_takes_whatever_yaml_gives() -> None:
    assert flatten(None) == {}
    assert flatten({"a": {"b": [], "c": {}}, "d": [[1], [2]], "e": False}) == {
        "a.b": "[]",
        "d.0": "[1]",
        "d.1": "[2]",
        "e": "false",
    }


def test_every_logger_gets_every_metric_at_once(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path, name="", version="csv")
    dashboard = Dashboard()
    trainer = a_trainer(tmp_path, loggers=[csv, TensorBoardLogger(tmp_path / "a", name="", version="")])
    dashboard.on_fit_start(trainer)
    run_rounds(dashboard, trainer, 0, 1)
    header, row = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["clients/acc_mean"] == "0.5"
    dashboard.on_exception(trainer, KeyboardInterrupt())
    assert steps(read(tmp_path / "a").Scalars("train/loss")) == [0]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    dashboard, trainer = Dashboard(picture_every=1), a_trainer(tmp_path, rank_zero=False)
    dashboard.on_fit_start(trainer)
    run_rounds(dashboard, trainer, 0, 1)
    dashboard.on_fit_end(trainer)
    dashboard.on_exception(trainer, ValueError())
    assert list(tmp_path.iterdir()) == []


def test_negative_picture_every_is_refused() -> None:
    with pytest.raises(ConfigError, match="picture_every is -1"):
        Dashboard(picture_every=-1)


# ---------------------------------------------------------------------- pictures


@pytest.mark.parametrize(("count", "most"), [(1, 200), (200, 200), (201, 200), (100_000, 200), (5, 1)])
def test_even_subset(count: int, most: int) -> None:
    chosen = even_subset(count, most)
    assert len(chosen) == len(set(chosen.tolist())) == min(count, most)
    assert chosen[0] == 0
    if most > 1:
        assert chosen[-1] == count - 1
    gaps = np.diff(chosen)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_partition_picture_says_what_it_leaves_out() -> None:
    histogram = np.zeros((1000, 300), dtype=np.int64)
    histogram[:, 0] = 3
    axes = partition_picture(histogram).axes[0]
    assert axes.get_title() == (
        "Who has what: 3,000 training samples, 200 of 1,000 clients, evenly spread, 200 of 300 classes, evenly spread"
    )
    shown = axes.images[0].get_array()
    assert shown is not None
    assert shown.shape == (200, 200)
    assert shown[0].tolist() == [3] * 200
    assert np.ma.getmaskarray(shown)[1:].all()
    assert (
        partition_picture(np.ones((5, 2), dtype=np.int64))
        .axes[0]
        .get_title()
        .endswith("10 training samples, 5 clients")
    )


def test_participation_map_shows_each_fate_where_it_happened() -> None:
    fates = [Fate.ON_TIME, Fate.LATE, Fate.LOST_AFTER, Fate.LOST_BEFORE]
    figure = participation_map(lambda round_idx: [Participant(round_idx, fates[round_idx])], 4, 5, 1)
    values = figure.axes[0].images[0].get_array()
    assert values is not None
    # classes × rounds: client r takes part in round r with the r-th fate, coded from 1
    assert values.tolist() == [*np.diag([1, 2, 3, 4]).tolist(), [0] * 4]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "not selected",
        "on time",
        "late, arrives a round later",
        "lost after training",
        "lost before training",
    ]


def test_participation_map_bins_long_runs_by_the_most_frequent_fate() -> None:
    def plan(round_idx: int) -> list[Participant]:
        return [
            Participant(0, Fate.LATE if round_idx % 4 == 3 else Fate.ON_TIME),
            Participant(1, Fate.LOST_BEFORE if round_idx % 2 else Fate.ON_TIME),
        ]

    axes = participation_map(plan, 1600, 3, 2).axes[0]
    assert "400 bins of rounds" in axes.get_title()
    values = axes.images[0].get_array()
    assert values is not None
    assert values.shape == (3, 400)
    assert set(values[0].tolist()) == {1}, "three of four on time"
    assert set(values[1].tolist()) == {4}, "of two equally frequent the one worth noticing"
    assert set(values[2].tolist()) == {0}


def test_participation_map_of_a_large_population_looks_at_some_rounds() -> None:
    asked: list[int] = []

    def plan(round_idx: int) -> list[Participant]:
        asked.append(round_idx)
        return [Participant(0, Fate.ON_TIME)]

    axes = participation_map(plan, 1000, 100_000, 20_000).axes[0]
    assert len(asked) == 10
    assert "10 of the rounds are shown" in axes.get_title()
    assert "200 of 100,000 clients" in axes.get_title()


def test_pictures_leave_pyplot_alone_and_render_to_pixels() -> None:
    pixels = render(predictions_picture(np.zeros((1, 3, 4, 4), dtype=np.float32), [1], [2]))
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert pixels.min() < 100 < pixels.max()
