"""FedEraser: approximate unlearning by calibrated replay.

Liu, Ma, Yang, Wang, Liu: "FedEraser: Enabling Efficient Client-Level Data Removal from Federated Learning Models",
IWQoS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.record.unlearning.kept_updates import check_on_time


class FedEraser(FedAvg):
    r"""Replays the kept rounds of a run of `FedAvg` without some clients, which ``participation.absent`` names.

    Each client trains from the calibrated model, :math:`\hat U`, usually for fewer epochs than in the run. Of every
    tensor the length of the kept update, :math:`U`, is taken, and the direction of the new one:

    .. math:: \tilde U = \lVert U \rVert \, \hat U / \lVert \hat U \rVert

    The calibrated updates are averaged, and added to the model. The first kept round, whose model no client had
    changed, is replayed as it was.

    Set ``trainer.max_rounds`` to the number of kept rounds, and the same participation of all clients. The result is
    an approximation without a bound: `lit-fed forget` makes the exact model.

    Args:
        updates: The folder ``updates`` of the run, which `KeptUpdates` wrote.
        kwargs: The settings of `FedAvg`.

    Raises:
        ConfigError: Round 0 was not kept, a file is missing or has other tensors, or there are more rounds than were
            kept; updates arrive after their round.

    Note:
        Lengths are of each tensor, not of the layer that has a weight and a bias. A tensor that did not move in the
        calibration does not move. Buffers are as the calibration leaves them. Clients train in the first round, too,
        and their weights alone are used: the first model of the replay changes nothing.
    """

    def __init__(self, updates: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.updates = updates

    @override
    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        check_on_time(population.participation, "algorithm FedEraser")
        return super().setup(models, population)

    @cached_property
    def _rounds(self) -> list[int]:
        """The kept rounds; read where they are first needed, as a finished run is tested and exported without them."""
        folder = Path(self.updates)
        found = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        if 0 not in found:
            raise ConfigError(f"algorithm.updates {self.updates} has no kept round 0; set it to a run's folder updates")
        return sorted(found)

    @override
    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        if stage == "train":
            self._round_idx = round_idx
        return super().broadcast(server, round_idx, kind, stage)

    @override
    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """The calibrated update, added to the model that the client began from."""
        if self._round_idx >= len(self._rounds):
            raise ConfigError(
                f"algorithm.updates {self.updates} has {len(self._rounds)} kept rounds; set trainer.max_rounds to that"
            )
        round_idx = self._rounds[self._round_idx]
        kept = self._like(self._read(round_idx, f"{update.client_id}"), update.payload, f"client {update.client_id}")
        if self._round_idx == 0:
            return update.with_payload(kept)
        sent = fed.split_prefix(f"{update.kind}/", self._read(round_idx, "sent"))[0]
        sent = self._like(sent, begun, "the server")
        calibrated = {
            name: begun[name] + calibrate(kept[name] - sent[name], tensor - begun[name])
            for name, tensor in update.payload.items()
            if name in begun and name in self.model.parameters
        }
        return update.with_payload({**update.payload, **calibrated})

    def _read(self, round_idx: int, name: str) -> dict[str, Tensor]:
        path = Path(self.updates) / str(round_idx) / f"{name}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"algorithm.updates: {path} is missing or damaged; take a run in which all clients took part, and "
                "keep its folder whole"
            ) from error

    def _like(self, kept: fed.Payload, wanted: fed.Payload, sender: str) -> dict[str, Tensor]:
        """Kept tensors on the device of others; raise `ConfigError` if names or shapes differ."""
        if {name: one.shape for name, one in kept.items()} != {name: one.shape for name, one in wanted.items()}:
            raise ConfigError(
                f"algorithm.updates {self.updates} has other tensors of {sender} than this model's; set the run's model"
            )
        return {name: tensor.to(wanted[name].device) for name, tensor in kept.items()}


def calibrate(kept: Tensor, new: Tensor) -> Tensor:
    r"""A movement with the length of a kept one, and the direction of a new one; 0 for a new one of length 0."""
    length = new.norm()
    return new * torch.where(length > 0, kept.norm() / length, 0.0)
