"""The objective of a group of clients whose tensors are stacked.

Hooks that are pure in tensors (``objective``, ``correct``) run once for the whole group under ``torch.vmap``, on the
unchanged task, and so does ``finish`` where it is pure too; hooks that are asked for each client alone (``start``,
``phases``) see its part of the stacked tensors as its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.method.client import Client, Tensors, Update
from lit_fed.engine.method.model import Model
from lit_fed.errors import ConfigError

Rows = slice | Tensor


class NotVectorizable(ConfigError):
    """What a group of clients cannot do as one computation."""


class StackedTensors:
    """Stacked tensors of a group, client by client: taken apart where somebody looks.

    Args:
        stacks: Tensors (n, …) by name.
    """

    def __init__(self, stacks: Tensors) -> None:
        self._stacks = stacks
        self._columns: dict[str, Sequence[Tensor]] = {}

    def at(self, idx: int, name: str) -> Tensor | None:
        """A client's tensor; None where the group has none of that name."""
        if name not in self._columns:
            if name not in self._stacks:
                return None
            self._columns[name] = self._stacks[name].unbind(0)
        return self._columns[name][idx]


class Slice(Model):
    """A model whose tensors are elsewhere, such as a client's part of a group's.

    Args:
        whole: The model, whose names, split and policies are its own.
        find: A tensor by name, which needs no gradient; where it is None it is the model's.
    """

    def __init__(self, whole: Model, find: Callable[[str], Tensor | None]) -> None:
        self.__dict__.update(whole.__dict__)
        self._whole, self._find = whole, find

    def tensor(self, name: str) -> Tensor:
        """A parameter (detached) or buffer."""
        own = self._find(name)
        return self._whole.tensor(name) if own is None else own


class GroupClient(Client):
    """All clients of a group at once, as ``objective``, ``correct`` and ``finish`` see them.

    Args:
        one: Any of them: what they have in common is taken from it.
    """

    def __init__(self, one: Client) -> None:
        super().__init__(one.id, one.round_idx, one.stage, one.seed, one.model, objective=one.objective)
        self.received, self.is_new, self.phase = one.received, one.is_new, one.phase
        self.work, self.fine_tuning = one.work, one.fine_tuning
        self.id = Differs("client.id")  # type: ignore[assignment]  # says so where it is used
        self.data = one.data  # a method may ask whether there are data, see `population`
        self.tensors: Mapping[str, Tensor] = {}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by name, differentiable."""
        return self.tensors

    @property
    def population(self) -> NoReturn:
        """Refused: what depends on a client's data is looked up in ``start`` and put among ``client.results``."""
        raise NotVectorizable("the method looks at each client's data while it trains")

    def gradients(self, loss: Tensor, create_graph: bool = False) -> Tensors:
        """Refused: within the computation there is no graph yet."""
        raise NotVectorizable("the method takes gradients within its objective")


class Differs:
    """Stands for a number of Python that is not the same for all clients of a group.

    Args:
        what: Its name.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def _refuse(self, *_args: Any) -> NoReturn:
        raise NotVectorizable(f"{self.what} is used, which differs between the clients of a group")

    __int__ = __index__ = __float__ = __bool__ = __hash__ = __str__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = _refuse


class StepMeter(Meter):
    """Hands what is logged in one step out of the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, int | None]] = []
        self.values: list[Tensor] = []

    def add(self, name: str, value: Any, batch_size: int | None = None, reduce_fx: Any = "mean") -> None:
        """See `Meter.add`."""
        if isinstance(value, Metric):
            raise NotVectorizable(f"a step logs {name!r} as a torchmetrics object, which sees one client at a time")
        if reduce_fx != "mean" and reduce_fx is not torch.mean:
            raise NotVectorizable(f"a step logs {name!r} with reduce_fx={reduce_fx!r} and not as a mean")
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        if tensor.numel() != 1:
            raise ConfigError(f"self.log({name!r}, …) got {tensor.numel()} values; log one number, or their mean")
        self.logged.append((name, batch_size))
        self.values.append(tensor.reshape(()))


class Stepper(nn.Module):
    """One of an objective's steps as a forward, which is what ``functional_call`` takes.

    Args:
        objective: Whose tensors are replaced for the while, under ``objective.``.
        step: Such as its ``training_step``.
    """

    def __init__(self, objective: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.objective, self.step = objective, step

    def forward(self, batch: Any, batch_idx: Any) -> Any:
        """The step."""
        return self.step(batch, batch_idx)


class GroupObjective:
    """What a group's clients minimise in a phase, as a function of stacked tensors.

    Args:
        loop: Of the clients' kind.
        clients: Who, in the order of the stacks. What they hold has the same names and shapes.
    """

    def __init__(self, loop: LocalLoop, clients: Sequence[Client]) -> None:
        self.loop = loop
        self.client = GroupClient(clients[0])
        self.recorder = StepMeter()
        self.batch_idx: Any = 0
        self._stepper = Stepper(loop.objective, loop.objective.training_step)
        self._rebound: list[str] = []
        self._common, own = _common({name: [one.begun[name] for one in clients] for name in clients[0].begun})
        self._own: dict[str, Any] = {
            "begun": own,
            "state": _stacked([client.state for client in clients]),
            "results": {key: _stacked([one.results[key] for one in clients]) for key in clients[0].results},
        }

    def losses(
        self, parameters: Tensors, buffers: Tensors, batch: Any, rows: Rows, counts: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Every client's objective on its batch, and what it logs (`Recorder.logged` says under which names).

        Args:
            parameters: Those that train, each (n, …).
            buffers: Each (n, …); written in place.
            batch: Tensors (n, B, …).
            rows: Which of the group's clients these are.
            counts: How many of each batch's samples are real, (n,): the others are padding, and the objective is taken
                sample by sample. None where all are.

        Returns:
            The objective, (n,), and each logged value, (n,).
        """
        own = self._of(rows)
        if len(next(iter(parameters.values()))) == 1:  # one alone would be multiplied by other kernels than a group
            doubled = tree_map(twice, (parameters, buffers, batch, own, counts))
            loss, values = self._run(*doubled)
            for name, tensor in buffers.items():
                tensor.copy_(doubled[1][name][:1])
            return loss[:1], [value[:1] for value in values]
        return self._run(parameters, buffers, batch, own, counts)

    def _run(
        self, parameters: Tensors, buffers: Tensors, batch: Any, own: dict[str, Any], counts: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        if counts is None:
            step = torch.vmap(self._step, in_dims=(0, 0, batch_dims(batch), 0))
            loss, values, rebound = step(parameters, buffers, batch, own)
            for name, tensor in zip(self._rebound, rebound, strict=True):
                buffers[name].copy_(tensor)
            return loss, list(values)
        by_sample = torch.vmap(self._step_on_sample, in_dims=(None, None, batch_dims(batch), None))
        loss, values = torch.vmap(by_sample, in_dims=(0, 0, batch_dims(batch), 0))(parameters, buffers, batch, own)
        weights = (torch.arange(loss.shape[1], device=loss.device) < counts.unsqueeze(1)) / counts.unsqueeze(1)
        return (loss * weights).sum(1), [(value * weights).sum(1) for value in values]

    @torch.no_grad()
    def correct(self, parameters: Tensors, gradients: Tensors, rows: Rows) -> Tensors:
        """What the method makes of the gradients, see `lit_fed.engine.method.algorithm.Algorithm.correct`."""

        def one(parameters: Tensors, gradients: Tensors, own: dict[str, Any]) -> Tensors:
            self._become(parameters, {}, own)
            return dict(self.loop.algorithm.correct(self.client, gradients))

        corrected: Tensors = torch.vmap(one)(parameters, gradients, self._of(rows))
        return corrected

    @torch.no_grad()
    def finish(self, clients: Sequence[Client], tensors: Tensors) -> Update:
        """What all clients send and what the method keeps of them, stacked; ``self.client`` then has their tensors.

        Args:
            clients: Them, each trained by as many steps.
            tensors: Of their models, each (n, …).

        Raises:
            NotVectorizable: If ``finish`` looks at what is not the same for all of them, and is no tensor.
        """
        client, weights = self.client, list[float | None]()
        client.steps = clients[0].steps
        held = {"own": _stacked([one.own for one in clients]), "left": _stacked([one.left for one in clients])}

        def one(tensors: Tensors, own: dict[str, Any], held: dict[str, Tensors]) -> tuple[Tensors, Tensors]:
            self._become(tensors, {}, own)
            client.own, client.left = held["own"], held["left"]
            made = self.loop.algorithm.finish(client)
            weights.append(made.weight)
            return dict(made.payload), dict(made.state)

        payload, state = torch.vmap(one)(tensors, self._own, held)
        client.model = Slice(self.loop.model, tensors.get)
        return Update(payload, state, weights[0])

    def _of(self, rows: Rows) -> dict[str, Any]:
        found: dict[str, Any] = tree_map(lambda tensor: tensor[rows], self._own)
        return found

    # ------------------------------------------------------------------ within the computation: one client each

    def _step(self, parameters: Tensors, buffers: Tensors, batch: Any, own: dict[str, Any]) -> Any:
        self._become(parameters, buffers, own)
        self.recorder.logged, self.recorder.values = [], []
        given = {f"objective.{name}": tensor for name, tensor in (parameters | buffers).items()}
        loss = functional_call(self._stepper, given, (batch, self.batch_idx))
        if loss is None:
            raise NotVectorizable("training_step skips a batch by returning None")
        # What was written in place is in the group's tensors already, what was bound anew is not.
        self._rebound = [name for name in buffers if given[f"objective.{name}"] is not buffers[name]]
        return loss, tuple(self.recorder.values), tuple(given[f"objective.{name}"] for name in self._rebound)

    def _step_on_sample(self, parameters: Tensors, buffers: Tensors, sample: Any, own: dict[str, Any]) -> Any:
        batch = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, sample)
        return self._step(parameters, buffers, batch, own)[:2]

    def _become(self, parameters: Tensors, buffers: Tensors, own: dict[str, Any]) -> None:
        client = self.client
        client.tensors = {**self.loop.model.parameters, **parameters}
        client.model = Slice(self.loop.model, {n: t.detach() for n, t in (parameters | buffers).items()}.get)
        client.state, client.results = own["state"], dict(own["results"])
        client.begun = {**self._common, **own["begun"]}
        client._anchor = None
        client.forget()


def _common(columns: Mapping[str, list[Tensor]]) -> tuple[Tensors, Tensors]:
    """Tensors that are one for all clients, such as the global model, and stacks of those that are not."""
    common = {name: found[0] for name, found in columns.items() if all(one is found[0] for one in found)}
    return common, {name: torch.stack(found) for name, found in columns.items() if name not in common}


def _stacked(held: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Stacks of what clients hold, by name, where all hold it in one shape; others are for ``finish`` alone."""
    columns = {name: [one.get(name) for one in held] for name in held[0]}
    fit = {n: found for n, found in columns.items() if len({None if t is None else t.shape for t in found}) == 1}
    return {name: torch.stack(found) for name, found in fit.items()}  # type: ignore[arg-type]  # of one shape, so no None


def twice(leaf: Any) -> Any:
    """A client's tensor for two that are alike."""
    return torch.cat([leaf, leaf.detach()]) if isinstance(leaf, Tensor) else leaf


def batch_dims(batch: Any) -> Any:
    """Along what ``torch.vmap`` takes apart a batch that holds tensors of several clients, and anything else."""
    return tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
