"""Evaluate a trained federation, and predict with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fed.engine.evaluation.prediction import write_predictions
from lit_fed.engine.evaluation.protocols import EvalSubset, check_protocols, run_protocols
from lit_fed.engine.loop.checkpoint import find_checkpoint, restore, run_folder
from lit_fed.engine.loop.run import Run
from lit_fed.engine.loop.runs import check_server
from lit_fed.errors import CheckpointError, ConfigError


def evaluate(run: Run, ckpt_path: str | None, subset: EvalSubset) -> dict[str, float]:
    """Run the protocols on a checkpoint, or on the model just trained."""
    check_protocols(run.settings.protocols, run.federation, subset)
    last_round = _load_trained(run, ckpt_path)
    with run.federation.session.at_work("validate" if subset == "val" else "test"):
        evaluation = run_protocols(run.settings.protocols, run.federation, last_round, subset)
    run.learn_names(evaluation.metrics)
    run.tell_absent(evaluation)
    return evaluation.metrics


def predict(
    run: Run, ckpt_path: str | None, client_id: int | None, output: Path | None, inputs: Path | None = None
) -> list[Any]:
    """Predict with a checkpoint, or the model just trained, on test data or another file's inputs."""
    last_round = _load_trained(run, ckpt_path)
    with run.federation.session.at_work("predict"):
        batches = write_predictions(run.federation, output, client_id, last_round, inputs=inputs)
    run.fabric.print(f"model      {run.origin}")
    return batches


def _load_trained(run: Run, ckpt_path: str | None) -> int:
    """Load the trained state, and return its last round."""
    if ckpt_path is not None:
        path = find_checkpoint(ckpt_path, run.settings.logs, run.folder)
        if path is None:
            where = f"no run under {run.settings.logs} has" if run.folder is None else f"this run, {run.folder}, lacks"
            raise CheckpointError(f"{where} a {ckpt_path}.ckpt; name a checkpoint file")
        restore(run, path, trains=False)
        run.loaded = path
        check_server(run, str(path))
        folder = run_folder(path)
        if folder is not None:
            run.federation.store.open(folder / "checkpoints" / "clients")
    elif not run.next_round:
        raise ConfigError("this trainer has not trained a model; give --ckpt_path last, best, or a checkpoint file")
    return max(run.next_round - 1, 0)
