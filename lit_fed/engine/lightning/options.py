"""Settings that several rooms of the engine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fed.checks import check_choice, check_range


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """What happens to gradients between backward and step.

    Args:
        clip_val: Threshold, None for no clipping.
        clip_algorithm: ``norm`` scales all gradients to a total norm of at most the threshold, ``value`` clamps each.
        accumulate: Batches whose gradients are averaged into one step.

    Raises:
        ConfigError: For a value out of range.
    """

    clip_val: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    accumulate: int = 1

    def __post_init__(self) -> None:
        check_range("trainer.gradient_clip_val", self.clip_val, above=0, null="for no clipping")
        check_choice("trainer.gradient_clip_algorithm", self.clip_algorithm, ("norm", "value"))
        check_range("trainer.accumulate_grad_batches", self.accumulate, least=1)


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How networks are run, which changes no more than rounding.

    Args:
        compile: By ``torch.compile``.
        channels_last: Images go to the networks with a pixel's channels side by side in memory.
    """

    compile: bool = False
    channels_last: bool = False
