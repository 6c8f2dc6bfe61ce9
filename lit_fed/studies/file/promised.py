"""The metrics that follow from a run's configuration, without a run.

The configuration names the protocols, and a task that declares ``metrics`` lists the metrics that it logs in an
evaluation. Metrics that only the code of a task, a method or a protocol determines are missing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from lit_fed.data import FederatedDataModule
from lit_fed.engine.lightning.metric_names import ON_VALIDATION, OVER_CLIENTS, MetricNames
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.methods import FedAvg
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest, UnseenTest

_ALWAYS = (
    *("comm/uplink_bytes", "comm/downlink_bytes", "comm/total_bytes", "participation/count"),
    *("drift/update_norm_mean", "drift/cosine_mean"),
    *("time/round_s", "time/local_s", "time/aggregate_s"),
)
_SPREAD = [end for end in OVER_CLIENTS if end != "_missing"]  # which only some rounds have


def metric_names(config: Mapping[str, Any]) -> MetricNames:
    """Return the task's declared metrics, and the one that selects the best round if it is certain."""
    names = MetricNames()
    names.declare(SimpleNamespace(metrics=_metrics(config["model"])))
    if names.declared and (promised := names_with(config, "global")[0]):
        names.see(dict.fromkeys(promised, 0.0))
    return names


def known_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names that follow from a configuration."""
    protocols = [name for name in _protocols(config) if name]
    return [name for prefix in (*protocols, "train", "comm", "val") for name in names_with(config, prefix)[0]]


def names_with(config: Mapping[str, Any], prefix: str) -> tuple[list[str], bool]:
    """Return the names with a prefix that follow from a configuration, and whether the list is complete."""
    trainer = config["trainer"]
    if prefix in ("comm", "drift", "time", "participation"):
        evaluated = ["time/eval_s"] if trainer["evaluate_every"] else []
        failed = ["participation/failed"] if trainer["on_client_failure"] == "skip" else []
        return [*_ALWAYS, *evaluated, *failed], True
    if prefix == "train":
        return ["train/loss"], False  # plus a name per term of the loss
    if prefix in ("server", "clock", "staleness"):  # of the method; of the participation
        return [], False
    if prefix == "val":  # of the protocols by which a run may choose
        held_out = (config["data"].get("init_args") or {}).get("val_fraction")
        chooses = held_out and trainer["evaluate_on"] == "test" and not trainer["privacy"]
        names = [name for of in ("global", "clients") if chooses for name in names_with(config, of)[0]]
        return [f"{ON_VALIDATION}{name}" for name in names], False
    protocols = _protocols(config)
    if prefix not in protocols:
        return [], None not in protocols and not trainer["callbacks"]  # a callback may add metrics
    declared = _declared(config["model"])
    certain = bool(declared) and not trainer["kinds"]
    if prefix == "global":  # empty for methods without a global model, or with personal parts of every model
        method = _class(config["algorithm"])
        certain &= isinstance(method, type) and issubclass(method, FedAvg) and method.split is Algorithm.split
    ends = [""] if prefix == "global" else _SPREAD
    names = [f"{prefix}/{metric}{end}" for metric in declared for end in ends] if certain else []
    seen = prefix == "global" and _class(config["data"]).views is not FederatedDataModule.views
    return names, certain and None not in protocols and not seen  # through views under further names


def kind_of(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for runs that report the same names."""
    trainer = config["trainer"]
    classes = [config[key]["class_path"] for key in ("model", "algorithm", "data")]
    listens = [trainer["protocols"], trainer["callbacks"], bool(trainer["evaluate_every"])]
    wrapped = config["algorithm"].get("init_args", {}).get("regularizer")
    metrics = _metrics(config["model"])
    return json.dumps([classes, listens, wrapped, trainer["kinds"], metrics], default=str)


def _metrics(section: Mapping[str, Any]) -> Any:
    """Return the metrics that a task declares: its class, or by its settings."""
    task = _class(section)
    metrics = getattr(task, "metrics", None)
    if isinstance(metrics, Mapping) and hasattr(task, "metrics_with"):
        return task.metrics_with(**(section.get("init_args") or {}))
    return metrics


def _declared(section: Mapping[str, Any]) -> list[str]:
    """Return the metrics that a task declares, unless a subclass overrides the evaluation."""
    order, metrics = getattr(_class(section), "__mro__", ()), _metrics(section)
    said = next((cls for cls in order if "metrics" in vars(cls)), None)
    if said is None or not isinstance(metrics, Mapping):
        return []
    below = order[: order.index(said)]
    steps = ("test_step", "validation_step")
    return [] if any(step in vars(cls) for cls in below for step in steps) else list(metrics)


def _protocols(config: Mapping[str, Any]) -> list[str | None]:
    """Return the protocols' prefixes; None for a protocol whose names only its code determines."""
    if not config["trainer"]["evaluate_every"]:
        return []
    given = config["trainer"]["protocols"]
    classes: list[Any] = [GlobalTest, ClientTest] if given is None else [_class(protocol) for protocol in given]
    ours: tuple[Any, ...] = (GlobalTest, ClientTest, PersonalTest, UnseenTest)
    return [cls.name if cls in ours else None for cls in classes]


def _class(section: Mapping[str, Any]) -> Any:
    module, _, name = section["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)
