"""Settings that must match between a server and its nodes, and settings that are local to each end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fed import privacy
from lit_fed.command.refusals.suggest import imported
from lit_fed.data.population.figures import fingerprint
from lit_fed.engine.method.wrapper import Wrapper
from lit_fed.federation.messages.schema import Hello
from lit_fed.federation.messages.wire import PROTOCOL, shown
from lit_fed.networks import hash_of_weights
from lit_fed.yaml_text import read_yaml

if TYPE_CHECKING:
    from lit_fed.trainer import FederatedTrainer

_TRAINER = (
    "seed", "max_rounds", "local_epochs", "local_steps", "limit_train_batches", "fast_dev_run", "kinds",
    "precision", "buffers", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
    "schedule_steps", "client_optimizer", "uplink_codec", "downlink_codec", "protocols", "evaluate_on", "num_threads",
    "channels_last", "privacy", "aggregation", "attack", "secure_sum",
)  # fmt: skip
_WRAPPERS: dict[str, type[Wrapper]] = {"privacy": privacy.ClientLevel, "aggregation": Wrapper, "attack": Wrapper}
OWN_DATA: dict[str, type] = {"root": str, "download": bool, "num_workers": int}
"""Data settings that are local to each end, with their types: where the files are and how they are read."""


def agreed(config: str) -> dict[str, str]:
    """Return the settings of a resolved YAML configuration on which the bits of a run depend, each as JSON."""
    content = read_yaml(config) or {}
    trainer, data = content.get("trainer") or {}, content.get("data") or {}
    settings = {key: value for key, value in (data.get("init_args") or {}).items() if key not in OWN_DATA}
    if isinstance(file := settings.get("normalize"), str):  # its figures are common, its place is each end's own
        settings["normalize"] = fingerprint(file)
    agreed_on = {key: trainer[key] for key in _TRAINER if key in trainer}
    agreed_on |= {"record": True} if trainer.get("record") else {}  # for which nodes sign
    for key, usual in _WRAPPERS.items():
        if isinstance(given := agreed_on.get(key), Mapping):
            path = str(given.get("class_path"))
            kind = imported(path) or getattr(privacy, path.rpartition(".")[2], usual)
            alike = {
                name: value for name, value in (given.get("init_args") or {}).items() if name not in kind.own_settings
            }
            agreed_on[key] = {**given, "init_args": alike}
    parts = {
        "trainer": agreed_on,
        "data": {**data, "init_args": settings},
        "model": content.get("model"),
        "algorithm": content.get("algorithm"),
    }
    found = {".".join(path): value for path, value in _leaves(parts, ())}
    for key, file in found.items():
        if key.endswith(".weights") and isinstance(file, str) and Path(file).exists():  # as of `normalize`
            found[key] = hash_of_weights(Path(file), key)
    return {key: json.dumps(value) for key, value in found.items()}


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Describe the first setting that differs; None if all match. The values of ``there`` are untrusted."""
    for key in sorted(here.keys() | there.keys()):
        mine, other = here.get(key), there.get(key)
        if mine != other:
            return f"{key[:100]} is {_shown(mine)} on the node and {_shown(other)} on the server"
    return None


def mismatch(settings: Mapping[str, str], hello: Hello, more: str = "") -> str | None:
    """Describe why a node with these settings cannot work for the server that greets it; None if it can.

    ``more`` is appended to the remedy for a setting that differs.
    """
    from lit_fed import __version__

    if hello.protocol != PROTOCOL or hello.version != __version__:
        theirs = shown(hello.version, 20)
        return f"the node runs lit_fed {__version__} and the server {theirs}; install the same version"
    odd = difference(settings, hello.settings)
    return None if odd is None else f"{odd}; use the same configuration on both ends{more}"


def signs(trainer: FederatedTrainer, key: object | None, say: Callable[[str], object]) -> bool:
    """Whether nodes sign what they send, as they do for a run's record; say why they do not."""
    is_recorded = any(one.keeps_record for one in trainer.callbacks)
    if is_recorded and key is None:
        say("trainer.record: without --ca, --certificate and --key nodes sign nothing, and get no receipts")
    return is_recorded and key is not None


def _shown(value: str | None) -> str:
    return "not set" if value is None else str(value)[:80]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _leaves(entry, (*path, str(key)))
    else:
        yield path, value
