"""The local work of a group of clients, as one computation, and its clients' answers.

A method's ``finish`` that is pure in tensors runs once for all of them, under ``torch.vmap``. One that uses a client's
number, its data or another value of Python is asked for each client. The results are the same bits: ``finish`` computes
every value of a tensor by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Answer, Answers, Session
from lit_fed.engine.lightning.meter import StackedSums
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, EffectiveSteps, Pass, Phase, Tensors
from lit_fed.engine.method.model import Differs, ModelView
from lit_fed.engine.method.task_run import TaskRunOn
from lit_fed.engine.vectorized.alone import Outside
from lit_fed.engine.vectorized.batches import Collected, Gathered, GroupBatches, Rows, can_gather, cut, total_steps
from lit_fed.engine.vectorized.by_sample import Ignored, Unproven
from lit_fed.engine.vectorized.layers import Called, Streams
from lit_fed.engine.vectorized.metrics import GroupMeter
from lit_fed.engine.vectorized.objective import GroupObjective, NotVectorizable, StackedTensors, differing
from lit_fed.engine.wire.payload import MOST_VALUES, Flat, Payload
from lit_fed.errors import ClientFailure
from lit_fed.private_names import tree_leaves
from lit_fed.seeding import derive_seeds
from lit_fed.tensors import on_device

OF_ALL = ", which all clients share"
_CLOCK = ("num_training_batches", "estimated_stepping_batches", "global_step")
_Logged = tuple[str, Sequence[int] | None, Tensor]  # a name, each client's weight (None: its batch's size) and value


class Trained(NamedTuple):
    """Result of a group's work.

    Args:
        tensors: The clients' models, stacked.
        metrics: Logged means of each client.
    """

    tensors: Tensors
    metrics: list[dict[str, float]]


def holdings(client: Client) -> Any:
    """Key of a group: names and shapes of a client's tensors, and whether it is new; equal for all its clients."""
    if not client.state and not client.results and not client.addressed:
        return client.is_new, tuple(client.begun)
    held = (client.state, client.addressed, *client.results.values())
    shapes = tuple([tuple([(name, tensor.shape) for name, tensor in tensors.items()]) for tensors in held])
    return client.is_new, tuple(client.begun), tuple(client.results), shapes


class Computations:
    """Computations for several clients at once, by the operations of torch that they are made of."""

    def __init__(self) -> None:
        self.fresh: dict[Any, int] = {}
        """Those of the last group that no comparison with a client alone has shown, and a client of each."""
        self._trusted: set[Any] = set()

    def note(self, computation: Any, members: Sequence[int]) -> None:
        """Note a computation and one of its clients: one that is to be compared already, or the first."""
        if computation not in self._trusted and computation not in self.fresh:
            chosen = self.fresh.values()
            self.fresh[computation] = next((member for member in members if member in chosen), members[0])

    def trust(self, compared: Collection[int]) -> None:
        """Trust the new computations of clients whose results are those alone."""
        self._trusted |= {computation for computation, member in self.fresh.items() if member in compared}


class GroupLoop:
    """Trains groups of clients of one kind.

    Args:
        loop: Trains one of them.
        pad_to: Pad smaller batches to this many samples, where a batch's objective is proven to be the mean of its
            samples' (`BySample`); 0 pads none.
    """

    def __init__(self, loop: LocalLoop, pad_to: int = 0) -> None:
        self.loop = loop
        self.pad_to = pad_to
        self.meter = GroupMeter(loop)
        self.computations = Computations()
        self.unproven = ""
        """The reason for which a smaller batch was not padded; empty where all were."""
        self.held: dict[tuple[int, int], bool] = {}
        """Whether all samples' targets, by their ``id``, hold a value."""

    def train(self, clients: Sequence[Client]) -> Trained:
        """Run the clients' local work; each then has its trained tensors as ``client.model``, and its results.

        Args:
            clients: Admitted, with equal `holdings`, in descending order of steps.

        Raises:
            NotVectorizable: If they have to be trained one by one.
        """
        loop, model = self.loop, self.loop.model
        tensors = _stack_models(model, clients)
        parts = StackedTensors(tensors)
        for idx, client in enumerate(clients):
            client.model = ModelView(model, partial(parts.tensor_of, idx))
            client.task_run = TaskRunOn(loop.state.task_run, client.model)
        work, rows = self._work(clients)
        if len({len(phases) for phases in work}) > 1:
            raise NotVectorizable("clients of a round have different phases; a group needs equal ones")
        meter, streams = StackedSums(len(clients)), Streams(clients)
        self.computations.fresh, outside = {}, Outside(model.task)
        self.meter.renew(len(clients))
        with self._at_work(clients[0].round_idx):
            for phases in zip(*work, strict=True):
                self._run(phases, clients, tensors, meter, streams, rows)
        if (drawn := outside.drawn()) is not None:
            raise NotVectorizable(f"training draws from {drawn}{OF_ALL}")
        return Trained(
            tensors, [sums | other for sums, other in zip(meter.means(), self.meter.computed(), strict=True)]
        )

    def _work(self, clients: Sequence[Client]) -> tuple[list[list[Phase | Pass]], Rows | None]:
        """The clients' phases; and their rows where a method leaves `Algorithm.phases` as it is.

        Clients with equally many rows then have the phase of one of them: no loader is made for the others.
        """
        algorithm, first = self.loop.algorithm, clients[0]
        is_plain = type(algorithm).phases is Algorithm.phases and first.stage == "train" and not self.loop.converts
        is_plain &= first.work.limit is None and all(one.work is first.work and not one.wrap_loader for one in clients)
        ids = [client.id for client in clients]
        if is_plain and first.data is not None and (found := first.data.cohort_loader(ids)) is not None:
            loader, sizes = found[0], found[1].tolist()
            examples = dict(zip(sizes, clients, strict=True))
            of_size = {size: algorithm.phases(client) for size, client in examples.items()}
            if can_gather([loader, *(phase.loader for (phase,) in of_size.values())]):
                seeds = derive_seeds(first.seed, first.stage, first.round_idx, ids, "data")
                return [of_size[size] for size in sizes], Rows.of_cohort(loader, found[1], seeds)
        return [algorithm.phases(client) for client in clients], None

    @contextmanager
    def _at_work(self, round_idx: int) -> Iterator[None]:
        state, trainer = self.loop.state, self.loop.trainer
        state.training, trainer.stage, trainer.meter = True, "fit", differing("self.trainer.callback_metrics")
        trainer.current_epoch, trainer.global_step = round_idx, 0
        if not self.loop.objective.training:
            self.loop.objective.train()
        try:
            yield
        finally:
            state.meter, state.training, state.public, trainer.meter = None, False, False, None

    def _run(
        self,
        phases: Sequence[Phase | Pass],
        clients: Sequence[Client],
        tensors: Tensors,
        meter: StackedSums,
        streams: Streams,
        rows: Rows | None,
    ) -> None:
        for each, client in zip(phases, clients, strict=True):
            client.phase = each.name
        trained = [entry for entry in phases if isinstance(entry, Phase)]
        if not trained:
            for each, client in zip(phases, clients, strict=True):
                view, task_run = client.model, client.task_run
                self.loop.model.load(view.tensors(tensors))
                client.model, client.task_run = self.loop.model, self.loop.state.task_run
                self.loop.read(each, client)  # type: ignore[arg-type]  # a Pass: no phase was found
                client.model, client.task_run = view, task_run
            return
        first = trained[0]
        kind = _kind(first)
        if len(trained) < len(phases) or any(_kind(entry) != kind for entry in trained):
            raise NotVectorizable("clients of a round have different phases; a group needs equal ones")
        if first.begin is not None:
            for each, client in zip(trained, clients, strict=True):
                client.left = client.model.copy(tensors)
                for name, tensor in (each.begin or {}).items():
                    client.model.tensor(name).copy_(tensor)
        for idx, each in enumerate(trained):
            if each.seed is not None:
                streams.seed(idx, each.seed)
        with _attention(self.loop.fabric.device):
            _PhaseOfGroup(self, trained, clients, tensors, meter, streams, rows).run()


def _attention(device: torch.device) -> AbstractContextManager[Any]:
    """Attention as plain products on a GPU, whose fused kernels do not take the strides of a group's tensors."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()


def _kind(phase: Phase) -> tuple[Any, ...]:
    return phase.name, phase.trains, phase.moves, phase.public, phase.lr, phase.begin is None


class _PhaseOfGroup:
    """One phase of a group's work."""

    def __init__(
        self,
        group: GroupLoop,
        phases: Sequence[Phase],
        clients: Sequence[Client],
        tensors: Tensors,
        meter: StackedSums,
        streams: Streams,
        rows: Rows | None,
    ) -> None:
        loop = self.loop = group.loop
        self.group, self.streams, self.phases = group, streams, phases
        self.pad_to, self.phase, self.clients, self.meter = group.pad_to, phases[0], clients, meter
        self.device = loop.fabric.device
        loop.model.set_trainable(self.phase.trains)
        self.trained = {name: tensors[name] for name, p in loop.model.parameters.items() if p.requires_grad}
        self.still = {
            name: tensors[name] for name in tensors if name in loop.model.parameters and name not in self.trained
        }
        self.buffers = {name: tensors[name] for name in tensors if name in loop.model.buffers}
        self.batches = _batches(loop, phases, rows)
        self.objective = GroupObjective(loop, clients, streams, group.meter)
        self.leaves: dict[str, nn.Parameter] = {}
        self.steps = EffectiveSteps()

    def run(self) -> None:
        """Step until the last client is done."""
        loop, lengths = self.loop, self.batches.num_steps
        loop.state.public, loop.state.client = self.phase.public, self.objective.client
        loop.state.meter = self.objective.recorder
        clock = self._set_clock()
        accumulate = loop.gradients.accumulate if self.phase.moves else 1
        if accumulate > 1 and len({*zip(lengths, self.batches.each, strict=True)}) > 1:
            raise NotVectorizable("with accumulate_grad_batches, the clients of a group need equally many batches")
        optimizers, schedulers = loop.optimizers.build(
            self.phase.name, loop.trainer.current_epoch, self.clients[0].rate_of(self.phase)
        )
        loop.trainer.optimizers, loop.trainer.schedulers = optimizers, [entry.scheduler for entry in schedulers]
        optimizer = optimizers[0]
        if schedulers and len(set(lengths)) > 1:
            raise NotVectorizable("with a schedule by steps, the clients of a group need equally many batches")
        own_parameters = [list(group["params"]) for group in optimizer.param_groups]
        distances = [0.0]
        gradients, samples = StackedSums(len(self.clients)), np.zeros(len(self.clients), dtype=np.int64)
        try:
            active = 0
            for step in range(lengths[0] if lengths else 0):
                remaining = sum(length > step for length in lengths)
                if remaining != active:
                    active = remaining
                    self._narrow(optimizer, active)
                batch_idx = self._batch_idx(step, active)
                sizes = self._take_gradients(step, batch_idx, active, accumulate)
                if not self.phase.moves:
                    samples[:active] += sizes
                    self._add_gradients(gradients, sizes)
                elif accumulate == 1 or self._ends_here(step, batch_idx, accumulate):
                    self._step(optimizer, active)
                    for entry in schedulers:
                        if loop.trainer.global_step % entry.frequency == 0:
                            loop.optimizers.advance(entry)
                distances.append(self.steps.distance)
        finally:
            for group, parameters in zip(optimizer.param_groups, own_parameters, strict=True):
                group["params"] = parameters
            optimizer.state.clear()
            loop.state.meter = None
            vars(loop.trainer).update(clock)
        for client, length in zip(self.clients, lengths, strict=True):
            client.steps.extend(distances[length], self.steps)
        if not self.phase.moves:
            parts = {name: total.unbind(0) for name, total in gradients.totals.items()}
            for idx, (client, count) in enumerate(zip(self.clients, samples.tolist(), strict=True)):
                means = {name: part[idx] / count for name, part in parts.items()} if count else {}
                client.results[self.phase.name] = means

    def _set_clock(self) -> dict[str, Any]:
        """Set the task's clock; a value that differs between clients is refused where it is read.

        Returns:
            The first client's.
        """
        loop, clocks = self.loop, list[dict[str, Any]]()
        lengths = zip(self.batches.each, self.batches.num_steps, strict=True)
        for phase in reversed(dict(zip(lengths, self.phases, strict=True)).values()):
            loop.expect(phase)
            clocks.append({name: getattr(loop.trainer, name) for name in _CLOCK})
        for name in _CLOCK:
            if any(clock[name] != clocks[0][name] for clock in clocks):
                setattr(loop.trainer, name, differing(f"self.trainer.{name}"))
        return clocks[-1]

    def _add_gradients(self, sums: StackedSums, sizes: Sequence[int]) -> None:
        """Add the gradients of the first clients' batches, each weighted by its samples."""
        for name, leaf in self.leaves.items():
            if (gradient := leaf.grad) is not None:
                weights = on_device(sizes, self.device).view(-1, *(1 for _ in gradient.shape[1:]))
                sums.add(name, gradient, weights, sizes, slice(0, len(sizes)))

    def _batch_idx(self, step: int, active: int) -> Any:
        """The number of the batch in its epoch, where all clients are at the same."""
        each = self.batches.each
        alike = each[0] == each[active - 1] or step < each[active - 1]
        return step % each[0] if alike else differing("batch_idx")

    def _ends_here(self, step: int, batch_idx: int, accumulate: int) -> bool:
        """Whether to step on the accumulated gradients, also on those left over at the end of an epoch."""
        last = batch_idx + 1 == self.batches.each[0] or step + 1 == self.batches.num_steps[0]
        return last or (batch_idx + 1) % accumulate == 0

    def _narrow(self, optimizer: Optimizer, active: int) -> None:
        """Continue with the first clients only, on views of the parameters and of the optimizer's state."""
        parameters = self.loop.model.parameters
        before = self.leaves
        self.leaves = {name: nn.Parameter(tensor[:active]) for name, tensor in self.trained.items()}
        old = {id(before[name] if before else parameters[name]): leaf for name, leaf in self.leaves.items()}
        for group in optimizer.param_groups:
            group["params"] = [old[id(parameter)] for parameter in group["params"] if id(parameter) in old]
        for name, earlier in before.items():
            if earlier in optimizer.state:
                kept = optimizer.state.pop(earlier)
                optimizer.state[self.leaves[name]] = {
                    key: value[:active] if isinstance(value, Tensor) and value.ndim else value
                    for key, value in kept.items()
                }

    def _take_gradients(self, step: int, batch_idx: Any, active: int, accumulate: int) -> list[int]:
        """Add every client's gradient on its batch to the leaves; returns the batches' sizes."""
        loop = self.loop
        batch, sizes = self.batches.take(step, active, self.pad_to)
        self.objective.batch_idx = batch_idx
        if accumulate == 1 or batch_idx % accumulate == 0:
            for leaf in self.leaves.values():
                leaf.grad = None
        with loop.autocast():
            loss, logged = self._losses(batch, sizes)
        total = loss.sum()
        (total / accumulate if accumulate > 1 else total).backward()
        counts = on_device(sizes, self.device)
        for name, numbers, value in logged:
            weights = counts if numbers is None else on_device(numbers, self.device)
            self.meter.add(name, value, weights, sizes if numbers is None else numbers, slice(0, active))
        return sizes

    def _losses(self, batch: Any, sizes: Sequence[int]) -> tuple[Tensor, list[_Logged]]:
        """Every client's objective and logged values.

        The computation for a client depends on the size of its own batch alone, so that its bits do not depend on the
        other clients of the group.
        """
        pads = {idx for idx, size in enumerate(sizes) if size < self.pad_to}
        drawn = self.streams.states() if pads else {}
        while True:
            try:
                return self._by_size(batch, sizes, pads)
            except Ignored as ignored:
                pads -= set(self._holding(batch, ignored.leaf, ignored.value))
            except Exception as error:
                if not pads:
                    raise
                self.group.unproven, pads = str(error), set()
            self.streams.restore(drawn)

    def _holding(self, batch: Any, leaf: int, value: int) -> list[int]:
        """Clients whose batches have a value in a leaf."""
        held = (tree_leaves(batch)[leaf] == value).flatten(1).any(1)
        found: list[int] = held.nonzero().flatten().tolist()
        return found

    def _by_size(self, batch: Any, sizes: Sequence[int], pads: Collection[int]) -> tuple[Tensor, list[_Logged]]:
        """As `_losses`, with the batches of some clients padded; these come first, and fail before any other."""
        ways: dict[tuple[int, bool], list[int]] = {(self.pad_to, True): sorted(pads)} if pads else {}
        for idx, size in enumerate(sizes):
            if idx not in pads:
                ways.setdefault((size, False), []).append(idx)
        recorder, width = self.objective.recorder, max(*sizes, self.pad_to)
        if len(ways) == 1 and width in (size for size, _ in ways):
            ((_, padded),) = ways
            loss, values = self._losses_of(batch, range(len(sizes)), slice(0, len(sizes)), sizes if padded else None)
            named = zip(recorder.logged, values, strict=True)
            return loss, [(name, None if size is None else [size] * len(sizes), v) for (name, size), v in named]
        parts, given = [], []
        for (size, padded), of_way in ways.items():
            rows = on_device(of_way, self.device)
            counts = [sizes[idx] for idx in of_way] if padded else None
            parts.append(self._losses_of(cut(batch, rows, size, width), of_way, rows, counts))
            given.append([weight for _, weight in recorder.logged])
        back = on_device([idx for members in ways.values() for idx in members], self.device).argsort()
        loss = torch.cat([part[0] for part in parts])[back]
        values = [torch.cat(column)[back] for column in zip(*(part[1] for part in parts), strict=True)]
        weights = [_weights(column, ways.values(), sizes) for column in zip(*given, strict=True)]
        names = [name for name, _ in recorder.logged]
        return loss, list(zip(names, weights, values, strict=True))

    def _losses_of(
        self, batch: Any, members: Sequence[int], rows: slice | Tensor, sizes: Sequence[int] | None
    ) -> tuple[Tensor, list[Tensor]]:
        leaves = self.leaves if isinstance(rows, slice) else {name: leaf[rows] for name, leaf in self.leaves.items()}
        parameters = {**{name: tensor[rows] for name, tensor in self.still.items()}, **leaves}
        buffers = {name: tensor[rows] for name, tensor in self.buffers.items()}
        counts, holds = None, None
        if sizes is not None:
            if not self.batches.by_rows:
                raise Unproven("a tensor of a batch has no row for each sample")
            counts, holds = on_device(sizes, self.device), partial(self._holds, batch)
            buffers = {name: tensor.clone() for name, tensor in buffers.items()}
        loss, values = self.objective.losses(parameters, buffers, batch, rows, counts, holds)
        self.group.computations.note((counts is None, *self.objective.called), members)
        if isinstance(rows, Tensor) or counts is not None:
            for name, tensor in buffers.items():
                self.buffers[name][rows] = tensor
        return loss, values

    def _holds(self, batch: Any, leaf: int, value: int) -> bool:
        """Whether a value is in a leaf of a batch; the targets of all samples are looked through once."""
        targets, held = self.batches.targets if leaf == 1 else None, self.group.held
        if targets is not None and (id(targets), value) not in held:
            held[id(targets), value] = bool((targets == value).any())
        return (targets is None or held[id(targets), value]) and bool(self._holding(batch, leaf, value))

    def _step(self, optimizer: Optimizer, active: int) -> None:
        loop, leaves = self.loop, self.leaves
        if loop.counts_steps:
            self.steps.count(optimizer)
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        if loop.corrects:
            others = {name: tensor[:active] for name, tensor in (self.still | self.buffers).items()}
            held = others | {name: leaf.detach() for name, leaf in leaves.items()}
            for name, gradient in self.objective.correct(held, gradients, slice(0, active)).items():
                leaves[name].grad = gradients[name] = gradient
        loop.gradients.clip(list(gradients.values()))
        if type(optimizer).__module__.startswith("torch."):
            loop.take_step(optimizer)
        else:
            with Called() as called:
                loop.take_step(optimizer)
            self.group.computations.note(("step", *called.sequence), range(active))
        if not isinstance(loop.trainer.global_step, Differs):
            loop.trainer.global_step += 1


def _weights(given: Sequence[int | None], parts: Iterable[Sequence[int]], sizes: Sequence[int]) -> Sequence[int] | None:
    """Each client's weight of a value from the weights that ``self.log`` got for each part of the clients."""
    if all(weight is None for weight in given):
        return None
    weights = list(sizes)
    for weight, rows in zip(given, parts, strict=True):
        for idx in rows:
            weights[idx] = sizes[idx] if weight is None else weight
    return weights


def _stack_models(model: Any, clients: Sequence[Client]) -> Tensors:
    """Stacks of the tensors that the clients start from: all but the frozen parameters that they have in common."""
    found = {}
    begun = clients[0].begun
    frozen = set(model.split.frozen).difference(begun)
    alike = all(client.begun is begun for client in clients)
    for name in model.names:
        if name in frozen:
            continue
        column = [begun.get(name)] if alike else [client.begun.get(name) for client in clients]
        first = column[0]
        if all(one is first for one in column):
            whole = model.tensor(name) if first is None else first
            found[name] = whole.unsqueeze(0).repeat(len(clients), *(1 for _ in whole.shape))
        else:
            found[name] = torch.stack([model.tensor(name) if one is None else one for one in column])
    return found


def _batches(loop: LocalLoop, phases: Sequence[Phase], rows: Rows | None) -> GroupBatches:
    of_phase = {id(phase): total_steps(phase) for phase in {id(phase): phase for phase in phases}.values()}
    lengths = [of_phase[id(phase)] for phase in phases]
    if lengths != sorted(lengths, reverse=True):
        raise NotVectorizable("clients with more samples make fewer steps")
    if lengths[0] and rows is not None:
        return Gathered(rows, lengths)
    if lengths[0] and not loop.converts and can_gather(phase.loader for phase in phases):
        return Gathered(Rows.of_loaders([phase.loader for phase in phases]), lengths)  # type: ignore[misc]  # looked at
    return Collected(phases, lengths, loop.to_device)


class GroupFinish:
    """Asks a method for the answers of groups of clients of one kind.

    Args:
        session: Knows the method.
        loop: The kind's.
    """

    def __init__(self, session: Session, loop: LocalLoop) -> None:
        self.session = session
        self.loop = loop
        self.together = True
        """Whether ``finish`` is called for all clients at once; false after a failure."""
        self._layout: Mapping[str, torch.Size] = {}

    def of_all(self, clients: Sequence[Client], tensors: Tensors) -> list[Answers] | None:
        """The clients' answers, in their order; None where each has to be asked by `Session.answer`.

        Args:
            clients: Trained, in descending order of steps.
            tensors: Their models, stacked.
        """
        answers, start = list[Answers](), 0
        for _, equals in itertools.groupby([client.steps.distance for client in clients]):
            rows = slice(start, start + sum(1 for _ in equals))
            start = rows.stop
            try:
                if self.together:
                    parts = {name: tensor[rows] for name, tensor in tensors.items()}
                    answers.append(self._answers(clients[rows], parts))
            except (Exception, SystemExit):  # asked alone, a failing client is named
                self.together = False
        return answers if self.together else None

    def _answers(self, clients: Sequence[Client], tensors: Tensors) -> Answers:
        objective, count = GroupObjective(self.loop, clients), len(clients)
        made = objective.finish(clients, tensors)
        if isinstance(made.weight, Tensor):
            raise NotVectorizable("algorithm.finish gives a weight that is a tensor")
        stacks = self.session.local_state(objective.client, made.state)
        finite = finite_rows([*made.payload.values(), *stacks.values()], count)
        vectors, weights = self._vectors(made.payload, count), [made.weight] * count
        payloads = _rows(made.payload, count) if vectors is None else []
        return Answers(payloads, _rows(stacks, count), weights, vectors, finite)

    def _vectors(self, payload: Payload, count: int) -> Flat | None:
        """Every client's payload as a row; None where it cannot be a vector, see `Flat.copy_of`."""
        shapes = {name: stack.shape[1:] for name, stack in payload.items()}
        kinds = {stack.dtype for stack in payload.values()}
        if len(kinds) != 1 or not kinds.pop().is_floating_point:
            return None
        if sum(map(torch.Size.numel, shapes.values())) > MOST_VALUES:
            return None
        layout = self._layout = self._layout if shapes == self._layout else shapes
        return Flat(layout, torch.cat([payload[name].reshape(count, -1) for name in layout], 1))


FailureT = TypeVar("FailureT", bound=ClientFailure)


def answer_at(parts: Sequence[Answers | FailureT], idx: int) -> Answer | FailureT:
    """The answer of a group's client."""
    for part in parts:
        count = len(part.finite) if isinstance(part, Answers) else 1
        if idx < count:
            return part.of_client(idx) if isinstance(part, Answers) else part
        idx -= count
    raise IndexError(idx)


def finite_rows(stacks: Iterable[Tensor], count: int) -> list[bool]:
    """Whether each client's tensors are finite, as by `are_finite`; one device synchronization."""
    parts = (torch.view_as_real(stack) if stack.is_complex() else stack for stack in stacks)
    floats = [stack for stack in parts if stack.is_floating_point() and stack.numel()]
    if not floats:
        return [True] * count
    sums = [stack.reshape(count, -1).sum(1, dtype=torch.promote_types(stack.dtype, torch.float32)) for stack in floats]
    finite: list[bool] = torch.stack(sums).isfinite().all(0).tolist()
    return finite


def _rows(stacks: Mapping[str, Any], count: int) -> list[Tensors]:
    """Stacked tensors by name, unbound by client."""
    if not stacks:
        return [{} for _ in range(count)]
    columns = [stack.unbind(0) for stack in stacks.values()]
    return [dict(zip(stacks, parts, strict=True)) for parts in zip(*columns, strict=True)]
