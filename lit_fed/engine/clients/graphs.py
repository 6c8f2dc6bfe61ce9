"""A client's forward and backward pass as one CUDA graph: ``trainer.compile: graph``.

A graph repeats the kernels of one batch on the same addresses, without Python and with one launch. So it reads copies,
at fixed addresses, of everything that differs between clients or batches: the batch, and every tensor of the client
that the objective reads. It writes the gradients, the loss and the logged values. The method's correction, clipping and
the optimizer's step follow as without graphs. Values that a graph cannot read anew, such as ``client.id``, are refused.
"""

from __future__ import annotations

import gc
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torchmetrics import Metric
from typing_extensions import override

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.method.model import Differs
from lit_fed.engine.wire.payload import Broadcast
from lit_fed.errors import ConfigError, reason
from lit_fed.private_names import foreach, tree_flatten, tree_unflatten, version_of
from lit_fed.tensors import map_tensors

_MOST = 32  # graphs kept; each holds a set of gradients
_WARM_UPS = 3  # as torch.cuda.make_graphed_callables
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_zero_grad")
_REPLACED = ("backward", "optimizer_zero_grad")
_HELD = ("begun", "own", "left", "state", "received", "addressed")
_KEY = "trainer.compile is graph"

Replay = Callable[[], None]


def refuse(loop: LocalLoop) -> None:
    """Refuse a setting or a task whose steps no graph can repeat."""
    name = task_name(loop.objective)
    if not has_graphs(loop.fabric.device):
        raise ConfigError(f"{_KEY}, which needs a GPU, and clients train on {loop.fabric.device.type}; set it to false")
    if not loop.objective.automatic_optimization:
        raise ConfigError(f"{_KEY}, and model {name} optimises by hand; set compile to false")
    if loop.workers.data_parallel:
        raise ConfigError(f"{_KEY}, and strategy=ddp divides each client's batches; use strategy=clients")
    if loop.scaler is not None:
        raise ConfigError(f"{_KEY}, and precision 16-mixed changes the scale of gradients; use bf16-mixed")
    if loop.gradients.accumulate > 1:
        raise ConfigError(
            f"{_KEY}, and trainer.accumulate_grad_batches is {loop.gradients.accumulate}; set one of them"
        )
    for hook in _HOOKS:
        if loop.listeners(hook):
            raise ConfigError(f"{_KEY}, and model {name} or a callback has {hook}, which a graph does not call")
    for hook in _REPLACED:
        if hook in loop.replaced:
            raise ConfigError(f"{_KEY}, and model {name} overrides {hook}, which a graph does not call")


def has_graphs(device: torch.device) -> bool:
    """Whether a device can record graphs."""
    return device.type == "cuda"


class StaticTensors(Mapping[str, Tensor]):
    """Copies of a client's tensors at fixed addresses, each made when it is first read.

    Args:
        given: The tensors.
        what: Name of the mapping, for errors.
    """

    def __init__(self, given: Mapping[str, Tensor], what: str) -> None:
        self._given, self._what = given, what
        self._held: Tensors = {}
        self.is_complete = False
        """Whether all tensors that are read have been read."""

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Copy another client's tensors in place."""
        self._given = given
        if self._held:
            foreach.copy_(list(self._held.values()), [given[name] for name in self._held])

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            given = self._given[name]
            if self.is_complete:
                raise ConfigError(f"{_KEY}, and the objective reads client.{self._what}[{name!r}] in some steps only")
            self._held[name] = given.clone()
        return self._held[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    @override
    def __len__(self) -> int:
        return len(self._given)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._given


class GraphClient(Client):
    """Any client of a phase, as the objective sees it while a graph is recorded.

    Args:
        one: The first of them, whose common attributes are taken over.
    """

    def __init__(self, one: Client) -> None:
        super().__init__(one.id, one.round_idx, one.stage, one.seed, one.model, task_run=one.task_run)
        self.is_new, self.phase, self.fine_tuning = one.is_new, one.phase, one.fine_tuning
        self.data = one.data  # a method may ask whether there are data; `population` is refused
        self._static = {name: StaticTensors(getattr(one, name), name) for name in _HELD}
        results = {key: StaticTensors(tensors, f"results[{key!r}]") for key, tensors in one.results.items()}
        for name, tensors in self._static.items():
            setattr(self, name, tensors)
        self.results, self._static_results = cast("dict[str, Tensors]", results), results
        self.id, self.seed = _differs("client.id"), _differs("client.seed")
        self.steps, self.work = _differs("client.steps"), _differs("client.work")
        self.reads_round = False
        """Whether the objective reads the round's number, so that every round needs new graphs."""

    @property
    def static(self) -> list[StaticTensors]:
        """The copies."""
        return [*self._static.values(), *self._static_results.values()]

    def check_results(self) -> None:
        """Refuse an objective that puts other tensors into ``results``."""
        mine = self._static_results
        if self.results.keys() != mine.keys() or any(self.results[key] is not mine[key] for key in mine):
            raise _refusal("client.results as a memory from step to step")

    @property
    def round_idx(self) -> int:
        """The round, from 0."""
        self.reads_round = True
        return self._round

    @round_idx.setter
    def round_idx(self, round_idx: int) -> None:
        self._round = round_idx

    def is_of(self, round_idx: int) -> bool:
        """Whether a graph recorded with this client holds in a round."""
        return not self.reads_round or self._round == round_idx

    def become(self, one: Client) -> None:
        """Copy a client's tensors."""
        self.round_idx = one.round_idx
        for name, tensors in self._static.items():
            tensors.load(getattr(one, name))
        for key, tensors in self._static_results.items():
            tensors.load(one.results[key])

    @property
    @override
    def population(self) -> NoReturn:
        """Refused: read a client's data in ``start`` or ``phases``."""
        raise _refusal("client.population")

    @override
    def rehearsed(self) -> NoReturn:
        """Refused: a graph goes on with the GPU's random numbers."""
        raise _refusal("client.rehearsed")


class StepRecorder(Meter):
    """Collects the values logged in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, Tensor, int | None]] = []

    @override
    def add(self, name: str, value: Any, batch_size: int | None = None, reduce_fx: Any = "mean") -> None:
        if isinstance(value, Metric) or not isinstance(value, Tensor):
            kind = "a torchmetrics object" if isinstance(value, Metric) else "a Python number"
            raise ConfigError(f"{_KEY}, and training_step logs {name!r} as {kind}, which a graph would not change")
        if reduce_fx != "mean" and reduce_fx is not torch.mean:
            raise ConfigError(f"{_KEY}, and training_step logs {name!r} with reduce_fx={reduce_fx!r}; use mean")
        self.logged.append((name, value.detach(), batch_size))


class Graph:
    """One recorded forward and backward pass.

    Args:
        loop: The clients' loop.
        client: The client whose tensors it reads.
        batch: Any batch of its form.
    """

    def __init__(self, loop: LocalLoop, client: GraphClient, batch: Any) -> None:
        self._loop = loop
        leaves, form = tree_flatten(batch)
        self._batch = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._own = [leaf for leaf in self._batch if isinstance(leaf, Tensor)]
        with _surroundings(loop, client) as recorder, _undone(loop):
            # Passes held elsewhere keep their accumulation of gradients, which belongs to the stream that they ran on.
            loop.state.task_run.forget()
            gc.collect()
            _check_held(loop)
            with _nothing_drawn(loop):
                self._replay = record(lambda: self._step(form, recorder), loop.fabric.device, client.static)
            _check_held(loop)
            self._written = [buffer for buffer, version in self._versions if version_of(buffer) != version]
            self._logged = list(recorder.logged)
            parameters = loop.model.parameters.values()
            self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def take(self, batch: Any) -> Tensor:
        """Replay it on another batch of the same form, add the logged values, and return the loss."""
        loop = self._loop
        foreach.copy_(self._own, [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)])
        self._replay()
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if loop.state.meter is not None:
            for name, value, batch_size in self._logged:
                loop.state.meter.add(name, value, batch_size)
        loss: Tensor = self._loss
        if not loop.wants_outputs:
            return loss
        loop.state.task_run.returned = map_tensors(self._returned, Tensor.clone)
        return loss.clone()

    def _step(self, form: Any, recorder: StepRecorder) -> None:
        loop = self._loop
        recorder.logged.clear()
        loop.model.forget_gradients()
        buffers = loop.model.all_buffers()
        self._versions = [(buffer, version_of(buffer)) for buffer in buffers]
        with loop.autocast():
            loss = loop.training_step(tree_unflatten(self._batch, form), _differs("batch_idx"))
        if loss is None:
            raise ConfigError(f"{_KEY}, and training_step returns None, which skips a batch; set compile to false")
        loop.backward(loss)
        self._loss = loss.detach()
        self._returned = map_tensors(loop.state.task_run.returned, Tensor.detach)
        loop.state.client.forget()
        loop.state.task_run.forget()
        cast("GraphClient", loop.state.client).check_results()
        if any(buffer is not other for buffer, other in zip(buffers, loop.model.all_buffers(), strict=True)):
            raise ConfigError(f"{_KEY}, and training_step replaces a buffer; write it in place, by copy_")
        if any(metric.update_called for metric in loop.metrics):
            raise ConfigError(f"{_KEY}, and training_step updates a torchmetrics object; update it in validation_step")


class Graphs:
    """Gradients by graphs: one for each phase, kind of client and form of batch, for all clients.

    Args:
        loop: The clients' loop.
    """

    def __init__(self, loop: LocalLoop) -> None:
        refuse(loop)
        self._loop = loop
        self._clients: OrderedDict[Any, GraphClient] = OrderedDict()
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()
        self._phase: Any = None

    def enter(self, client: Client) -> bool:
        """Begin a phase of a client: the copies of this phase's tensors become the client's."""
        self._phase = _kind(self._loop, client)
        if (held := self._clients.get(self._phase)) is None:
            self._clients[self._phase] = GraphClient(client)
            if len(self._clients) > _MOST:
                self._drop(self._clients.popitem(last=False)[0])
            return True
        self._clients.move_to_end(self._phase)
        if not held.is_of(client.round_idx):
            self._drop(self._phase)
        held.become(client)
        return True

    def _drop(self, phase: Any) -> None:
        """Drop the graphs of a phase."""
        for key in [key for key in self._graphs if key[0] == phase]:
            del self._graphs[key]

    def take(self, batch: Any) -> Tensor:
        """Gradients of the client's objective on a batch, in place of those present; returns the loss."""
        key = self._phase, _form(batch), self._loop.model.switches()  # hooks may have changed these since `enter`
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = Graph(self._loop, self._clients[self._phase], batch)
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph.take(batch)


def try_out(session: Session, broadcast: Broadcast) -> None:
    """Record a step of one client of each kind before the run; tensors, modes and generators stay as they are."""
    for kind, loop in session.loops.items():
        own = (
            idx
            for idx in session.data.census.clients
            if session.kinds[idx] == kind and session.data.census.num_samples(idx)
        )
        client_id = next(own, None)
        if client_id is None:
            continue
        with torch.random.fork_rng(_devices(loop)), loop.model.lent():
            try:
                client = session.admit(client_id, broadcast, "train")
                client.work = replace(client.work, epochs=None, steps=1)
                session.become(client)
                session.train(client)
            except ConfigError:
                raise
            except Exception:  # the executor names the client in its round, if it fails there
                continue


def record(step: Callable[[], None], device: torch.device, static: Sequence[StaticTensors]) -> Replay:
    """Run a step until nothing more is prepared in it, and record it as a CUDA graph.

    Args:
        step: Takes no argument and depends on tensors at fixed addresses.
        device: The GPU.
        static: Copies that the step reads; complete after the first run.

    Returns:
        Repeats the step's kernels.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    debug = torch.cuda.get_sync_debug_mode()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for idx in range(_WARM_UPS):
                if idx == _WARM_UPS - 1:  # the first ones set up libraries
                    torch.cuda.set_sync_debug_mode("error")
                step()
                for tensors in static:
                    tensors.is_complete = True
        torch.cuda.set_sync_debug_mode(debug)
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            step()
    except RuntimeError as error:
        raise ConfigError(
            f"{_KEY}, and a step of the clients cannot be recorded: {reason(error)}; set it to false"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(debug)
    return graph.replay


@contextmanager
def _surroundings(loop: LocalLoop, client: GraphClient) -> Iterator[StepRecorder]:
    """Have the objective see the copies, log into a recorder, and refuse the task's clock."""
    state, trainer = loop.state, loop.trainer
    before = state.client, state.meter, trainer.current_epoch, trainer.global_step
    recorder = state.meter = StepRecorder()
    state.client = client
    trainer.current_epoch, trainer.global_step = _differs("self.current_epoch"), _differs("self.global_step")
    try:
        yield recorder
    finally:
        state.client, state.meter, trainer.current_epoch, trainer.global_step = before
        client.forget()


@contextmanager
def _undone(loop: LocalLoop) -> Iterator[None]:
    """Restore buffers and generators on leaving: passes before a recording do not train."""
    buffers = loop.model.all_buffers()
    saved = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng(_devices(loop)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, first in zip(buffers, saved, strict=True):
                    buffer.copy_(first)


def _notes(parameter: Tensor) -> dict[str, Any]:
    """Notes on the node by which autograd accumulates a parameter's gradient; they live as long as a graph with it."""
    node: Any = get_gradient_edge(parameter).node  # whose metadata are typed as a method
    metadata: dict[str, Any] = node.metadata
    return metadata


def _check_held(loop: LocalLoop) -> None:
    """Refuse a task that holds a graph of autograd which leads to the parameters, outside of its step."""
    trained = [parameter for parameter in loop.model.parameters.values() if parameter.requires_grad]
    for parameter in trained:
        _notes(parameter)[__name__] = True
    if any(__name__ in _notes(parameter) for parameter in trained):
        raise ConfigError(
            f"{_KEY}, and model {task_name(loop.objective)} or a hook holds the result of an earlier training_step; "
            "keep results detached"
        )


def _numpy_state() -> list[Any]:
    """State of NumPy's global generator, as values that compare."""
    state: Any = np.random.get_state()  # noqa: NPY002  # the generator that a task may draw from
    return [state[1].tolist(), *state[2:]]


@contextmanager
def _nothing_drawn(loop: LocalLoop) -> Iterator[None]:
    """Refuse a step that draws random numbers beside the GPU's generator, of which a graph would repeat the first."""
    states: dict[str, Callable[[], Any]] = {"Python's random": random.getstate, "NumPy's np.random": _numpy_state}
    if loop.fabric.device.type != "cpu":
        states["torch's generator of the CPU"] = lambda: torch.get_rng_state().tolist()
    before = {name: state() for name, state in states.items()}
    yield
    for name, state in states.items():
        if state() != before[name]:
            raise ConfigError(
                f"{_KEY}, and training_step draws from {name}, whose numbers a graph would repeat; draw on the batch's "
                "device"
            )


def _devices(loop: LocalLoop) -> list[torch.device]:
    return [loop.fabric.device] if loop.fabric.device.type == "cuda" else []


def _kind(loop: LocalLoop, client: Client) -> Any:
    """Key of the clients and phases that share graphs."""
    held = (*(getattr(client, name) for name in _HELD), *client.results.values())
    shapes = tuple(
        [tuple([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]) for tensors in held]
    )
    return (
        client.phase, loop.state.public, client.stage, client.fine_tuning, client.is_new, tuple(client.results), shapes
    )  # fmt: skip


def _form(batch: Any) -> Any:
    """Structure of a batch, and shape, type and strides of its tensors; its other parts as they are."""
    leaves, form = tree_flatten(batch)
    if any(isinstance(leaf, str | bytes) for leaf in leaves):
        raise ConfigError(f"{_KEY}, and a batch holds text, which a graph would not change; leave it out of batches")
    parts = tuple(
        (leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
    )
    try:
        hash(parts)
    except TypeError:
        raise ConfigError(f"{_KEY}, and a batch holds parts other than tensors that change; set it to false") from None
    return form, parts


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"{_KEY}, and the clients' objective uses {what}, which a graph would not change; set it to false"
    )


def _differs(what: str) -> Any:
    return Differs(lambda: _refusal(what))
