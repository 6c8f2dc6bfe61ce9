"""Facts about a trained network, from its checkpoint and its run's folder."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import lit_fed
from lit_fed.callbacks.progress import protocol_of
from lit_fed.engine.loop.checkpoint import run_folder
from lit_fed.engine.method.wrapper import AROUND
from lit_fed.errors import CheckpointError
from lit_fed.yaml_text import read_yaml

_TRAINER = ("local_epochs", "local_steps", "participation", "seed", "precision")
_MODEL = ("network", "network_args", "optimizer", "lr_scheduler")
_PACKAGES = ("lightning", "torch", "torchvision", "timm", "numpy")


@dataclass(frozen=True)
class Facts:
    """The facts on a card.

    Args:
        task: The task's class.
        method: The method's class.
        rounds: Rounds of training.
        data: The data module's class, and its settings without paths.
        algorithm: The method's settings.
        training: Settings of local training.
        clients: Counts of clients and samples, from the run's folder; empty of a private run.
        partition_sha256: Fingerprint of the partition; None of a private run, which it would tell the data of.
        metrics: Protocols' metrics of the checkpoint's round.
        evaluated_on: ``test`` or ``validation``.
        preprocessing: Steps from stored inputs to the network; None for code of the data module.
        class_names: Names of the outputs.
        versions: Versions of the packages that wrote the files.
        around: Wrappers' facts by name.
    """

    task: str
    method: str
    rounds: int
    data: tuple[str, dict[str, Any]]
    algorithm: dict[str, Any]
    training: dict[str, Any]
    clients: dict[str, Any]
    partition_sha256: str | None
    metrics: dict[str, float]
    evaluated_on: str
    preprocessing: list[dict[str, Any]] | None
    class_names: list[str] | None
    versions: dict[str, str] = field(default_factory=dict)
    around: dict[str, dict[str, Any]] = field(default_factory=dict)


def facts_of(content: Mapping[str, Any], path: Path) -> Facts:
    """Read the facts from a checkpoint and its run's folder.

    Args:
        content: The checkpoint.
        path: Its file.
    """
    config = _settings(content["config"], path)
    trainer, inputs = config.get("trainer") or {}, content["inputs"]
    metrics = {name: value for name, value in content["metrics"].items() if protocol_of(name)}
    training = {
        key: trainer[key]
        for key in ("max_rounds", "local_epochs", "local_steps", "seed", "precision")
        if key in trainer
    }
    training |= {"participation": trainer["participation"]} if trainer.get("participation") else {}
    data = (config.get("data") or {}).get("init_args") or {}
    model = (config.get("model") or {}).get("init_args") or {}
    training |= {key: model[key] for key in ("network", "network_args", "optimizer", "lr_scheduler") if model.get(key)}
    return Facts(
        task=", ".join(dict.fromkeys(content["tasks"].values())),
        method=content["method"],
        rounds=content["round_idx"],
        data=(str(inputs.get("source")), {key: value for key, value in data.items() if key != "root"}),
        algorithm=(config.get("algorithm") or {}).get("init_args") or {},
        training={key: value for key, value in training.items() if value is not None},
        clients={} if "apart" in content else _clients(run_folder(path)),
        partition_sha256=content.get("partition"),
        metrics=metrics,
        evaluated_on={"val": "validation"}.get(str(trainer.get("evaluate_on")), "test"),
        preprocessing=inputs.get("steps"),
        class_names=None if inputs.get("class_names") is None else list(map(str, inputs["class_names"])),
        around=_around(content["server"]),
        versions={"lit_fed": lit_fed.__version__, "python": platform.python_version(), **_versions()},
    )


def _around(server: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Wrappers' texts and numbers for readers, by the wrapper's name; names with an underscore are left out."""
    return {
        str(key).removeprefix(AROUND): {
            str(name): value
            for name, value in kept.items()
            if isinstance(value, str | int | float) and not str(name).startswith("_")
        }
        for key, kept in server.items()
        if str(key).startswith(AROUND) and isinstance(kept, Mapping)
    }


def _settings(config: str, path: Path) -> Mapping[str, Any]:
    """The configuration in a checkpoint.

    Raises:
        CheckpointError: If the text is not a configuration.
    """
    try:
        found = read_yaml(config) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{path} holds no configuration: {' '.join(str(error).split())[:200]}") from error
    parts = (
        [found, *(found.get(key) or {} for key in ("trainer", "data", "model", "algorithm"))]
        if isinstance(found, Mapping)
        else [found]
    )
    if not all(isinstance(part, Mapping) for part in parts) or not all(
        isinstance(part.get("init_args") or {}, Mapping) for part in parts
    ):
        raise CheckpointError(f"{path} holds no configuration, but {str(found)[:80]!r}")
    return found


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _clients(run: Path | None) -> dict[str, Any]:
    """Counts of clients and samples; empty without a run's folder."""
    try:
        record = json.loads((run / "partition.json").read_text(encoding="utf-8")) if run is not None else {}
        sizes = [len(client["indices"]) for client in record["clients"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    if not sizes:
        return {}
    return {
        "clients": len(sizes),
        "training samples": sum(sizes),
        "samples a client (least, median, most)": f"{min(sizes)}, {np.median(sizes):g}, {max(sizes)}",
    }
