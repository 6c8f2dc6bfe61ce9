"""The objective of a group of clients whose tensors are stacked.

Hooks that are pure in tensors (``objective``, ``correct``) run once for the whole group under ``torch.vmap``, on the
unchanged task, and so does ``finish`` where it is pure too; hooks that are asked for each client alone (``start``,
``phases``) see the client's rows of the stacks as its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics import Metric
from typing_extensions import override

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.method.client import Client, Tensors, Update, gradients_of
from lit_fed.engine.method.model import Differs, ModelView
from lit_fed.engine.method.task_run import TaskRun
from lit_fed.engine.vectorized.by_sample import BySample, Count, Unproven
from lit_fed.engine.vectorized.layers import GroupDropout, GroupLayers, Streams
from lit_fed.errors import ConfigError
from lit_fed.private_names import tree_map

Rows = slice | Tensor
_OfStep = tuple[Tensor, list[Tensor], list[Tensor]]  # objectives, logged values, and outputs for `StepMeter.replay`
Hook = Literal["objective", "correct", "finish"]
_DIFFERS = "which differs between the clients of a group"
Holds = Callable[[int, int], bool]


class NotVectorizable(ConfigError):
    """A group of clients cannot be trained as one computation."""


class StackedTensors:
    """Stacked tensors of a group, unbound by client on first use.

    Args:
        stacks: Tensors (n, …) by name.
    """

    def __init__(self, stacks: Tensors) -> None:
        self._stacks = stacks
        self._columns: dict[str, Sequence[Tensor]] = {}

    def tensor_of(self, idx: int, name: str) -> Tensor | None:
        """A client's tensor; None where the group has none of this name."""
        if name not in self._columns:
            if name not in self._stacks:
                return None
            self._columns[name] = self._stacks[name].unbind(0)
        return self._columns[name][idx]


class GroupClient(Client):
    """All clients of a group at once, as ``objective``, ``correct`` and ``finish`` see them.

    An attribute has the value of the client in whose place the hook runs, or raises `NotVectorizable` where it is used.

    Args:
        one: Any of them, whose common attributes are taken over.
        task_run: Runs the task on the module's tensors.
    """

    def __init__(self, one: Client, task_run: TaskRun) -> None:
        super().__init__(one.id, one.round_idx, one.stage, one.seed, one.model, task_run=task_run)
        self.received, self.is_new, self.phase = one.received, one.is_new, one.phase
        self.work, self.fine_tuning = one.work, one.fine_tuning
        self.data = one.data  # a method may ask whether there are data; `population` is refused
        self.hook: Hook = "objective"
        self.streams: Streams | None = None
        self.stacks: Tensors | None = None
        """The group's parameters, (n, …); None where a batch is taken sample by sample."""
        self.id, self.steps = self.differs("id"), self.differs("steps")

    def differs(self, attribute: str) -> Any:
        """Placeholder of an attribute that is not one value or one stack for the group."""
        return Differs(lambda: NotVectorizable(f"algorithm.{self.hook} uses client.{attribute}, {_DIFFERS}"))

    @property
    @override
    def population(self) -> NoReturn:
        """Refused: read a client's data in ``start`` or ``phases``, as ``client.results``."""
        raise NotVectorizable(f"algorithm.{self.hook} uses client.population, {_DIFFERS}")

    @property
    @override
    def _task(self) -> TaskRun:
        """Runs the task in ``objective`` only: in other hooks the module does not hold the group's tensors."""
        if self.hook != "objective":
            raise NotVectorizable(f"algorithm.{self.hook} runs the task, which a group does only in objective")
        return super()._task

    @override
    def gradients(self, loss: Tensor, create_graph: bool = False, keep_graph: bool = False) -> Tensors:
        if self.stacks is None:
            raise NotVectorizable(f"algorithm.{self.hook} uses client.gradients, of a batch as a whole")
        stacks, names = self.stacks, list[str]()

        def of_all(losses: Tensor) -> tuple[Tensor, ...]:
            found = gradients_of(losses.sum(), stacks, create_graph, create_graph or keep_graph)
            names.extend(found)
            return tuple(found.values())

        return dict(zip(names, _Gradients.apply(loss, of_all), strict=True))

    @override
    def rehearsed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.streams is None else self.streams.repeated()


class _Gradients(torch.autograd.Function):
    """The gradients of every client's loss, from within ``torch.vmap`` over clients."""

    @staticmethod
    def forward(loss: Tensor, of_all: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        raise RuntimeError("gradients outside of a group")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: `vmap` is differentiable itself."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, loss: Tensor, of_all: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Gradients (n, …) of losses (n,)."""
        found = of_all(loss)
        return found, (0,) * len(found)


def differing(what: str) -> Any:
    """Placeholder of a value that a step may read, where it differs between the clients of a group."""
    return Differs(lambda: NotVectorizable(f"training_step or a step of evaluation uses {what}, {_DIFFERS}"))


class StepMeter(Meter):
    """Collects the values logged in one step, as outputs of the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, int | None]] = []
        self.values: list[Tensor] = []
        self.taken: list[Tensor] = []
        """Further outputs, for `replay`."""

    def begin(self) -> None:
        """Forget the last step."""
        self.logged, self.values, self.taken = [], [], []

    def recording(self) -> AbstractContextManager[None]:
        """Record the calls of the task's metrics."""
        return nullcontext()

    def replay(self, taken: Sequence[Tensor], rows: Rows, counts: Tensor | None = None) -> list[Tensor]:
        """Give every client's metrics the recorded calls; returns further logged values (k,), named in ``logged``.

        Args:
            taken: `taken` of each of k clients, (k, …).
            rows: The k clients among the group's.
            counts: Samples of each, (k,), where the step took samples one by one and `taken` is (k, B, …); else None.
        """
        return []

    @override
    def add(self, name: str, value: Any, batch_size: int | None = None, reduce_fx: Any = "mean") -> None:
        if isinstance(value, Metric):
            raise NotVectorizable(f"a step logs {name!r} as a torchmetrics object, which holds one client's state")
        self.check_mean(name, reduce_fx)
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        if tensor.numel() != 1:
            raise ConfigError(f"self.log({name!r}, …) got {tensor.numel()} values; log one number, or their mean")
        size: Any = batch_size
        if isinstance(size, Count):
            size = None if size.factor == 1 else size._refuse()
        self.logged.append((name, size))
        self.values.append(tensor.reshape(()))

    @staticmethod
    def check_mean(name: str, reduce_fx: Any) -> None:
        """Refuse another reduction than the mean."""
        if reduce_fx != "mean" and reduce_fx is not torch.mean:
            raise NotVectorizable(f"a step logs {name!r} with reduce_fx={reduce_fx!r}, which is not mean")


class Stepper(nn.Module):
    """A step of an objective as a module's forward, as ``functional_call`` needs it.

    Args:
        objective: The module whose tensors are replaced, under ``objective.``.
        step: A step of it, such as ``training_step``.
    """

    def __init__(self, objective: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.objective, self.step = objective, step

    def forward(self, batch: Any, batch_idx: Any) -> Any:
        """The step."""
        return self.step(batch, batch_idx)


class GroupObjective:
    """The objective of a group's clients in a phase, as a function of stacked tensors.

    Args:
        loop: The loop of the clients' kind.
        clients: The clients in the order of the stacks. Their tensors have the same names and shapes.
        streams: Their random numbers, for dropout; None where nothing trains.
        recorder: Takes what a step logs.
    """

    def __init__(
        self,
        loop: LocalLoop,
        clients: Sequence[Client],
        streams: Streams | None = None,
        recorder: StepMeter | None = None,
    ) -> None:
        self.loop, self._streams = loop, streams
        self.client = GroupClient(clients[0], loop.state.task_run)
        self.client.streams = streams
        self.recorder = StepMeter() if recorder is None else recorder
        self.batch_idx: Any = 0
        self.called: tuple[Any, ...] = ()
        """Operations of the last step; equal for equal computations."""
        self._layers = GroupLayers()
        self._stepper = Stepper(loop.objective, loop.objective.training_step)
        self._rebound: list[str] = []
        self._received = clients[0].received
        self._common, begun = clients[0].begun, Tensors()
        if any(one.begun is not self._common for one in clients):
            self._common, begun = _common({name: [one.begun[name] for one in clients] for name in clients[0].begun})
        # Where every client starts from its own tensors, as by default, there is one stack of both.
        self._started = [n for n in clients[0].own if all(one.own[n] is one.begun.get(n) for one in clients)]
        own = [{name: one.own[name] for name in one.own if name not in self._started} for one in clients]
        self._unstackable: dict[str, list[str]] = {}
        self._own: dict[str, Any] = {
            "begun": begun,
            "own": self._stacked("own", own),
            "left": self._stacked("left", [one.left for one in clients]),
            "state": self._stacked("state", [one.state for one in clients]),
            "addressed": self._stacked("addressed", [one.addressed for one in clients]),
            "results": {
                key: self._stacked(f"results[{key!r}]", [one.results[key] for one in clients])
                for key in clients[0].results
            },
        }

    def losses(
        self,
        parameters: Tensors,
        buffers: Tensors,
        batch: Any,
        rows: Rows,
        counts: Tensor | None = None,
        holds: Holds | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Every client's objective on its batch, and its logged values, named in `StepMeter.logged`.

        Args:
            parameters: All parameters, each (n, …).
            buffers: Each (n, …); written in place.
            batch: Tensors (n, B, …).
            rows: The clients among the group's.
            counts: Real samples of each batch, (n,): the others are padding, and the objective is taken sample by
                sample. None without padding.
            holds: Whether one of these batches has a value in a leaf, as (place, value); with `counts`.

        Returns:
            The objective, (n,), and each logged value, (n,).

        Raises:
            Unproven: If a batch cannot be taken sample by sample.
        """
        own_rows = self._own_rows(rows)
        dropout = None
        if self._streams is not None and self.loop.fabric.device.type == "cpu":
            held = range(len(next(iter(parameters.values())))) if isinstance(rows, slice) else rows.tolist()
            dropout = GroupDropout(self._streams, held, None if counts is None else counts.tolist())
        self._layers = GroupLayers(dropout) if holds is None else BySample(2, holds, dropout)
        loss, values, taken = self._as_a_group(parameters, buffers, batch, own_rows, counts)
        self.called = tuple(self._layers.sequence)
        return loss, values + self.recorder.replay(taken, rows, counts)

    def _as_a_group(
        self, parameters: Tensors, buffers: Tensors, batch: Any, own: dict[str, Any], counts: Tensor | None
    ) -> _OfStep:
        if len(next(iter(parameters.values()))) == 1:  # other kernels multiply a single client than a group
            doubled = tree_map(twice, (parameters, buffers, batch, own, counts))
            loss, values, taken = self._run(*doubled)
            for name, tensor in buffers.items():
                tensor.copy_(doubled[1][name][:1])
            return loss[:1], [value[:1] for value in values], [tensor[:1] for tensor in taken]
        return self._run(parameters, buffers, batch, own, counts)

    def _run(
        self, parameters: Tensors, buffers: Tensors, batch: Any, own: dict[str, Any], counts: Tensor | None
    ) -> _OfStep:
        self.client.stacks = parameters if counts is None else None
        if counts is None:
            step = torch.vmap(self._step, in_dims=(0, 0, batch_dims(batch), 0))
            with self._layers, self.recorder.recording():
                loss, values, taken, rebound = step(parameters, buffers, batch, own)
            for name, tensor in zip(self._rebound, rebound, strict=True):
                buffers[name].copy_(tensor)
            return loss, list(values), list(taken)
        by_sample = torch.vmap(self._step_on_sample, in_dims=(None, None, batch_dims(batch), None))
        run = torch.vmap(by_sample, in_dims=(0, 0, batch_dims(batch), 0))
        with self._layers, self.recorder.recording():
            loss, values, taken = run(parameters, buffers, batch, own)
        weights = (torch.arange(loss.shape[1], device=loss.device) < counts.unsqueeze(1)) / counts.unsqueeze(1)
        return (loss * weights).sum(1), [(value * weights).sum(1) for value in values], list(taken)

    @torch.no_grad()
    def correct(self, parameters: Tensors, gradients: Tensors, rows: Rows) -> Tensors:
        """`Algorithm.correct` of stacked gradients.

        Args:
            parameters: All tensors of the clients' models, each (n, …).
            gradients: Each (n, …).
            rows: The clients among the group's.
        """

        def one(parameters: Tensors, gradients: Tensors, own: dict[str, Any]) -> Tensors:
            self._become("correct", parameters, own)
            return dict(self.loop.algorithm.correct(self.client, gradients))

        corrected: Tensors = torch.vmap(one)(parameters, gradients, self._own_rows(rows))
        return corrected

    @torch.no_grad()
    def finish(self, clients: Sequence[Client], tensors: Tensors) -> Update:
        """Answers and method's states of all clients, stacked; ``self.client`` then has their tensors.

        Args:
            clients: The group, each trained by equally many steps.
            tensors: Tensors of their models, each (n, …).

        Raises:
            NotVectorizable: If ``finish`` uses a value other than a tensor that differs between them.
        """
        client, weights = self.client, list[float | None]()
        client.steps = clients[0].steps

        def one(tensors: Tensors, own: dict[str, Any]) -> tuple[Tensors, Tensors]:
            self._become("finish", tensors, own)
            made = self.loop.algorithm.finish(client)
            weights.append(made.weight)
            return dict(made.payload), dict(made.state)

        payload, state = torch.vmap(one)(tensors, self._own)
        client.model = ModelView(self.loop.model, tensors.get)
        return Update(payload, state, weights[0])

    def _own_rows(self, rows: Rows) -> dict[str, Any]:
        own_rows: dict[str, Any] = tree_map(lambda tensor: tensor[rows], self._own)
        return own_rows

    # ------------------------------------------------------------------ within the computation: one client each

    def _step(self, parameters: Tensors, buffers: Tensors, batch: Any, own: dict[str, Any]) -> Any:
        self._become("objective", parameters, own)  # the module has the buffers, also where a step rebinds one
        self.recorder.begin()
        given = {f"objective.{name}": tensor for name, tensor in (parameters | buffers).items()}
        results = dict(self.client.results)
        loss = functional_call(self._stepper, given, (batch, self.batch_idx))
        if moved := [key for key, one in self.client.results.items() if one is not results.get(key)]:
            raise NotVectorizable(f"algorithm.objective moves client.results[{moved[0]!r}] from step to step")
        if loss is None:
            raise NotVectorizable("training_step returns None, which skips a batch")
        # Buffers written in place are in the group's tensors already, rebound ones are not.
        self._rebound = [name for name in buffers if given[f"objective.{name}"] is not buffers[name]]
        rebound = tuple(given[f"objective.{name}"] for name in self._rebound)
        return loss, tuple(self.recorder.values), tuple(self.recorder.taken), rebound

    def _step_on_sample(self, parameters: Tensors, buffers: Tensors, sample: Any, own: dict[str, Any]) -> Any:
        proof: BySample = self._layers  # type: ignore[assignment]  # a batch without padding is not taken by sample
        loss, values, taken, rebound = self._step(parameters, buffers, proof.begin(sample), own)
        if rebound:
            raise Unproven("a step replaces a buffer")
        proof.expect((loss, *values), taken)
        return loss, values, taken

    def _become(self, hook: Hook, tensors: Tensors, own: dict[str, Any]) -> None:
        """Make ``self.client`` the client with these tensors; others are the module's."""
        client, model = self.client, self.loop.model
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        parameters = {name: tensors.get(name, parameter) for name, parameter in model.parameters.items()}
        client.hook, client.model = hook, ModelView(model, detached.get, parameters)
        client.task_run = self.loop.state.task_run if hook == "objective" else client.differs("task_run")
        client.begun = {**self._common, **own["begun"]}
        client.own = {**{name: client.begun[name] for name in self._started}, **own["own"], **self._refusing("own")}
        client.left = {**own["left"], **self._refusing("left")}
        client.state = {**own["state"], **self._refusing("state")}
        client.addressed = own["addressed"]
        if client.addressed:
            client.received = {**self._received, **client.addressed}
        client.results = {key: {**held, **self._refusing(f"results[{key!r}]")} for key, held in own["results"].items()}
        client._anchor = None
        client.forget()

    def _stacked(self, what: str, held: Sequence[Mapping[str, Tensor]]) -> Tensors:
        """Stacks of the clients' tensors by name, where all have the same shape; the others are `_refusing`."""
        names = dict.fromkeys(name for tensors in held for name in tensors)
        columns = {name: [tensors[name] for tensors in held if name in tensors] for name in names}
        alike = {
            n for n, tensors in columns.items() if len(tensors) == len(held) and len({t.shape for t in tensors}) == 1
        }
        if unlike := [name for name in names if name not in alike]:
            self._unstackable[what] = unlike
        return {name: torch.stack(columns[name]) for name in names if name in alike}

    def _refusing(self, what: str) -> dict[str, Any]:
        """Placeholders of the tensors that cannot be stacked."""
        return {name: self.client.differs(f"{what}[{name!r}]") for name in self._unstackable.get(what, ())}


def _common(columns: Mapping[str, list[Tensor]]) -> tuple[Tensors, Tensors]:
    """Tensors that all clients share, such as the global model's, and stacks of the others."""
    common = {name: tensors[0] for name, tensors in columns.items() if all(tensor is tensors[0] for tensor in tensors)}
    return common, {name: torch.stack(tensors) for name, tensors in columns.items() if name not in common}


def twice(leaf: Any) -> Any:
    """A single client's tensor (1, …) as that of two equal clients."""
    return torch.cat([leaf, leaf.detach()]) if isinstance(leaf, Tensor) else leaf


def batch_dims(batch: Any) -> Any:
    """``in_dims`` of ``torch.vmap`` for a batch of several clients: 0 for tensors, None for other leaves."""
    return tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
