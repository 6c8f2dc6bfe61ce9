"""Evaluate a trained federation, and predict with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

from lit_fed.engine.evaluation.prediction import write_predictions
from lit_fed.engine.evaluation.protocols import EvalSubset, run_protocols
from lit_fed.engine.loop.checkpoint import find_checkpoint, restore, run_folder
from lit_fed.engine.loop.run import Run
from lit_fed.engine.loop.runs import check_server
from lit_fed.errors import CheckpointError, ConfigError


def evaluate(run: Run, last_round: int, subset: EvalSubset) -> dict[str, float]:
    """Run the protocols on the `loaded` state."""
    with run.federation.session.at_work("validate" if subset == "val" else "test"):
        evaluation = run_protocols(run.settings.protocols, run.federation, last_round, subset)
    run.learn_names(evaluation.metrics)
    run.tell_absent(evaluation)
    return evaluation.metrics


def predict(
    run: Run, ckpt_path: str | None, client_id: int | None, output: Path | None, inputs: Path | None = None
) -> list[Any]:
    """Predict with a checkpoint, or the model just trained, on test data or another file's inputs."""
    with loaded(run, ckpt_path) as last_round:
        with run.federation.session.at_work("predict"):
            batches = write_predictions(run.federation, output, client_id, last_round, inputs=inputs)
        run.fabric.print(f"model      {run.origin}")
    return batches


@contextmanager
def loaded(run: Run, ckpt_path: str | None) -> Iterator[int]:
    """Load the trained state, and yield its last round; on leaving, a run that has trained gets its own state back."""
    if ckpt_path is None:
        if not run.next_round:
            raise ConfigError("this trainer has not trained a model; give --ckpt_path last, best, or a checkpoint file")
        yield run.next_round - 1
        return
    trained = bool(run.next_round) and run.loaded is None
    with _restoring(run) if trained else nullcontext():
        path = find_checkpoint(ckpt_path, run.settings.logs, run.folder)
        if path is None:
            where = f"no run under {run.settings.logs} has" if run.folder is None else f"this run, {run.folder}, lacks"
            raise CheckpointError(f"{where} a {ckpt_path}.ckpt; name a checkpoint file")
        restore(run, path, trains=False)
        run.loaded = None if trained else path
        check_server(run, str(path))
        folder = run_folder(path)
        if folder is not None:
            run.federation.store.open(folder / "checkpoints" / "clients")
        yield max(run.next_round - 1, 0)


@contextmanager
def _restoring(run: Run) -> Iterator[None]:
    """Put the state of a run that has trained back on leaving."""
    federation, monitor = run.federation, run.names.monitor
    server, store = dict(federation.server), copy(federation.store)
    models = [loop.model for loop in federation.loops.values()]
    owned = [one for model in models for name, one in model.initial.items() if not model.base.holds(name, one)]
    initial = [(tensor, tensor.clone()) for tensor in owned]
    progress = {name: getattr(run, name) for name in ("start_round", "next_round", "metrics", "origin")}

    try:
        yield
    finally:
        federation.server.clear()
        federation.server.update(server)
        vars(federation.store).update(vars(store))
        for tensor, before in initial:
            tensor.copy_(before)
        for name, value in progress.items():
            setattr(run, name, value)
        run.names.monitor = monitor
