"""What a node keeps of a finished run: the model as it was last sent, and which of its clients' states go with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_fed.deployment.node import RUN_ID, settle
from lit_fed.engine.files import Version, write_atomically
from lit_fed.engine.payload import Payload
from lit_fed.engine.prediction import write_predictions
from lit_fed.engine.protocols import EvalSubset, Protocol, check_protocols
from lit_fed.engine.session import Broadcast
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.algorithm import Algorithm

NAME = "last.pt"
_CLIENT = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Kept:
    """The end of a run, at home.

    Args:
        run_id: What the run is called on its nodes.
        round_idx: Its last round.
        versions: Of the clients' states, by client; None for a client that keeps nothing.
        payloads: What clients receive, by kind of network.
        frozen: The parameters that travel beside it, by kind.
    """

    run_id: str
    round_idx: int
    versions: Mapping[int, Version | None]
    payloads: Mapping[str, Payload]
    frozen: Mapping[str, Payload]

    def write(self, folder: Path) -> None:
        """Keep it in the place of what was there before."""
        content = {
            "run": self.run_id,
            "round": self.round_idx,
            "versions": {str(one): version for one, version in self.versions.items()},
            "payloads": {kind: dict(payload) for kind, payload in self.payloads.items()},
            "frozen": {kind: dict(payload) for kind, payload in self.frozen.items()},
        }
        write_atomically(content, folder / NAME)


def read(folder: Path) -> Kept:
    """What a node keeps in its folder.

    Raises:
        CheckpointError: If there is nothing, or it cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(
            f"there is no {path}: a node writes it when a run has ended; name the folder that the node was started with"
        )
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        versions = {int(one): _version(one, version) for one, version in content["versions"].items()}
        groups = [{kind: _tensors(entry) for kind, entry in content[key].items()} for key in ("payloads", "frozen")]
        if not RUN_ID.fullmatch(content["run"]) or type(content["round"]) is not int:
            raise ValueError("it names no run")
    except Exception as error:  # damaged bytes make the reader fail in a dozen ways
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())[:120]}") from error
    return Kept(content["run"], content["round"], versions, groups[0], groups[1])


def _version(name: Any, version: Any) -> Version | None:
    if not isinstance(name, str) or not _CLIENT.fullmatch(name):
        raise ValueError(f"{name!r} is no client")
    if version is not None and (type(version) is not tuple or [type(part) for part in version] != [int, int]):
        raise ValueError(f"{version!r} is no version")
    return version


def _tensors(entry: Any) -> dict[str, Tensor]:
    if not isinstance(entry, dict) or not all(isinstance(tensor, Tensor) for tensor in entry.values()):
        raise ValueError("it holds no tensors")
    return entry


class Home:
    """Some clients of a finished run, at home: their models predict and are tested without a server.

    Args:
        trainer: With the settings of the run.
        model: What was learnt.
        data: The data, not set up yet; they are, for these clients only.
        algorithm: How it was federated.
        clients: Who; all that live here by default.
        folder: Where the node keeps their states.
        stage: What is to be done.

    Raises:
        CheckpointError: If nothing is kept here.
        ConfigError: For clients that do not live here, or parts that cannot work together.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        model: Tasks,
        data: FederatedDataModule,
        algorithm: Algorithm[Any],
        clients: list[int] | None,
        folder: Path,
        stage: Any,
    ) -> None:
        self.kept = read(folder)
        self.clients = sorted(self.kept.versions) if clients is None else sorted(set(clients))
        if absent := [one for one in self.clients if one not in self.kept.versions]:
            there = ", ".join(map(str, sorted(self.kept.versions)))
            raise ConfigError(f"client {absent[0]} does not live in {folder}, where those are: {there}")
        self.run = settle(trainer, model, data, algorithm, self.clients, stage)
        self.federation = self.run.federation
        device, store = self.federation.fabric.device, self.federation.store
        if odd := {self.federation.kinds[one] for one in self.clients} - self.kept.payloads.keys():
            raise ConfigError(f"{folder} keeps no model of the kind {min(odd)!r}; use the configuration of the run")
        store.open(folder / self.kept.run_id)
        versions = {str(one): version for one, version in self.kept.versions.items() if version is not None}
        store.load_state_dict(versions, self.kept.round_idx + 1)
        moved = [
            {kind: {name: tensor.to(device) for name, tensor in entry.items()} for kind, entry in group.items()}
            for group in (self.kept.payloads, self.kept.frozen)
        ]
        self.broadcast = Broadcast(self.kept.round_idx, moved[0], moved[1])

    def predict(self, client_id: int, output: Path) -> None:
        """Write what a client's model predicts on the client's own test data."""
        with self.federation.session.at_work("predict"):
            write_predictions(self.federation, output, client_id, self.kept.round_idx, self.broadcast)

    def evaluate(self, subset: EvalSubset) -> dict[int, dict[str, float]]:
        """By client: what all protocols that ask clients find on the client's own data."""
        check_protocols([], self.federation, subset)
        asking = [one for one in self.run.settings.protocols if type(one).answer is not Protocol.answer]
        found: dict[int, dict[str, float]] = {}
        with self.federation.session.at_work("validate" if subset == "val" else "test"):
            for protocol in asking:
                asked: Callable[[Any], Any] = getattr(protocol, "clients", lambda _: self.clients)
                for client_id in (one for one in asked(self.federation) if one in self.clients):
                    answer = protocol.answer(self.federation, int(client_id), self.broadcast, subset)
                    metrics = {} if answer is None else answer.metrics
                    row = found.setdefault(int(client_id), {})
                    row |= {f"{protocol.name}/{name}": value for name, value in metrics.items()}
        return found
