"""The checkpoint file: what it holds, how it is found, read and turned back into a network.

A checkpoint holds tensors and primitives only, is written to a temporary file and renamed, and loads with
``weights_only=True``.
"""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_fed.engine.files import write_atomically
from lit_fed.engine.strategy import on_first_process
from lit_fed.errors import CheckpointError

if TYPE_CHECKING:
    from lit_fed.engine.callback import Callback
    from lit_fed.engine.model import Model
    from lit_fed.engine.run import Run

FORMAT = 2
_KEYS = {
    "lit_fed_format",
    "round_idx",
    "seed",
    "partition",
    "method",
    "state_dict",
    "models",
    "server",
    "clients",
    "initial",
    "callbacks",
}
_KEYS |= {"metrics", "monitor", "config"}
_PRIMITIVES = (str, bytes, bool, int, float, type(None))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load and check a checkpoint.

    Raises:
        CheckpointError: If the file is missing, corrupt, or not lit_fed's.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        with warnings.catch_warnings():  # of formats that we do not write
            warnings.simplefilter("ignore")
            content = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is not a checkpoint that can be loaded safely (weights_only)") from error
    except Exception as error:  # damaged bytes make the reader fail in a dozen ways, struct.error included
        raise CheckpointError(f"{path} is corrupt, or no checkpoint at all; use another, such as best.ckpt") from error
    known = isinstance(content, dict) and content.keys() >= _KEYS and isinstance(content["lit_fed_format"], int)
    if not known:
        raise CheckpointError(f"{path} is not a lit_fed checkpoint (it may come from another program)")
    if content["lit_fed_format"] > FORMAT:
        raise CheckpointError(f"{path} was written by a newer lit_fed; upgrade the package")
    checked: dict[str, Any] = content
    return checked


def snapshot(run: Run) -> dict[str, Any]:
    """Everything a run needs to go on after its last finished round.

    Raises:
        CheckpointError: If a method or a callback keeps what is neither tensor nor primitive.
    """
    federation, last_round = run.federation, max(run.next_round - 1, 0)
    models = federation.global_models(last_round)
    return {
        "lit_fed_format": FORMAT,
        "round_idx": run.next_round,
        "seed": run.settings.seed,
        "partition": federation.data.partition_sha256(),
        "method": type(federation.algorithm).__name__,
        "state_dict": models.get(federation.kinds.names[0], {}),
        "models": models if len(federation.kinds.names) > 1 else {},
        "server": _plain(federation.server, "the server's state"),
        "clients": federation.store.state_dict(),
        "initial": {kind: _initial(run, loop.model) for kind, loop in federation.loops.items()},
        "callbacks": _plain({name: callback.state_dict() for name, callback in _named(run)}, "callbacks"),
        "metrics": _plain(run.metrics, "metrics"),
        "monitor": run.names.monitor,
        "config": run.settings.config,
    }


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the state after the last finished round; called on every process, written by the first.

    Raises:
        CheckpointError: If it cannot be written; an older file of that name is then still there.
    """
    on_first_process(run.fabric, lambda: write_atomically(snapshot(run), path))


def _initial(run: Run, model: Model) -> dict[str, torch.Tensor]:
    """What a client's personal part starts from, which must not depend on when the client first appears.

    A split may change with the round, so what travels now and in the last round is what needs no keeping.
    """
    algorithm, buffers = run.federation.algorithm, model.buffers
    travels = set(model.shared_names("down"))
    always = travels & {*algorithm.split(model, run.max_rounds - 1).shared, *buffers}
    return {name: tensor for name, tensor in model.initial.items() if name not in always}


def restore(run: Run, path: Path, resume: bool) -> None:
    """Put a run where a checkpoint left it.

    Args:
        run: Assembled.
        path: The file.
        resume: Training is to go on, so the clients must still have the same data.

    Raises:
        CheckpointError: If it is corrupt, foreign, or from a run with another model, method, seed or partition.
    """
    content, federation = read_checkpoint(path), run.federation
    if content["seed"] != run.settings.seed:
        raise CheckpointError(
            f"{path} comes from a run with seed {content['seed']}; set --trainer.seed {content['seed']} to use it"
        )
    if odd := sorted(content["initial"].keys() ^ federation.loops.keys()):
        raise CheckpointError(f"{path} comes from a run whose trainer.kinds differ from this one's in {odd[0]!r}")
    try:
        server = _fitted(federation.server, content["server"], run.fabric.device, content["method"])
        for kind, tensors in content["initial"].items():
            for name, tensor in tensors.items():
                federation.loops[kind].model.initial[name].copy_(tensor)
    except (KeyError, RuntimeError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise CheckpointError(f"{path} does not fit this model or method: {error}") from error
    federation.server.clear()
    federation.server.update(server)
    if resume and content["partition"] != federation.data.partition_sha256():
        raise CheckpointError(f"{path} comes from a run whose clients had other data; resume it with that run's config")
    federation.store.load_state_dict(content["clients"], content["round_idx"])
    for name, callback in _named(run):
        if state := content["callbacks"].get(name):
            callback.load_state_dict(state)
    run.start_round = run.next_round = content["round_idx"]
    run.metrics = content["metrics"]
    run.names.monitor = run.names.monitor or content["monitor"]


def _fitted(own: Mapping[str, Any], saved: Mapping[str, Any], device: torch.device, method: str) -> dict[str, Any]:
    """A saved server state on the device, where it is of the same method and model as the present one."""
    if own.keys() != saved.keys():
        odd = sorted(own.keys() ^ saved.keys())[0]
        raise CheckpointError(f"it was saved by {method}, whose server differs from this one in {odd!r}")
    return {key: _fit(own[key], saved[key], device, key) for key in own}


def _fit(own: Any, saved: Any, device: torch.device, where: str) -> Any:
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        if own and saved and where in ("model", "models") and own.keys() != saved.keys():
            raise CheckpointError(
                f"it was saved from another model: it differs in {sorted(own.keys() ^ saved.keys())[0]!r}"
            )
        return {
            key: _fit(own.get(key), value, device, where if where == "models" else str(key))
            for key, value in saved.items()
        }
    if isinstance(saved, torch.Tensor):
        if isinstance(own, torch.Tensor) and own.shape != saved.shape:
            raise CheckpointError(f"it was saved from another model: it differs in {where!r}")
        return saved.to(device, copy=True)
    if isinstance(saved, Mapping):
        return {key: _fit(None, value, device, str(key)) for key, value in saved.items()}
    if isinstance(own, torch.Tensor):
        raise CheckpointError(f"it was saved by another method: {where!r} is no tensor there")
    return saved


def _named(run: Run) -> Iterator[tuple[str, Callback]]:
    """The callbacks by the name of their class, the second of a class as ``<name>.2`` and so on."""
    count: Counter[str] = Counter()
    for callback in run.callbacks:
        name = type(callback).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}.{count[name]}", callback


def _plain(value: Any, where: str) -> Any:
    """A state as a checkpoint may hold it: NumPy's numbers as Python's, and nothing that could not be read back."""
    if isinstance(value, torch.Tensor) or type(value) in _PRIMITIVES:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_plain(entry, f"{where}.{position}") for position, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    raise CheckpointError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and primitives only")


def find_checkpoint(ckpt_path: str | Path, logs: Path) -> Path | None:
    """Turn ``last``, ``best``, a run folder or a file into a file.

    Args:
        ckpt_path: What the user gave.
        logs: The ``lightning_logs`` folder in which ``last`` and ``best`` mean the newest run that has one.

    Returns:
        The file; None where ``last`` or ``best`` names nothing yet.
    """
    if str(ckpt_path) in ("last", "best"):
        runs = sorted(logs.glob("version_*"), key=lambda run: _version(run), reverse=True)
        files = [run / "checkpoints" / f"{ckpt_path}.ckpt" for run in runs]
        return next((file for file in files if file.is_file()), None)
    path = Path(ckpt_path)
    return path / "checkpoints" / "last.ckpt" if path.is_dir() else path


def run_folder(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to, None where it lies somewhere else."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else None


def _version(run: Path) -> int:
    suffix = run.name.removeprefix("version_")
    return int(suffix) if suffix.isdigit() else -1
