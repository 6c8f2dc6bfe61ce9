"""Settings that must match between a server and its nodes, and settings that are local to each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lit_fed.yaml_text import read_yaml

_TRAINER = (
    "seed", "max_rounds", "local_epochs", "local_steps", "kinds", "precision", "buffers", "gradient_clip_val",
    "gradient_clip_algorithm", "accumulate_grad_batches", "schedule_steps", "uplink_codec", "downlink_codec",
    "protocols", "evaluate_on", "num_threads", "channels_last", "privacy",
    "aggregation", "attack",
)  # fmt: skip
OWN_DATA: dict[str, type] = {"root": str, "download": bool, "num_workers": int}
"""Data settings that are local to each end, with their types: where the files are and how they are read."""
OWN_PRIVACY = ("key_file", "withhold")
"""Privacy settings of the server alone."""


def agreed(config: str) -> dict[str, str]:
    """Return the settings of a resolved YAML configuration on which the bits of a run depend, each as JSON."""
    content = read_yaml(config) or {}
    trainer, data = content.get("trainer") or {}, content.get("data") or {}
    own = {key: value for key, value in (data.get("init_args") or {}).items() if key not in OWN_DATA}
    agreed_on = {key: trainer[key] for key in _TRAINER if key in trainer}
    if isinstance(private := agreed_on.get("privacy"), Mapping):  # the key is the server's alone
        alike = {key: value for key, value in (private.get("init_args") or {}).items() if key not in OWN_PRIVACY}
        agreed_on["privacy"] = {**private, "init_args": alike}
    parts = {
        "trainer": agreed_on,
        "data": {**data, "init_args": own},
        "model": content.get("model"),
        "algorithm": content.get("algorithm"),
    }
    return {".".join(path): json.dumps(value) for path, value in _leaves(parts, ())}


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Describe the first setting that differs; None if all match. The values of ``there`` are untrusted."""
    for key in sorted(here.keys() | there.keys()):
        one, other = here.get(key), there.get(key)
        if one != other:
            return f"{key[:100]} is {_shown(one)} on the node and {_shown(other)} on the server"
    return None


def _shown(value: str | None) -> str:
    return "not set" if value is None else str(value)[:80]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _leaves(entry, (*path, str(key)))
    else:
        yield path, value
