"""TensorBoard's table of HParams: short names, and columns for the settings that tell runs apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lit_fed.yaml_text import read_yaml

Setting = str | float | int
Settings = dict[str, Setting]

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
    """A configuration file's settings by dotted name, without those that do not change a run's results."""
    flat = flatten(read_yaml(config))
    return {name.replace(".init_args", ""): value for name, value in flat.items() if not name.startswith(_EQUAL_RUNS)}


def hparams_of(settings: Mapping[str, Setting]) -> Settings:
    """Settings by the names of HParams: the algorithm's class as ``method``, every class by its last name."""
    found: Settings = {"method": ""} if "algorithm.class_path" in settings else {}
    for name, value in settings.items():
        if name.endswith(".class_path"):
            found[_class_key(name)] = str(value).rpartition(".")[2]
        else:
            found[name] = value
    return found


def columns_of(own: Settings, told: Sequence[str], others: Sequence[Settings]) -> Settings:
    """The columns of a run's HParams, with a value each: the method, what differs between runs, what was asked for.

    TensorBoard shows the first five. A setting that nobody asked for, and that all runs share, has no column.

    Args:
        own: The run's HParams.
        told: The keys that its user asked for, most recent first.
        others: The HParams of the runs beside it.
    """
    keys = [_class_key(key) for key in told]
    merged: Settings = {}
    for settings in (*others, own):
        merged |= settings

    def rank(name: str) -> int:
        for place, key in enumerate(keys):
            if name == key or (key not in merged and name.startswith(f"{key}.")):  # a class is not its settings
                return place
        return len(keys)

    asked = {name for name in own if rank(name) < len(keys)}
    differing = {name for name, value in merged.items() if any(one.get(name) != value for one in (*others, own))}
    chosen = sorted({"method"} & own.keys() | differing | asked, key=list({**own, **merged}).index)
    chosen.sort(key=lambda name: (name != "method", name not in differing, rank(name)))
    return {name: merged[name] for name in chosen}


def runs_beside(log_dir: Path) -> Iterator[Settings]:
    """The HParams of the newest runs in the folder of a run's folder; an unreadable configuration is left out."""
    siblings = [path for path in log_dir.parent.glob("*/config.yaml") if path.parent != log_dir]
    for path in sorted(siblings, key=_modified)[-_MOST_RUNS:]:
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, ValueError):
            yield hparams_of(settings_of(path.read_text(encoding="utf-8")))


def _class_key(name: str) -> str:
    key = name.replace(".init_args", "").removesuffix(".class_path")
    return "method" if key == "algorithm" else key


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since it was listed
        return 0.0
