"""The trainer that a task sees, and settings of gradients and networks that several rooms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import Fabric
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fed.checks import check_range
from lit_fed.engine.lightning.meter import Meter

ScheduleSteps = Literal["round", "run"]
ClientOptimizer = Literal["fresh", "kept"]


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """Treatment of gradients between backward and step.

    Args:
        clip_val: Threshold, None for no clipping.
        clip_algorithm: ``norm`` scales all gradients to a total norm of at most the threshold, ``value`` clamps each.
        accumulate: Batches whose gradients are averaged into one step.
        schedule_steps: Span of a schedule by steps: a client's work in a ``round``, or in the whole ``run``.
        client_optimizer: Whether a client's optimizers begin each round ``fresh``, or with the state ``kept``.
    """

    clip_val: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    accumulate: int = 1
    schedule_steps: ScheduleSteps = "round"
    client_optimizer: ClientOptimizer = "fresh"

    def __post_init__(self) -> None:
        check_range("trainer.gradient_clip_val", self.clip_val, above=0, null="for no clipping")
        check_range("trainer.accumulate_grad_batches", self.accumulate, least=1)

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


def _during(stage: str) -> Any:
    """A property: whether the client's work is of a stage."""
    return property(lambda trainer: trainer.stage == stage)


class TaskTrainer:
    """The clock and the surroundings of a client's work, under the names of ``lightning.Trainer``.

    Args:
        fabric: Gives devices and processes.
        max_epochs: Rounds in all: learning rates are scheduled in rounds.
        datamodule: The population.
        gradients: Clipping, accumulation, and the span of schedules by steps.
        data_parallel: Whether several processes work on one client.

    Note:
        An epoch of this clock is a round, because schedules with ``interval: epoch`` count rounds; a client that makes
        five passes over its data in a round does so within one epoch of the clock. Steps count the client's work in
        this round, the span of schedules with ``interval: step``. With ``schedule_steps: run`` they count a phase of
        its work over all rounds, as if the client took part in each: a function of the round.
    """

    max_steps = -1
    sanity_checking = False
    fast_dev_run = False
    progress_bar_callback = None

    def __init__(
        self,
        fabric: Fabric,
        max_epochs: int,
        datamodule: Any,
        gradients: GradientOptions,
        data_parallel: bool = False,
    ) -> None:
        self.fabric = fabric
        self.max_epochs = max_epochs
        self.datamodule = datamodule
        self.accumulate_grad_batches = gradients.accumulate
        self.gradient_clip_val = gradients.clip_val
        self.gradient_clip_algorithm = gradients.clip_algorithm
        self.spans_run = gradients.schedule_steps == "run"
        self.data_parallel = data_parallel
        self.strategy: Any = fabric.strategy
        self.precision = str(fabric.strategy.precision.precision)  # such as ``32-true``
        self.is_global_zero = fabric.is_global_zero
        self.global_rank = fabric.global_rank
        self.local_rank = fabric.local_rank  # among this machine's processes
        # processes, devices of this machine and machines that work on one client
        self.world_size = fabric.world_size if data_parallel else 1
        self.num_devices = len(getattr(fabric.strategy, "parallel_devices", [0])) if data_parallel else 1
        self.num_nodes = int(getattr(fabric.strategy, "num_nodes", 1)) if data_parallel else 1
        self.model: Any = None
        self.call: Callable[..., None] = _nobody
        self.current_epoch = 0
        self.global_step = 0
        self.num_training_batches = 1  # until a client's work is known
        self.estimated_stepping_batches = 1
        self.steps_per_round = 0  # of the phase at hand, where schedules span the run
        self.optimizers: list[Optimizer] = []
        self.fabric_optimizers: list[Any] = []  # the same, wrapped, of a task that steps them by hand
        self.schedulers: list[LRScheduler] = []
        self.stage = "fit"
        self.loggers: list[Any] = []
        self.log_dir: Path | None = None
        self.meter: Meter | None = None
        self.callbacks: list[Any] = []

    def expect(self, steps: int) -> None:
        """Set the clock to the number of optimizer steps of a phase."""
        self.estimated_stepping_batches = steps
        if self.spans_run:
            self.steps_per_round = steps
            self.global_step = steps * self.current_epoch
            self.estimated_stepping_batches = steps * self.max_epochs

    @property
    def lightning_module(self) -> Any:
        """The task."""
        return self.model

    @property
    def logger(self) -> Any:
        """The run's first logger; a dummy on other processes than the first."""
        return self.loggers[0] if self.loggers else None

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The values that the client has logged so far in this work or test, on this process; read when asked for."""
        values = {} if self.meter is None else self.meter.so_far()
        return {name: torch.tensor(value) for name, value in values.items()}

    training = _during("fit")
    validating = _during("validate")
    testing = _during("test")
    predicting = _during("predict")

    @property
    def default_root_dir(self) -> str:
        """The run's folder."""
        return str(self.log_dir or "")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process."""
        self.fabric.print(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a client of a federation has no self.trainer.{name}; use current_epoch (the round), max_epochs, "
            "global_step, estimated_stepping_batches, datamodule, logger, optimizers or the properties of processes"
        )

    @property
    def should_stop(self) -> bool:
        """False: no client stops the run."""
        return False

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        raise AttributeError("a client cannot stop the run by self.trainer.should_stop; use callback EarlyStopping")


def clip_gradients(optimizer: Optimizer, options: GradientOptions) -> None:
    """Clip an optimizer's gradients."""
    if options.clip_val is not None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        options.clip([gradient.unsqueeze(0) for gradient in gradients])


def _nobody(hook: str, *args: Any) -> None:
    """Ignore a hook that nobody overrides."""
