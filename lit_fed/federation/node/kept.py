"""The end of a run, as a node saves it for prediction and evaluation without a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_fed.engine.storage.files import write_atomically
from lit_fed.engine.storage.packs import Version
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import CheckpointError
from lit_fed.networks.base import Names, is_base
from lit_fed.tensors import check_bytes

NAME = "last.pt"
RUN_ID = re.compile(r"[0-9a-f]{16}")
_CLIENT = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Kept:
    """The end of a run, as a node saves it.

    Args:
        versions: The versions of states by client; None for a client without state.
        payloads: The broadcast payloads by kind of network.
        frozen: The frozen parameters by kind, without those in `base`.
        base: By kind, the pretrained parameters that the node reads again.
        addressed: By client, what the server addressed to it alone; empty where the method addresses nobody.
    """

    run_id: str
    round_idx: int
    versions: Mapping[int, Version | None]
    payloads: Mapping[str, Payload]
    frozen: Mapping[str, Payload]
    base: Mapping[str, Names]
    addressed: Mapping[int, Payload]

    def write(self, folder: Path) -> None:
        """Write it, replacing an earlier one."""
        content = {
            "run": self.run_id,
            "round": self.round_idx,
            "versions": {str(client_id): version for client_id, version in self.versions.items()},
            "payloads": {kind: dict(payload) for kind, payload in self.payloads.items()},
            "frozen": {kind: dict(payload) for kind, payload in self.frozen.items()},
            "base": {kind: dict(names) for kind, names in self.base.items()},
            "addressed": {client_id: dict(payload) for client_id, payload in self.addressed.items()},
        }
        write_atomically(content, folder / NAME)


def read(folder: Path) -> Kept:
    """Read the end of a run from a node's folder; raise `CheckpointError` if the file is missing or damaged."""
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give the folder that the node ran with, after a run has ended")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        check_bytes(path)
        versions = {int(name): _version(name, version) for name, version in content["versions"].items()}
        groups = [{kind: _tensors(entry) for kind, entry in content[key].items()} for key in ("payloads", "frozen")]
        addressed = {int(client_id): _tensors(entry) for client_id, entry in content.get("addressed", {}).items()}
        if not RUN_ID.fullmatch(content["run"]) or type(content["round"]) is not int:
            raise ValueError("the run's id is malformed")
        if not is_base(content["base"]):
            raise ValueError("the names of pretrained parameters are malformed")
    except Exception as error:  # damaged bytes raise many exceptions
        raise CheckpointError(f"{path} cannot be read ({' '.join(str(error).split())[:120]})") from error
    return Kept(content["run"], content["round"], versions, groups[0], groups[1], content["base"], addressed)


def _version(name: Any, version: Any) -> Version | None:
    if not isinstance(name, str) or not _CLIENT.fullmatch(name):
        raise ValueError(f"{name!r} is not a client")
    if version is not None and (type(version) is not tuple or [type(part) for part in version] != [int, int]):
        raise ValueError(f"{version!r} is not a version")
    return version


def _tensors(entry: Any) -> dict[str, Tensor]:
    if not isinstance(entry, dict) or not all(isinstance(tensor, Tensor) for tensor in entry.values()):
        raise ValueError("an entry is not a tensor")
    return entry
