"""A client's local work: training, evaluation and prediction with one objective.

This is the hot path: a batch costs a loader step, the task's own work and the overridden hooks, without allocation of
our own and without device synchronization. A phase of training takes its batches in one of three ways, at the end of
this file: `_Automatic`, `_Manual` and `_Still`.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal
from typing import Protocol as Interface

import torch
from lightning import Callback, Fabric, LightningModule
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies.strategy import Strategy
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor
from torch.optim import SGD, Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lit_fed.engine.lightning import direct
from lit_fed.engine.lightning.compatibility import overrides
from lit_fed.engine.lightning.meter import Meter, WeightedSums, in_order
from lit_fed.engine.lightning.metric_names import Direction
from lit_fed.engine.lightning.objective import at_work, bind_step, join, task_name
from lit_fed.engine.lightning.optimization import HandedOptimizer, OptimizerFactory, Schedule, load_state, state_of
from lit_fed.engine.lightning.task_trainer import GradientOptions, TaskTrainer, clip_gradients
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, Pass, Phase, Tensors
from lit_fed.engine.method.model import Model
from lit_fed.engine.wire.batches import batch_size_of, mark_last, slice_batch
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError, EvaluationFailure, LitFedError, own_traceback, reason
from lit_fed.private_names import share
from lit_fed.seeding import derive_seed, seed_device
from lit_fed.tensors import map_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TaskStage = Literal["fit", "validate", "test", "predict"]
_EVALUATION_SEED = derive_seed(0, "evaluation")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_REPLACEABLE = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")


class Replays(Interface):
    """Takes gradients in place of forward and backward passes, such as `lit_fed.engine.clients.graphs`."""

    def enter(self, client: Client) -> bool:
        """Begin a phase of a client; returns whether to take its gradients."""

    def take(self, batch: Any) -> Tensor:
        """Set the gradients of a batch, log its values, and return its loss."""


class LocalLoop:
    """Trains and evaluates one task as any client, and predicts with it.

    Args:
        fabric: Gives precision, device and backward.
        model: The task's tensors; moved to the device.
        algorithm: The method.
        workers: Tells whether a client's batches are divided among processes (``ddp``).
        gradients: Clipping, accumulation, and the span of schedules by steps.
        callbacks: Lightning's callbacks for the local work. Each client's work, test and prediction has copies of them,
            so that nothing of one client reaches the next.
        max_rounds: Rounds in all, the task's ``self.trainer.max_epochs``.
        datamodule: The task's ``self.trainer.datamodule``.
        channels_last: Whether batches of images are laid out so.
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
        self.fabric, self.model, self.algorithm, self.workers = fabric, model, algorithm, workers
        self.gradients, self.channels_last = gradients, channels_last
        self.objective, self.state = join(model.task, algorithm, model)
        wrapped = fabric.setup_module(self.objective)
        model.task.fabric = None  # set by `setup_module`; at work, the trainer answers
        # DDP must see the call; without DDP, the objective's own method saves the wrapper's cost on every batch.
        self.training_step: Callable[..., Any] = (wrapped if workers.data_parallel else self.objective).training_step
        self.trainer = TaskTrainer(fabric, max_rounds, datamodule, gradients, workers.data_parallel)
        self.watchers: list[Callback] = list(callbacks)
        self.trainer.callbacks = self.watchers
        self.trainer.model, self.trainer.call = self.objective, self.call
        self.state.trainer = self.trainer
        self.optimizers = OptimizerFactory(self.objective, self.trainer)
        self.directions: dict[str, Direction] = {}  # by logged torchmetrics objects
        self.metrics = [module for module in model.task.modules() if isinstance(module, Metric)]
        self.warnings = WarningCache()  # each is said once
        self.is_fresh = True  # the task has just been set up
        self._names = {id(parameter): name for name, parameter in model.parameters.items()}
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._steps: dict[str, Callable[..., Any]] = {}

        self.corrects = type(algorithm).correct is not Algorithm.correct
        self.counts_steps = "one_optimizer" in algorithm.all_needs
        self.replaced = {name for name in _REPLACEABLE if overrides(model.task, name)}
        self.wants_outputs = bool(self.listeners("on_train_batch_end"))
        self.watches_zero_grad = "optimizer_zero_grad" in self.replaced or bool(self.listeners("on_before_zero_grad"))

        strategy, precision = fabric.strategy, fabric.strategy.precision
        is_plain = type(precision) is Precision  # 32-true: no conversion, no context to enter
        self.autocast: Callable[[], AbstractContextManager[Any]] = (
            contextlib.nullcontext if is_plain else fabric.autocast
        )
        self.is_mixed = isinstance(precision, MixedPrecision)
        # Autocast converts as it goes; the "true" precisions need inputs in the dtype of the weights.
        self._convert_inputs = not is_plain and not self.is_mixed
        self._transfers = any(overrides(model.task, name) for name in _TRANSFER)
        self.scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        self._scaler_state = self.scaler.state_dict() if self.scaler is not None else {}
        # Fabric's path to a plain backward and step costs as much as a small layer's forward.
        self.backward: Callable[[Tensor], object] = (
            direct.backward if is_plain and type(strategy).backward is Strategy.backward else fabric.backward
        )
        self.replays: Replays | None = None
        self.around_hook: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
        """Entered around each of Lightning's hooks that somebody overrides, by its name."""
        self.take_step: Callable[[Optimizer], object] = (
            direct.step
            if is_plain and type(strategy).optimizer_step is Strategy.optimizer_step
            else strategy.optimizer_step
        )

    # ------------------------------------------------------------------ the task at work

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Lend the task to the federation; afterwards it is a plain LightningModule again."""
        inner = [module for module in self.model.task.modules() if isinstance(module, LightningModule)][1:]
        synced = [(metric.sync_on_compute, metric.distributed_available_fn) for metric in self.metrics]
        with at_work(self.objective, self.state):
            for module in inner:
                module.trainer = self.trainer  # type: ignore[assignment]  # a Trainer by its attributes
            try:
                yield
            finally:
                self.model.leave()
                self.begin_metrics(sync=False)
                for metric, (before, available) in zip(self.metrics, synced, strict=True):
                    share(metric, before)
                    metric.distributed_available_fn = available
                for module in inner:
                    module.trainer = None

    def begin(self, stage: TaskStage) -> None:
        """Call ``setup``, unless the task was just set up for this stage, and ``on_fit_start``."""
        if not self.is_fresh:
            self.call("setup", stage)
            if not self.model.is_of(self.model.task):
                raise ConfigError(
                    f"model {task_name(self.objective)} replaces its parameters in setup({stage!r}); create them once"
                )
        self.is_fresh = False
        if stage == "fit":
            self.call("on_fit_start")

    def end(self, stage: TaskStage) -> None:
        """Call ``on_fit_end`` and ``teardown``, on the callbacks themselves."""
        self.trainer.callbacks, self._hooks = self.watchers, {}
        if stage == "fit":
            self.call("on_fit_end")
        self.call("teardown", stage)

    def copy_watchers(self, meter: Meter | None = None) -> None:
        """Give the work that begins its own copies of Lightning's callbacks, and its logged values to them."""
        self.trainer.meter = meter
        if self.watchers:
            self.trainer.callbacks = deepcopy(self.watchers)
            self._hooks = {}

    def begin_metrics(self, sync: bool) -> None:
        """Reset the task's torchmetrics, and set whether processes share them."""
        for metric in self.metrics:
            share(metric, sync)
            if metric.update_called:
                metric.reset()

    def call(self, hook: str, *args: Any) -> None:
        """Call one of Lightning's hooks on the task and on Lightning's callbacks, where they override it."""
        listeners = self._hooks.get(hook)
        for function in self.listeners(hook) if listeners is None else listeners:
            with self.around_hook(hook):
                function(*args)

    def listeners(self, hook: str) -> list[Callable[..., Any]]:
        """The overrides of a hook; looked up once, because a hook may run for every batch."""
        listeners = self._hooks.get(hook)
        if listeners is None:
            listeners = []
            for callback in self.trainer.callbacks:
                if getattr(type(callback), hook, None) is not getattr(Callback, hook, None):
                    listener = getattr(callback, hook)
                    watch = self._watch if hook.endswith("_start") else self._call_watcher
                    listeners.append(partial(watch, listener))
            if overrides(self.model.task, hook):
                listeners.append(getattr(self.objective, hook))
            self._hooks[hook] = listeners
        return listeners

    def _call_watcher(self, listener: Callable[..., Any], *args: Any) -> None:
        listener(self.trainer, self.objective, *args)

    def _watch(self, listener: Callable[..., Any], *args: Any) -> None:
        """Call a hook of one of Lightning's callbacks; refuse one that changes what is tested.

        Every piece of work has its own copy of a callback, in which nothing is left of the training.
        """
        tested = None if self.state.training else [(one, one.clone()) for one in self.objective.parameters()]
        self._call_watcher(listener, *args)
        now = list(self.objective.parameters())
        same = tested is None or [id(one) for one, _ in tested] == list(map(id, now))
        if not same or not all(torch.equal(one, value) for one, value in tested or ()):
            name = type(getattr(listener, "__self__", listener)).__name__
            raise ConfigError(
                f"trainer.callbacks: {name} changes the model's weights for a test, and nothing that it kept of a "
                "client's training is there; average and swap in the model's own hooks, with buffers, or use a method "
                "that averages"
            )

    def reset_scaler(self) -> None:
        """Reset the scale of 16-bit gradients, which must not carry over from one client to the next."""
        if self.scaler is not None:
            self.scaler.load_state_dict(self._scaler_state)

    # ------------------------------------------------------------------ training

    def train(self, client: Client, phases: Iterable[Phase | Pass]) -> Meter:
        """Run a client's phases and passes in order; returns the logged values."""
        state, trainer, model = self.state, self.trainer, self.model
        meter = state.meter = Meter()
        state.client, state.training, trainer.stage = client, True, "fit"
        self.copy_watchers(meter)
        trainer.current_epoch, trainer.global_step = client.round_idx, 0
        seed_device(client.derive_seed("training"), self.fabric.device)
        self.reset_scaler()
        if not self.objective.training:  # ``train`` walks over all submodules
            self.objective.train()
        self.begin_metrics(sync=self.workers.data_parallel)
        try:
            self.call("on_train_start")
            for phase in phases:
                client.phase = phase.name
                if isinstance(phase, Pass):
                    self.read(phase, client)
                else:
                    self._run_phase(phase, client, meter)
            self.call("on_train_end")
            model.check_fixed()
        finally:
            state.meter, state.training = None, False
            client.forget()
            model.forget_gradients()  # before the update is added to the aggregate
        return meter

    def _run_phase(self, phase: Phase, client: Client, meter: Meter) -> None:
        model = self.model
        if phase.begin is not None:
            self.workers.agree(model.tensors(model.buffers))  # ddp: each process saw its part of the batches
            client.left = model.copy()
            model.load(phase.begin)
        if phase.seed is not None:
            seed_device(phase.seed, self.fabric.device)
        model.set_trainable(phase.trains)
        self.state.public = phase.public
        remaining = self.expect(phase)
        way = self._way(phase, client)
        for _ in range(int(phase.epochs or 0)) if remaining is None else count():
            self.call("on_train_epoch_start")
            taken = 0
            for batch_idx, (batch, last) in enumerate(mark_last(islice(phase.loader, remaining))):
                batch = self.to_device(batch, phase.loader)
                meter.batch_size = batch_size_of(batch)
                started = [listener(batch, batch_idx) for listener in self.listeners("on_train_batch_start")]
                if -1 in started:  # as in Lightning, it ends the epoch
                    break
                output = way.take(batch, batch_idx, last)
                if self.wants_outputs:
                    self.call("on_train_batch_end", way.outputs(output), batch, batch_idx)
                taken += 1
            meter.batch_size = 1
            self.call("on_train_epoch_end")
            if remaining is not None:
                remaining -= taken
                if remaining <= 0 or not taken:
                    break
        self.state.public = False
        way.end()
        if self._keeps_optimizers(phase, client):
            left = state_of(self.trainer.optimizers, self._names, phase.name)
            client.optimizers = {**client.optimizers, **left}

    def _keeps_optimizers(self, phase: Phase, client: Client) -> bool:
        return self.gradients.client_optimizer == "kept" and client.stage == "train" and phase.moves

    def expect(self, phase: Phase) -> int | None:
        """Set the task's clock to a phase's length; returns its batches where it is not a whole number of epochs."""
        steps, trainer = num_batches(phase), self.trainer
        trainer.num_training_batches = len(phase.loader) if isinstance(phase.loader, Sized) else 0
        if trainer.spans_run and steps is None and not isinstance(phase.loader, Sized):
            raise ConfigError("trainer.schedule_steps is 'run', and loaders do not know their length; set local_steps")
        accumulate = self.gradients.accumulate if phase.moves else 1
        trainer.expect(_optimizer_steps(phase, steps, trainer.num_training_batches, accumulate))
        return steps

    def _way(self, phase: Phase, client: Client) -> _Way:
        """The way through a phase's batches, with fresh optimizers, or with those that the client kept."""
        optimizers, schedules = self.optimizers.build(phase.name, client.round_idx, client.rate_of(phase))
        if self._keeps_optimizers(phase, client):
            load_state(optimizers, client.optimizers, self._names, phase.name)
        client.steps.begin_phase()
        self.trainer.optimizers, self.trainer.schedulers = optimizers, [entry.scheduler for entry in schedules]
        if not phase.moves:
            return _Still(self, client, phase.name)
        if self.objective.automatic_optimization:
            return _Automatic(self, client, optimizers[0], schedules)
        return _Manual(self, client, optimizers)

    # ------------------------------------------------------------------ reading

    @torch.no_grad()
    def read(self, one: Pass, client: Client) -> None:
        """Run a pass, whose result is then in ``client.results``."""
        parts: list[Tensors] = []
        dtype = next(iter(self.model.parameters.values())).dtype
        with self.model.evaluating(), client.muted():
            for batch in one.loader:
                client.forget()
                tensors = one.read(client, self.to_dtype(batch, dtype))
                if one.gather == "sum" and parts:
                    before = parts.pop()
                    tensors = {name: before[name] + tensor for name, tensor in tensors.items()}
                parts.append(tensors)
        if not parts:
            parts = [{name: torch.zeros_like(like[:0], device=client.device) for name, like in one.example.items()}]
        client.results[one.name] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], subset: Literal["val", "test"], spread: bool = False) -> dict[str, float]:
        """Means of the values that ``test_step`` (or ``validation_step``) logs over a loader.

        Args:
            loader: Batches.
            subset: Selects the step; the other one where the task has only that.
            spread: Divide the batches among the processes and merge; every process must then call this.

        Returns:
            Values by name without a leading ``test`` or ``val``, in the order of the first calls of ``self.log``, of
            numbers and of torchmetrics objects; empty without batches.
        """
        stage = self.evaluation_stage(subset)
        if stage is None:
            return {}
        step = self.bound(f"{stage}_step")
        batches, length = loader, len(loader) if isinstance(loader, Sized) else None
        if length == 0:
            return {}
        # With fewer batches than processes, every process evaluates all of them: none may be left without one.
        spread = spread and self.workers.world_size > 1 and (length is None or length >= self.workers.world_size)
        if spread:
            batches = islice(loader, self.workers.rank, None, self.workers.world_size)
        meter, wrong = Meter(() if spread else self.metrics), None  # processes hold parts of their states
        self.state.meter = meter
        self.trainer.stage = "test" if subset == "test" else "validate"
        self.copy_watchers(meter)
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
            except Exception as error:
                if not spread:
                    raise
                wrong = error  # the other processes, which wait for this one, must learn of it
            finally:
                self.state.meter = None
        self.directions |= meter.directions
        if not spread:
            return in_order(meter.compute(), meter.names)
        told = self.workers.gather((list(meter.names), "" if wrong is None else reason(wrong)))
        if cause := next((cause for _, cause in told if cause), None):
            raise wrong or EvaluationFailure(cause)
        return in_order(meter.merged(self.workers, self.metrics), [name for names, _ in told for name in names])

    @contextmanager
    def mode(self, stage: str) -> Iterator[None]:
        """Evaluation mode, by the task's own hooks where it has them, under a fixed seed."""
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
        """A step of the task, looked up once."""
        if hook not in self._steps:
            self._steps[hook] = bind_step(getattr(self.objective, hook))
        return self._steps[hook]

    def evaluation_stage(self, subset: Literal["val", "test"]) -> str | None:
        """The stage whose step evaluates, ``test`` or ``validation``; None where the task has neither."""
        preferred = ("test", "validation") if subset == "test" else ("validation", "test")
        return next((stage for stage in preferred if overrides(self.model.task, f"{stage}_step")), None)

    @torch.no_grad()
    def predict(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Every batch with the result of ``predict_step``, in order; without one, of ``forward(x)`` on the inputs."""
        step = self.bound("predict_step") if overrides(self.model.task, "predict_step") else self._forward
        self.trainer.stage = "predict"
        self.copy_watchers()
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

    def _forward(self, batch: Any, _batch_idx: int) -> Any:
        """The task's ``forward`` on a batch's inputs: the first of a pair, else the batch."""
        name = task_name(self.model.task)
        if not overrides(self.model.task, "forward"):
            raise ConfigError(f"model {name} has neither predict_step nor forward(x), by which it predicts; add one")
        try:
            return self.objective(batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch)
        except LitFedError:
            raise
        except Exception as error:  # whatever a task's own code raises
            raise ConfigError(
                f"forward of model {name} cannot take the inputs of a batch ({reason(error)}); add a "
                "predict_step(batch, batch_idx)",
                own_traceback(error),
            ) from error

    @torch.no_grad()
    def figures(self, loaders: Mapping[str, Iterable[Any]]) -> dict[str, Figure]:
        """The task's ``test_figures`` of the first batch of each loader; empty where it has none."""
        draw = getattr(self.model.task, "test_figures", None)
        if draw is None:
            return {}
        batches = {name: batch for name, loader in loaders.items() for batch in islice(self.batches(loader), 1)}
        if not batches:
            return {}
        with self.mode("predict"), self.autocast():
            figures: dict[str, Figure] = draw(batches)
        return figures

    # ------------------------------------------------------------------ batches

    @property
    def converts(self) -> bool:
        """Whether a batch made on the device still has to be converted for the task."""
        return self._transfers or self._convert_inputs

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Every batch of a loader, on the device and in the model's precision."""
        for batch in loader:
            yield self.to_device(batch, loader)

    def to_dtype(self, batch: Any, dtype: torch.dtype) -> Any:
        """A batch on the device, with floating-point tensors in a given dtype."""
        moved = self._laid_out(self.fabric.to_device(batch))
        return map_tensors(moved, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def to_device(self, batch: Any, loader: Iterable[Any]) -> Any:
        """A batch on the device, where its loader does not make it there, and in the model's precision."""
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


class _Way(ABC):
    """A way through the batches of a phase."""

    def __init__(self, loop: LocalLoop, client: Client) -> None:
        self.loop, self.client = loop, client

    @abstractmethod
    def take(self, batch: Any, batch_idx: int, last: bool) -> Any:
        """Work on a batch; returns the loss, or the task's own result where it optimises by hand."""

    @abstractmethod
    def outputs(self, returned: Any) -> dict[str, Any]:
        """The argument of ``on_train_batch_end``, as in Lightning, from the result of `take`."""

    def end(self) -> None:
        """Put away the result of the phase."""
        return

    def before_step(self, optimizer: Optimizer) -> None:
        """The method's part in an optimizer step, before clipping."""
        loop = self.loop
        if loop.counts_steps:
            self.client.steps.count(optimizer)
        if loop.corrects:
            parameters = loop.model.parameters
            if len(loop.trainer.optimizers) > 1:  # the other optimizers' gradients may be corrected in their own steps
                steps = {id(p) for group in optimizer.param_groups for p in group["params"]}
                parameters = {name: p for name, p in parameters.items() if id(p) in steps}
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            for name, gradient in loop.algorithm.correct(self.client, gradients).items():
                parameters[name].grad = gradient
        loop.call("on_before_optimizer_step", optimizer)


class _Manual(_Way):
    """The task steps its optimizers by hand."""

    def __init__(self, loop: LocalLoop, client: Client, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(loop, client)
        for optimizer in optimizers:
            if loop.corrects or loop.counts_steps or loop.listeners("on_before_optimizer_step"):
                optimizer.register_step_pre_hook(lambda stepped, _args, _kwargs: self.before_step(stepped))
            optimizer.register_step_post_hook(self._count_step)
        loop.trainer.fabric_optimizers = [loop.fabric.setup_optimizers(optimizer) for optimizer in optimizers]

    def _count_step(self, *_args: Any) -> None:
        self.loop.trainer.global_step += 1

    @override
    def take(self, batch: Any, batch_idx: int, last: bool) -> Any:
        with self.loop.autocast():
            return self.loop.state.task_run.step(batch, batch_idx)

    @override
    def outputs(self, returned: Any) -> dict[str, Any]:
        return {"loss": returned.detach()} if isinstance(returned, Tensor) else dict(returned or {})


class _ByGradient(_Way):
    """The loop takes the gradients of the loss that the objective returns."""

    def __init__(self, loop: LocalLoop, client: Client, optimizer: Optimizer) -> None:
        super().__init__(loop, client)
        self.optimizer = optimizer
        self.replays = loop.replays if loop.replays is not None and loop.replays.enter(client) else None
        self._has_gradients = False  # `set_trainable` drops them: a client of one step need not do so again

    @override
    def outputs(self, returned: Any) -> dict[str, Any]:
        if returned is None:
            return {}
        outputs = self.loop.state.task_run.returned
        return {**(outputs if isinstance(outputs, Mapping) else {}), "loss": returned.detach()}

    def take_gradients(self, batch: Any, batch_idx: int, accumulate: int) -> Tensor | None:
        """Loss of a batch, whose gradients are added to those present; None where the task skips the batch."""
        loop, scale = self.loop, 1.0 / accumulate
        if self.replays is not None:
            return self.replays.take(batch)
        if loop.workers.data_parallel:
            world_size, meter = loop.fabric.world_size, loop.state.meter
            batch, fraction = slice_batch(batch, loop.fabric.global_rank, world_size)
            scale *= fraction
            if meter is not None:  # logged values are about this part
                meter.batch_size = round(fraction * meter.batch_size / world_size)
        with loop.autocast():
            loss: Tensor | None = loop.training_step(batch, batch_idx)
        if batch_idx % accumulate == 0 and (self._has_gradients or loop.watches_zero_grad):
            self._zero_grad(batch_idx)
        self._has_gradients = True
        if loss is None:
            loop.warnings.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning: the batch is skipped"
            )
            return None
        if scale != 1.0:
            loss = loss * scale
        loop.call("on_before_backward", loss)
        if "backward" in loop.replaced:
            # The task's own, on the scaled loss, as in Lightning.
            loop.objective.backward(loss if loop.scaler is None else loop.scaler.scale(loss))
        else:
            loop.backward(loss)
        loop.call("on_after_backward")
        return loss

    def unscale(self) -> None:
        """Undo the scale of 16-bit gradients."""
        if self.loop.scaler is not None:
            self.loop.fabric.strategy.precision.unscale_gradients(self.optimizer)

    def _zero_grad(self, batch_idx: int) -> None:
        loop, optimizer = self.loop, self.optimizer
        loop.call("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in loop.replaced:
            loop.objective.optimizer_zero_grad(loop.trainer.current_epoch, batch_idx, optimizer)
        elif type(optimizer).zero_grad is Optimizer.zero_grad:  # the same without the profiler's record
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()


class _Automatic(_ByGradient):
    """The loop steps the task's optimizer."""

    def __init__(self, loop: LocalLoop, client: Client, optimizer: Optimizer, schedules: Sequence[Schedule]) -> None:
        super().__init__(loop, client, optimizer)
        self.schedules = schedules

    @override
    def take(self, batch: Any, batch_idx: int, last: bool) -> Any:
        loop, accumulate = self.loop, self.loop.gradients.accumulate
        loss: Tensor | None = None

        def closure() -> Tensor | None:
            nonlocal loss
            loss = self.take_gradients(batch, batch_idx, accumulate)
            return loss

        def step() -> None:
            # None is Lightning's way of skipping a batch; gradients of batches before it are still stepped on.
            if loss is not None or (accumulate > 1 and any(p.grad is not None for p in loop.model.parameters.values())):
                self._step()

        if (batch_idx + 1) % accumulate and not last:
            return closure()
        before = loop.trainer.global_step
        if "optimizer_step" in loop.replaced:
            handed: Any = HandedOptimizer(self.optimizer, step)
            loop.objective.optimizer_step(self.client.round_idx, batch_idx, handed, closure)
        else:
            closure()
            step()
        if loop.trainer.global_step > before:
            for entry in self.schedules:
                if loop.trainer.global_step % entry.frequency == 0:
                    loop.optimizers.advance(entry)
        return loss

    def _step(self) -> None:
        """One step along the gradients present: corrected by the method, clipped."""
        loop, options = self.loop, self.loop.gradients
        self.unscale()
        self.before_step(self.optimizer)
        if "configure_gradient_clipping" in loop.replaced:
            loop.objective.configure_gradient_clipping(self.optimizer, options.clip_val, options.clip_algorithm)
        else:
            clip_gradients(self.optimizer, options)
        loop.take_step(self.optimizer)
        loop.trainer.global_step += 1


class _Still(_ByGradient):
    """The model stays as it is; the result of the phase is its mean gradient over all samples."""

    def __init__(self, loop: LocalLoop, client: Client, name: str) -> None:
        if not loop.objective.automatic_optimization:
            raise ConfigError(
                f"model {task_name(loop.objective)} optimises by hand, and phase {name!r} of the method needs a loss; "
                "use another method, or set self.automatic_optimization = True"
            )
        # It never steps; its groups say which gradients to drop and unscale.
        super().__init__(loop, client, SGD((p for p in loop.model.parameters.values() if p.requires_grad), lr=0.0))
        self._name, self._sums, self._samples = name, WeightedSums(), 0

    @override
    def take(self, batch: Any, batch_idx: int, last: bool) -> Any:
        loss = self.take_gradients(batch, batch_idx, accumulate=1)
        if loss is not None:
            self.unscale()
            size = batch_size_of(batch)
            self._samples += size
            for name, parameter in self.loop.model.parameters.items():
                if parameter.grad is not None:
                    self._sums.add(name, parameter.grad, size)
        return loss

    @override
    def end(self) -> None:
        totals = self._sums.totals  # without a parameter that never had a gradient
        self.client.results[self._name] = {name: total / self._samples for name, total in totals.items()}


def num_batches(phase: Phase) -> int | None:
    """Batches of a phase that is not a whole number of epochs; else None."""
    if phase.steps is not None or phase.epochs is None or float(phase.epochs).is_integer():
        return phase.steps
    if not isinstance(phase.loader, Sized):
        raise ConfigError("a fraction of an epoch needs a loader with a length; set trainer.local_steps instead")
    batches = round(phase.epochs * len(phase.loader), 6)  # 0.55 · 100 is a little above 55 in floating point
    return max(1, math.ceil(batches))


def _optimizer_steps(phase: Phase, steps: int | None, batches: int, accumulate: int) -> int:
    """Optimizer steps of a phase; gradients left over at the end of an epoch are stepped on."""
    each = -(-batches // accumulate)
    if steps is None:
        return each * int(phase.epochs or 1)
    epochs, rest = divmod(steps, batches) if batches else (0, steps)
    return each * epochs - (-rest // accumulate)


def _channels_last(tensor: Tensor) -> Tensor:
    """Images (B, C, H, W) with a pixel's channels side by side in memory; convolutions keep this layout."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
