"""Recordings on a CPU that repeat as CUDA graphs do: the same operations on the same addresses, without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lit_fed.engine.clients.graphs import StaticTensors
from lit_fed.errors import ConfigError, reason
from lit_fed.tensors import map_tensors


class Operations(TorchDispatchMode):
    """Keeps every operation with its tensors; reading a number is refused, as while a stream is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        # Aliases: the tensors themselves would hold autograd's graph.
        self.calls.append(map_tensors((function, args, kwargs or {}, result), Tensor.detach))
        return result

    def repeat(self) -> None:
        """Run the operations again, each into the tensors of its first result."""
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                again = function(*args, **kwargs)
                for kept, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():  # else a view, or in place
                        kept.copy_(new)


def record(step: Callable[[], None], device: torch.device, static: Sequence[StaticTensors]) -> Callable[[], None]:
    """`lit_fed.engine.clients.graphs.record` for a CPU."""
    for _ in range(3):
        step()
        for tensors in static:
            tensors.is_complete = True
    operations = Operations()
    try:
        with operations:
            step()
    except RuntimeError as error:
        raise ConfigError(f"cannot be recorded: {reason(error)}") from error
    return operations.repeat
