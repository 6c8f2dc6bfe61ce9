"""One task of a process: its objective, its hooks, evaluation and prediction with it.

What `lit_fed.engine.local.LocalLoop` adds is training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import Callback, Fabric, LightningModule
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torchmetrics import Metric

from lit_fed.engine.algorithm import Algorithm
from lit_fed.engine.compatibility import overrides
from lit_fed.engine.local_batches import batch_size_of, map_tensors, seed_device
from lit_fed.engine.meter import Meter, share
from lit_fed.engine.metric_names import Direction
from lit_fed.engine.model import Model
from lit_fed.engine.objective import at_work, bind_step, join, task_name
from lit_fed.engine.options import GradientOptions
from lit_fed.engine.strategy import Workers
from lit_fed.engine.surface import plain_name
from lit_fed.engine.task_trainer import TaskTrainer
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TaskStage = Literal["fit", "validate", "test", "predict"]
_EVALUATION_SEED = derive_seed(0, "evaluation")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class TaskLoop:
    """Evaluates one task as any client, and predicts with it.

    Args:
        fabric: Gives precision, device and backward.
        model: The task's tensors; the task is on the device after this.
        algorithm: The method.
        workers: Tells whether a client's batches are split over processes (``ddp``).
        gradients: Clipping and accumulation.
        callbacks: Lightning's, which watch the local work.
        max_rounds: Rounds in all, the task's ``self.trainer.max_epochs``.
        datamodule: The task's ``self.trainer.datamodule``.
        channels_last: Lay batches of images out so.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: Model,
        algorithm: Algorithm[Any],
        workers: Workers,
        gradients: GradientOptions,
        callbacks: Iterable[Callback] = (),
        max_rounds: int = 1,
        datamodule: Any = None,
        channels_last: bool = False,
    ) -> None:
        self.fabric, self.model, self.algorithm, self.workers, self.gradients = (
            fabric,
            model,
            algorithm,
            workers,
            gradients,
        )
        self.objective, self.state = join(model.task, algorithm, model)
        wrapped = fabric.setup_module(self.objective)
        self.objective._fabric = None  # what Fabric notes there is for `at_work`
        self.trainer = TaskTrainer(fabric, max_rounds, datamodule, gradients, workers.data_parallel)
        self.trainer.callbacks = list(callbacks)
        self.trainer.model, self.trainer.call = self.objective, self.call
        self.state.trainer = self.trainer
        # DDP must see the call; otherwise the objective's own method avoids the wrapper's cost on every batch.
        self.training_step: Callable[..., Any] = (wrapped if workers.data_parallel else self.objective).training_step
        self.directions: dict[str, Direction] = {}  # what logged torchmetrics objects say of themselves
        self.metrics = [module for module in model.task.modules() if isinstance(module, Metric)]
        self.is_fresh = True  # the task has just been set up
        self.channels_last = channels_last
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._steps: dict[str, Callable[..., Any]] = {}
        self._transfers = any(overrides(model.task, name) for name in _TRANSFER)
        precision = fabric.strategy.precision
        self.scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        plain = type(precision) is Precision  # 32-true: nothing to convert, no context to enter
        self.autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext if plain else fabric.autocast
        # Autocast converts as it goes; the "true" precisions want their inputs in the type of the weights.
        self._convert_inputs = not plain and not isinstance(precision, MixedPrecision)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The task belongs to the federation for a while; afterwards it is a plain LightningModule again."""
        inner = [module for module in self.model.task.modules() if isinstance(module, LightningModule)][1:]
        synced = [metric.sync_on_compute for metric in self.metrics]
        with at_work(self.objective, self.state, self.fabric):
            for module in inner:
                module.trainer = self.trainer  # type: ignore[assignment]  # a Trainer in what it offers
            try:
                yield
            finally:
                self.model.leave()
                self.begin_metrics(sync=False)
                for metric, before in zip(self.metrics, synced, strict=True):
                    share(metric, before)
                for module in inner:
                    module.trainer = None

    def begin(self, stage: TaskStage) -> None:
        """Tell the task what begins: ``setup``, unless it was set up for this just now, and ``on_fit_start``.

        Raises:
            ConfigError: If it makes new parameters, which nobody has trained.
        """
        if not self.is_fresh:
            self.call("setup", stage)
            if not self.model.is_of(self.model.task):
                raise ConfigError(
                    f"model {task_name(self.objective)} makes other parameters in setup({stage!r}) than it has; make "
                    "them once"
                )
        self.is_fresh = False
        if stage == "fit":
            self.call("on_fit_start")

    def end(self, stage: TaskStage) -> None:
        """Tell the task what is over: ``on_fit_end`` and ``teardown``."""
        if stage == "fit":
            self.call("on_fit_end")
        self.call("teardown", stage)

    def begin_metrics(self, sync: bool) -> None:
        """Empty the task's torchmetrics, which would hand on what they saw, and say whether processes share them."""
        for metric in self.metrics:
            share(metric, sync)
            if metric.update_called:
                metric.reset()

    @property
    def converts(self) -> bool:
        """Whether a batch that a loader made on the device is not yet what the task gets."""
        return self._transfers or self._convert_inputs

    def call(self, hook: str, *args: Any) -> None:
        """Call one of Lightning's hooks on the task and on Lightning's callbacks, where they have it."""
        found = self._hooks.get(hook)
        for function in self.listeners(hook) if found is None else found:
            function(*args)

    def listeners(self, hook: str) -> list[Callable[..., Any]]:
        """Who has a hook of its own; looked up once, for a hook may run for every batch."""
        found = self._hooks.get(hook)
        if found is None:
            found = []
            for callback in self.trainer.callbacks:
                if getattr(type(callback), hook, None) is not getattr(Callback, hook, None):
                    own = getattr(callback, hook)
                    found.append(lambda *args, own=own: own(self.trainer, self.objective, *args))
            if overrides(self.model.task, hook):
                found.append(getattr(self.objective, hook))
            self._hooks[hook] = found
        return found

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], subset: Literal["val", "test"], spread: bool = False) -> dict[str, float]:
        """Means of what ``test_step`` (or ``validation_step``) logs over a loader.

        Args:
            loader: Batches.
            subset: Which of the two steps to call; the other where the task has only that.
            spread: Divide the batches among the processes and merge; every process must then call this.

        Returns:
            Values by name without a leading ``test`` or ``val``; empty where there is no batch.
        """
        stage = self.evaluation_stage(subset)
        if stage is None:
            return {}
        step = self.bound(f"{stage}_step")
        batches, length = loader, len(loader) if isinstance(loader, Sized) else None
        if length == 0:
            return {}
        # With fewer batches than processes everybody goes through all of them: nobody is left without one.
        spread = spread and self.workers.world_size > 1 and (length is None or length >= self.workers.world_size)
        if spread:
            batches = islice(loader, self.workers.rank, None, self.workers.world_size)
        meter = self.state.meter = Meter()
        self.trainer.stage = "test" if subset == "test" else "validate"
        self.begin_metrics(sync=spread)
        with self.mode(stage):
            try:
                self.call(f"on_{stage}_start")
                self.call(f"on_{stage}_epoch_start")
                for batch_idx, batch in enumerate(batches):
                    batch = self.to_device(batch, loader)
                    meter.batch_size = batch_size_of(batch)
                    self.call(f"on_{stage}_batch_start", batch, batch_idx, 0)
                    with self.autocast():
                        output = step(batch, batch_idx)
                    self.call(f"on_{stage}_batch_end", output, batch, batch_idx, 0)
                meter.batch_size = 1
                self.call(f"on_{stage}_epoch_end")
                self.call(f"on_{stage}_end")
            finally:
                self.state.meter = None
        self.directions |= {plain_name(name): found for name, found in meter.directions.items()}
        values = meter.merged(self.workers, self.metrics) if spread else meter.compute()
        return {plain_name(name): value for name, value in values.items()}

    @contextmanager
    def mode(self, stage: str) -> Iterator[None]:
        """Evaluation mode for a while, or what the task's own hooks make of it; and noise that is always the same."""
        seed_device(_EVALUATION_SEED, self.fabric.device)
        enter, leave = (self.listeners(f"on_{stage}_model_{mode}") for mode in ("eval", "train"))
        if not enter and not leave:
            with self.model.evaluating():
                yield
            return
        with self.model.same_modes():
            for function in enter or [self.objective.eval]:
                function()
            yield
            for function in leave:
                function()

    def bound(self, hook: str) -> Callable[..., Any]:
        """One of the task's steps; looked up once, for every client is evaluated."""
        if hook not in self._steps:
            self._steps[hook] = bind_step(self.objective, hook)
        return self._steps[hook]

    def evaluation_stage(self, subset: Literal["val", "test"]) -> str | None:
        """``test`` or ``validation``: which of the task's steps evaluates; None where it has none."""
        preferred = ("test", "validation") if subset == "test" else ("validation", "test")
        return next((stage for stage in preferred if overrides(self.model.task, f"{stage}_step")), None)

    @torch.no_grad()
    def predict(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Every batch with what ``predict_step`` returns for it, in order."""
        step = self.bound("predict_step")
        self.trainer.stage = "predict"
        self.begin_metrics(sync=False)
        with self.mode("predict"):
            self.call("on_predict_start")
            self.call("on_predict_epoch_start")
            for batch_idx, batch in enumerate(loader):
                batch = self.to_device(batch, loader)
                self.call("on_predict_batch_start", batch, batch_idx, 0)
                with self.autocast():
                    output = step(batch, batch_idx)
                self.call("on_predict_batch_end", output, batch, batch_idx, 0)
                yield batch, output
            self.call("on_predict_epoch_end")
            self.call("on_predict_end")

    @torch.no_grad()
    def figures(self, loaders: Mapping[str, Iterable[Any]]) -> dict[str, Figure]:
        """What the task draws of the first batch of each loader: ``test_figures``, where it has that."""
        draw = getattr(self.model.task, "test_figures", None)
        if draw is None:
            return {}
        batches = {name: batch for name, loader in loaders.items() for batch in islice(self.batches(loader), 1)}
        if not batches:
            return {}
        with self.mode("predict"), self.autocast():
            found: dict[str, Figure] = draw(batches)
        return found

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Every batch of a loader, on the device and in the model's precision."""
        for batch in loader:
            yield self.to_device(batch, loader)

    def to_dtype(self, batch: Any, dtype: torch.dtype) -> Any:
        """A batch on the device, floating-point tensors in a type of their own."""
        moved = self._laid_out(self.fabric.to_device(batch))
        return map_tensors(moved, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def to_device(self, batch: Any, loader: Iterable[Any]) -> Any:
        """Move a batch, unless its loader already makes it on the device, and give it the model's precision."""
        if self._transfers:
            batch = self.objective.on_before_batch_transfer(batch, 0)
            batch = self.objective.transfer_batch_to_device(batch, self.fabric.device, 0)
            batch = self.objective.on_after_batch_transfer(batch, 0)
        elif getattr(loader, "device", None) != self.fabric.device:
            batch = self.fabric.to_device(batch)
        if self._convert_inputs:
            batch = self.fabric.strategy.precision.convert_input(batch)
        return self._laid_out(batch)

    def _laid_out(self, batch: Any) -> Any:
        return map_tensors(batch, _channels_last) if self.channels_last else batch


def _channels_last(tensor: Tensor) -> Tensor:
    """Images (B, C, H, W) with a pixel's channels side by side in memory; convolutions keep what they are given so."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
