"""What a trained federation is good for: evaluate it by every protocol, predict with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lit_fed.callbacks.progress import print_evaluation
from lit_fed.checkpoint import find_checkpoint, run_folder
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.federation import Federation
from lit_fed.prediction import write_predictions
from lit_fed.protocols import EvalSplit, check_protocols, run_protocols

if TYPE_CHECKING:
    from lit_fed.trainer import FederatedTrainer


def evaluate(
    trainer: FederatedTrainer, federation: Federation, ckpt_path: str | None, split: EvalSplit
) -> dict[str, float]:
    """Run the trainer's protocols on a checkpoint, or on what it has just trained, and print their table."""
    check_protocols(trainer.protocols, federation, split)
    last_round = _load_trained(trainer, federation, ckpt_path)
    metrics = run_protocols(trainer.protocols, federation, last_round, split).metrics
    if trainer.fabric.is_global_zero:
        print_evaluation(metrics, split, trainer.next_round)
    return metrics


def predict(
    trainer: FederatedTrainer, federation: Federation, ckpt_path: str | None, client_id: int | None, output: Path
) -> Path:
    """Write what a checkpoint, or what the trainer has just trained, predicts on test data."""
    last_round = _load_trained(trainer, federation, ckpt_path)
    return write_predictions(federation, output, client_id, last_round)


def _load_trained(trainer: FederatedTrainer, federation: Federation, ckpt_path: str | None) -> int:
    """Put the trained state into the module; returns the last round that was trained."""
    if ckpt_path is not None:
        path = find_checkpoint(ckpt_path, trainer.logs)
        if path is None:
            raise CheckpointError(f"no run under {trainer.logs} has a checkpoint named {ckpt_path}.ckpt")
        trainer.load_checkpoint(path)
        folder = run_folder(path)
        if folder is not None:
            federation.store.open(folder / "checkpoints" / "clients")
    elif not trainer.next_round:
        raise ConfigError("there is no trained model yet; give --ckpt_path last, best, or a checkpoint file")
    last_round = max(trainer.next_round - 1, 0)
    federation.module.prepare_round(last_round)
    federation.module.load_tensors(federation.algorithm.global_state())
    return last_round
