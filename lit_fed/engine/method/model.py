"""The tensors of a task by name: which travel, which stay with a client, which never move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError

BufferPolicy = Literal["average", "local", "server"]


@dataclass(frozen=True)
class Split:
    """Which parameters travel, which stay with the client, and which neither train nor travel.

    Together the three name every parameter of the model exactly once.

    Args:
        shared: Trained, sent down and up.
        personal: Trained and kept by the client.
        frozen: As the server's model has them.
    """

    shared: tuple[str, ...]
    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


class Model:
    """A task's parameters and persistent buffers by name, looked up once.

    Parameters that the task itself does not train (``requires_grad`` false) are frozen, whatever a method says.

    Args:
        task: Any LightningModule. One instance serves all clients of a process, one after the other.
        buffers: What becomes of buffers that the task writes in place, such as batch-norm statistics: ``average``
            sends and averages them, ``local`` keeps them with the client, ``server`` sends the server's down and never
            changes them.
    """

    def __init__(self, task: LightningModule, buffers: BufferPolicy = "average") -> None:
        self.task = task
        self.buffer_policy = buffers
        self.parameters: dict[str, nn.Parameter] = dict(task.named_parameters())
        self.buffers, self._passing = _buffers(task)
        self.fixed = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        self.split = self._without_fixed(Split(tuple(self.parameters)))
        self.initial: dict[str, Tensor] = {}
        """What new clients begin with: all tensors where the method has an `initial_state`, else `staying`."""
        self.staying: frozenset[str] = frozenset()
        """Names of tensors that do not travel in every round."""
        self.optimizer: type[Optimizer] | None = None
        """The class of the task's optimizer, None where it has several or nothing trains, as in ``cost``."""
        self._given: Split | None = None
        self.frozen_by_method: frozenset[str] = frozenset()
        """Those of `fixed` that the method froze, and not the task's author."""
        self._switched: list[nn.Parameter] = []
        self._modules = list(task.modules())
        self._first_passing: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []

    def remember(self, names: Iterable[str] | None = None) -> None:
        """Keep a copy of all tensors, or of some: what clients start from that never took part."""
        self.initial = self.copy(names)
        for owner, key in self._passing:
            buffer = owner._buffers[key]
            if buffer is not None:
                self._first_passing.append((owner, key, buffer, buffer._version, buffer.clone()))

    def renew(self) -> None:
        """Bring non-persistent buffers back that the task has changed: no client sees what another left in them."""
        for idx, (owner, key, buffer, version, first) in enumerate(self._first_passing):
            if owner._buffers.get(key) is not buffer or buffer._version != version:
                buffer.copy_(first)
                owner._buffers[key] = buffer
                self._first_passing[idx] = (owner, key, buffer, buffer._version, first)

    def is_of(self, task: LightningModule) -> bool:
        """Whether a task still has the parameters that were looked up."""
        now = dict(task.named_parameters())
        return now.keys() == self.parameters.keys() and all(now[name] is one for name, one in self.parameters.items())

    def divide(self, split: Split) -> None:
        """Take a round's split.

        Raises:
            ConfigError: If it does not name every parameter once.
        """
        if split != self._given:
            named = [*split.shared, *split.personal, *split.frozen]
            if len(named) != len(set(named)) or set(named) != self.parameters.keys():
                odd = sorted(set(named) ^ self.parameters.keys()) or sorted({n for n in named if named.count(n) > 1})
                raise ConfigError(
                    f"the split of parameters must name each parameter once; look at {', '.join(odd[:5])}"
                )
            self._given, self.split = split, self._without_fixed(split)
        self.set_trainable(None)

    def leave(self) -> None:
        """Let train what the task itself lets train, and forget all gradients."""
        self._put_back()
        for parameter in self.parameters.values():
            parameter.grad = None

    def check_fixed(self) -> None:
        """Refuse a task that lets parameters train while it works which it did not at first: they do not travel.

        Raises:
            ConfigError: It names one.
        """
        for name in self.fixed:
            parameter = self.parameters[name]
            if parameter.requires_grad and not any(parameter is one for one in self._switched):
                raise ConfigError(
                    f"the model lets {name!r} train by one of its hooks, and at first it did not, so that it is not "
                    "sent; let it train from the start"
                )

    def _put_back(self) -> None:
        for parameter in self._switched:
            parameter.requires_grad_(not parameter.requires_grad)
        self._switched = []

    def _without_fixed(self, split: Split) -> Split:
        """A split in which the parameters that the task itself does not train are frozen."""
        if not self.fixed:
            return split
        shared, personal = (
            tuple(name for name in names if name not in self.fixed) for names in (split.shared, split.personal)
        )
        return Split(shared, personal, (*split.frozen, *(name for name in self.fixed if name not in split.frozen)))

    # ------------------------------------------------------------------ names

    def __contains__(self, name: str) -> bool:
        return name in self.parameters or name in self.buffers

    @property
    def names(self) -> list[str]:
        """Names of all parameters and persistent buffers."""
        return [*self.parameters, *self.buffers]

    def shared_names(self, direction: Literal["up", "down"] = "up") -> list[str]:
        """Names of the tensors that travel: the shared parameters, and buffers as their policy says.

        Where no parameter travels, no buffer does.
        """
        travels = self.buffer_policy == "average" or (self.buffer_policy == "server" and direction == "down")
        return [*self.split.shared, *(self.buffers if travels and self.split.shared else ())]

    @property
    def personal_names(self) -> list[str]:
        """Names of the tensors that stay with the client: the personal parameters, and local buffers.

        Where no parameter travels, all buffers are the client's.
        """
        local = self.buffer_policy == "local" or not self.split.shared
        return [*self.split.personal, *(self.buffers if local else ())]

    # ------------------------------------------------------------------ tensors

    def tensor(self, name: str) -> Tensor:
        """A parameter (detached) or buffer; it aliases the model's memory."""
        parameter = self.parameters.get(name)
        if parameter is not None:
            return parameter.detach()
        owner, key = self.buffers[name]
        return owner._buffers[key]  # type: ignore[return-value]  # None was left out when the buffers were listed

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Several tensors by name, or all of them, aliasing the model's memory."""
        return {name: self.tensor(name) for name in (self.names if names is None else names)}

    def copy(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Several tensors by name, or all of them, in memory of their own."""
        return {name: tensor.clone() for name, tensor in self.tensors(names).items()}

    def load(self, payload: Payload) -> None:
        """Copy tensors into the parameters and buffers of the same names, in place.

        Raises:
            ConfigError: For a name the model does not have, or another shape.
        """
        if not payload:
            return
        try:
            own = [self.tensor(name) for name in payload]
            torch._foreach_copy_(own, list(payload.values()))
        except (KeyError, RuntimeError) as error:
            raise ConfigError(self._mismatch(payload)) from error

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore every parameter and buffer on leaving."""
        saved = self.copy()
        try:
            yield
        finally:
            self.load(saved)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Restore every tensor, every submodule's mode and which parameters train on leaving; gradients are gone."""
        trains = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        with self.preserved(), self.same_modes():
            try:
                yield
            finally:
                self.set_trainable(trains)

    def set_trainable(self, names: Collection[str] | None) -> None:
        """Let only the named parameters train, and forget all gradients; None means all that are not frozen.

        What the task's author does not let train, at first or by a hook, stays so; what a method froze (in
        ``Algorithm.adapt``) trains where the method names it.
        """
        self._put_back()
        frozen = self.split.frozen
        for name, parameter in self.parameters.items():
            trains = parameter.requires_grad and name not in frozen if names is None else name in names
            if parameter.requires_grad != trains and not (trains and name not in self.frozen_by_method):
                parameter.requires_grad_(trains)
                self._switched.append(parameter)
            parameter.grad = None

    def forget_gradients(self) -> None:
        """Let go of gradients, which take as much memory as what trains."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while; every submodule's own mode comes back, also where a task mixes them."""
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def same_modes(self) -> Iterator[None]:
        """Every submodule's own mode comes back on leaving, whatever the task makes of it."""
        modes = [module.training for module in self._modules]
        try:
            yield
        finally:
            for module, training in zip(self._modules, modes, strict=True):
                module.training = training

    def _mismatch(self, payload: Mapping[str, Tensor]) -> str:
        for name, tensor in payload.items():
            if name not in self:
                return f"the model has no parameter or buffer named {name!r}; was it saved from another model?"
            if self.tensor(name).shape != tensor.shape:
                own = tuple(self.tensor(name).shape)
                return (
                    f"{name!r} has shape {tuple(tensor.shape)} where the model has {own}; was it saved from another"
                    " model?"
                )
        return "the model's tensors do not fit what was sent to it"


def _buffers(module: nn.Module) -> tuple[dict[str, tuple[nn.Module, str]], list[tuple[nn.Module, str]]]:
    """Where each persistent buffer lives, by name, and each other one.

    Modules may rebind their buffers, so the tensor itself is not kept.
    """
    found, passing = {}, []
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if key in owner._non_persistent_buffers_set:
                passing.append((owner, key))
            elif buffer is not None:
                found[f"{prefix}.{key}" if prefix else key] = (owner, key)
    return found, passing
