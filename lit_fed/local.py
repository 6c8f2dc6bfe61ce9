"""A client's local work: the training loop and the evaluation loop over one module.

This is the hot path. Per batch it costs a loader step, the module's own work and a handful of empty hook calls;
nothing is built per batch and the device is never synchronised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import torch
from lightning import Fabric
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fed.client import ClientContext, ClientModule, Phase
from lit_fed.metrics.meter import Meter
from lit_fed.optimization import OptimizerFactory
from lit_fed.strategy import Workers


@dataclass(slots=True)
class GradientOptions:
    """What happens to gradients between backward and step.

    Args:
        clip_val: Threshold, None for no clipping.
        clip_algorithm: ``norm`` scales all gradients to a total norm of at most the threshold, ``value`` clamps each.
        accumulate: Batches whose gradients are averaged into one step.
    """

    clip_val: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    accumulate: int = 1


class LocalLoop:
    """Trains and evaluates the one module of a process on any client.

    Args:
        fabric: Gives precision, device and backward.
        module: Already on the device.
        workers: Tells whether a client's batches are split over processes (``ddp``).
        gradients: Clipping and accumulation.
    """

    def __init__(self, fabric: Fabric, module: ClientModule, workers: Workers, gradients: GradientOptions) -> None:
        self.fabric = fabric
        self.module = module
        self.workers = workers
        self.gradients = gradients
        self.optimizers = OptimizerFactory(module)
        wrapped = fabric.setup_module(module)
        # DDP must see the call; otherwise the module's own method avoids the wrapper's cost on every batch.
        self._training_step: Callable[..., Any] = (wrapped if workers.data_parallel else module).training_step
        precision = fabric.strategy.precision
        self._scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        self._scaler_state = self._scaler.state_dict() if self._scaler is not None else {}
        plain = type(precision) is Precision  # 32-true: nothing to convert, no context to enter
        self._autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext if plain else fabric.autocast
        # Autocast converts as it goes; the "true" precisions want their inputs in the type of the weights.
        self._convert_inputs = not plain and not isinstance(precision, MixedPrecision)

    # ------------------------------------------------------------------ training

    def train(self, ctx: ClientContext) -> Meter:
        """Run all phases of the module's current client; returns what it logged."""
        lr = ctx.fine_tuning.lr if ctx.fine_tuning is not None else None
        return self._work(ctx, self.module.phases, lr)

    @contextlib.contextmanager
    def prepared(self, ctx: ClientContext) -> Iterator[None]:
        """The module's current client after its `ClientModule.preparation`, whose effects end with the context."""
        if not self.module.preparation(ctx):
            yield
            return
        with self.module.preserved():
            self._work(ctx, self.module.preparation, None)
            yield

    def _work(self, ctx: ClientContext, phases: Callable[[ClientContext], list[Phase]], lr: float | None) -> Meter:
        module = self.module
        meter = module.work.meter = Meter()
        seed_device(ctx.derive_seed("training"), self.fabric.device)
        if self._scaler is not None:
            self._scaler.load_state_dict(self._scaler_state)  # a scale learnt on one client must not reach the next
        if not module.training:  # walks over all submodules
            module.train()
        try:
            module.on_train_start()
            for phase in phases(ctx):
                ctx.phase = phase.name
                self._run_phase(phase, ctx, meter, lr)
            module.on_train_end()
        finally:
            module.work.meter = None
        return meter

    def _run_phase(self, phase: Phase, ctx: ClientContext, meter: Meter, lr: float | None) -> None:
        module = self.module
        module.on_phase_start(phase)
        module.set_trainable(phase.trains)
        optimizers, schedulers = self.optimizers.build(phase.name, ctx.round_idx)
        if lr is not None:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr
        automatic = module.automatic_optimization
        if not automatic:
            wrapped = self.fabric.setup_optimizers(*optimizers)
            module._fabric_optimizers = list(wrapped) if isinstance(wrapped, tuple) else [wrapped]
        run_batch = self._step_automatically if automatic else self._step_manually
        remaining = phase.steps
        for epoch in range(phase.epochs) if phase.epochs is not None else count():
            module.on_train_epoch_start()
            taken = 0
            for batch_idx, (batch, last) in enumerate(_mark_last(islice(phase.loader, remaining))):
                batch = self._to_device(batch, phase.loader)
                meter.batch_size = batch_size_of(batch)
                module.on_train_batch_start(batch, batch_idx)
                if automatic and batch_idx % self.gradients.accumulate == 0 and (batch_idx or epoch):
                    module.on_before_zero_grad(optimizers[0])
                    optimizers[0].zero_grad()  # before the first batch there is no gradient, see set_trainable
                output = run_batch(batch, batch_idx, optimizers[0], schedulers, last)
                module.on_train_batch_end(output, batch, batch_idx)
                taken += 1
            module.on_train_epoch_end()
            if remaining is not None:
                remaining -= taken
                if remaining <= 0 or not taken:
                    return

    def _step_automatically(
        self, batch: Any, batch_idx: int, optimizer: Optimizer, schedulers: list[LRScheduler], last: bool
    ) -> Any:
        module, options = self.module, self.gradients
        scale = 1.0 / options.accumulate
        if self.workers.data_parallel:
            batch, fraction = slice_batch(batch, self.fabric.global_rank, self.fabric.world_size)
            scale *= fraction
        with self._autocast():
            output = self._training_step(batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is None:  # Lightning's way of skipping a batch
            return None
        if scale != 1.0:
            loss = loss * scale
        module.on_before_backward(loss)
        self.fabric.backward(loss)
        module.on_after_backward()
        if (batch_idx + 1) % options.accumulate and not last:
            return output
        if self._scaler is not None:
            self.fabric.strategy.precision.unscale_gradients(optimizer)
        module.on_before_optimizer_step(optimizer)
        if options.clip_val is not None:
            self._clip(optimizer, options.clip_val)
        self.fabric.strategy.optimizer_step(optimizer)
        for scheduler in schedulers:
            scheduler.step()
        return output

    def _step_manually(
        self, batch: Any, batch_idx: int, optimizer: Optimizer, schedulers: list[LRScheduler], last: bool
    ) -> Any:
        with self._autocast():
            return self._training_step(batch, batch_idx)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.gradients.clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_value_(parameters, clip_val)

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], split: Literal["val", "test"], spread: bool = False) -> dict[str, float]:
        """Means of what ``test_step`` (or ``validation_step``) logs over a loader.

        Args:
            loader: Batches.
            split: Which of the two steps to call.
            spread: Divide the batches among the processes and merge; every process must then call this.

        Returns:
            Values by name without the leading ``test/`` or ``val/``; empty where there is no batch.
        """
        module = self.module
        step = module.test_step if split == "test" else module.validation_step
        batches: Iterable[Any] = loader
        if spread and self.workers.world_size > 1:
            batches = islice(loader, self.workers.rank, None, self.workers.world_size)
        meter = module.work.meter = Meter()
        module.eval()
        try:
            for batch_idx, batch in enumerate(batches):
                batch = self._to_device(batch, loader)
                meter.batch_size = batch_size_of(batch)
                with self._autocast():
                    step(batch, batch_idx)
        finally:
            module.work.meter = None
        values = meter.merged(self.workers) if spread else meter.compute()
        return {name.removeprefix("test/").removeprefix("val/"): value for name, value in values.items()}

    @torch.no_grad()
    def predict(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Every batch with what ``predict_step`` returns for it, in order."""
        self.module.eval()
        for batch_idx, batch in enumerate(loader):
            batch = self._to_device(batch, loader)
            with self._autocast():
                yield batch, self.module.predict_step(batch, batch_idx)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Every batch of a loader, on the device and in the model's precision."""
        for batch in loader:
            yield self._to_device(batch, loader)

    def _to_device(self, batch: Any, loader: Iterable[Any]) -> Any:
        """Move a batch, unless its loader already makes it on the device, and give it the model's precision."""
        if getattr(loader, "device", None) != self.fabric.device:
            batch = self.fabric.to_device(batch)
        return self.fabric.strategy.precision.convert_input(batch) if self._convert_inputs else batch


def _mark_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch with whether it is the last, so that left-over accumulated gradients still make a step."""
    iterator = iter(batches)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def batch_size_of(batch: Any) -> int:
    """Number of samples of a batch: the length of its first tensor."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, dict):
            batch = next(iter(batch.values()))
        elif isinstance(batch, tuple | list) and batch:
            batch = batch[0]
        else:
            return 1
    return batch.shape[0] if batch.ndim else 1


def slice_batch(batch: Any, rank: int, world_size: int) -> tuple[Any, float]:
    """This process's part of a batch for ``ddp``, and what its mean loss weighs.

    Gradients are averaged over processes with equal weight; the factor ``n_rank * world_size / n`` makes that the
    gradient of the whole batch's mean, also when the parts are unequal. A process left without a sample gets one, at
    weight 0, so that it takes part in the exchange.
    """
    size = batch_size_of(batch)
    start, stop = size * rank // world_size, size * (rank + 1) // world_size
    part = slice(start, stop) if stop > start else slice(0, 1)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[part] if value.ndim and value.shape[0] == size else value
        if isinstance(value, dict):
            return {key: cut(entry) for key, entry in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(cut(entry) for entry in value)
        return value

    return cut(batch), (stop - start) * world_size / size


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout and random layers draw from.

    ``torch.manual_seed`` does this for every backend and costs about 200 µs, which a client of five samples would
    notice.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
