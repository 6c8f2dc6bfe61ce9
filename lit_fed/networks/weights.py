"""Pretrained weights from a local file or folder, in the formats of timm and Hugging Face; nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_fed.checks import check_choice
from lit_fed.errors import ConfigError, reason
from lit_fed.file_names import is_file_name
from lit_fed.networks.base import loaded_from
from lit_fed.tensors import check_bytes

PARTS = ("all", "backbone")
_IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
_LAYOUTS = ("state_dict_ema", "model_ema", "state_dict", "model")  # of training checkpoints, in timm's order
_WRAPPED = re.compile(r"^(_orig_mod\.|module\.)+")  # of torch.compile and DDP
_FEW_BITS = re.compile(r"\.(absmax|quant_map|quant_state\.\w+|SCB|qweight|qzeros)$")
_SHOWN = 3


def load_weights(network: nn.Module, file: str | Path, head: nn.Module | None = None, part: str = "all") -> None:
    """Load a file of weights into a network in place.

    The file's names may have a prefix that the network's lack, or lack one. timm's own conversion runs for networks of
    timm, and also resamples position embeddings.

    Args:
        network: Any module.
        file: A file (``.safetensors``, ``.pth``, ``.bin``, a lit_fed checkpoint), an index of shards
            (``model.safetensors.index.json``), or a folder with one of these under Hugging Face's names.
        head: The network's last layer; None where there is none.
        part: ``all``, or ``backbone`` for everything except the head, which starts anew; the file's head is left out.

    Raises:
        ConfigError: If the file cannot be read, holds weights of few bits, or does not fit the network.
    """
    check_choice("model.weights_of", part, PARTS)
    heads = tuple(f"{name}." for name, module in network.named_modules() if module is head and name)
    if part == "backbone" and not heads:
        raise ConfigError(f"model.weights_of is 'backbone', and {type(network).__name__} has no head; set it to 'all'")
    raw = read_tensors(Path(file), "model.weights")
    if quantized := next((name for name in raw if _FEW_BITS.search(name)), None):
        raise ConfigError(
            f"model.weights is {str(file)!r}, whose {quantized!r} is of weights in 4 or 8 bits (bitsandbytes, GPTQ); "
            "name the weights before quantization"
        )
    own: dict[str, Any] = network.state_dict(keep_vars=True)
    held = _converted(_aligned(raw, network, own), network, str(file))
    _check_fit(held, network, own, heads, part, str(file))
    with torch.no_grad():
        for name, tensor in held.items():
            if name in own:
                own[name].copy_(tensor)
                loaded_from(own[name], str(file))


def read_tensors(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors of a file or folder by name; ``key`` is the setting that names it."""
    return _merged(_files(path, key))


def hash_of_weights(path: Path, key: str) -> str:
    """SHA-256 of a file, or of ``sha256sum``'s lines of the files that a folder or an index names."""
    digests = []
    for one in _files(path, key):
        with open(one, "rb") as file:
            digests.append((hashlib.file_digest(file, "sha256").hexdigest(), one.name))
    if len(digests) == 1:
        return digests[0][0]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in digests).encode()).hexdigest()


def absent_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """The names of a network's tensors that a file lacks; a file names tied weights once.

    Args:
        tensors: The network's, from ``state_dict(keep_vars=True)``.
        names: The file's.
    """
    named = set(names)
    loaded = {id(tensors[name]) for name in named if name in tensors}
    return [name for name, tensor in tensors.items() if name not in named and id(tensor) not in loaded]


def _files(path: Path, key: str) -> list[Path]:
    """The files of a path: itself, a folder's, or an index's shards."""
    found = path
    try:
        if path.is_dir():
            _refuse_few_bits(path, key)
            names = [name for one in _IN_FOLDERS for name in (one + _INDEX, one)]
            found = next((path / name for name in names if (path / name).is_file()), path)
            if found is path:
                raise ConfigError(f"{key} is {str(path)!r}; the folder has neither of {', '.join(names)}")
        if not found.is_file():
            raise ConfigError(f"{key} is {str(path)!r}; the file does not exist")
        if not found.name.endswith(_INDEX):
            return [found]
        shards: Any = json.loads(found.read_text(encoding="utf-8")).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(map(is_file_name, shards.values())):
            raise ConfigError(f"{key} is {str(path)!r}, whose {found.name} has no weight_map of files beside it")
        files = [found.parent / name for name in sorted(set(shards.values()))]
        if absent := [one.name for one in files if not one.is_file()]:
            raise ConfigError(f"{key} is {str(path)!r}, which lacks the file {absent[0]} of its {found.name}")
    except ConfigError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key} is {str(path)!r}, which cannot be read: {reason(error)}") from error
    return files


def _refuse_few_bits(folder: Path, key: str) -> None:
    config = folder / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if isinstance(content, dict) and (quantized := content.get("quantization_config")):
        method = quantized.get("quant_method", "few bits") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{key} is {str(folder)!r}, whose config.json has a quantization_config ({method}); name the weights "
            "before quantization"
        )


def _merged(files: Iterable[Path]) -> dict[str, Tensor]:
    return {name: tensor for path in files for name, tensor in _read(path).items()}


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped into memory where its format allows it."""
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            with warnings.catch_warnings(action="ignore"):  # of the time that a check takes
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        check_bytes(path)
    except Exception as error:  # damaged bytes make the readers fail in a dozen ways
        why = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]  # not torch's advice to load it
        raise ConfigError(f"{path} holds more than weights, or is damaged: {why}") from error
    if isinstance(content, Mapping) and "lit_fed_format" in content and content.get("base"):
        raise ConfigError(
            f"{path} is a checkpoint without its pretrained weights; name what lit-fed export writes of it"
        )
    for layout in _LAYOUTS:
        if isinstance(content, Mapping) and isinstance(content.get(layout), Mapping):
            content = content[layout]
            break
    entries = content.items() if isinstance(content, Mapping) else ()
    tensors = {_WRAPPED.sub("", str(name)): value for name, value in entries if isinstance(value, Tensor)}
    if not tensors:
        raise ConfigError(f"{path} does not hold weights by name; give a state_dict")
    return tensors


def _aligned(tensors: Mapping[str, Tensor], network: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the network's names: with a prefix removed, such as ``bert.``, or with one added."""
    tensors = {re.sub(r"\bLayerNorm\.gamma$", "LayerNorm.weight", name): tensor for name, tensor in tensors.items()}
    tensors = {re.sub(r"\bLayerNorm\.beta$", "LayerNorm.bias", name): tensor for name, tensor in tensors.items()}
    if tensors.keys() & own.keys():
        return tensors
    for before in dict.fromkeys(name.partition(".")[0] + "." for name in tensors):
        if any(name.removeprefix(before) in own for name in tensors):
            return {name.removeprefix(before): tensor for name, tensor in tensors.items()}
    for child, _ in network.named_children():
        if any(f"{child}.{name}" in own for name in tensors):
            return {f"{child}.{name}": tensor for name, tensor in tensors.items()}
    return tensors


def _converted(tensors: dict[str, Tensor], network: nn.Module, file: str) -> dict[str, Tensor]:
    """The tensors after the conversion that timm runs for networks of the same module."""
    convert = getattr(sys.modules.get(type(network).__module__), "checkpoint_filter_fn", None)
    if convert is None:
        return tensors
    try:
        converted: dict[str, Tensor] = convert(dict(tensors), network)
    except Exception as error:  # any error of timm's conversions
        raise ConfigError(f"model.weights is {file!r}, which timm cannot convert: {reason(error)}") from error
    return converted


def _check_fit(
    held: dict[str, Tensor],
    network: nn.Module,
    own: Mapping[str, Tensor],
    heads: tuple[str, ...],
    part: str,
    file: str,
) -> None:
    """Refuse missing, superfluous and misshapen tensors in one line; of ``backbone``, drop the file's head."""
    tops = {name.partition(".")[0] for name in own if not name.startswith(heads)}

    def beside(name: str) -> bool:
        return name.startswith(heads) or name.partition(".")[0] not in tops

    if part == "backbone":
        for name in list(filter(beside, held)):
            del held[name]
    passing = {name for name, _ in network.named_buffers()}
    absent = [name for name in absent_of(own, held) if not name.endswith("num_batches_tracked")]
    absent = [name for name in absent if part == "all" or not name.startswith(heads)]
    odd = [name for name in held if name not in own and name not in passing]
    other = [name for name in held if name in own and _form(held[name]) != _form(own[name])]
    if not (absent or odd or other):
        return
    forms = [f"{name!r} of {_form(held[name])} in place of {_form(own[name])}" for name in other]
    found = {"lacks": list(map(repr, absent)), "also has": list(map(repr, odd)), "has": forms}
    faults = " and ".join(f"{verb} {_some(names)}" for verb, names in found.items() if names)
    if part == "all" and heads and all(map(beside, [*absent, *odd, *other])):
        hint = "set model.weights_of to backbone to leave the file's head out and start with a new one"
    elif absent and (near := get_close_matches(absent[0], odd, 1)):
        hint = f"the nearest to {absent[0]!r} is {near[0]!r}; rename it, or choose the network of the file"
    else:
        hint = "choose the network and the settings of the file"
    raise ConfigError(f"model.weights is {file!r}, which does not fit {type(network).__name__}: it {faults}; {hint}")


def _form(tensor: Tensor) -> str:
    """A tensor's shape, and its type where the type is not of floating point."""
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return f"{tuple(tensor.shape)}{kind}"


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
