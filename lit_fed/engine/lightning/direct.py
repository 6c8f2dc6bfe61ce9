"""Torch's backward and optimizer step without their overhead for profilers and hooks, where there are none.

On a small network the overhead (a profiler record, a copy of the context, checks of arguments) costs as much as the
network's own forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_fed.private_names import is_watched, run_backward

_ONE = torch.ones(())
_RECORDED = getattr(Optimizer, "profile_hook_step", lambda step: step)(lambda: None).__code__
"""Torch's wrapper of every optimizer's ``step``: profiler record and hooks."""


def backward(loss: Tensor) -> None:
    """``loss.backward()``; for a plain number on the CPU, by the autograd engine directly."""
    if run_backward and type(loss) is Tensor and loss.dtype == torch.float32 and not loss.ndim and loss.is_cpu:
        # as torch.autograd.backward calls it
        run_backward((loss,), (_ONE,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        loss.backward()


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``; without the wrapper where no profiler runs and no hook is registered."""
    function: Any = type(optimizer).step
    if (
        "step" in vars(optimizer)  # as a scheduler puts one there
        or is_watched(optimizer)
        or getattr(function, "__code__", None) is not _RECORDED
    ):
        optimizer.step()
    else:
        function.__wrapped__(optimizer)
