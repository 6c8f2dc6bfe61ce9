"""A pretrained base: parameters of a named file that never train.

A checkpoint names the SHA-256 of each in its place, and the file gives it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lit_fed.errors import CheckpointError
from lit_fed.private_names import version_of
from lit_fed.tensors import hash_of

Names = Mapping[str, tuple[str, str]]
"""By a parameter's name, its file and its digest."""

_LOADED = cast("Any", WeakTensorKeyDictionary)()  # by parameter, its file and its version after loading


def loaded_from(parameter: Tensor, file: str) -> None:
    """Record that a parameter has its values from a file."""
    _LOADED[parameter] = file, version_of(parameter)


def file_of(parameter: Tensor) -> str | None:
    """The file of a parameter's values; None where they come from elsewhere, or were written since."""
    file, version = _LOADED.get(parameter, ("", -1))
    return file if version == version_of(parameter) else None


class Base:
    """The parameters of one model that came from files and never train.

    Args:
        files: Their files, by name.
        tensors: Values by name, these among them.
    """

    def __init__(self, files: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensors[name] for name in files}
        self.names: Names = {name: (file, _digest_of(tensors[name])) for name, file in files.items()}
        self._versions = {name: version_of(tensor) for name, tensor in self.tensors.items()}

    def holds(self, name: Any, value: Any) -> bool:
        """Whether a value of this name is still the file's."""
        tensor = self.tensors.get(name)
        if tensor is None or version_of(tensor) != self._versions[name] or not isinstance(value, Tensor):
            return False
        alike = (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device)
        return value is tensor or (alike and torch.equal(value, tensor))


def shared(value: Any, bases: Collection[Base]) -> Any:
    """A nested value in which the tensors of bases are the bases' own, so that memory holds them once."""
    return _replaced(value, bases, named=False)


def named(value: Any, bases: Collection[Base]) -> Any:
    """A nested value in which digests stand for the tensors of bases."""
    return _replaced(value, bases, named=True)


def _replaced(value: Any, bases: Collection[Base], named: bool) -> Any:
    if isinstance(value, dict):
        found = {}
        for key, entry in value.items():
            base = next((one for one in bases if one.holds(key, entry)), None)
            if base is None:
                found[key] = _replaced(entry, bases, named)
            else:
                found[key] = base.names[key][1] if named else base.tensors[key]
        return found
    if type(value) in (list, tuple):
        return type(value)(_replaced(entry, bases, named) for entry in value)
    return value


def given(names: Names, own: Mapping[str, Tensor], path: Any) -> dict[str, Tensor]:
    """The tensors that a saved file names, from a network that read them itself.

    Args:
        names: As saved; names that the network lacks are left out.
        own: The network's tensors by name.
        path: The saved file, for errors.

    Raises:
        CheckpointError: If the network has other values.
    """
    found = {}
    for name, (file, digest) in names.items():
        if name in own:
            dtype = getattr(torch, digest.partition(":")[0], None)  # a saved file may say anything
            tensor = own[name].to(dtype) if isinstance(dtype, torch.dtype) else own[name]
            if _digest_of(tensor) != digest:
                raise CheckpointError(
                    f"{path} does not hold the pretrained weights of {file}, and {name!r} has other values here; give "
                    "that file, unchanged"
                )
            found[name] = tensor
    return found


def filled(value: Any, tensors: Mapping[tuple[str, str], Tensor]) -> Any:
    """A nested value in which tensors, by name and digest, stand for their digests again, see `named`."""
    if isinstance(value, dict):
        return {
            key: tensors.get((key, entry), entry) if isinstance(entry, str) else filled(entry, tensors)
            for key, entry in value.items()
        }
    return type(value)(filled(entry, tensors) for entry in value) if type(value) in (list, tuple) else value


def fill_base(checkpoint: Mapping[str, Any], network: nn.Module, path: Any) -> None:
    """Complete the ``state_dict`` of a checkpoint in place, from a network that has read its file of weights.

    Raises:
        CheckpointError: If the network has other values than the run's.
    """
    state: dict[str, Tensor] = checkpoint["state_dict"]
    names: Names = checkpoint.get("base", {}).get(next(iter(checkpoint.get("tasks", ())), ""), {})
    own, prefix = network.state_dict(), "network."
    if not names.keys() <= own.keys():  # the network of the task
        names = {name.removeprefix(prefix): entry for name, entry in names.items()}
    else:
        prefix = ""
    missing = {name: entry for name, entry in names.items() if prefix + name not in state}
    state.update({prefix + name: tensor for name, tensor in given(missing, own, path).items()})


def is_base(content: Any) -> bool:
    """Whether a saved file's entry names tensors by kind of network."""
    return isinstance(content, dict) and all(
        isinstance(names, dict)
        and all(
            isinstance(name, str) and type(entry) is tuple and [type(part) for part in entry] == [str, str]
            for name, entry in names.items()
        )
        for names in content.values()
    )


def _digest_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}:{hash_of(tensor)}"
