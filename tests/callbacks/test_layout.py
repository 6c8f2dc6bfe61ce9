"""The charts that TensorBoard shows first, as its own plugin reads them from event files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lit_fed.callbacks import Callback, Dashboard, RoundRecord, Run
from lit_fed.callbacks.boards import COLUMNS_FILE
from lit_fed.callbacks.layout import layout_of
from lit_fed.command.cli import main
from lit_fed.data import Digits
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.methods import FedAvg
from lit_fed.participation import Asynchronous, PoissonParticipation, Speeds
from lit_fed.privacy import ClientLevel
from lit_fed.tasks import Classifier
from tests.support import ROOT, events_of, fit

QUICK = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_rounds", "1", "--trainer.local_epochs", "1"]

RESULTS = ["acc", "clients/acc: mean, and worst tenth", "loss"]
PLAIN = {
    "Results": RESULTS,
    "Drift": ["norm of clients' updates", "cosine between clients' updates"],
    "Cost": ["bytes of a round, up and down", "seconds of a round", "clients of a round"],
}


def run(folder: Path, weighting: str = "samples", **settings: Any) -> Path:
    data = Digits(num_clients=4, max_train_samples=80, max_test_samples=40)
    task = Classifier(network="logistic", num_classes=10, in_channels=1, input_shape=(1, 8, 8))
    return fit(folder, task, data, FedAvg(weighting=weighting), **{"logger": True, **settings}).log_dir


class Ended(Callback):
    """Ends a run after its first round."""

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        assert "global/acc" not in record.metrics
        run.should_stop = True


def scalars_and_layout(log_dir: Path) -> tuple[list[str], Layout]:
    events = EventAccumulator(events_of(log_dir), size_guidance={"tensors": 0}).Reload()
    (content,) = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    return events.Tags()["scalars"], Layout.FromString(content)


KINDS: dict[str, dict[str, Any]] = {
    "FedAvg-Digits": {},
    "FedAvg-Digits, asynchronous": {"participation": Asynchronous(3, 2, Speeds(sigma=1.0))},
    "FedAvg-ClientLevel-Digits": {
        "privacy": ClientLevel(0.5, 8.0, delta=0.01),
        "participation": PoissonParticipation(0.9),
        "on_client_failure": "skip",
        "weighting": "uniform",
    },
}
SHOWN = {
    "FedAvg-Digits": PLAIN,
    "FedAvg-Digits, asynchronous": {**PLAIN, "Clock": ["staleness, in steps of the server", "virtual time, s"]},
    "FedAvg-ClientLevel-Digits": {**PLAIN, "Results": [*RESULTS, "privacy budget spent: epsilon"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_lays_out_what_it_has_and_is_called_after_method_and_data(kind: str, tmp_path: Path) -> None:
    if "privacy" in KINDS[kind]:
        pytest.importorskip("dp_accounting")
    log_dir = run(tmp_path, **KINDS[kind])
    assert log_dir == tmp_path / "lightning_logs/version_0"
    assert Path(events_of(log_dir)) == log_dir / kind.partition(",")[0]
    tags, layout = scalars_and_layout(log_dir)
    assert {part.title: [chart.title for chart in part.chart] for part in layout.category} == SHOWN[kind]
    for chart in (chart for part in layout.category for chart in part.chart):
        for pattern in chart.multiline.tag:
            assert any(re.match(pattern, tag) for tag in tags), pattern
        for series in chart.margin.series:
            assert {series.value, series.lower, series.upper} <= set(tags)


def test_the_band_goes_from_the_worst_client_to_the_worst_tenth_where_small_is_good_too() -> None:
    names = MetricNames({"mae": "min", "r2": "max"}, declared=True, monitor="global/mae")
    over = [f"{start}/mae{end}" for start in ("clients", "val/clients") for end in ("_mean", "_worst", "_worst10")]
    layout = layout_of(["global/mae", "global/r2", *over], names)
    assert layout == {
        "Results": {
            "mae": ("Multiline", ["[^/]+/mae(_mean)?$"]),
            # The worst is the largest, and so the upper edge.
            "clients/mae: mean, and worst tenth": (
                "Margin",
                ["clients/mae_mean", "clients/mae_worst10", "clients/mae_worst"],
            ),
            "r2": ("Multiline", ["[^/]+/r2(_mean)?$"]),
        }
    }


@pytest.mark.parametrize(
    ("name", "is_shown"),
    [
        ("global/acc", True),
        ("global_cnn/acc", True),
        ("personal/acc_mean", True),
        ("fairness/acc_mean", True),
        ("train/acc", True),
        ("val/global/acc", False),
        ("clients/acc_std", False),
        ("clients/acc_topk_mean", False),
    ],
)
def test_a_metric_is_shown_by_every_protocol_on_test_data(name: str, is_shown: bool) -> None:
    layout = layout_of([name], MetricNames(monitor="global/acc"))
    assert ("Results" in layout and "acc" in layout["Results"]) == is_shown


def test_several_runs_share_their_charts_as_tensorboard_merges_them(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, participation=Asynchronous(3, 2, Speeds(sigma=1.0)))
    logs = str(tmp_path / "lightning_logs")
    runs = EventMultiplexer().AddRunsFromDirectory(logs).Reload()
    plugin = CustomScalarsPlugin(
        TBContext(data_provider=MultiplexerDataProvider(runs, logs), plugin_name_to_instance={})
    )
    merged = json.loads(plugin.layout_impl(RequestContext(), ""))
    charts = {part["title"]: [chart["title"] for chart in part["chart"]] for part in merged["category"]}
    assert charts == {**PLAIN, "Clock": SHOWN["FedAvg-Digits, asynchronous"]["Clock"]}
    assert sorted(runs.Runs()) == ["version_0/FedAvg-Digits", "version_1/FedAvg-Digits"]


def test_a_resumed_run_keeps_the_charts_of_metrics_that_its_first_round_lacks(tmp_path: Path) -> None:
    run(tmp_path, max_rounds=2, evaluate_every=2)
    log_dir = run(tmp_path, max_rounds=9, evaluate_every=9, ckpt_path="last", callbacks=[Ended()])
    _, layout = scalars_and_layout(log_dir)
    assert {part.title: [chart.title for chart in part.chart] for part in layout.category} == PLAIN


def test_single_clients_are_shown_last_and_only_in_tensorboard_by_another_name(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path, "csv")]
    log_dir = run(tmp_path, logger=loggers, callbacks=[Dashboard(client_scalars=True)])
    tags, layout = scalars_and_layout(log_dir)
    assert layout.category[-1].title == "Single clients"
    (pattern,) = layout.category[-1].chart[0].multiline.tag
    assert [tag for tag in tags if re.match(pattern, tag)] == [
        f"per_client/clients/acc/{client}" for client in range(4)
    ]
    header = (tmp_path / "csv/version_0/metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert {f"clients/acc/{client}" for client in range(4)} <= set(header)
    assert not [name for name in header if name.startswith(("per_client", "histograms", "custom"))]


def test_the_columns_of_hparams_are_in_the_newest_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for logger in ("true", "{class_path: TensorBoardLogger, init_args: {save_dir: .}}", "true"):
        main([*QUICK, "--trainer.logger", logger])
    (only,) = (tmp_path / "lightning_logs").rglob(COLUMNS_FILE)
    assert only.parent == tmp_path / "lightning_logs/version_2/FedAvg-Digits"
