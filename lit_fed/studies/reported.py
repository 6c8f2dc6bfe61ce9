"""Whether a run will report a metric, found out before any cell runs.

Most names follow from the configuration: which protocols run, and what `Classifier` logs. What only the code of a
module, a method or a protocol knows is asked of the code itself: one round of one cell is run in a folder of its own,
and its ``metrics.csv`` has the names. A metric that first appears in a later round cannot be asked for that way.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from lit_fed.classifier import Classifier
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest, UnseenTest
from lit_fed.studies.cells import Cell, Grid

_ALWAYS = (
    *("comm/uplink_bytes", "comm/downlink_bytes", "comm/total_bytes", "participation/count"),
    *("drift/update_norm_mean", "drift/cosine_mean"),
    *("time/round_s", "time/local_s", "time/aggregate_s"),
)
_SPREAD = ("mean", "std", "p10", "min")

Ask = Callable[[Cell], Sequence[str]]


def check_metrics(grid: Grid, cells: Iterable[Cell] = (), ask: Ask | None = None) -> None:
    """Refuse a study with a metric that its runs do not report.

    Args:
        grid: The study.
        cells: Those that are about to run.
        ask: Runs a round of a cell and gives the names that it reports; None to go by the configurations alone.

    Raises:
        ConfigError: If there is one, or the round that was to tell cannot be run.
    """
    about_to_run = {cell.name for cell in cells}
    told: dict[str, list[str]] = {}  # what runs of a kind report, as far as it was asked
    for cell, metric in _wanted(grid):
        names, complete = _names(cell.config, metric.partition("/")[0])
        if not complete and metric not in names:
            kind = _kind(cell.config)
            if kind not in told:
                done = next((c for c in grid.cells if c.done and _kind(c.config) == kind), None)
                if done is not None:
                    told[kind] = list(done.rows()[0])
                elif ask is None or cell.name not in about_to_run:
                    continue
                else:
                    told[kind] = list(ask(cell))
            names = [name for name in told[kind] if name != "round"]
        if metric not in names:
            every = list(dict.fromkeys([*names, *known_names(cell.config)]))
            close = get_close_matches(metric, every, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(every)}"
            raise ConfigError(f"{grid.study.path}: {cell.row}/{cell.column} reports no metric {metric!r}; {hint}")


def _wanted(grid: Grid) -> list[tuple[Cell, str]]:
    """A cell of every place with each metric that the table or a claim reads there."""
    seed = grid.study.seeds[0]
    wanted = [(place, grid.study.measure_of(place).metric) for place in grid.study.places]
    for claim in grid.study.claims:
        wanted += [(p, claim.metric) for p in grid.study.places if claim.metric is not None and p in claim.places]
    return list({(c.name, metric): (c, metric) for c, metric in ((grid.at[p, seed], m) for p, m in wanted)}.values())


def known_names(config: Mapping[str, Any]) -> list[str]:
    """The names that follow from a configuration alone."""
    protocols = [name for name in _protocols(config) if name]
    return [name for prefix in (*protocols, "train", "comm") for name in _names(config, prefix)[0]]


def _names(config: Mapping[str, Any], prefix: str) -> tuple[list[str], bool]:
    """The names with a prefix that follow from a configuration, and whether there are no others."""
    model = _class(config["model"])
    if prefix in ("comm", "drift", "time", "participation"):
        evaluated = ["time/eval_s"] if config["trainer"]["evaluate_every"] else []
        failed = ["participation/failed"] if config["trainer"]["on_client_failure"] == "skip" else []
        return [*_ALWAYS, *evaluated, *failed], True
    if prefix == "train":
        standard = getattr(model, "training_step", None) is Classifier.training_step
        return ["train/loss"] if standard else [], False  # each term of the loss has a name of its own
    if prefix == "server":
        return [], False
    protocols = _protocols(config)
    if prefix not in protocols:
        return [], None not in protocols and not config["trainer"]["callbacks"]  # a callback may add metrics
    steps = [
        (getattr(model, name, None), getattr(Classifier, name))
        for name in ("test_step", "validation_step", "_evaluate")
    ]
    standard = all(own is classifiers for own, classifiers in steps)
    if prefix == "global":  # a method without a global model reports nothing here
        standard &= getattr(_class(config["algorithm"]), "global_state", None) is FedAvg.global_state
    ends = [""] if prefix == "global" else [f"_{word}" for word in _SPREAD]
    return [f"{prefix}/{metric}{end}" for metric in ("loss", "acc") if standard for end in ends], (
        standard and None not in protocols
    )


def _protocols(config: Mapping[str, Any]) -> list[str | None]:
    """Prefixes of the protocols that will run; None stands for one whose names only its code knows."""
    if not config["trainer"]["evaluate_every"]:
        return []
    given = config["trainer"]["protocols"]
    classes: list[Any] = [GlobalTest, ClientTest] if given is None else [_class(protocol) for protocol in given]
    ours: tuple[Any, ...] = (GlobalTest, ClientTest, PersonalTest, UnseenTest)
    return [cls.name if cls in ours else None for cls in classes]


def _class(section: Mapping[str, Any]) -> Any:
    module, _, name = section["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def _kind(config: Mapping[str, Any]) -> str:
    """Runs of a kind report the same names."""
    trainer = config["trainer"]
    classes = [config[key]["class_path"] for key in ("model", "algorithm", "data")]
    listens = [trainer["protocols"], trainer["callbacks"], bool(trainer["evaluate_every"])]
    return json.dumps([classes, *listens], default=str)
