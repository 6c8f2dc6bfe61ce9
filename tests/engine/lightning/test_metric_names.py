"""Which metric is better which way, and which one names the best round."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_fed.engine.lightning.metric_names import MetricNames, base_name, lower_is_better


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        *(
            (name, True)
            for name in ("global/loss", "train/sub_loss", "clients/loss_mean", "global/rmse", "a/error_rate")
        ),
        *((name, False) for name in ("clients/acc_mean", "global/auroc", "global/power")),
    ],
)
def test_direction_of_metrics(name: str, lower: bool) -> None:
    assert lower_is_better(name) == lower


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("global/acc", "acc"),
        ("clients/acc_mean", "acc"),
        ("personal/acc_p10", "acc"),
        ("unseen/word_error_std", "word_error"),
        ("global/jaw_mean", "jaw_mean"),  # the global model has no statistic over clients
        ("train/task", "task"),
        ("loss", "loss"),
    ],
)
def test_base_name(name: str, base: str) -> None:
    assert base_name(name) == base


def test_the_task_s_word_comes_before_torchmetrics_and_that_before_the_name() -> None:
    names = MetricNames()
    names.declare(SimpleNamespace(metrics={"gain": "min"}))
    names.observe({"gain": "max", "score": "min"})
    assert [names.direction(f"global/{name}") for name in ("gain", "score", "loss", "points")] == [
        "min", "min", "min", "max"
    ]  # fmt: skip
    assert [names.is_declared(f"clients/{name}_mean") for name in ("gain", "loss")] == [True, False]


@pytest.mark.parametrize("metrics", [None, {"acc": "up"}, ["acc"], 3])
def test_what_a_task_means_by_metrics_otherwise_is_left_alone(metrics: object) -> None:
    names = MetricNames()
    names.declare(SimpleNamespace(metrics=metrics))
    assert (names.directions, names.declared) == ({}, False)


@pytest.mark.parametrize(
    ("declared", "reported", "monitor"),
    [
        ({}, ["train/loss", "global/loss", "global/acc"], "global/loss"),  # the first that is logged
        ({}, ["train/loss", "clients/loss_std", "clients/loss_mean"], "clients/loss_mean"),
        ({}, ["train/loss", "comm/total_bytes"], None),
        ({"acc": "max", "loss": "min"}, ["global/loss", "global/acc"], "global/acc"),  # the most important
        ({"acc": "max"}, ["global/loss", "clients/acc_mean"], "clients/acc_mean"),
        ({"acc": "max"}, ["global/loss", "clients/loss_mean"], "global/loss"),  # none of them is reported
    ],
)
def test_which_one_names_the_best_round(declared: dict[str, str], reported: list[str], monitor: str | None) -> None:
    names = MetricNames()
    names.declare(SimpleNamespace(metrics=declared))
    names.see({"train/loss": 1.0})
    names.see(dict.fromkeys(reported, 1.0))
    assert names.monitor == monitor
    names.see({"global/else": 1.0})
    assert names.monitor == (monitor or "global/else")  # once it has been seen it stays
