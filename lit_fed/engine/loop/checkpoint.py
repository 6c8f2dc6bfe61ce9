"""Checkpoint files: content, search, reading and restoring.

A checkpoint holds tensors and primitives only, is written to a temporary file and renamed, and loads with
``weights_only=True``. Of a private run it holds nothing that tells of single clients: those entries lie beside the
clients' states, in a file that the checkpoint names by `Wrapper.seal`. ``load_from_checkpoint`` and ``Trainer.test`` of
Lightning read ``pytorch-lightning_version``, ``state_dict`` and ``hyper_parameters``.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning import Callback as LightningCallback
from lightning import LightningModule

from lit_fed.data.population.census import Contents
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.method.algorithm import held_model
from lit_fed.engine.method.wrapper import STATE_PREFIX
from lit_fed.engine.storage.files import unreadable_named, write_atomically
from lit_fed.engine.storage.packs import Version
from lit_fed.engine.storage.store import read_table
from lit_fed.engine.wire.payload import Arrival, Broadcast
from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import CheckpointError
from lit_fed.file_names import shown
from lit_fed.networks.base import filled, given, is_base, named
from lit_fed.tensors import check_bytes

if TYPE_CHECKING:
    from lit_fed.engine.clients.local import LocalLoop
    from lit_fed.engine.evaluation.federation import Federation
    from lit_fed.engine.loop.run import Callback, Run
    from lit_fed.engine.method.model import Model

FORMAT = 6
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
    "clients": torch.Tensor,
    "initial": dict,
    "callbacks": dict,
    "metrics": dict,
    "monitor": (str, type(None)),
    "config": str,
    "inputs": dict,
}
_SENT = ("payloads", "frozen", "num_bytes")
"""Parts of a broadcast that are kept while clients work on it."""
_APART = ("partition", "data", "clients")
"""Entries that tell of the clients' data, and of who took part."""
_PRIMITIVES = (str, bytes, bool, int, float, type(None))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load and check a checkpoint.

    Raises:
        UnreadableFile: If the system refuses to read it.
        CheckpointError: If the file is missing, corrupt, or foreign.
    """
    path = Path(path)
    with unreadable_named(path):
        if not path.is_file():
            raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        with warnings.catch_warnings():  # about foreign formats
            warnings.simplefilter("ignore")
            content = torch.load(path, weights_only=True, map_location="cpu")
        check_bytes(path)
    except pickle.UnpicklingError as error:
        _read_through(path)
        raise CheckpointError(f"{path} is not a checkpoint that can be loaded safely (weights_only)") from error
    except Exception as error:  # damaged bytes make the reader fail in a dozen ways, struct.error included
        _read_through(path)
        raise CheckpointError(f"{path} is corrupt or not a checkpoint; use another, such as best.ckpt") from error
    if not isinstance(content, dict) or type(content.get("lit_fed_format")) is not int:
        raise CheckpointError(f"{path} is not a lit_fed checkpoint (it may come from another program)")
    if content["lit_fed_format"] > FORMAT:
        raise CheckpointError(f"{path} was written by a newer lit_fed; upgrade the package")
    if content["lit_fed_format"] < FORMAT:
        raise CheckpointError(
            f"{path} was written by an older lit_fed, whose checkpoints had another form; train again"
        )
    if odd := _malformed(content):
        raise CheckpointError(f"{path} is not a lit_fed checkpoint: {odd}")
    checked: dict[str, Any] = content
    return checked


def apart_of(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The fingerprints and the clients' table: in a checkpoint itself, or of a private run beside the clients' states.

    Raises:
        UnreadableFile: If the system refuses to read them.
        CheckpointError: If they are missing or corrupt.
    """
    if "apart" not in content:
        return content
    file = apart_file(path.parent, content["apart"])
    hint = "use the checkpoint where the run left it"
    with unreadable_named(file):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, which tells whose states a private run keeps; {hint}")
    try:
        apart: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        check_bytes(file)
        odd = _malformed_apart(apart)
    except Exception as error:  # damaged bytes make the reader fail in a dozen ways
        _read_through(file)
        raise CheckpointError(f"{file} is corrupt; {hint}") from error
    if odd:
        raise CheckpointError(f"{file} does not belong to a checkpoint: {odd}")
    return apart


def callback_states(content: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """The callbacks' states of a checkpoint, with what a private run keeps apart; raises as `apart_of`."""
    states: dict[str, dict[str, Any]] = content["callbacks"] | apart_of(content, path).get("callbacks", {})
    return states


def apart_file(folder: Path, seal: str) -> Path:
    """The file of a private run's entries that are kept apart from its checkpoint in a folder."""
    return folder / "clients" / f"{seal}.apart"


def _read_through(path: Path) -> None:
    """Read a whole file that failed to load; an `UnreadableFile` if the system is the cause."""
    with unreadable_named(path), open(path, "rb", buffering=0) as file:
        while file.read(2**20):
            pass


def _malformed(content: Mapping[str, Any]) -> str | None:
    """The first flaw of a file's content; None if a run may have written it."""
    private = "apart" in content
    if odd := _mistyped(content, _CONTENT.keys() - (_APART if private else ())):
        return odd
    if private and not re.fullmatch("[0-9a-f]+", str(content["apart"])):
        return "'apart' is not a name"
    if not private and (odd := _malformed_apart(content)):
        return odd
    if content["round_idx"] < 0:
        return f"'round_idx' is {content['round_idx']}"
    sizes = content.get("executor", {})  # files of before groups kept their size have none
    if not isinstance(sizes, dict) or any(type(size) is not int or size < 0 for size in sizes.values()):
        return "'executor' is not a group's size by kind"
    if (odd := _malformed_versions(content.get("versions", {}))) is not None:
        return odd
    if not is_base(content.get("base", {})):
        return "'base' does not name tensors"
    for key, kind in (("initial", Mapping), ("callbacks", Mapping), ("tasks", str), ("metrics", int | float)):
        if odd := next((name for name, entry in content[key].items() if not isinstance(entry, kind)), None):
            return f"{odd!r} in {key!r} is of type {type(content[key][odd]).__name__}"
    return None


def _malformed_versions(versions: Any) -> str | None:
    fits = isinstance(versions, dict) and all(
        type(version) is int
        and isinstance(one, dict)
        and one.keys() - {"addressed"} == {*_SENT, "clients"}
        and all(isinstance(part, dict) for part in one.values())
        and all(type(count) is int for count in one["num_bytes"].values())
        and all(map(_is_arrival, one.get("addressed", {}).values()))
        for version, one in versions.items()
    )
    return None if fits else "'versions' are not broadcasts"


def _is_arrival(entry: Any) -> bool:
    return type(entry) is tuple and list(map(type, entry)) == [dict, int]


def _malformed_apart(content: Mapping[str, Any]) -> str | None:
    """The first flaw of the entries that a private run keeps apart."""
    if odd := _mistyped(content, _APART):
        return odd
    try:
        read_table(content["clients"])
    except ValueError as error:
        return f"'clients' has {error}"
    try:
        Contents(**content["data"])
    except TypeError:
        return "'data' is not a fingerprint"
    return None


def _mistyped(content: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    for key in sorted(keys, key=list(_CONTENT).index):
        if key not in content:
            return f"{key!r} is missing"
        if not isinstance(content[key], _CONTENT[key]):
            return f"{key!r} is of type {type(content[key]).__name__}"
    return None


def snapshot(run: Run) -> dict[str, Any]:
    """Everything needed to continue after the last finished round.

    Raises:
        CheckpointError: If a method or a callback keeps anything but tensors and primitives.
    """
    federation, last_round = run.federation, max(run.next_round - 1, 0)
    bases = {kind: loop.model.base for kind, loop in federation.loops.items()}
    models = {
        kind: {name: tensor for name, tensor in model.items() if not bases[kind].holds(name, tensor)}
        for kind, model in federation.global_models(last_round).items()
    }

    def plain(value: Any, where: str) -> Any:
        return named(_plain(value, where), bases.values())

    return {
        "lit_fed_format": FORMAT,
        "pytorch-lightning_version": lightning.__version__,
        "round_idx": run.next_round,
        "seed": run.settings.seed,
        "partition": federation.data.record.sha256,
        "data": dict(vars(federation.data.record.contents)),
        "method": type(federation.algorithm).__name__,
        "tasks": _tasks(run),
        "state_dict": models.get(first := federation.kinds.names[0], {}),
        "hyper_parameters": _hyper_parameters(federation.loops[first].model.task),
        "models": models if len(federation.kinds.names) > 1 else {},
        "server": plain(federation.server, "the server's state"),
        "clients": federation.store.table(),
        "initial": {
            kind: plain(_initial(loop.model, held_model(federation.server, kind)), "initial")
            for kind, loop in federation.loops.items()
        },
        "callbacks": _plain({name: callback.state_dict() for name, callback in _named(run)}, "callbacks"),
        "metrics": _plain(run.metrics, "metrics"),
        "monitor": run.names.monitor,
        "executor": federation.executor.state_dict(),
        **({"versions": plain(_versions(federation, last_round), "versions")} if federation.versions else {}),
        "base": {kind: dict(base.names) for kind, base in bases.items() if base.names},
        "config": run.settings.config,
        "inputs": {
            "source": type(federation.data).__name__,
            "steps": _plain(federation.data.preprocessing(), "preprocessing"),
            "class_names": _plain(federation.data.class_names, "class_names"),
            "stored": _plain(federation.data.stored_like(), "stored"),
        },
    }


def save_checkpoint(run: Run, path: Path) -> str | None:
    """Write the state after the last finished round; called on every process, written by the first.

    Returns:
        The name of what a private run keeps apart, see `apart_of`.

    Raises:
        CheckpointError: If it cannot be written; an older file of that name survives.
    """
    return on_first_process(run.fabric, lambda: _save(run, path))


def _save(run: Run, path: Path) -> str | None:
    content = snapshot(run)
    apart = {key: content[key] for key in _APART}
    telling = {name for name, callback in _named(run) if getattr(callback, "tells_of_clients", False)}
    sealed = (path.name, content["round_idx"], apart["partition"], apart["data"], apart["clients"].numpy().tobytes())
    seal = run.federation.wrappers.seal(repr(value).encode() for value in sealed)
    if seal is not None:
        states = content["callbacks"]
        apart["callbacks"] = {name: states[name] for name in telling}
        content["callbacks"] = {name: state for name, state in states.items() if name not in telling}
        write_atomically(apart, apart_file(path.parent, seal))  # first: a checkpoint never lacks it
        content = {key: entry for key, entry in content.items() if key not in _APART} | {"apart": seal}
    write_atomically(content, path)
    return seal


def _initial(model: Model, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first tensors of clients' personal parts, which must not depend on when a client first appears.

    A tensor that equals the server's, such as a frozen one, is the server's, which the file holds once.
    """
    found = {}
    for name, tensor in model.initial.items():
        if name in model.staying:
            found[name] = held[name] if name in held and torch.equal(held[name], tensor) else tensor
    return found


def restore(run: Run, path: Path, trains: bool = True) -> None:
    """Restore an assembled run from a checkpoint; nothing is restored unless everything fits.

    Args:
        run: Assembled.
        path: The file.
        trains: Whether the run goes on; to test a model or to predict with it, neither what was around its method is
            needed, nor the callbacks' states, nor what a private run keeps apart.

    Raises:
        CheckpointError: If it is corrupt, foreign, or from a run with another model, method, seed or partition.
    """
    content, federation = read_checkpoint(path), run.federation
    if content["seed"] != run.settings.seed:
        raise CheckpointError(
            f"{path} comes from a run with seed {content['seed']}; set --trainer.seed {content['seed']} to use it"
        )
    if content.get("base"):
        _fill(content, federation.loops, path)
    _check_around(federation.server, content["server"], path, trains)
    saved = content["initial"]
    if odd_kinds := sorted(map(str, saved.keys() ^ federation.loops.keys())):
        raise CheckpointError(f"{path} comes from a run whose trainer.kinds differ from this one's in {odd_kinds[0]!r}")
    models = {kind: loop.model for kind, loop in federation.loops.items()}
    like = {kind: {n: model.tensor(n) for n in saved[kind] if n in model} for kind, model in models.items()}
    if odd := _difference(federation.server, content["server"]) or _difference(like, saved, ("initial",)):
        now = _made_of(type(federation.algorithm).__name__, _tasks(run))
        before = _made_of(content["method"], content["tasks"])
        config = (run_folder(path) or path) / "config.yaml"
        see = f"; the run's own settings are in {shown(config)}" if config.is_file() else ""
        raise CheckpointError(f"{path} was saved by {before} and does not fit {now}: {odd}{see}")
    index: dict[str, Version] = {}
    states = content["callbacks"]
    if trains or "apart" not in content or apart_file(path.parent, content["apart"]).is_file():
        apart = apart_of(content, path)
        if apart["partition"] != federation.data.record.sha256:
            raise CheckpointError(
                f"{path} comes from a run whose clients had other data; use it with that run's config"
            )
        if not federation.data.record.contents.is_of(Contents(**apart["data"])):
            raise CheckpointError(
                f"{path} comes from a run on other data, whose labels or inputs have changed; use it with the data "
                "that it was trained on"
            )
        index, states = read_table(apart["clients"]), callback_states(content, path)
    if trains:
        _check_versions(run, content, path)
        placed = _placed(content.get("versions", {}), {}, run.fabric.device)
        federation.versions = {
            version: Broadcast(version, **{name: one[name] for name in _SENT}, addressed=_arrivals(one))
            for version, one in placed.items()
        }
    server = _placed(content["server"], federation.server, run.fabric.device)
    federation.server.clear()
    federation.server.update(server)
    for kind, model in models.items():
        for name in saved[kind].keys() & model.initial.keys():  # no client begins with the other tensors
            if not model.base.holds(name, saved[kind][name]):  # those are shared
                model.initial[name].copy_(saved[kind][name])
    federation.store.load_state_dict(index, content["round_idx"])
    if trains:
        _load_callbacks(run, states, path)
        federation.executor.load_state_dict(content.get("executor", {}))
    run.start_round = run.next_round = content["round_idx"]
    run.metrics = content["metrics"]
    run.names.monitor = run.names.monitor or content["monitor"]
    run.origin = f"{shown(path)}, saved by {_made_of(content['method'], content['tasks'])}"


def _fill(content: dict[str, Any], loops: Mapping[str, LocalLoop], path: Path) -> None:
    """Replace the digests of pretrained parameters by the tensors that this run has read from their file."""
    tensors = dict[tuple[str, str], torch.Tensor]()
    for kind, names in content["base"].items():
        model = loops[kind].model if kind in loops else None
        own = {} if model is None else {n: model.initial.get(n, model.tensor(n)) for n in names if n in model}
        tensors |= {(name, names[name][1]): tensor for name, tensor in given(names, own, path).items()}
    for entry in ("server", "initial", "versions"):
        content[entry] = filled(content.get(entry, {}), tensors)


def _check_around(own: dict[str, Any], saved: dict[str, Any], path: Path, trains: bool) -> None:
    """Refuse to train on with other wrappers than those that a run began with; else take what it has."""
    odd = sorted(key for key in own.keys() ^ saved.keys() if str(key).startswith(STATE_PREFIX))
    if odd and trains:
        name = f"trainer.{odd[0].removeprefix(STATE_PREFIX)}"
        before, now = ("with", "without") if odd[0] in saved else ("without", "with")
        raise CheckpointError(f"{path} comes from a run {before} {name}, and this one is {now} it; keep it as it was")
    for key in odd:
        saved.pop(key, None)
        own.pop(key, None)


def _load_callbacks(run: Run, states: Mapping[str, dict[str, Any]], path: Path) -> None:
    for name, callback in _named(run):
        if state := states.get(name):
            try:
                callback.load_state_dict(state)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{path} has a state that callback {name} cannot load: {error!r}; leave the callback out"
                ) from error


def _difference(own: Any, saved: Any, where: tuple[str, ...] = ()) -> str | None:
    """The first difference between the present state and a saved one; None if they fit.

    A state may grow in training: only its top level, and models, have fixed entries.
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
    """Copy a saved state to the device, in the dtypes of the present one."""
    if isinstance(saved, Mapping):
        held = own if isinstance(own, Mapping) else {}
        return {key: _placed(entry, held.get(key), device) for key, entry in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_placed(entry, None, device) for entry in saved)
    if isinstance(saved, torch.Tensor):
        if saved is own:  # a pretrained parameter, which memory holds once
            return own
        return saved.to(device, own.dtype if isinstance(own, torch.Tensor) else saved.dtype, copy=True)
    return saved


def _arrivals(saved: Mapping[str, Any]) -> dict[int, Arrival] | None:
    """The addressed payloads of a saved broadcast, by client."""
    held = saved.get("addressed")
    return None if held is None else {client_id: Arrival({}, *one) for client_id, one in held.items()}


def _versions(federation: Federation, last_round: int) -> dict[int, dict[str, Any]]:
    """The broadcasts on which clients of an asynchronous federation still work, with these clients."""
    clients = federation.participation.in_flight(last_round)
    found = {}
    for version, one in federation.versions.items():
        found[version] = {name: getattr(one, name) for name in _SENT} | {"clients": clients[version]}
        if one.addressed is not None:
            found[version]["addressed"] = {i: (held.payload, held.num_bytes) for i, held in one.addressed.items()}
    return found


def _check_versions(run: Run, content: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint whose clients at work are not those of this run's schedule, or start from other models."""
    federation, done = run.federation, content["round_idx"]
    saved = content.get("versions", {})
    due = federation.participation.in_flight(done - 1) if done else {}
    if {version: one["clients"] for version, one in saved.items()} != due:
        raise CheckpointError(
            f"{path} comes from a run whose clients at work were others; keep trainer.participation as it was"
        )
    like = federation.broadcast(0)
    for version, one in saved.items():
        for part in ("payloads", "frozen"):
            if odd := _difference(getattr(like, part), one[part], ("models",)):
                raise CheckpointError(f"{path} holds a broadcast of round {version} that does not fit: {odd}")
        if one.get("addressed", {}).keys() != (one["clients"] if federation.algorithm.addresses else {}).keys():
            raise CheckpointError(f"{path} lacks what round {version} addressed to clients at work; start a new run")


def _tasks(run: Run) -> dict[str, str]:
    return {kind: task_name(loop.model.task) for kind, loop in run.federation.loops.items()}


def _hyper_parameters(task: LightningModule) -> dict[str, Any]:
    """The arguments that a task gave to ``save_hyperparameters``; empty if a checkpoint cannot hold them."""
    try:
        hparams: dict[str, Any] = _plain(vars(task).get("_hparams", {}), "hparams")
    except CheckpointError:
        return {}
    return hparams


def _made_of(method: str, tasks: Mapping[str, str]) -> str:
    return f"{method} on {', '.join(dict.fromkeys(tasks.values()))}"


def _named(run: Run) -> Iterator[tuple[str, Callback | LightningCallback]]:
    """The callbacks by class name, the second of a class as ``<name>.2`` and so on.

    States of Lightning's callbacks, which watch each process's clients, are the first process's, as in Lightning.
    """
    count: Counter[str] = Counter()
    watchers = next(iter(run.federation.loops.values())).watchers
    callbacks: list[Callback | LightningCallback] = [*run.callbacks, *watchers]
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}.{count[name]}", callback


def _plain(value: Any, where: str) -> Any:
    """Convert NumPy's numbers to Python's, and refuse values that could not be read back."""
    if isinstance(value, torch.Tensor) or type(value) in _PRIMITIVES:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_plain(entry, f"{where}.{position}") for position, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    raise CheckpointError(f"{where} is a {type(value).__name__}; keep tensors and primitives only")


def find_checkpoint(ckpt_path: str | Path, logs: Path, own: Path | None = None) -> Path | None:
    """Resolve ``last``, ``best``, a run folder or a file to a file.

    ``last`` and ``best`` mean the folder ``own`` of a run of this process, or without it the newest run in ``logs``
    that has one; None if none has.
    """
    if str(ckpt_path) in ("last", "best"):
        if own is not None:
            file = own / "checkpoints" / f"{ckpt_path}.ckpt"
            return file if file.is_file() else None
        files = [run / "checkpoints" / f"{ckpt_path}.ckpt" for run in runs_in(logs)]
        return next((file for file in files if file.is_file()), None)
    path = Path(ckpt_path)
    return path / "checkpoints" / "last.ckpt" if path.is_dir() else path


def run_folder(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint's run; None if the file lies elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else None


def runs_in(logs: Path) -> list[Path]:
    """The runs of a ``lightning_logs`` folder, newest first."""
    return sorted(logs.glob("version_*"), key=version_of, reverse=True)


def version_of(run: Path) -> int:
    """The number of a run's folder; −1 without one."""
    suffix = run.name.removeprefix("version_")
    return int(suffix) if suffix.isdecimal() else -1
