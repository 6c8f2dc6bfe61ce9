"""TensorBoard's table of HParams: short names, and columns for the settings that tell runs apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

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
    found: Settings = {METHOD: ""} if "algorithm.class_path" in settings else {}
    for name, value in settings.items():
        if name.endswith(".class_path"):
            found[_class_key(name)] = str(value).rpartition(".")[2]
        else:
            found[name] = value
    return found


class Column(NamedTuple):
    """A column of HParams.

    Args:
        value: A value of the setting, for the column's type.
        leads: Whether the column comes before the others.
    """

    value: Setting
    leads: bool


def columns_of(own: Settings, told: Sequence[str], others: Sequence[Settings]) -> dict[str, Column]:
    """The columns of HParams: the method, settings that differ between runs, settings that the user asked for.

    The method and the differing settings come first; if they fill fewer than the five columns that TensorBoard shows,
    the settings asked for last come first, too. A setting with the same value in all runs that have it needs to be
    asked for.

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
    differing = {name for name, value in merged.items() if any(one.get(name, value) != value for one in (*others, own))}
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
