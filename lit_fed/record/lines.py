"""What the lines of a record hold, and where two of them differ.

A payload is a mapping of tensors. Its hash is the SHA-256 of a JSON list, sorted by name, of each tensor's name and the
SHA-256 of its dtype, shape and bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lit_fed.engine.loop.run import Run
from lit_fed.engine.storage.files import unreadable_named
from lit_fed.engine.wire.payload import Payload
from lit_fed.handover.card import versions
from lit_fed.private_names import version_of
from lit_fed.tensors import hash_of, hash_of_named

NAME = "record.jsonl"
_CPU_INFO = Path("/proc/cpuinfo")
_TOLERANCE = 1e-5  # of metrics, whose sums follow the number of processes


class Hashes:
    """Hashes of tensors; one that nobody has written to since, such as a frozen one, is not hashed again."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def of(self, leaf: Any) -> str:
        """The SHA-256 of a tensor, or of a primitive's text."""
        if not isinstance(leaf, Tensor):
            return sha256(repr(leaf).encode()).hexdigest()
        version, known = self._known.get(leaf, (None, ""))
        if version != version_of(leaf):
            known = hash_of(leaf)
            self._known[leaf] = version_of(leaf), known
        return str(known)

    def state(self, state: Any) -> dict[str, str]:
        """The hashes of a nested state, by dotted name."""
        return {name: self.of(leaf) for name, leaf in leaves(state)}

    def payload(self, payload: Payload) -> str:
        """The hash of a payload."""
        return hash_of_named({}, {name: self.of(one) for name, one in payload.items()})


def leaves(state: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and primitives of a nested state, by dotted name."""
    if not isinstance(state, Mapping | list | tuple):
        yield where, state
        return
    for key, entry in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from leaves(entry, f"{where}.{key}" if where else str(key))


def differences(there: Any, here: Any, bits: bool = True) -> Iterator[str]:
    """Each entry in which two nested values differ, and its values.

    Args:
        there: One of them.
        here: The other.
        bits: Whether numbers are compared exactly, as in files of one run.
    """
    one, other = dict(leaves(there)), dict(leaves(here))
    for name in [*one, *(name for name in other if name not in one)]:
        a, b = one.get(name), other.get(name)
        close = isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-7)
        if a != b and (bits or not (close or name.startswith("metrics.time/"))):
            yield f"{name} is {_shown(a)} there and {_shown(b)} here"


def _shown(value: Any) -> str:
    return "missing" if value is None else str(value)[:60]


def plain(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON holds them, which has no infinity and no NaN."""
    return {name: float(value) if math.isfinite(value) else str(float(value)) for name, value in metrics.items()}


def hash_of_rows(rows: Iterable[tuple[Any, ...]]) -> str:
    """The hash of a round's rows of ``clients.csv``: client, stage, metric and value, as they are printed there."""
    return sha256("".join(",".join(map(str, row)) + "\n" for row in rows).encode()).hexdigest()


def hash_of_file(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with unreadable_named(path), open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def facts_of(run: Run) -> dict[str, Any]:
    """What the rounds to come depend on: configuration, versions, machine and data.

    Data that a private run must not tell are hashed with its key.
    """
    device, data = run.fabric.device, run.federation.data.record
    named = {"partition": data.sha256, "contents": data.contents.sha256}
    seal = run.federation.wrappers.seal([f"record {named}".encode()])
    cpu = re.search("model name.*: (.*)", _CPU_INFO.read_text(encoding="utf-8")) if _CPU_INFO.is_file() else None
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": cpu[1] if cpu else "",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__config__.show(),
    }
    told = named if seal is None else {"keyed": seal}
    return {"config": run.settings.config, "versions": versions(), "machine": machine, "data": told}
