"""Private names of torch, torchmetrics and Lightning, and what replaces a name that a release lacks.

A private name may be missing in any release. The package looks up each name here and nowhere else. Without it, a plain
and slower way runs, or the ability that needs it is refused with the library's version: docs/architecture_core.md lists
the names. The names are bound on import, so that a call costs no look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import chain, repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.errors import ConfigError
from lit_fed.tensors import map_leaves


def _found(module: str, *names: str) -> list[Any] | None:
    """The values of names in a module; None if one does not exist."""
    try:
        return [attrgetter(name)(import_module(module)) for name in names]
    except (ImportError, AttributeError):
        return None


def lacks(package: str, name: str) -> str:
    """Half of an error: the release that lacks a name, and the remedy."""
    return f"{package} {version(package)} has no {name}; install an earlier {package}"


# ---------------------------------------------------------------------- lists of tensors


def _each(single: Callable[..., Tensor], tensors: list[Tensor], *others: Any, **kwargs: Any) -> list[Tensor]:
    columns = [other if isinstance(other, list | tuple) else repeat(other) for other in others]
    return [single(*row, **kwargs) for row in zip(tensors, *columns, strict=False)]  # a number is repeated without end


_FOREACH = ("add", "addcmul_", "copy_", "div", "lerp_", "mul", "mul_", "norm", "sign", "sqrt", "sub", "zero_")
foreach = SimpleNamespace(**{n: getattr(torch, f"_foreach_{n}", partial(_each, getattr(Tensor, n))) for n in _FOREACH})
"""Operations on lists of tensors, ``torch._foreach_…``; a second list has the first's length."""


# ---------------------------------------------------------------------- nested values


def _flatten(tree: Any, **_options: Any) -> tuple[list[Any], Any]:
    """Leaves, and a structure that is equal to one of the same types and keys in the same order."""
    leaves: list[Any] = []
    form = map_leaves(tree, leaves.append)
    return leaves, (repr(form), form)


def _unflatten(leaves: Iterable[Any], spec: Any) -> Any:
    left = iter(leaves)
    return map_leaves(spec[1], lambda _leaf: next(left))


tree_flatten, tree_leaves, tree_map, tree_unflatten = _found(
    "torch.utils._pytree", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"
) or [_flatten, lambda tree: _flatten(tree)[0], lambda function, tree: map_leaves(tree, function), _unflatten]


# ---------------------------------------------------------------------- tensors, modules, optimizers

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BATCH_NORMS += tuple(_found("torch.nn", "modules.batchnorm._BatchNorm") or ())  # other libraries' have this base
TorchDispatchMode: Any = (_found("torch.utils._python_dispatch", "TorchDispatchMode") or [object])[0]
"""Base of classes that see the kernels of an operation; ``object`` in a torch without it."""

run_backward: Any = (_found("torch.autograd", "Variable._execution_engine.run_backward") or [None])[0]
"""The autograd engine's function that ``torch.autograd.backward`` calls; None in a torch without it."""

has_versions = _found("torch", "Tensor._version") is not None
version_of: Callable[[Tensor], Any] = attrgetter("_version") if has_versions else lambda _tensor: object()
"""A value that changes with every write to a tensor; without versions, it differs each time."""


def _softmax_backward(gradient: Tensor, output: Tensor, dim: int, _dtype: torch.dtype) -> Tensor:
    return output * (gradient - (gradient * output).sum(dim, keepdim=True))


softmax_backward: Callable[..., Tensor] = (_found("torch", "_softmax_backward_data") or [_softmax_backward])[0]
"""Gradient by the input of softmax, of (gradient, output, dimension, the input's dtype)."""

_GLOBAL = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
_before, _after = _found("torch.optim.optimizer", *_GLOBAL) or [True, True]
_profiles = (_found("torch", "_C._autograd._profiler_enabled") or [lambda: True])[0]


def is_watched(optim: Optimizer) -> bool:
    """Whether a hook or a profiler sees an optimizer's step; true where torch does not tell."""
    own = getattr(optim, "_optimizer_step_pre_hooks", True) or getattr(optim, "_optimizer_step_post_hooks", True)
    return bool(own or _before or _after or _profiles())


def passing_buffers(module: nn.Module) -> Any:
    """Names of a module's own buffers that are not in its ``state_dict``."""
    if (names := getattr(module, "_non_persistent_buffers_set", None)) is None:
        in_state = nn.Module.state_dict(module)  # not a class's own, which may leave out more
        names = {name for name, _ in module.named_buffers(recurse=False) if name not in in_state}
    return names


# ---------------------------------------------------------------------- metrics

UPDATES = "_update_count"
"""A metric's attribute by which it tells whether it was updated."""
SHARE_STATES = "_compute_groups_create_state_ref"
"""A collection's method that is called whenever its metrics are looked at."""


def computed_value(metric: Any) -> Any:
    """The value that ``compute`` returned since the last update; without a cache, a metric's value now."""
    if hasattr(metric, "_computed"):
        return metric._computed
    return metric.compute() if metric.update_called else None


def share(metric: Any, everywhere: bool) -> None:
    """Set whether a metric's ``compute`` merges processes; it must not where processes hold different clients."""
    metric.sync_on_compute = everywhere
    metric._to_sync = everywhere  # read by ``compute``; set from `sync_on_compute` only when a metric is made
    metric.distributed_available_fn = torch.distributed.is_initialized if everywhere else bool  # which is False


def merge_states(metric: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Load a metric with its states of several processes, each reduced as the metric declares.

    Args:
        metric: The metric.
        states: By name, of each process that updated it.
    """
    if absent := [name for name in ("_computed", "_reductions", UPDATES) if not hasattr(metric, name)]:
        raise ConfigError(f"a metric's states do not merge over processes: {lacks('torchmetrics', absent[0])}")
    metric._computed, metric._update_count = None, max(metric._update_count, len(states))
    for name, reduce in metric._reductions.items() if states else ():
        values = [state[name] for state in states]
        joined = list(chain(*values)) if isinstance(values[0], list) else torch.stack(values)
        setattr(metric, name, reduce(joined) if callable(reduce) and isinstance(joined, Tensor) else joined)
