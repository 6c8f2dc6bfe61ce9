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
from torch import nn

from lit_fed.errors import CheckpointError

if TYPE_CHECKING:
    from lit_fed.callbacks import Callback
    from lit_fed.trainer import FederatedTrainer

FORMAT = 1
_KEYS = {
    "lit_fed_format",
    "round_idx",
    "seed",
    "partition",
    "state_dict",
    "algorithm",
    "clients",
    "initial",
    "callbacks",
}
_KEYS |= {"metrics", "config"}
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


def snapshot(trainer: FederatedTrainer) -> dict[str, Any]:
    """Everything a run needs to go on after its last finished round.

    Raises:
        CheckpointError: If an algorithm or a callback gives its state in another form than tensors and primitives.
    """
    assert trainer.federation is not None
    federation, module = trainer.federation, trainer.federation.module
    # What any client starts its personal part from must not depend on when it first appears. A split may change with
    # the round, so what travels now and in the last round is what needs no keeping.
    shared = set(module.shared_names("down")) & {*module.split(trainer.max_rounds - 1).shared, *module.layout.buffers}
    return {
        "lit_fed_format": FORMAT,
        "round_idx": trainer.next_round,
        "seed": trainer.seed,
        "partition": federation.data.partition_sha256(),
        "state_dict": dict(federation.algorithm.global_state()),
        "algorithm": _plain(federation.algorithm.state_dict(), "algorithm"),
        "clients": federation.store.state_dict(),
        "initial": {name: tensor for name, tensor in module.initial_tensors.items() if name not in shared},
        "callbacks": _plain({name: callback.state_dict() for name, callback in _named(trainer)}, "callbacks"),
        "metrics": _plain(trainer.metrics, "metrics"),
        "config": trainer.config,
    }


def restore(trainer: FederatedTrainer, path: Path, resume: bool) -> None:
    """Put a trainer and its federation where a checkpoint left them.

    Args:
        trainer: Assembled.
        path: The file.
        resume: Training is to go on, so the clients must still have the same data.

    Raises:
        CheckpointError: If it is corrupt, foreign, or from a run with another model, seed or partition.
    """
    assert trainer.federation is not None
    content, federation = read_checkpoint(path), trainer.federation
    if content["seed"] != trainer.seed:
        raise CheckpointError(
            f"{path} comes from a run with seed {content['seed']}; set --trainer.seed {content['seed']} to use it"
        )
    try:
        federation.algorithm.load_state_dict(content["algorithm"])
        for name, tensor in content["initial"].items():
            federation.module.initial_tensors[name].copy_(tensor)
    except (KeyError, RuntimeError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise CheckpointError(f"{path} does not fit this model or algorithm: {error}") from error
    if resume and content["partition"] != federation.data.partition_sha256():
        raise CheckpointError(f"{path} comes from a run whose clients had other data; resume it with that run's config")
    federation.store.load_state_dict(content["clients"], content["round_idx"])
    for name, callback in _named(trainer):
        if state := content["callbacks"].get(name):
            callback.load_state_dict(state)
    trainer.start_round = trainer.next_round = content["round_idx"]
    trainer.metrics = content["metrics"]


def _named(trainer: FederatedTrainer) -> Iterator[tuple[str, Callback]]:
    """The callbacks by the name of their class, the second of a class as ``<name>.2`` and so on."""
    count: Counter[str] = Counter()
    for callback in trainer.callbacks:
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


def load_network(ckpt_path: str | Path, network: nn.Module | None = None) -> nn.Module:
    """The trained global network of a checkpoint as a plain ``nn.Module``, in eval mode, on the CPU.

    Args:
        ckpt_path: A checkpoint file, or a run folder (its ``best.ckpt``, else its ``last.ckpt``).
        network: What to load the weights into; None rebuilds it from the configuration in the checkpoint.

    Raises:
        CheckpointError: If there is no configuration to rebuild from, or the weights do not fit.
    """
    path = Path(ckpt_path)
    if path.is_dir():
        files = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
        path = next((file for file in files if file.is_file()), files[-1])
    content = read_checkpoint(path)
    if network is None:
        from lit_fed.command.cli import build_module  # the command line imports this module

        if not content["config"]:
            raise CheckpointError(f"{path} holds no configuration; pass the network to load its weights into")
        module = build_module(content["config"])
        _load(module, content["state_dict"], path)
        return module.deployable().eval()
    state = content["state_dict"]
    if not state.keys() <= network.state_dict().keys():
        state = {name.removeprefix("network."): tensor for name, tensor in state.items() if name.startswith("network.")}
    _load(network, state, path)
    return network.eval()


def _load(module: nn.Module, state: dict[str, torch.Tensor], path: Path) -> None:
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit this network: {' '.join(str(error).split())[:160]}") from error
    # A checkpoint names a tensor once; a network that uses it in two places (tied weights) knows it by two names.
    own = module.state_dict(keep_vars=True)
    loaded = {id(own[name]) for name in state if name in own}
    absent = [name for name in missing if id(own[name]) not in loaded]
    if absent or unexpected or not state:
        wrong = (
            f"it lacks {', '.join(absent[:3])}" if absent else f"it also has {', '.join(unexpected[:3]) or 'nothing'}"
        )
        raise CheckpointError(f"{path} does not fit this network: {wrong}")
