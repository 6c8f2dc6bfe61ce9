r"""Gradients of single samples of an unchanged ``training_step``, clipped and summed exactly, with noise.

.. math:: \tilde g = \frac{1}{B} \left[\sum_i \min\left(1, \frac{C}{\lVert g_i \rVert}\right) g_i +
    \mathcal{N}(0, z^2 C^2 I)\right]

A sample is a client of a group whose clients share one model: the step runs under ``torch.vmap`` over batches of one
sample. Clipped gradients are cut to the grid of `lit_fed.privacy.bounded_sum`, so that their sum does not depend on
their order.

A sample's gradient must be a function of the sample, and of what the step began with, alone. What a step leaves in the
task for other samples is refused by name where nothing is secret: before the run, and in a simulation. Under a key a
refusal, too, would tell of the samples in a batch. There the change is undone, the samples are taken each for itself,
one that fails counts as none, and a line on this machine says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.vectorized.alone import aside, closeness
from lit_fed.engine.vectorized.layers import GroupLayers
from lit_fed.engine.vectorized.objective import GroupObjective, batch_dims
from lit_fed.engine.wire.batches import batch_size_of, first_samples
from lit_fed.errors import ConfigError, LitFedError, reason
from lit_fed.privacy.bounded_sum import grid_of
from lit_fed.privacy.state_snapshot import StateSnapshot
from lit_fed.private_names import BATCH_NORMS, has_versions, lacks, tree_map
from lit_fed.seeding import seed_device
from lit_fed.tensors import map_tensors

_COMPARED = 16  # samples that are taken one by one and as a batch
_ROUNDING = 1e-6
ROUNDED = 1 + 2**-22
"""The most by which rounding in single precision lifts a clipped gradient over the bound; noise makes up for it."""
_HANDED = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "on_train_batch_end", "on_before_backward", "on_after_backward", "backward", "optimizer_zero_grad",
)  # fmt: skip
"""Hooks that are handed a batch or its loss beside the gradient, or take gradients themselves."""

_DRAWS = {"normal", "uniform", "bernoulli", "exponential", "random", "multinomial", "poisson", "feature_dropout"}

Draw = Callable[[], NDArray[np.bool_]]
Noise = Callable[[Tensor], Tensor]


class PoissonLoader:
    """Batches into which every sample is drawn by itself; as many as in one pass of another loader.

    Args:
        loader: Loads chosen samples.
        draw: Draws a batch: which samples are in it.
    """

    def __init__(self, loader: Any, draw: Draw) -> None:
        self._loader, self._draw = loader, draw
        self.device = getattr(loader, "device", None)  # of batches that are made there
        self.num_samples, self.batch_size = loader.num_samples, loader.batch_size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches of different sizes, also empty ones."""
        drawn: Iterable[NDArray[np.bool_]] = (self._draw() for _ in range(len(self)))
        yield from self._loader.batches_of(torch.from_numpy(np.flatnonzero(one)) for one in drawn)


class SampleGradients:
    """Takes the noisy sum of clipped gradients in place of a batch's gradient; see `LocalLoop.replays`.

    Args:
        loop: The loop of the clients' kind.
        clip_norm: C, over all trained parameters together.
        physical_batch: Most samples whose gradients are in memory at a time.
        begin: Begins a phase of a client; gives the noise's standard deviation, the expected batch, and a secret seed
            of the task's own draws, such as dropout's; None for the run's.
        noise: Noise (d,) of a client's next step, from the sum of clipped gradients (d,); None for none.
    """

    def __init__(
        self,
        loop: LocalLoop,
        clip_norm: float,
        physical_batch: int,
        begin: Callable[[Client], tuple[float, float, int | None]],
        noise: Callable[[Client, Tensor], Tensor | None],
    ) -> None:
        self._loop, self._norm, self._most = loop, clip_norm, physical_batch
        self._begin, self._noise = begin, noise
        self._trusted: set[Any] = set()
        self.one_by_one: str | None = None
        """Why samples are taken in turn, without ``torch.vmap``."""
        self.say: Callable[[str], object] | None = None
        """Prints a line on this machine, where a refusal would tell of the samples of a batch; None to refuse."""
        self._held: StateSnapshot | None = None
        self._recurrent = [vars(one) for one in loop.model.task.modules() if isinstance(one, nn.RNNBase)]
        self._said: set[str] = set()
        loop.around_hook = self._hook

    def enter(self, client: Client) -> bool:
        """Take over a phase of training on the client's own data."""
        if client.stage != "train" or self._loop.state.public:
            return False
        self._loop.state.meter = Meter()  # dropped, as is what hooks log: no mean of losses is private
        std, self._expected, seed = self._begin(client)
        if seed is not None:  # masks that the server knows would tell in which place of a batch a sample is
            seed_device(seed, self._loop.fabric.device)
        self._grid = grid_of(max(self._norm, std))
        # A batch has rarely more: one chunk, and little padding. Of public numbers alone.
        self._rows = min(self._most, math.ceil(self._expected + 2 * math.sqrt(self._expected)))
        self._client, self._objective = client, self._objective_of(client)
        return True

    def take(self, batch: Any) -> Tensor:
        """Set the gradients of a batch, also of an empty one; returns 0 for its loss, which is not private."""
        model = self._loop.model
        trained = {name: p for name, p in model.parameters.items() if p.requires_grad}
        sums, count = _zeros(trained), batch_size_of(batch)
        try:
            with self._still("its training_step", values=self.one_by_one is not None):
                for start in range(0, count, self._rows):
                    self._add(_rows(batch, start, self._rows, count, count), min(self._rows, count - start), sums)
            if count > 1 and self._objective.called not in self._trusted:
                self.check(self._client, first_samples(batch, min(count, _COMPARED)))
        except ConfigError as error:
            if self.say is None:
                raise
            if (why := str(error)) not in self._said:
                self._said.add(why)
                self.say(
                    f"warning: {why}; under a key the run goes on, as its end would tell of the batch: such a batch's "
                    "samples are taken each for itself, and one that fails counts as none"
                )
            self._trusted.add(self._objective.called)
            sums = _zeros(trained)
            for idx in range(count):
                self._add_alone(batch, idx, count, sums, self.one_by_one is not None)
        total = torch.cat([one.reshape(-1) for one in sums.values()])
        if (noise := self._noise(self._client, total * self._grid)) is not None:
            total += (noise.to(total.device) / self._grid).round_()
        total *= self._grid / self._expected
        parts = total.split([p.numel() for p in trained.values()])
        for p, part in zip(trained.values(), parts, strict=True):
            p.grad = part.view(p.shape).to(p.dtype)
        return torch.zeros((), device=total.device)

    def _add_alone(self, batch: Any, idx: int, count: int, sums: Tensors, in_turn: bool) -> None:
        """Add one sample's clipped gradient, from the state that the step began with; none where it fails."""
        own = _zeros(sums)
        try:
            with self._still("its training_step", values=True):
                self._add(_rows(batch, idx, 1 if in_turn else self._rows, idx + 1, count), 1, own, in_turn)
        except _Unmapped:
            if not in_turn:
                self._add_alone(batch, idx, count, sums, in_turn=True)
            return
        except _Changed:
            pass  # undone
        except ConfigError:
            return
        for name, one in own.items():
            sums[name] += one

    # ------------------------------------------------------------------ state that samples would share

    @contextmanager
    def _still(self, what: str, values: bool, hook: bool = False) -> Iterator[None]:
        """Undo, and refuse by name, a change of the task's state, or of what it reaches in its trainer."""
        trainer: Any = self._loop.trainer
        if self._held is None or not self._held.is_whole:
            self._held = StateSnapshot({"": self._loop.objective})
        self._held.mark()
        of_optimizers = [{"param_groups": one.param_groups, "state": one.state} for one in trainer.optimizers]
        around: dict[str, Any] = {"optimizers": of_optimizers}
        if not hook:
            around |= {"schedulers": [vars(one) for one in trainer.schedulers], "trainer": vars(trainer)}
        if values and not hook:
            around |= {"Python's generator (random)": _of(random.getstate)}
            around |= {"NumPy's generator (numpy.random)": _of(np.random.get_state)}
        held = [self._held, StateSnapshot(around, self._held)]
        lists = [(own, {key: own[key] for key in own if key.startswith("_flat_weight")}) for own in self._recurrent]
        try:
            yield
        finally:
            for own, weights in lists:  # torch lists them anew
                own.update(weights)
            if (odd := next((name for one in held if (name := one.changed(values)) is not None), None)) is not None:
                for one in held:
                    one.restore()
                raise _Changed(str(_cannot(
                    self._loop, f"{what} changes {odd!r}, by which a sample could reach others; compute it from the "
                    "batch, self.current_epoch and values set before the run"
                )))  # fmt: skip

    @contextmanager
    def _hook(self, hook: str) -> Iterator[None]:
        """Refuse a hook of a client's training that changes the task's state, also its weights."""
        state = self._loop.state
        if not state.training or state.client.stage != "train":
            yield
            return
        state.meter = Meter()
        with self._still(f"the hook {hook}", values=True, hook=True):
            yield

    def _add(self, chunk: Any, count: int, sums: Tensors, in_turn: bool = False) -> None:
        """Add the clipped gradients of a chunk's first samples to the sums, in units of the grid; the rest is padding.

        A sample without a finite gradient counts as none: its gradient would be the whole step's. Products in single
        precision may be above the bound by `ROUNDED`.
        """
        _, gradients = self._alone(self._objective, chunk, in_turn=in_turn)
        is_tiny = self._grid < 2.0**-100  # beyond single precision
        flat = {name: one.reshape(len(one), -1) for name, one in gradients.items()}
        wide = {name: one.double() if is_tiny or one.dtype.itemsize < 4 else one for name, one in flat.items()}
        norms = torch.stack([torch.linalg.vector_norm(one, dim=1, dtype=torch.float64) for one in wide.values()])
        norms = norms.square_().sum(0).sqrt_()
        scales = (self._norm / norms).clamp(max=1.0) / self._grid
        finite = norms.isfinite()
        scales[~finite | (torch.arange(len(norms), device=norms.device) >= count)] = 0
        whole = finite.device.type == "cpu" and bool(finite.all())  # a GPU would wait for the answer
        for name, one in wide.items():
            scaled = one * scales.to(one.dtype).unsqueeze(1)
            scaled -= scaled.frac()  # exactly `trunc`, of which torch takes 13 times as long on a CPU
            if not whole:
                scaled[~finite] = 0
            sums[name] += scaled.sum(0, dtype=torch.float64).view_as(sums[name])

    # ------------------------------------------------------------------ the unchanged step

    def _objective_of(self, client: Client) -> GroupObjective:
        objective = GroupObjective(self._loop, [client])
        objective.client.id, objective.client.steps = client.id, client.steps  # there is one client
        return objective

    def _alone(
        self, objective: GroupObjective, chunk: Any, dropout: Any = None, in_turn: bool = False
    ) -> tuple[Tensor, Tensors]:
        """Every sample's objective (b,) and gradients (b, …)."""
        size = batch_size_of(chunk)
        if in_turn or self.one_by_one is not None:
            each = [self._together(objective, _rows(chunk, idx, 1, size, size), dropout) for idx in range(size)]
            gradients = {name: torch.stack([own[name] for _, own in each]) for name in each[0][1]}
            return torch.stack([loss for loss, _ in each]), gradients

        def run(parameters: Tensors, buffers: Tensors) -> Tensor:
            still = {name: tensor for name, tensor in parameters.items() if not tensor.requires_grad}
            own = self._own(objective)

            def of_sample(trained: Tensors, sample: Any) -> Tensor:
                batch = map_tensors(sample, lambda tensor: tensor.unsqueeze(0))
                loss: Tensor = objective._step({**still, **trained}, buffers, batch, own)[0]
                return loss

            trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
            found: Tensor = torch.vmap(of_sample, (0, batch_dims(chunk)), randomness="different")(trained, chunk)
            return found

        return self._gradients(objective, run, lambda p: p.expand(size, *p.shape), dropout)

    def _together(self, objective: GroupObjective, batch: Any, dropout: Any) -> tuple[Tensor, Tensors]:
        """The objective of a batch () and its gradients."""

        def run(parameters: Tensors, buffers: Tensors) -> Tensor:
            found: Tensor = objective._step(parameters, buffers, batch, self._own(objective))[0]
            return found

        return self._gradients(objective, run, lambda p: p.clone(), dropout)

    def _gradients(
        self,
        objective: GroupObjective,
        run: Callable[[Tensors, Tensors], Tensor],
        leaf: Callable[[Tensor], Tensor],
        dropout: Any,
    ) -> tuple[Tensor, Tensors]:
        loop = self._loop
        parameters = {
            name: leaf(p.detach()).requires_grad_() if p.requires_grad else p.detach()
            for name, p in loop.model.parameters.items()
        }
        buffers = loop.model.copy(loop.model.buffers)
        before = {name: tensor.clone() for name, tensor in buffers.items()}
        updates = sum(metric.update_count for metric in loop.metrics)
        try:
            with (
                self._at_work(objective), sdpa_kernel(SDPBackend.MATH), loop.autocast(),
                GroupLayers(dropout, by_sample=True) as layers,
            ):  # fmt: skip
                loss = run(parameters, buffers)
            objective.called = tuple(layers.sequence)
            leaves = {name: p for name, p in parameters.items() if p.requires_grad}
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        except LitFedError as error:
            raise _cannot(loop, str(error)) from error
        except Exception as error:  # whatever a task's own code raises
            raise _Unmapped(str(_cannot(loop, reason(error)))) from error
        if odd := objective._rebound + [n for n, tensor in buffers.items() if not torch.equal(tensor, before[n])]:
            raise _cannot(loop, f"it writes the buffer {odd[0]!r}, past the bound on a sample's gradient")
        if sum(metric.update_count for metric in loop.metrics) > updates:
            raise _cannot(loop, "it updates a torchmetrics object, past the bound on a sample's gradient")
        gradients = {
            name: torch.zeros_like(p) if grad is None else grad
            for (name, p), grad in zip(leaves.items(), found, strict=True)
        }
        return loss.detach(), gradients

    @contextmanager
    def _at_work(self, objective: GroupObjective) -> Iterator[None]:
        """Let the task run as the objective's client; what it logs is of single samples, and dropped."""
        state = self._loop.state
        before = state.client, state.meter
        state.client, state.meter = objective.client, objective.recorder
        try:
            yield
        finally:
            state.client, state.meter = before

    @staticmethod
    def _own(objective: GroupObjective) -> dict[str, Any]:
        found: dict[str, Any] = tree_map(lambda tensor: tensor[0], objective._own)
        return found

    # ------------------------------------------------------------------ samples that are mixed

    def settle(self, client: Client, batch: Any) -> None:
        """`check`, which settles whether samples are taken in turn: where ``torch.vmap`` cannot, as for an LSTM."""
        try:
            self.check(client, batch)
        except _Unmapped as error:
            self.one_by_one = reason(error.__cause__ or error)
            self.check(client, batch)

    def check(self, client: Client, batch: Any) -> None:
        """Refuse a step whose batch is not the mean of its samples, wherever it does what it has not done before.

        Args:
            client: Whose.
            batch: Two samples or more; dropout is left out.
        """
        loop, objective = self._loop, self._objective_of(client)
        with aside(loop), self._still("its training_step", values=True):
            self._alone(objective, batch)
            called = objective.called
        with aside(loop), self._still("its training_step", values=True):
            one_by_one, singles = self._alone(objective, batch, _no_dropout)
            loss, gradients = self._together(objective, batch, _no_dropout)
        close = closeness(loop)
        off = (one_by_one.mean() - loss).abs()
        apart = _norm([singles[name].mean(0) - gradients[name] for name in gradients])
        if off > close * (1 + loss.abs()) or apart > close * _norm(gradients.values()) + _ROUNDING * (1 + loss.abs()):
            mixes = "it mixes the samples of a batch: the loss or the gradient is not the mean of its samples' alone"
            if drawn := [name for one in objective.called if (name := getattr(one, "__name__", "")) and _draws(name)]:
                mixes = (
                    f"it draws random numbers by torch's {drawn[0]}, which differ between a batch and its samples alone"
                )
            raise _cannot(loop, mixes)
        self._trusted.add(called)


class _Unmapped(ConfigError):
    """A step that fails."""


class _Changed(ConfigError):
    """A step, or a hook, that changes the task's state."""


def refuse(loop: LocalLoop) -> None:
    """Refuse a task or a setting with a known obstacle to a bound on single samples."""
    task, name = loop.model.task, task_name(loop.objective)
    if not loop.objective.automatic_optimization:
        raise _cannot(loop, "it optimises by hand")
    if odd := [key for key, module in task.named_modules() if isinstance(module, BATCH_NORMS)]:
        raise _cannot(loop, f"batch norm in {odd[0]!r} mixes the samples of a batch; take group norm")
    for hook in _HANDED:
        if hook in loop.replaced or loop.listeners(hook):
            raise ConfigError(
                f"trainer.privacy: model {name} or a callback has {hook}, which sees samples past the bound on their "
                "gradients; leave it out"
            )
    if loop.workers.data_parallel:
        raise ConfigError("trainer.privacy is SampleLevel, and strategy=ddp divides each client's batches; use clients")
    if loop.scaler is not None:
        raise ConfigError("trainer.privacy is SampleLevel, and precision 16-mixed scales gradients; use bf16-mixed")
    if loop.replays is not None:
        raise ConfigError("trainer.privacy is SampleLevel, and trainer.compile is graph; set compile to false")
    if not has_versions:
        raise ConfigError(f"trainer.privacy is SampleLevel, which sees writes, and {lacks('torch', 'Tensor._version')}")
    if (accumulate := loop.gradients.accumulate) > 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches is {accumulate}, and every batch of SampleLevel is a step with noise of "
            "its own; set it to 1, and raise data.batch_size: physical_batch bounds the memory"
        )


def _cannot(loop: LocalLoop, why: str) -> ConfigError:
    return ConfigError(
        f"trainer.privacy: SampleLevel cannot bound what a sample does to model {task_name(loop.objective)}: {why}"
    )


def _rows(batch: Any, start: int, most: int, end: int, count: int) -> Any:
    """Samples of a batch of some size, padded to a fixed number, so that no sample's bits depend on the others."""
    places = torch.arange(start, start + most).clamp(max=end - 1)

    def chosen(tensor: Tensor) -> Tensor:
        return tensor[places.to(tensor.device)] if tensor.ndim and len(tensor) == count else tensor

    return map_tensors(batch, chosen)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


def _zeros(like: Mapping[str, Tensor]) -> Tensors:
    return {name: torch.zeros(one.shape, dtype=torch.float64, device=one.device) for name, one in like.items()}


def _of(method: Any) -> Any:
    """The object of a bound method."""
    return method.__self__


def _no_dropout(input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return input


def _draws(name: str) -> bool:
    return name.startswith("rand") or name.rstrip("_") in _DRAWS or ("dropout" in name and name != "dropout")
