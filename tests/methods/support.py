"""What the methods' tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed import FederatedTrainer
from lit_fed.participation import Participation


class Rota(Participation):
    """Client 0 in round 0, client 1 in round 1, and so on."""

    @property
    def nominal_cohort_size(self) -> int:
        return 1

    def _draw(self, round_idx: int) -> NDArray[np.int64]:
        return np.array([round_idx % self.num_clients])


def client_state(made: FederatedTrainer, client_id: int) -> dict[str, list[Any]]:
    """What a client keeps, as numbers."""
    assert made.federation is not None
    state = made.federation.store.get(client_id)
    assert state is not None
    return {name: tensor.tolist() for name, tensor in state.items()}


def global_weight(made: FederatedTrainer) -> list[float]:
    """The global model of `tests.support.LeastSquares`: its two weights."""
    assert made.federation is not None
    weight: list[float] = made.federation.algorithm.global_state()["network.weight"].flatten().tolist()
    return weight


def run_quickstart(folder: Path, *options: str, rounds: int = 2) -> Path:
    """The quickstart with a small network for a few rounds; returns the run's folder."""
    from lit_fed.command.cli import main
    from tests.methods.run_methods import CONFIGS, SMALL

    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    rounds_args = ["--trainer.max_rounds", str(rounds), "--trainer.default_root_dir", str(folder)]
    main(["fit", "-c", str(CONFIGS / "quickstart.yaml"), *words, *rounds_args, *options])
    return folder / "lightning_logs" / "version_0"
