"""Settings that several rooms of the engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_fed.checks import check_choice, check_range

ScheduleSteps = Literal["round", "run"]


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """Treatment of gradients between backward and step.

    Args:
        clip_val: Threshold, None for no clipping.
        clip_algorithm: ``norm`` scales all gradients to a total norm of at most the threshold, ``value`` clamps each.
        accumulate: Batches whose gradients are averaged into one step.
        schedule_steps: Span of a schedule by steps: a client's work in a ``round``, or in the whole ``run``.

    Raises:
        ConfigError: For a value out of range.
    """

    clip_val: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    accumulate: int = 1
    schedule_steps: ScheduleSteps = "round"

    def __post_init__(self) -> None:
        check_range("trainer.gradient_clip_val", self.clip_val, above=0, null="for no clipping")
        check_choice("trainer.gradient_clip_algorithm", self.clip_algorithm, ("norm", "value"))
        check_range("trainer.accumulate_grad_batches", self.accumulate, least=1)
        check_choice("trainer.schedule_steps", self.schedule_steps, get_args(ScheduleSteps))

    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Clip stacked gradients (n, …) in place, each client's as ``torch.nn.utils`` clips a single client's."""
        if self.clip_val is None or not gradients:
            return
        if self.clip_algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-self.clip_val, self.clip_val)
            return
        norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
        factors = (self.clip_val / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *(1 for _ in gradient.shape[1:])))


Compile = bool | Literal["reduce-overhead", "graph"]
"""Compilation of clients' networks or steps."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Execution of networks, which changes results by rounding only.

    Args:
        compile: By ``torch.compile``, with its mode ``reduce-overhead``, or clients' steps by CUDA graphs.
        channels_last: Lay out images with a pixel's channels side by side in memory.
    """

    compile: Compile = False
    channels_last: bool = False
