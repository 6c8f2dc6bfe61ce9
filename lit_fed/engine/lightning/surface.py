"""What a task uses of Lightning while it works for a federation, under Lightning's names.

`lit_fed.engine.lightning.objective.Objective` builds on it. Under a plain ``lightning.Trainer`` everything is
Lightning's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning import LightningModule
from lightning.fabric.utilities.apply_func import convert_to_tensors
from torch import Tensor, nn

from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.lightning.task_trainer import TaskTrainer, clip_gradients
from lit_fed.engine.method.client import Client
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.engine.method.algorithm import Algorithm

_STAGE = re.compile(r"^(train|val|test)[/_]")
ATTRIBUTE = "_lit_fed"
"""Where a task's attributes hold what its objective works on."""


@cache
def plain_name(name: str) -> str:
    """A logged name without a leading ``train``, ``val`` or ``test`` and its ``/`` or ``_``."""
    return _STAGE.sub("", name)


@dataclass(slots=True)
class ObjectiveState:
    """What an objective works on at the moment; a plain object, because ``nn.Module`` makes setting attributes slow.

    Args:
        algorithm: The method.
        client: Whose work it is.
        step: The task's own ``training_step``, with the arguments it takes.
        head: The submodule whose input and output are captured, None where no method asks for them.
        meter: Takes what is logged; None under a plain ``lightning.Trainer``.
        trainer: What the task sees as ``self.trainer`` in a federation.
        training: Whether what is logged is about training.
        muted: Whether what is logged is dropped.
        public: Whether the batch is the public set's.
        batch_idx: Number of the batch in its epoch.
        returned: What the task's own step returned last.
        capturing: Whether the head is listened to at the moment.
        captured: What the head saw and put out, once for every time it ran.
    """

    algorithm: Algorithm[Any]
    client: Client
    step: Callable[[Any, int], Any]
    head: nn.Module | None = None
    meter: Meter | None = None
    trainer: TaskTrainer | None = None
    training: bool = False
    muted: bool = False
    public: bool = False
    batch_idx: int = 0
    returned: Any = None
    capturing: bool = False
    captured: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Surface(LightningModule):
    """The part of an objective that answers the task where Lightning's trainer would."""

    @property
    def state(self) -> ObjectiveState:
        """What it works on."""
        state: ObjectiveState = self.__dict__[ATTRIBUTE]
        return state

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Log as in Lightning; in a federation the value joins the client's mean over batches, without a device sync.

        ``on_step``, ``prog_bar`` and the like have no meaning there; ``logger=False`` keeps a value out of the record.
        """
        state = self.state
        if state.meter is None:
            if state.trainer is not None and not state.muted:
                raise ConfigError(f"self.log({name!r}, …) outside of training, validation and test is kept nowhere")
            if self._trainer is not None and not state.muted:
                super().log(name, value, *args, batch_size=batch_size, **kwargs)  # type: ignore[misc]
            return
        logged = args[1] if len(args) > 1 else kwargs.get("logger")
        if state.muted or logged is False:
            return
        reduce_fx = args[4] if len(args) > 4 else kwargs.get("reduce_fx", "mean")
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self.log(f"{name}.{key}", entry, *args, batch_size=batch_size, **kwargs)
            return
        plain = plain_name(name)
        if state.training:
            if plain == "loss" and self.automatic_optimization:
                return  # it is the objective that stands there, and beside it the task's loss as a term of its own
            plain = f"train/{plain}"
        state.meter.add(plain, value, batch_size, reduce_fx)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values, see `log`."""
        if self.state.meter is None and self.state.trainer is None:
            if self._trainer is not None:
                super().log_dict(dictionary, *args, **kwargs)
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    @property
    def trainer(self) -> Any:
        """In a federation the client's clock and surroundings, see `TaskTrainer`."""
        own = self.state.trainer
        return super().trainer if own is None else own

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]  # the property's own setter

    @property
    def current_epoch(self) -> int:
        """The round, in a federation: the unit in which learning rates are scheduled there."""
        own = self.state.trainer
        return super().current_epoch if own is None else own.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps of the client's work in this round, in a federation."""
        own = self.state.trainer
        return super().global_step if own is None else own.global_step

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        own = self.state.trainer
        return super().global_rank if own is None else own.global_rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        own = self.state.trainer
        return super().local_rank if own is None else own.local_rank

    @property
    def logger(self) -> Any:
        """The run's first logger, on the first process."""
        own = self.state.trainer
        return super().logger if own is None else own.logger

    @property
    def loggers(self) -> Any:
        """The run's loggers, on the first process."""
        own = self.state.trainer
        return super().loggers if own is None else own.loggers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizers of a client's phase, as in Lightning: one or several."""
        own = self.state.trainer
        if own is None:
            return super().optimizers(use_pl_optimizer)
        found = self._fabric_optimizers if use_pl_optimizer and not self.automatic_optimization else own.optimizers
        return found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward where the task optimises by hand, with the hooks around it."""
        own = self.state.trainer
        if own is not None:
            own.call("on_before_backward", loss)
        super().manual_backward(loss, *args, **kwargs)
        if own is not None:
            own.call("on_after_backward")

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors from the processes that work on one client; where it is one, they are as they were."""
        own = self.state.trainer
        if own is None or own.data_parallel:
            return super().all_gather(data, group, sync_grads)
        return convert_to_tensors(data, device=self.device)

    def lr_schedulers(self) -> Any:
        """The schedulers of a client that optimises by hand, as in Lightning: one, several or none."""
        own = self.state.trainer
        if own is None:
            return super().lr_schedulers()
        return None if not own.schedulers else own.schedulers[0] if len(own.schedulers) == 1 else own.schedulers

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer, as in Lightning."""
        own = self.state.trainer
        if own is None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        value = own.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if value is not None:
            clip_gradients(optimizer, value, gradient_clip_algorithm or own.gradient_clip_algorithm)
