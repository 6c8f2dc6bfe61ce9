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

from lit_fed.callbacks import RoundRecord
from lit_fed.callbacks.boards import COLUMNS_FILE
from lit_fed.callbacks.dashboard import Dashboard
from lit_fed.callbacks.pictures import predictions_picture
from lit_fed.data import Diabetes, Digits
from lit_fed.data.population.pictures import partition_picture, render
from lit_fed.engine.evaluation.protocols import ClientRow
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.engine.method.model import Model
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedRAF
from lit_fed.participation import UniformParticipation
from lit_fed.tasks import Classifier, Regressor
from tests.methods.raf_support import estimator, puppets
from tests.support import LeastSquares, assert_same, events_of, fit, weights

CONFIG = """
model: {class_path: lit_fed.FedAvg, init_args: {lr: 0.1, nesterov: true, milestones: [1, 2], name: null}}
trainer: {max_rounds: 3, protocols: [{class_path: A}, {class_path: B}]}
"""


class Module(LightningModule):
    """Says class ``pixel 0 of the image``, or nothing but zeros without its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        classes = (batch[0][:, 0, 0, 0] * self.weight.detach()).long()
        return torch.nn.functional.one_hot(classes, 10).float()


class Data:
    num_classes: int | None = 10
    class_names: list[str] | None = None
    client_names: list[str] | None = None
    num_clients, input_shape = 4, (1, 8, 8)

    @property
    def record(self) -> Data:
        return self

    def picture(self) -> Any:
        return render(partition_picture(np.arange(40).reshape(4, 10)))

    def views(self) -> dict[str, Any]:
        return {}

    def pictured(self) -> dict[str, Any]:
        return {}

    def test_loader(self) -> list[Any]:
        labels = torch.arange(100) % 10
        return [(labels.float().reshape(-1, 1, 1, 1).expand(-1, *self.input_shape), labels)]


def a_federation(task: Any = None, model: Any = None) -> Any:
    """Four clients, a global model of weight 1, and a task whose own weight is 0."""
    participation = UniformParticipation(count=2, dropout_after=0.3)
    participation.setup(4, lambda client_id: 10, seed=0)
    task = task or Module()
    loop = SimpleNamespace(model=Model(task))
    loop.predict = lambda loader: ((batch, task.predict_step(batch, 0)) for batch in loader)
    models = {"model": {"weight": torch.ones(())}} if model is None else model
    return SimpleNamespace(
        loops={"model": loop},
        data=Data(),
        participation=participation,
        algorithm=SimpleNamespace(figures=lambda server: {}),
        server={},
        global_models=lambda round_idx: models,
        is_partly_personal=lambda *_: False,
    )


def a_run(folder: Path, start_round: int = 0, rank_zero: bool = True, config: str = CONFIG, **more: Any) -> Any:
    settings = {
        "fabric": SimpleNamespace(is_global_zero=rank_zero),
        "start_round": start_round,
        "loggers": [TensorBoardLogger(folder, name="", version="")],
        "log_dir": folder,
        "resumed_from": folder if start_round else None,
        "settings": SimpleNamespace(
            config=config, given_keys=more.pop("given_keys", ()), enable_pictures=more.pop("enable_pictures", True)
        ),
        "federation": a_federation(),
        "next_round": start_round,
        "max_rounds": 3,
        "withholds": False,
        "names": MetricNames({"acc": "max", "loss": "min"}, declared=True),
    }
    return SimpleNamespace(**settings | more)


def rows(offset: float = 0.0) -> list[ClientRow]:
    found = [ClientRow(client, stage, "acc", 0.25 * client) for client in range(4) for stage in ("test", "personal")]
    found += [ClientRow(client, "test", "loss", client + offset) for client in range(4)]
    return [*found, ClientRow(0, "train", "uplink_bytes", 8.0), ClientRow(3, "unseen", "loss", float("nan"))]


def run_rounds(dashboard: Dashboard, run: Any, start: int, stop: int, offset: float = 0.0) -> None:
    for round_idx in range(start, stop):
        run.next_round = round_idx + 1
        metrics = {"global/acc": round_idx + offset, "clients/acc_mean": 0.5, "train/loss": 1.0}
        dashboard.on_round_end(run, RoundRecord(round_idx, metrics, rows(offset), []))


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        events_of(folder), size_guidance=dict.fromkeys(("scalars", "images", "histograms"), 0)
    ).Reload()


def steps(events: list[Any]) -> list[int]:
    return [event.step for event in events]


def test_a_round_is_on_disk_when_the_hook_returns(tmp_path: Path) -> None:
    dashboard, run = Dashboard(), a_run(tmp_path)
    dashboard.on_fit_start(run)
    for stop in (1, 2, 3):
        run_rounds(dashboard, run, stop - 1, stop)
        events = read(tmp_path)  # the writer is still open: this is what a SIGKILL would leave
        assert steps(events.Scalars("global/acc")) == list(range(stop))
        assert steps(events.Histograms("histograms/clients/acc")) == list(range(stop))
    assert [event.value for event in events.Scalars("global/acc")] == [0.0, 1.0, 2.0]


def test_histograms_hold_the_clients_values_under_tags_of_their_own(tmp_path: Path) -> None:
    dashboard, run = Dashboard(), a_run(tmp_path)
    run_rounds(dashboard, run, 0, 1)
    tags = read(tmp_path).Tags()
    expected = ["histograms/clients/acc", "histograms/clients/loss", "histograms/personal/acc"]
    assert sorted(tags["histograms"]) == expected, "no NaN, no training rows"
    assert not set(tags["histograms"]) & set(tags["scalars"])
    histogram = read(tmp_path).Histograms("histograms/clients/acc")[0].histogram_value
    # 0, 0.25, 0.5, 0.75
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (4, 0, 0.75, 1.5)


def test_shares_have_bins_of_a_fiftieth_whatever_they_are_called(tmp_path: Path) -> None:
    run = a_run(tmp_path, names=MetricNames({"score": "max", "cost": "min"}, declared=True))
    values = [ClientRow(client, "test", name, 0.9 + 0.02 * client) for client in range(4) for name in ("score", "cost")]
    Dashboard().on_round_end(run, RoundRecord(0, {}, values, []))
    events = read(tmp_path)
    # 0.90, 0.92, 0.94, 0.96 fall into as many bins of 0.02; TensorBoard's own are 10 % wide there: all in one or two.
    filled = {
        name: sum(count > 0 for count in events.Histograms(f"histograms/clients/{name}")[0].histogram_value.bucket)
        for name in ("score", "cost")
    }
    assert filled["score"] == 4 > filled["cost"]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e20, -1e30, 1.7e308])
def test_a_run_that_diverges_goes_on_being_written(tmp_path: Path, value: float) -> None:
    dashboard, run = Dashboard(), a_run(tmp_path)
    dashboard.on_fit_start(run)
    diverged = [ClientRow(client, "test", "loss", value) for client in range(4)]
    dashboard.on_round_end(
        run, RoundRecord(0, {"global/loss": value}, [*diverged, ClientRow(0, "test", "acc", 0.5)], [])
    )
    events = read(tmp_path)
    assert events.Tags()["histograms"] == ["histograms/clients/acc"]
    assert steps(events.Scalars("global/loss")) == [0]


def test_a_round_without_evaluation_has_no_histogram(tmp_path: Path) -> None:
    dashboard, run = Dashboard(), a_run(tmp_path)
    dashboard.on_round_end(run, RoundRecord(0, {"train/loss": float("nan")}, [], []))
    assert read(tmp_path).Tags()["histograms"] == []


@pytest.mark.parametrize("cut", [0, 7])
def test_a_resumed_run_has_every_round_once(tmp_path: Path, cut: int) -> None:
    killed, run = Dashboard(picture_every=1), a_run(tmp_path)
    killed.on_fit_start(run)
    run_rounds(killed, run, 0, 5)
    run.loggers[0].experiment.close()
    (first,) = set(tmp_path.glob("events*")) - {tmp_path / COLUMNS_FILE}
    if cut:
        first.write_bytes(first.read_bytes()[:-cut])
    # Readers go by the name, which holds the second in which the file was made.
    first.rename(tmp_path / "events.out.tfevents.0000000001.host.1.0")
    if not cut:
        assert steps(read(tmp_path).Scalars("global/acc")) == [0, 1, 2, 3, 4]

    resumed, again = Dashboard(picture_every=1), a_run(tmp_path, start_round=3)
    resumed.on_fit_start(again)
    events = read(tmp_path)
    assert steps(events.Scalars("global/acc")) == [0, 1, 2], "before the first new round, too"
    run_rounds(resumed, again, 3, 4, offset=0.5)
    events = read(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("global/acc")] == [(0, 0), (1, 1), (2, 2), (3, 3.5)]
    for tag in ("clients/acc", "clients/loss", "personal/acc"):
        assert steps(events.Histograms(f"histograms/{tag}")) == [0, 1, 2, 3]
    assert steps(events.Images("pictures/participation")) == [0, 1, 2, 3]
    assert steps(events.Images("pictures/partition")) == [0]

    # What the web page reads with; it differs: the first start of a session in a folder forgets nothing.
    modern = PluginAccumulator(str(tmp_path), tensor_size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    modern.Reload()
    for tag in ("global/acc", "histograms/clients/acc", "pictures/participation"):
        assert steps(modern.Tensors(tag)) == [0, 1, 2, 3], tag


def test_a_whole_fit_leaves_pictures_once(tmp_path: Path) -> None:
    dashboard, run = Dashboard(picture_every=3), a_run(tmp_path)
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 3)
    dashboard.on_fit_end(run)
    events = read(tmp_path)
    expected = {"pictures/partition": [0], "pictures/participation": [2], "pictures/predictions": [2]}
    assert {tag: steps(events.Images(tag)) for tag in events.Tags()["images"]} == expected
    for tag in expected:
        event = events.Images(tag)[0]
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert image.size == (event.width, event.height)
        assert image.width >= 500
    assert not list(tmp_path.glob("hparams.yaml"))


def test_single_clients_are_scalars_where_asked_and_they_are_few(tmp_path: Path) -> None:
    dashboard, run = Dashboard(client_scalars=True), a_run(tmp_path)
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 2)
    events = read(tmp_path)
    assert [event.value for event in events.Scalars("per_client/clients/acc/3")] == [0.75, 0.75]
    assert steps(events.Scalars("per_client/personal/acc/0")) == [0, 1]
    run.federation.data.client_names = ["a", "b", "c", "d"]
    run_rounds(dashboard, run, 2, 3)
    assert steps(read(tmp_path).Scalars("per_client/clients/acc/d")) == [2]
    run.federation.data.num_clients = 21
    with pytest.raises(ConfigError, match=r"Dashboard.client_scalars is true, and there are 21 clients"):
        dashboard.on_fit_start(run)


def test_predictions_are_those_of_the_global_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def spy(images: Any, predicted: Any, true: Any, names: Any) -> Any:
        drawn.append((predicted, true))
        return predictions_picture(images, predicted, true, names)

    monkeypatch.setattr("lit_fed.callbacks.dashboard.predictions_picture", spy)
    Dashboard().on_fit_end(a_run(tmp_path, next_round=1))
    ((predicted, true),) = drawn
    assert len(true) == 16
    assert predicted == true, "with the global weight of 1; the module's own weight of 0 predicts class 0"
    assert len(set(true)) > 3


class Odd(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"text": "seven"}


@pytest.mark.parametrize("case", ["no global model", "no images", "no classes", "no predict_step", "odd output"])
def test_predictions_are_left_out_where_they_make_no_sense(tmp_path: Path, case: str) -> None:
    federation = a_federation(
        task={"no predict_step": LeastSquares(), "odd output": Odd()}.get(case),
        model={} if case == "no global model" else None,
    )
    if case == "no predict_step":
        federation.global_models = lambda round_idx: {"model": {"network.weight": torch.ones(1, 2)}}
    if case == "no images":
        federation.data.input_shape = (20,)
    if case == "no classes":
        federation.data.num_classes = None
    Dashboard().on_fit_end(a_run(tmp_path, federation=federation, next_round=1))
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
    if "_hparams_/experiment" not in parsed:
        return {"params": values}
    experiment = parsed["_hparams_/experiment"].experiment
    columns, metrics = experiment.hparam_infos, experiment.metric_infos
    names = {"columns": [info.name for info in columns], "metrics": [info.name.tag for info in metrics]}
    return {"params": values, **names}


def test_hparams_come_from_the_config_without_scalars_of_their_own(tmp_path: Path) -> None:
    Dashboard().on_fit_start(a_run(tmp_path))
    found = read_hparams(tmp_path)
    assert found["params"] == {
        "model": "FedAvg",
        "model.lr": 0.1,
        "model.nesterov": "true",
        "model.milestones": "[1, 2]",
        "trainer.max_rounds": 3,
        "trainer.protocols.0": "A",
        "trainer.protocols.1": "B",
    }
    assert found["metrics"] == ["global/acc", "global/loss", "clients/acc_mean"]
    assert read(tmp_path).Tags()["scalars"] == []


def test_columns_of_hparams_are_what_was_asked_for_last_first(tmp_path: Path) -> None:
    told = ("trainer.max_rounds", "trainer.protocols", "model.lr", "model.class_path")
    Dashboard().on_fit_start(a_run(tmp_path / "version_0", given_keys=told))
    columns = ["trainer.max_rounds", "trainer.protocols.0", "trainer.protocols.1", "model.lr", "model"]
    assert read_hparams(tmp_path / "version_0")["columns"] == columns  # nobody asked for nesterov and milestones


def test_columns_of_hparams_begin_with_what_differs_between_the_runs_beside(tmp_path: Path) -> None:
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0/config.yaml").write_text(CONFIG.replace("[1, 2]", "[9]"), encoding="utf-8")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.yaml").write_text("[", encoding="utf-8")
    Dashboard().on_fit_start(a_run(tmp_path / "version_1", given_keys=("trainer.max_rounds",)))
    assert read_hparams(tmp_path / "version_1")["columns"] == ["model.milestones", "trainer.max_rounds"]


def test_the_columns_of_hparams_are_those_of_the_newest_run(tmp_path: Path) -> None:
    """Of the columns of several runs TensorBoard takes any."""
    for name in ("version_0", "version_1"):
        Dashboard().on_fit_start(a_run(tmp_path / name, given_keys=("model.lr",)))
    assert "columns" not in read_hparams(tmp_path / "version_0")
    assert read_hparams(tmp_path / "version_0")["params"]["model.lr"] == 0.1
    assert read_hparams(tmp_path / "version_1")["columns"] == ["model.lr"]


@pytest.mark.parametrize(
    ("names", "metrics"),
    [
        (MetricNames({"rmse": "min", "r2": "max"}, declared=True), ["global/rmse", "global/r2", "clients/rmse_mean"]),
        (MetricNames(), ["global/loss", "clients/loss_mean"]),
    ],
)
def test_hparams_compare_what_the_task_calls_important(tmp_path: Path, names: MetricNames, metrics: list[str]) -> None:
    Dashboard().on_fit_start(a_run(tmp_path, names=names))
    assert read_hparams(tmp_path)["metrics"] == metrics


def test_hparams_only_on_a_fresh_start_and_with_a_config(tmp_path: Path) -> None:
    Dashboard().on_fit_start(a_run(tmp_path / "resumed", start_round=1))
    assert read_hparams(tmp_path / "resumed") == {}
    Dashboard().on_fit_start(a_run(tmp_path / "python", config=""))
    assert read_hparams(tmp_path / "python") == {}
    assert read(tmp_path / "python").Tags()["images"] == ["pictures/partition"]
    # A checkpoint such as best.ckpt starts a new folder, in which nothing has been written yet.
    Dashboard().on_fit_start(a_run(tmp_path / "fork", start_round=1, resumed_from=tmp_path / "resumed"))
    assert read_hparams(tmp_path / "fork")["params"]["trainer.max_rounds"] == 3
    assert steps(read(tmp_path / "fork").Images("pictures/partition")) == [1]


def test_every_logger_gets_every_metric_at_once(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path, name="", version="csv")
    dashboard = Dashboard()
    run = a_run(tmp_path, loggers=[csv, TensorBoardLogger(tmp_path / "a", name="", version="")])
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 1)
    header, row = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["clients/acc_mean"] == "0.5"
    dashboard.on_exception(run, KeyboardInterrupt())
    assert steps(read(tmp_path / "a").Scalars("train/loss")) == [0]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    dashboard, run = Dashboard(picture_every=1), a_run(tmp_path, rank_zero=False)
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 1)
    dashboard.on_fit_end(run)
    dashboard.on_exception(run, ValueError())
    assert list(tmp_path.iterdir()) == []


def test_negative_picture_every_is_refused() -> None:
    with pytest.raises(ConfigError, match="picture_every is -1"):
        Dashboard(picture_every=-1)


def test_in_a_real_run_everything_is_there(tmp_path: Path) -> None:
    data = Digits(num_clients=4, max_train_samples=80, max_test_samples=40)
    task = Classifier(network="logistic", num_classes=10, in_channels=1, input_shape=(1, 8, 8))
    made = fit(tmp_path, task, data, FedAvg(), logger=True)
    events = read(made.log_dir)
    assert {tag: steps(events.Images(tag)) for tag in events.Tags()["images"]} == {
        "pictures/partition": [0],
        "pictures/participation": [1],
        "pictures/predictions": [1],
    }
    assert steps(events.Scalars("global/acc")) == steps(events.Histograms("histograms/clients/acc")) == [0, 1]
    assert events.Scalars("global/acc")[1].value == pytest.approx(made.metrics["global/acc"])
    task = Regressor(network="mlp", input_shape=(10,))
    regression = fit(tmp_path / "regression", task, Diabetes(num_clients=4), FedAvg(), logger=True)
    events = read(regression.log_dir)
    assert sorted(events.Tags()["images"]) == ["pictures/participation", "pictures/partition"]


def test_what_is_shown_in_several_ways_is_drawn_in_all_of_them(tmp_path: Path) -> None:
    views = {"test_resolutions": [(32, 24), (64, 48)], "interpolations": ["area", "bicubic"]}
    made = fit(tmp_path, estimator(drop_path=0.0), puppets(**views, test_samples=12), FedRAF(), logger=True)
    events = read(made.log_dir)
    ways = [f"{way}_{what}" for way in ("resolutions", "interpolated") for what in ("poses", "joints", "features")]
    drawn = [*ways, "views"]
    tags = {f"pictures/{name}" for name in (*drawn, "partition", "participation")}
    assert {tag: steps(events.Images(tag)) for tag in events.Tags()["images"]} == {
        tag: [0 if tag == "pictures/partition" else 1] for tag in tags
    }
    before = fit(tmp_path / "undrawn", estimator(drop_path=0.0), puppets(**views, test_samples=12), FedRAF())
    assert before.metrics["global/pck"] == made.metrics["global/pck"]
    assert_same(weights(before), weights(made))
