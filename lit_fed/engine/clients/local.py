"""A client's local work: the training loop and the evaluation loop over one objective.

This is the hot path. Per batch it costs a loader step, the task's own work and the hooks that somebody overrides;
nothing is built per batch and the device is never synchronised.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import Callback, Fabric, LightningModule
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor
from torch.optim import SGD, Optimizer
from torchmetrics import Metric

from lit_fed.engine.lightning import direct
from lit_fed.engine.lightning.compatibility import overrides
from lit_fed.engine.lightning.meter import Meter, share
from lit_fed.engine.lightning.metric_names import Direction
from lit_fed.engine.lightning.objective import at_work, bind_step, join, task_name
from lit_fed.engine.lightning.optimization import HandedOptimizer, OptimizerFactory, Schedule
from lit_fed.engine.lightning.options import GradientOptions
from lit_fed.engine.lightning.surface import plain_name
from lit_fed.engine.lightning.task_trainer import TaskTrainer, clip_gradients
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, Pass, Phase, Tensors
from lit_fed.engine.method.model import Model
from lit_fed.engine.wire.batches import batch_size_of, mark_last, slice_batch
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, seed_device
from lit_fed.tensors import map_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TaskStage = Literal["fit", "validate", "test", "predict"]
_EVALUATION_SEED = derive_seed(0, "evaluation")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LocalLoop:
    """Trains and evaluates one task as any client, and predicts with it.

    Args:
        fabric: Gives precision, device and backward.
        model: The task's tensors; the task is on the device after this.
        algorithm: The method.
        workers: Tells whether a client's batches are split over processes (``ddp``).
        gradients: Clipping, accumulation, and what a schedule by steps spans.
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
        task, algorithm = self.model.task, self.algorithm
        self.optimizers = OptimizerFactory(self.objective, self.trainer)
        self._manual_step = self.state.step
        self.corrects = type(algorithm).correct is not Algorithm.correct
        self.counts_steps = "one_optimizer" in algorithm.all_needs
        self._replaced = {name for name in _REPLACEABLE if overrides(task, name)}
        self._wants_outputs = bool(self.listeners("on_train_batch_end"))
        self._has_gradients = False
        self._watches_zero_grad = "optimizer_zero_grad" in self._replaced or bool(self.listeners("on_before_zero_grad"))
        # Fabric's way to a plain backward and step costs as much as a small layer's forward.
        strategy = self.fabric.strategy
        is_plain, own = type(strategy.precision) is Precision, type(strategy)
        self._backward: Callable[[Tensor], object] = self.fabric.backward
        self.take_step: Callable[[Optimizer], object] = strategy.optimizer_step
        if is_plain and own.backward is Strategy.backward:
            self._backward = direct.backward
        if is_plain and own.optimizer_step is Strategy.optimizer_step:
            self.take_step = direct.step
        self._scaler_state = self.scaler.state_dict() if self.scaler is not None else {}

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

    # ------------------------------------------------------------------ training

    def train(self, client: Client, phases: Iterable[Phase | Pass]) -> Meter:
        """Run a client's phases and passes in order; returns what was logged."""
        state, trainer, model = self.state, self.trainer, self.model
        meter = state.meter = Meter()
        state.client, state.training, trainer.stage = client, True, "fit"
        client.objective = self.objective
        trainer.current_epoch, trainer.global_step = client.round_idx, 0
        lr = client.fine_tuning.lr if client.fine_tuning is not None else None
        seed_device(client.derive_seed("training"), self.fabric.device)
        self.reset_scaler()
        if not self.objective.training:  # walks over all submodules
            self.objective.train()
        self.begin_metrics(sync=self.workers.data_parallel)
        try:
            self.call("on_train_start")
            for one in phases:
                client.phase = one.name
                if isinstance(one, Pass):
                    self.read(one, client)
                else:
                    self._run_phase(one, client, meter, one.lr if one.lr is not None or one.public else lr)
            self.call("on_train_end")
            model.check_fixed()
        finally:
            state.meter, state.training = None, False
            client.forget()
            model.forget_gradients()  # while its update is taken in
        return meter

    def reset_scaler(self) -> None:
        """Forget the scale of 16-bit gradients: what is learnt on one client must not reach the next."""
        if self.scaler is not None:
            self.scaler.load_state_dict(self._scaler_state)

    def _run_phase(self, phase: Phase, client: Client, meter: Meter, lr: float | None) -> None:
        model, objective = self.model, self.objective
        if phase.begin is not None:
            self.workers.agree(model.tensors(model.buffers))  # ddp: each process saw its part of the batches
            client.left = model.copy()
            model.load(phase.begin)
        if phase.seed is not None:
            seed_device(phase.seed, self.fabric.device)
        model.set_trainable(phase.trains)
        self._has_gradients = False  # `set_trainable` forgets them: a client of one step need not do it again
        self.state.public = phase.public
        steps = self.expect(phase)
        optimizers, schedulers = self._make_optimizers(phase, client, lr)
        automatic = objective.automatic_optimization
        gradient = _MeanGradient() if not phase.moves else None
        remaining = steps
        for _ in range(int(phase.epochs or 0)) if steps is None else count():
            self.call("on_train_epoch_start")
            taken = 0
            for batch_idx, (batch, last) in enumerate(mark_last(islice(phase.loader, remaining))):
                batch = self.to_device(batch, phase.loader)
                meter.batch_size = batch_size_of(batch)
                if self._says_stop("on_train_batch_start", batch, batch_idx):
                    break
                if automatic:
                    output = self._step_automatically(
                        client, batch, batch_idx, optimizers[0], schedulers, last, gradient
                    )
                else:
                    with self.autocast():
                        output = self._manual_step(batch, batch_idx)
                if self._wants_outputs:
                    self.call("on_train_batch_end", self._outputs(output), batch, batch_idx)
                taken += 1
            meter.batch_size = 1
            self.call("on_train_epoch_end")
            if remaining is not None:
                remaining -= taken
                if remaining <= 0 or not taken:
                    break
        self.state.public = False
        if gradient is not None:
            client.results[phase.name] = gradient.means()

    def expect(self, phase: Phase) -> int | None:
        """Tell the task's clock how long a phase is; returns its batches where it is not a whole number of epochs."""
        steps, trainer = num_batches(phase), self.trainer
        trainer.num_training_batches = len(phase.loader) if isinstance(phase.loader, Sized) else 0
        if trainer.spans_run and steps is None and not isinstance(phase.loader, Sized):
            raise ConfigError("trainer.schedule_steps is 'run', and loaders do not know their length; set local_steps")
        accumulate = self.gradients.accumulate if phase.moves else 1
        trainer.expect(_optimizer_steps(phase, steps, trainer.num_training_batches, accumulate))
        return steps

    def _make_optimizers(
        self, phase: Phase, client: Client, lr: float | None
    ) -> tuple[list[Optimizer], list[Schedule]]:
        optimizers, schedulers = self.optimizers.build(phase.name, client.round_idx)
        client.steps.begin_phase()
        if lr is not None:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr
        self.trainer.optimizers, self.trainer.schedulers = optimizers, [entry.scheduler for entry in schedulers]
        if not phase.moves:  # the task may look at its own, and the loop steps another
            return [SGD((p for p in self.model.parameters.values() if p.requires_grad), lr=0.0)], []
        if not self.objective.automatic_optimization:
            for optimizer in optimizers:
                if self.corrects or self.counts_steps or self.listeners("on_before_optimizer_step"):
                    optimizer.register_step_pre_hook(lambda one, _args, _kwargs: self._before_step(client, one))
                optimizer.register_step_post_hook(self._count_step)
            wrapped = self.fabric.setup_optimizers(*optimizers)
            self.objective._fabric_optimizers = list(wrapped) if isinstance(wrapped, tuple) else [wrapped]
        return optimizers, schedulers

    def _count_step(self, *_args: Any) -> None:
        self.trainer.global_step += 1

    def _before_step(self, client: Client, optimizer: Optimizer) -> None:
        """The method's part in a step, before clipping."""
        if self.counts_steps:
            client.steps.count(optimizer)
        if self.corrects:
            parameters = self.model.parameters
            if len(self.trainer.optimizers) > 1:  # the others' gradients may be corrected in their own steps
                steps = {id(p) for group in optimizer.param_groups for p in group["params"]}
                parameters = {name: p for name, p in parameters.items() if id(p) in steps}
            found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            for name, gradient in self.algorithm.correct(client, found).items():
                parameters[name].grad = gradient
        self.call("on_before_optimizer_step", optimizer)

    def _step_automatically(
        self,
        client: Client,
        batch: Any,
        batch_idx: int,
        optimizer: Optimizer,
        schedulers: list[Schedule],
        last: bool,
        gradient: _MeanGradient | None,
    ) -> Any:
        accumulate = self.gradients.accumulate if gradient is None else 1
        loss: Tensor | None = None

        def closure() -> Tensor | None:
            nonlocal loss
            loss = self._take_gradients(batch, batch_idx, optimizer, accumulate)
            return loss

        def step() -> None:
            # None is Lightning's way of skipping a batch; gradients of batches before it are still stepped on.
            if loss is not None or (accumulate > 1 and any(p.grad is not None for p in self.model.parameters.values())):
                self._step(client, optimizer)

        if (batch_idx + 1) % accumulate and not last:
            return closure()
        if gradient is not None:
            if closure() is not None:
                self._unscale(optimizer)
                taken = {name: p.grad for name, p in self.model.parameters.items() if p.grad is not None}
                gradient.add(taken, batch_size_of(batch))
            return loss
        before = self.trainer.global_step
        if "optimizer_step" in self._replaced:
            handed: Any = HandedOptimizer(optimizer, step)
            self.objective.optimizer_step(client.round_idx, batch_idx, handed, closure)
        else:
            closure()
            step()
        if self.trainer.global_step > before:
            for entry in schedulers:
                if self.trainer.global_step % entry.frequency == 0:
                    self.optimizers.advance(entry)
        return loss

    def _take_gradients(self, batch: Any, batch_idx: int, optimizer: Optimizer, accumulate: int) -> Tensor | None:
        """The loss of a batch, whose gradients are added up; None where the task skips it."""
        scale = 1.0 / accumulate
        if self.workers.data_parallel:
            batch, fraction = slice_batch(batch, self.fabric.global_rank, self.fabric.world_size)
            scale *= fraction
            if self.state.meter is not None:  # what is logged is about this part
                self.state.meter.batch_size = round(fraction * self.state.meter.batch_size / self.fabric.world_size)
        with self.autocast():
            loss: Tensor | None = self.training_step(batch, batch_idx)
        if batch_idx % accumulate == 0 and (self._has_gradients or self._watches_zero_grad):
            self._zero_grad(optimizer, batch_idx)
        self._has_gradients = True
        if loss is None:
            return None
        if scale != 1.0:
            loss = loss * scale
        self.call("on_before_backward", loss)
        if "backward" in self._replaced:
            self._run_own_backward(loss)
        else:
            self._backward(loss)
        self.call("on_after_backward")
        return loss

    def _step(self, client: Client, optimizer: Optimizer) -> None:
        """One step along the gradients that were taken: corrected by the method, clipped."""
        options = self.gradients
        self._unscale(optimizer)
        self._before_step(client, optimizer)
        if "configure_gradient_clipping" in self._replaced:
            self.objective.configure_gradient_clipping(optimizer, options.clip_val, options.clip_algorithm)
        elif options.clip_val is not None:
            clip_gradients(optimizer, options.clip_val, options.clip_algorithm)
        self.take_step(optimizer)
        self.trainer.global_step += 1

    def _unscale(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.fabric.strategy.precision.unscale_gradients(optimizer)

    def _run_own_backward(self, loss: Tensor) -> None:
        """The task's own ``backward``, on a loss that is scaled already, as in Lightning."""
        self.objective._fabric = None  # which would scale it once more
        try:
            self.objective.backward(loss if self.scaler is None else self.scaler.scale(loss))
        finally:
            self.objective._fabric = self.fabric

    def _outputs(self, returned: Any) -> dict[str, Any]:
        """What ``on_train_batch_end`` is handed, as in Lightning: the loss and what else ``training_step`` returned."""
        if self.objective.automatic_optimization:
            if returned is None:
                return {}
            own = self.state.returned
            return {**(own if isinstance(own, Mapping) else {}), "loss": returned.detach()}
        if isinstance(returned, Tensor):
            return {"loss": returned.detach()}
        return dict(returned or {})

    def _zero_grad(self, optimizer: Optimizer, batch_idx: int) -> None:
        self.call("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self._replaced:
            self.objective.optimizer_zero_grad(self.trainer.current_epoch, batch_idx, optimizer)
        elif type(optimizer).zero_grad is Optimizer.zero_grad:  # what it does, without the profiler's record of it
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()

    def _says_stop(self, hook: str, *args: Any) -> bool:
        """Whether somebody who has a hook ends the epoch by returning -1, as in Lightning."""
        return any([function(*args) == -1 for function in self.listeners(hook)])  # noqa: C419  # everybody is asked

    # ------------------------------------------------------------------ reading

    @torch.no_grad()
    def read(self, one: Pass, client: Client) -> None:
        """Do a pass: its answer is then among the client's results."""
        parts: list[Tensors] = []
        dtype = next(iter(self.model.parameters.values())).dtype
        with self.model.evaluating(), client.muted():
            for batch in one.loader:
                client.forget()
                found = one.read(client, self.to_dtype(batch, dtype))
                if one.gather == "sum" and parts:
                    before = parts.pop()
                    found = {name: before[name] + tensor for name, tensor in found.items()}
                parts.append(found)
        if not parts:
            parts = [{name: torch.zeros_like(like[:0], device=client.device) for name, like in one.example.items()}]
        client.results[one.name] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

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


_REPLACEABLE = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)


class _MeanGradient:
    """The gradient over all of a client's samples, from the gradients of its batches."""

    def __init__(self) -> None:
        self._total = 0
        self._sums: Tensors = {}

    def add(self, gradients: Tensors, size: int) -> None:
        """Take in the mean gradient of a batch's samples."""
        for name, gradient in gradients.items():
            weighed = gradient * size
            self._sums[name] = self._sums[name] + weighed if name in self._sums else weighed
        self._total += size

    def means(self) -> Tensors:
        """By name; a parameter that never had a gradient is missing."""
        return {name: total / self._total for name, total in self._sums.items()}


def num_batches(phase: Phase) -> int | None:
    """How many batches a phase takes where it is not a whole number of epochs."""
    if phase.steps is not None or phase.epochs is None or float(phase.epochs).is_integer():
        return phase.steps
    if not isinstance(phase.loader, Sized):
        raise ConfigError("fractions of an epoch need loaders that know their length; set trainer.local_steps instead")
    batches = round(phase.epochs * len(phase.loader), 6)  # 0.55 · 100 is a little above 55 in floating point
    return max(1, math.ceil(batches))


def _optimizer_steps(phase: Phase, steps: int | None, batches: int, accumulate: int) -> int:
    """How many steps the optimizer takes in a phase; what is left over at the end of an epoch is stepped on."""
    each = -(-batches // accumulate)
    if steps is None:
        return each * int(phase.epochs or 1)
    epochs, rest = divmod(steps, batches) if batches else (0, steps)
    return each * epochs - (-rest // accumulate)


def _channels_last(tensor: Tensor) -> Tensor:
    """Images (B, C, H, W) with a pixel's channels side by side in memory; convolutions keep what they are given so."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
