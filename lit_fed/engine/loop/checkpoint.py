"""The checkpoint file: what it holds, how it is found, read and turned back into a network.

A checkpoint holds tensors and primitives only, is written to a temporary file and renamed, and loads with
``weights_only=True``.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Callback as LightningCallback

from lit_fed.data.population.contents import Contents
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.storage.files import unreadable_named, write_atomically
from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import CheckpointError
from lit_fed.file_names import shown

if TYPE_CHECKING:
    from lit_fed.engine.loop.run import Callback, Run
    from lit_fed.engine.method.model import Model

FORMAT = 4
_CONTENT: dict[str, type | tuple[type, ...]] = {
    "round_idx": int,
    "seed": int,
    "partition": str,
    "data": dict,
    "method": str,
    "tasks": dict,
    "state_dict": dict,
    "models": dict,
    "server": dict,
    "clients": dict,
    "initial": dict,
    "callbacks": dict,
    "metrics": dict,
    "monitor": (str, type(None)),
    "config": str,
    "inputs": dict,
}
_PRIMITIVES = (str, bytes, bool, int, float, type(None))
_KEPT = re.compile(r"(late-)?[0-9]+")  # what a client's state is called, which becomes part of a file's name


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load and check a checkpoint.

    Raises:
        UnreadableFile: If the system does not let us read it.
        CheckpointError: If the file is missing, corrupt, or not lit_fed's.
    """
    path = Path(path)
    with unreadable_named(path):
        if not path.is_file():
            raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        with warnings.catch_warnings():  # of formats that we do not write
            warnings.simplefilter("ignore")
            content = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        _read_through(path)
        raise CheckpointError(f"{path} is not a checkpoint that can be loaded safely (weights_only)") from error
    except Exception as error:  # damaged bytes make the reader fail in a dozen ways, struct.error included
        _read_through(path)
        raise CheckpointError(f"{path} is corrupt, or no checkpoint at all; use another, such as best.ckpt") from error
    if not isinstance(content, dict) or type(content.get("lit_fed_format")) is not int:
        raise CheckpointError(f"{path} is not a lit_fed checkpoint (it may come from another program)")
    if content["lit_fed_format"] > FORMAT:
        raise CheckpointError(f"{path} was written by a newer lit_fed; upgrade the package")
    if content["lit_fed_format"] < FORMAT:
        raise CheckpointError(f"{path} was written by an older lit_fed, in which classes had other paths; train again")
    if odd := _malformed(content):
        raise CheckpointError(f"{path} is not a lit_fed checkpoint: {odd}")
    checked: dict[str, Any] = content
    return checked


def _read_through(path: Path) -> None:
    """Read a file of which something could not be read, so that the system says whether it was the cause.

    Raises:
        UnreadableFile: If it was.
    """
    with unreadable_named(path), open(path, "rb", buffering=0) as file:
        while file.read(2**20):
            pass


def _malformed(content: Mapping[str, Any]) -> str | None:
    """What of a file's content no run has written, None where all is well."""
    for key, kinds in _CONTENT.items():
        if key not in content:
            return f"{key!r} is missing"
        if not isinstance(content[key], kinds):
            return f"{key!r} is of type {type(content[key]).__name__}"
    for name, version in content["clients"].items():
        if not isinstance(name, str) or not _KEPT.fullmatch(name):
            return f"{name!r} in 'clients' is no client"
        if not isinstance(version, tuple) or [type(part) for part in version] != [int, int] or min(version) < 0:
            return f"{name!r} in 'clients' has no version, but {version!r}"
    if content["round_idx"] < 0:
        return f"'round_idx' is {content['round_idx']}"
    try:
        Contents(**content["data"])
    except TypeError:
        return "'data' is no fingerprint"
    for key, kind in (("initial", Mapping), ("callbacks", Mapping), ("tasks", str), ("metrics", int | float)):
        if odd := next((name for name, entry in content[key].items() if not isinstance(entry, kind)), None):
            return f"{odd!r} in {key!r} is of type {type(content[key][odd]).__name__}"
    return None


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
        "data": dict(vars(federation.data.contents())),
        "method": type(federation.algorithm).__name__,
        "tasks": _tasks(run),
        "state_dict": models.get(federation.kinds.names[0], {}),
        "models": models if len(federation.kinds.names) > 1 else {},
        "server": _plain(federation.server, "the server's state"),
        "clients": federation.store.state_dict(),
        "initial": {kind: _initial(loop.model) for kind, loop in federation.loops.items()},
        "callbacks": _plain({name: callback.state_dict() for name, callback in _named(run)}, "callbacks"),
        "metrics": _plain(run.metrics, "metrics"),
        "monitor": run.names.monitor,
        "config": run.settings.config,
        "inputs": {
            "source": type(federation.data).__name__,
            "steps": _plain(federation.data.preprocessing(), "preprocessing"),
            "class_names": _plain(federation.data.class_names, "class_names"),
            "stored": _plain(federation.data.stored_like(), "stored"),
        },
    }


def save_checkpoint(run: Run, path: Path) -> None:
    """Write the state after the last finished round; called on every process, written by the first.

    Raises:
        CheckpointError: If it cannot be written; an older file of that name is then still there.
    """
    on_first_process(run.fabric, lambda: write_atomically(snapshot(run), path))


def _initial(model: Model) -> dict[str, torch.Tensor]:
    """What a client's personal part starts from, which must not depend on when the client first appears."""
    return {name: tensor for name, tensor in model.initial.items() if name in model.staying}


def restore(run: Run, path: Path) -> None:
    """Put a run where a checkpoint left it; nothing is taken from a file before all of it is known to fit.

    Args:
        run: Assembled.
        path: The file.

    Raises:
        CheckpointError: If it is corrupt, foreign, or from a run with another model, method, seed or partition.
    """
    content, federation = read_checkpoint(path), run.federation
    if content["seed"] != run.settings.seed:
        raise CheckpointError(
            f"{path} comes from a run with seed {content['seed']}; set --trainer.seed {content['seed']} to use it"
        )
    saved = content["initial"]
    if odd_kinds := sorted(map(str, saved.keys() ^ federation.loops.keys())):
        raise CheckpointError(f"{path} comes from a run whose trainer.kinds differ from this one's in {odd_kinds[0]!r}")
    models = {kind: loop.model for kind, loop in federation.loops.items()}
    like = {kind: {n: model.tensor(n) for n in saved[kind] if n in model} for kind, model in models.items()}
    if odd := _difference(federation.server, content["server"]) or _difference(like, saved, ("initial",)):
        now = _made_of(type(federation.algorithm).__name__, _tasks(run))
        before = _made_of(content["method"], content["tasks"])
        raise CheckpointError(f"{path} was saved by {before} and does not fit {now}: {odd}")
    if content["partition"] != federation.data.partition_sha256():
        raise CheckpointError(f"{path} comes from a run whose clients had other data; use it with that run's config")
    if not federation.data.contents().is_of(Contents(**content["data"])):
        raise CheckpointError(
            f"{path} comes from a run on other data: labels or inputs of the data set have changed since; use it with "
            "the data that it was trained on"
        )
    server = _placed(content["server"], federation.server, run.fabric.device)
    federation.server.clear()
    federation.server.update(server)
    for kind, model in models.items():
        for name in saved[kind].keys() & model.initial.keys():  # others, this run's rounds begin nobody with
            model.initial[name].copy_(saved[kind][name])
    federation.store.load_state_dict(content["clients"], content["round_idx"])
    _load_callbacks(run, content["callbacks"], path)
    run.start_round = run.next_round = content["round_idx"]
    run.metrics = content["metrics"]
    run.names.monitor = run.names.monitor or content["monitor"]
    run.origin = f"{shown(path)}, saved by {_made_of(content['method'], content['tasks'])}"


def _load_callbacks(run: Run, states: Mapping[str, dict[str, Any]], path: Path) -> None:
    for name, callback in _named(run):
        if state := states.get(name):
            try:
                callback.load_state_dict(state)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{path}: callback {name} cannot go on with its state: {error!r}") from error


def _difference(own: Any, saved: Any, where: tuple[str, ...] = ()) -> str | None:
    """What keeps a saved part of the server's state from taking the place of the present one; None where nothing does.

    A state may grow while it is trained: only its first entries, and those of models, are the same from the beginning.
    """
    name = ".".join(where) or "the server's state"
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            return f"{name} is a {type(saved).__name__} there"
        exact = where[:1] in ((), ("model",), ("models",), ("initial",))
        if odd := sorted(map(str, own.keys() ^ saved.keys() if exact else own.keys() - saved.keys())):
            return f"{name} has {odd[0]!r} {'there' if odd[0] in saved else 'here'} only"
        return next(filter(None, (_difference(own[key], saved[key], (*where, str(key))) for key in own)), None)
    if isinstance(own, torch.Tensor):
        if not isinstance(saved, torch.Tensor):
            return f"{name} is a {type(saved).__name__} there"
        if own.shape != saved.shape:
            return f"{name} has shape {tuple(saved.shape)} there and {tuple(own.shape)} here"
        return None if torch.can_cast(saved.dtype, own.dtype) else f"{name} is {saved.dtype} there, {own.dtype} here"
    like: Any = (bool, int, float) if isinstance(own, bool | int | float) else type(own)
    return None if own is None or isinstance(saved, like) else f"{name} is a {type(saved).__name__} there"


def _placed(saved: Any, own: Any, device: torch.device) -> Any:
    """A saved state in memory of its own on the device, in the types of the present one."""
    if isinstance(saved, Mapping):
        held = own if isinstance(own, Mapping) else {}
        return {key: _placed(entry, held.get(key), device) for key, entry in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_placed(entry, None, device) for entry in saved)
    if isinstance(saved, torch.Tensor):
        return saved.to(device, own.dtype if isinstance(own, torch.Tensor) else saved.dtype, copy=True)
    return saved


def _tasks(run: Run) -> dict[str, str]:
    return {kind: task_name(loop.model.task) for kind, loop in run.federation.loops.items()}


def _made_of(method: str, tasks: Mapping[str, str]) -> str:
    return f"{method} on {', '.join(dict.fromkeys(tasks.values()))}"


def _named(run: Run) -> Iterator[tuple[str, Callback | LightningCallback]]:
    """The callbacks by the name of their class, the second of a class as ``<name>.2`` and so on.

    Of Lightning's, which watch each process's own clients, the first process's are kept, as Lightning does.
    """
    count: Counter[str] = Counter()
    watchers = next(iter(run.federation.loops.values())).trainer.callbacks
    for callback in (*run.callbacks, *watchers):
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
        files = [run / "checkpoints" / f"{ckpt_path}.ckpt" for run in runs_in(logs)]
        return next((file for file in files if file.is_file()), None)
    path = Path(ckpt_path)
    return path / "checkpoints" / "last.ckpt" if path.is_dir() else path


def run_folder(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to, None where it lies somewhere else."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else None


def runs_in(logs: Path) -> list[Path]:
    """The runs of a ``lightning_logs`` folder, the newest first."""
    return sorted(logs.glob("version_*"), key=version_of, reverse=True)


def version_of(run: Path) -> int:
    """The number of a run's folder; −1 where it has none."""
    suffix = run.name.removeprefix("version_")
    return int(suffix) if suffix.isdecimal() else -1
