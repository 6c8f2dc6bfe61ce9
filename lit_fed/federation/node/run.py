"""A run over the clients of one node, whose states are on disk before the node answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.engine.clients.local import TaskStage
from lit_fed.engine.loop.run import Run
from lit_fed.engine.storage.packs import State, Version, VersionedFiles, checksum
from lit_fed.participation import FullParticipation
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm


_MARK = "/version"  # the tensor of a state that holds its number and its checksum


def settle(
    trainer: FederatedTrainer,
    model: Tasks,
    data: FederatedDataModule,
    algorithm: Algorithm[Any],
    clients: Iterable[int],
    stage: TaskStage,
) -> Run:
    """Assemble a run from its parts, with the data of some clients only."""
    trainer.participation = FullParticipation()  # the server samples the cohort
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit", clients=clients)
    run = trainer.assemble(model, data, algorithm, stage)
    if stage == "fit":
        run.federation.wrappers.settle()
    run.federation.store.keeper = StateFiles
    return run


class StateFiles(VersionedFiles):
    """Files in which a client's state is on disk before its node answers.

    A version's number leaves the node, and so is a hash of what the server asked for and not of the state; the checksum
    stays in the file.
    """

    number: Callable[[], bytes]
    """Digest of the request for which a client works, and of the version from which it continues."""

    @override
    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        number = int.from_bytes(self.number()[:4])
        super().write(name, round_idx, {**state, _MARK: torch.tensor([number, checksum(name, state)])})
        self.take(self.flush())
        return round_idx, number

    @override
    def is_written(self, name: str, state: State, number: int) -> bool:
        mark = state.pop(_MARK, None)
        return mark is not None and mark.tolist() == [number, checksum(name, state)]


@contextmanager
def for_nobody_else(folder: Path) -> Iterator[None]:
    """Create a folder, and make it and all files written meanwhile readable for the user alone."""
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        yield
    finally:
        os.umask(before)
