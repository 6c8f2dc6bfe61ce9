"""Load a checkpoint as a network, for use without a federation."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.data.loaders.transforms import rebuild
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.networks.base import fill_base
from lit_fed.networks.weights import absent_of
from lit_fed.yaml_text import read_yaml

_LIKE_A_FILE = re.compile(
    r"/|^~|^[A-Za-z]:\\|\.(pth?|pt2|ckpt|bin|pkl|pickle|npz|npy|safetensors|onnx|h5|tar|zip|ya?ml|json|csv|txt)$", re.I
)
_LOADED = re.compile(r"(.*_)?(path|file|filename|url|checkpoint|ckpt|folder|dir|hub_id)")  # settings with a file name
_MODULES = ("lit_fed", "torch.nn", "torch.optim", "torchmetrics")  # allowed by default


class DeployedNetwork(nn.Module):
    """A trained network with its preprocessing; inputs are as the data set stores them, such as bytes.

    A plain module that ``torch.export`` accepts.

    Args:
        preprocessing: The data module's, an identity if it has none.
        network: The trained network.
        class_names: Names of its outputs, in order; None if the data lack names.
        outputs: Makes the outputs of the network and its inputs, by the task's ``deployed_outputs``; None for the
            network's own.
    """

    def __init__(
        self,
        preprocessing: nn.Module,
        network: nn.Module,
        class_names: tuple[str, ...] | None,
        outputs: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.network = network
        self.class_names = class_names
        self.outputs = outputs

    def forward(self, stored: Tensor) -> Any:
        """Outputs for a batch of stored inputs, (B, …)."""
        cell = getattr(self.outputs, "cell", 1)
        for axis in (2, 3) if cell > 1 else ():  # the edge repeated; `pad` would fix the sizes of an exported program
            size = stored.shape[axis]
            places = torch.arange((size + cell - 1) // cell * cell, device=stored.device)
            stored = stored.index_select(axis, places.clamp(max=size - 1))
        inputs = self.preprocessing(stored)
        return self.network(inputs) if self.outputs is None else self.outputs(self.network, inputs)


class NotRebuilt(CheckpointError):
    """A checkpoint whose configuration does not give the network.

    Args:
        fault: The cause.
        module: The module whose permission would help; empty where none would.
    """

    def __init__(self, fault: str, module: str = "") -> None:
        allow = f"if you trust it, allow it: load_network(…, modules=[{module!r}]), or " if module else ""
        super().__init__(f"{fault}; {allow}pass the network to load its weights into")
        self.fault, self.module = fault, module


def load_network(
    ckpt_path: str | Path, network: nn.Module | None = None, modules: Sequence[str] = ()
) -> DeployedNetwork:
    """The trained global network of a checkpoint with its preprocessing, in eval mode, on the CPU.

    Args:
        ckpt_path: A checkpoint file, or a run folder (its ``best.ckpt``, else its ``last.ckpt``).
        network: Receives the weights; None rebuilds it from the configuration in the checkpoint.
        modules: Modules or packages, besides lit_fed, torch and torchmetrics, whose classes that configuration may use.
            Importing runs their code, and they receive the file paths of the configuration: name only trusted ones.

    Returns:
        The preprocessing and ``network``: the given one, else the task's ``network``, else the task. A rebuilt
        `KeypointEstimator` outputs joints, by name ``keypoints`` (B, K, 2) and ``score`` (B, K). If a data module
        prepares inputs by custom code, a warning says so, and inputs reach the network unchanged.

    Raises:
        CheckpointError: If the configuration is missing, names a file, or an unknown or forbidden class, or if the
            weights do not fit.
    """
    path = checkpoint_file(ckpt_path)
    content = read_checkpoint(path)
    if network is None:
        if not content["config"]:
            raise NotRebuilt(f"{path} holds no configuration")
        task, algorithm = _rebuilt(content, path, modules)
        algorithm.adapt(task)
        fill_base(content, task, path)
        _load(task, content["state_dict"], path)
        made: Any = getattr(task, "deployed_outputs", None)
        return _deployed(algorithm.release(task), content["inputs"], path, None if made is None else made())
    fill_base(content, network, path)
    state = content["state_dict"]
    if not state.keys() <= network.state_dict().keys():
        state = {name.removeprefix("network."): tensor for name, tensor in state.items() if name.startswith("network.")}
    _load(network, state, path)
    return _deployed(network, content["inputs"], path)


def checkpoint_file(ckpt_path: str | Path) -> Path:
    """A checkpoint file, or a run folder's ``best.ckpt``, else ``last.ckpt``."""
    path = Path(ckpt_path)
    if not path.is_dir():
        return path
    files = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
    return next((file for file in files if file.is_file()), files[-1])


def _deployed(
    network: nn.Module, inputs: Mapping[str, Any], path: Path, outputs: nn.Module | None = None
) -> DeployedNetwork:
    """The network with the checkpoint's preprocessing."""
    steps, names = inputs.get("steps"), inputs.get("class_names")
    if steps is None:
        warnings.warn(
            f"{path} lacks the preprocessing of {inputs.get('source')}, which is custom code; pass inputs as that data "
            "module's loaders yield them",
            stacklevel=3,
        )
    try:
        preprocessing = rebuild(steps or [])
    except (TypeError, KeyError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path} is not a lit_fed checkpoint: its preprocessing is {steps!r}") from error
    return DeployedNetwork(preprocessing, network, None if names is None else tuple(map(str, names)), outputs).eval()


def _rebuilt(content: Mapping[str, Any], path: Path, modules: Sequence[str]) -> tuple[LightningModule, Algorithm[Any]]:
    """Build the task and the method of a checkpoint's configuration.

    Raises:
        CheckpointError: If they cannot be built.
    """
    with _importing_only(modules):
        try:
            bases = content.get("base", {}).values()
            files = frozenset(file for names in bases for file, _ in names.values())
            return _build(read_yaml(content["config"]), path, modules, files)
        except CheckpointError:
            raise
        except Exception as error:  # of the parser, or of any constructor
            text = " ".join(str(error).split())
            if denied := re.search(r"Importing '([^']+)' is not allowed", text):
                owner = denied[1].rpartition(".")[0]
                raise NotRebuilt(f"{path} names {denied[1]}, which is not of lit_fed", owner) from error
            why = re.sub(r".*Errors: - (.*?) - Expected a .*", r"\1", text)[:200] or type(error).__name__
            raise NotRebuilt(f"{path} cannot be rebuilt from its configuration: {why}") from error


@contextmanager
def _importing_only(modules: Sequence[str]) -> Iterator[None]:
    """Restrict the parser's imports to objects defined in our modules and these."""
    from jsonargparse import set_parsing_settings
    from jsonargparse._common import parsing_settings  # no public function restores it

    before = dict(parsing_settings)
    named = [modules] if isinstance(modules, str) else list(modules)
    try:
        try:
            set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*_MODULES, *named])
        except ValueError as error:
            raise ConfigError(f"modules is {named}; it must list importable modules: {error}") from error
        yield
    finally:
        parsing_settings.update(before)


def _build(
    config: dict[str, Any], path: Path, modules: Sequence[str], files: frozenset[str]
) -> tuple[LightningModule, Algorithm[Any]]:
    """Build the task and the method of a run's resolved configuration, with untrained weights.

    It reads the files of pretrained parameters that the checkpoint names; `fill_base` checks their values.
    """
    from lit_fed.parsing import Parser  # not needed to import the package

    parser = Parser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    parser.add_subclass_arguments(Algorithm, "algorithm", required=True)
    model = config["model"]
    for options in list((config.get("trainer", {}).get("kinds") or {}).values())[:1]:
        model["init_args"] |= {key: value for key, value in options.items() if key != "clients"}
    named = (modules,) if isinstance(modules, str) else tuple(modules)
    parts = {
        key: _without_files(part, key, path, named, files)
        for key, part in (("model", model), ("algorithm", config["algorithm"]))
    }
    if odd := [key for key, part in parts.items() if not isinstance(part, Mapping)]:
        raise ValueError(f"{odd[0]} is {parts[odd[0]]!r}, not a class with settings")
    made = parser.instantiate(parser.parse_object(parts))
    return made.model, made.algorithm


def _without_files(value: Any, where: str, path: Path, trusted: tuple[str, ...], bases: Collection[str]) -> Any:
    """Strip settings that read files, because a checkpoint may be untrusted.

    Initial weights are dropped, as the checkpoint's replace them, but not a base, which it lacks. Classes of trusted
    modules keep all settings.

    Args:
        value: A part of the configuration.
        where: Its key.
        path: The checkpoint.
        trusted: Modules.
        bases: Files of pretrained parameters, which are read as weights alone.

    Raises:
        CheckpointError: If a setting may name a file.
        ValueError: If a text's aliases expand to too many values.
    """
    if isinstance(value, str):
        inner = _as_parsed(value)  # a text may encode a mapping
        if isinstance(inner, Mapping | list):
            return _without_files(inner, where, path, trusted, bases)
        if value == "-" or _LIKE_A_FILE.search(value) or _is_file(value):
            raise _names_a_file(value, where, path)
        return value
    if isinstance(value, list):
        return [_without_files(item, f"{where}.{place}", path, trusted, bases) for place, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if str(value.get("class_path")).startswith(tuple(f"{module}." for module in trusted)):
        return value
    content = {}
    for key, entry in value.items():
        last = str(key).rpartition(".")[2]
        if last == "weights" and isinstance(entry, str) and entry in bases:
            content[key] = entry
            continue
        if last == "pretrained" or (last == "weights" and isinstance(entry, str)):
            entry = False if last == "pretrained" else None
        elif last in ("pretrained_cfg", "pretrained_cfg_overlay") and isinstance(entry, Mapping):
            entry = {name: item for name, item in entry.items() if not isinstance(item, str)}
        elif _LOADED.fullmatch(last) and last != "class_path" and isinstance(entry, str) and entry:
            raise _names_a_file(entry, f"{where}.{key}", path)
        content[key] = _without_files(entry, f"{where}.{key}", path, trusted, bases)
    return content


def _names_a_file(value: str, where: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} names a file in its configuration, {where}: {value[:80]!r}, which only classes of trusted modules "
        "receive; pass the network to load its weights into"
    )


def _as_parsed(text: str) -> Any:
    try:
        return read_yaml(text)
    except yaml.MarkedYAMLError:  # a plain text
        return text


def _is_file(text: str) -> bool:
    """Whether a text names an existing file."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long, or a NUL byte
        return False


def _load(module: nn.Module, state: dict[str, torch.Tensor], path: Path) -> None:
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit this network: {' '.join(str(error).split())[:160]}") from error
    absent = absent_of(module.state_dict(keep_vars=True), state) if missing else []
    if absent or unexpected or not state:
        wrong = (
            f"it lacks {', '.join(absent[:3])}" if absent else f"it also has {', '.join(unexpected[:3]) or 'nothing'}"
        )
        raise CheckpointError(f"{path} does not fit this network: {wrong}")
