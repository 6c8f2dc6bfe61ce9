"""Settings that several rooms of the engine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleSteps = Literal["round", "run"]


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """How gradients become steps.

    Args:
        clip_val: Threshold, None for no clipping.
        clip_algorithm: ``norm`` scales all gradients to a total norm of at most the threshold, ``value`` clamps each.
        accumulate: Batches whose gradients are averaged into one step.
        schedule_steps: What a schedule by steps spans: a client's work in a ``round``, or in the whole ``run``.
    """

    clip_val: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    accumulate: int = 1
    schedule_steps: ScheduleSteps = "round"


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How networks are run, which changes no more than rounding.

    Args:
        compile: By ``torch.compile``.
        channels_last: Images go to the networks with a pixel's channels side by side in memory.
    """

    compile: bool = False
    channels_last: bool = False
