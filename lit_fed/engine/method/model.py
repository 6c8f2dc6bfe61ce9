"""A task as the federation sees it: tensors by role, the names that settings use, values that clients cannot share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.networks.base import Base
from lit_fed.private_names import foreach, passing_buffers, tree_flatten, version_of


class Differs:
    """Stands for a value that differs between the clients of one computation; refuses every use.

    Args:
        refusal: Makes the error to raise.
    """

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self._refusal()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse an operation of torch, by the first placeholder among its arguments."""
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Differs):
                leaf._refuse()
        raise TypeError("an operation of torch got a placeholder inside another object")

    __int__ = __index__ = __float__ = __bool__ = __hash__ = __str__ = __len__ = __iter__ = __getitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = _refuse
    __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = __divmod__ = __rdivmod__ = __and__ = _refuse
    __rtruediv__ = __rfloordiv__ = __pow__ = __rpow__ = __rmod__ = __rmatmul__ = _refuse


BufferPolicy = Literal["average", "local", "server"]


@dataclass(frozen=True)
class Split:
    """A division of the model's parameters; each is named exactly once.

    Args:
        shared: Trained, sent down and up.
        personal: Trained and kept by the client.
        frozen: Not trained, as in the server's model.
        buffers: Buffers that the client keeps, whatever the policy for buffers.
    """

    shared: tuple[str, ...]
    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


class Model:
    """A task's parameters and persistent buffers by name, looked up once.

    Parameters that the task does not train (``requires_grad`` false) are frozen, whatever the method's split says.

    Args:
        task: Any LightningModule. One instance serves all clients of a process in turn.
        buffers: Policy for buffers that the task writes in place, such as batch-norm statistics: ``average`` sends and
            averages them, ``local`` keeps them with the client, ``server`` sends the server's buffers down and leaves
            them unchanged.
    """

    def __init__(self, task: LightningModule, buffers: BufferPolicy = "average") -> None:
        self.task = task
        self.buffer_policy = buffers
        self.parameters: dict[str, nn.Parameter] = dict(task.named_parameters())
        self.buffers, self._passing = _buffers(task)
        self.fixed = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        self.split = self._without_fixed(Split(tuple(self.parameters)))
        self.initial: dict[str, Tensor] = {}
        """First tensors of a new client: all where the method has an `initial_state`, else `staying`."""
        self.staying: frozenset[str] = frozenset()
        """Names of tensors that do not travel in every round."""
        self.optimizer: type[Optimizer] | None = None
        """The class of the task's optimizer, None where it has several or nothing trains, as in ``cost``."""
        self._given: Split | None = None
        self.frozen_by_method: frozenset[str] = frozenset()
        """The names in `fixed` that the method froze, not the task's author."""
        self.files: dict[str, str] = {}
        """By name, the files of the values of parameters that the task's author froze."""
        self.base = Base({}, {})
        """The parameters in `files`, with their first values."""
        self._switched: list[nn.Parameter] = []
        self._modules = list(task.modules())
        self._first_passing: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []

    def remember(self, names: Iterable[str] | None = None) -> None:
        """Copy all tensors, or some, as the start of clients that have not taken part."""
        self.initial = self.copy(names)
        self.base = Base(self.files, self.initial)
        for owner, key in self._passing:
            buffer = getattr(owner, key)
            if buffer is not None:
                self._first_passing.append((owner, key, buffer, version_of(buffer), buffer.clone()))

    def renew(self) -> None:
        """Restore non-persistent buffers that the task has changed, so that no client sees another's values."""
        for idx, (owner, key, buffer, version, first) in enumerate(self._first_passing):
            if getattr(owner, key, None) is not buffer or version_of(buffer) != version:
                buffer.copy_(first)
                setattr(owner, key, buffer)
                self._first_passing[idx] = (owner, key, buffer, version_of(buffer), first)

    def all_buffers(self) -> list[Tensor]:
        """All buffers, persistent or not."""
        return [
            buffer
            for owner, key in (*self.buffers.values(), *self._passing)
            if (buffer := getattr(owner, key)) is not None
        ]

    def switches(self) -> tuple[bool, ...]:
        """Modes of all submodules, and which parameters train."""
        trains = [parameter.requires_grad for parameter in self.parameters.values()]
        return tuple([module.training for module in self._modules] + trains)

    def is_of(self, task: LightningModule) -> bool:
        """Whether a task still has the parameters looked up at construction."""
        now = dict(task.named_parameters())
        return now.keys() == self.parameters.keys() and all(
            now[name] is parameter for name, parameter in self.parameters.items()
        )

    def divide(self, split: Split) -> None:
        """Apply a round's split."""
        if split != self._given:
            named = [*split.shared, *split.personal, *split.frozen]
            if len(named) != len(set(named)) or set(named) != self.parameters.keys():
                odd = sorted(set(named) ^ self.parameters.keys()) or sorted({n for n in named if named.count(n) > 1})
                raise ConfigError(f"the split must name each parameter exactly once; check {', '.join(odd[:5])}")
            self._given, self.split = split, self._without_fixed(split)
        self.set_trainable(None)

    def leave(self) -> None:
        """Restore the task's own ``requires_grad`` and drop all gradients."""
        self._put_back()
        self.forget_gradients()

    def check_fixed(self) -> None:
        """Refuse a task whose hooks made a frozen parameter trainable, which would train and not be sent."""
        for name in self.fixed:
            parameter = self.parameters[name]
            if parameter.requires_grad and not any(parameter is switched for switched in self._switched):
                raise ConfigError(
                    f"a hook of the model makes {name!r} trainable, which was frozen at the start and is not sent; "
                    "make it trainable from the start"
                )

    def _put_back(self) -> None:
        for parameter in self._switched:
            parameter.requires_grad_(not parameter.requires_grad)
        self._switched = []

    def _without_fixed(self, split: Split) -> Split:
        """The split with the parameters that the task does not train moved to frozen."""
        if not self.fixed:
            return split
        shared, personal = (
            tuple(name for name in names if name not in self.fixed) for names in (split.shared, split.personal)
        )
        frozen = (*split.frozen, *(name for name in self.fixed if name not in split.frozen))
        return Split(shared, personal, frozen, split.buffers)

    # ------------------------------------------------------------------ names

    def __contains__(self, name: str) -> bool:
        return name in self.parameters or name in self.buffers

    @property
    def names(self) -> list[str]:
        """Names of all parameters and persistent buffers."""
        return [*self.parameters, *self.buffers]

    def shared_names(self, direction: Literal["up", "down"] = "up") -> list[str]:
        """Names of the tensors that travel: the shared parameters, and the buffers by their policy.

        Where no parameter travels, no buffer does.
        """
        travels = self.buffer_policy == "average" or (self.buffer_policy == "server" and direction == "down")
        buffers = self.buffers if travels and self.split.shared else ()
        return [*self.split.shared, *(name for name in buffers if name not in self.split.buffers)]

    @property
    def personal_names(self) -> list[str]:
        """Names of the tensors that the client keeps: the personal parameters, and the split's or local buffers.

        Where no parameter travels, the client keeps all buffers.
        """
        local = self.buffer_policy == "local" or not self.split.shared
        return [*self.split.personal, *(self.buffers if local else self.split.buffers)]

    # ------------------------------------------------------------------ tensors

    def tensor(self, name: str) -> Tensor:
        """A parameter (detached) or buffer, aliasing the model's memory."""
        parameter = self.parameters.get(name)
        if parameter is not None:
            return parameter.detach()
        owner, key = self.buffers[name]
        return cast("Tensor", getattr(owner, key))

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The named tensors, or all, aliasing the model's memory."""
        return {name: self.tensor(name) for name in (self.names if names is None else names)}

    def copy(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copies of the named tensors, or of all."""
        return {name: tensor.clone() for name, tensor in self.tensors(names).items()}

    def load(self, payload: Payload) -> None:
        """Copy tensors into the parameters and buffers of the same names, in place."""
        if not payload:
            return
        try:
            targets = [self.tensor(name) for name in payload]
            foreach.copy_(targets, list(payload.values()))
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
        """Restore every tensor, every submodule's mode and every ``requires_grad`` on leaving; drop gradients."""
        trains = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        with self.preserved(), self.same_modes():
            try:
                yield
            finally:
                self.set_trainable(trains)

    def set_trainable(self, names: Collection[str] | None) -> None:
        """Make only the named parameters trainable and drop all gradients; None means all except the frozen ones.

        A parameter frozen by the task's author, from the start or in a hook, stays frozen; one frozen by the method (in
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
        """Drop gradients; their memory equals that of the trainable parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode; every submodule's own mode is restored on leaving, also where a task mixes them."""
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
        """Restore every submodule's own mode on leaving."""
        modes = [module.training for module in self._modules]
        try:
            yield
        finally:
            for module, training in zip(self._modules, modes, strict=True):
                module.training = training

    def _mismatch(self, payload: Mapping[str, Tensor]) -> str:
        for name, tensor in payload.items():
            if name not in self:
                return f"the model has no parameter or buffer {name!r}; was the state saved from another model?"
            if self.tensor(name).shape != tensor.shape:
                shape = tuple(self.tensor(name).shape)
                return (
                    f"{name!r} has shape {tuple(tensor.shape)} and the model's has {shape}; was the state saved from "
                    "another model?"
                )
        return "the tensors sent to the model do not fit its own"


class ModelView(Model):
    """A model whose tensors are stored elsewhere, such as a client's rows of a group's stacks.

    Args:
        whole: The model; names, split and policies are shared with it.
        find: Finds a tensor by name, without gradient; None stands for the whole model's.
        parameters: Differentiable parameters by name; None makes leaves of what `find` gives, as the whole's are.
    """

    def __init__(
        self, whole: Model, find: Callable[[str], Tensor | None], parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        self._whole, self._find = whole, find  # a round makes two views a client: the rest is looked up, not copied
        self._leaves = _Leaves(whole, find) if parameters is None else parameters

    def __getattr__(self, name: str) -> Any:
        """Delegate attributes that the view lacks, such as the split, to the whole model."""
        if name in ("_whole", "_find", "_leaves"):  # of a view under construction
            raise AttributeError(name)
        return getattr(self._whole, name)

    @property
    def parameters(self) -> Mapping[str, Tensor]:  # type: ignore[override]  # found by name, never modules' own
        """The parameters by name, differentiable."""
        return self._leaves

    @override
    def tensor(self, name: str) -> Tensor:
        tensor = self._find(name)
        return self._whole.tensor(name) if tensor is None else tensor


class _Leaves(Mapping[str, Tensor]):
    """The parameters of a view, each made a leaf of autograd when it is first asked for."""

    def __init__(self, whole: Model, find: Callable[[str], Tensor | None]) -> None:
        self._whole, self._find = whole, find
        self._leaves: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._leaves:
            like, tensor = self._whole.parameters[name], self._find(name)
            self._leaves[name] = like if tensor is None else tensor.detach().requires_grad_(like.requires_grad)
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole.parameters)

    def __len__(self) -> int:
        return len(self._whole.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._whole.parameters


def _buffers(module: nn.Module) -> tuple[dict[str, tuple[nn.Module, str]], list[tuple[nn.Module, str]]]:
    """Owner and key of each persistent buffer by name, and of each non-persistent one.

    The tensors are not kept, because modules may rebind their buffers.
    """
    persistent, passing = {}, []
    for prefix, owner in module.named_modules():
        passes = passing_buffers(owner)
        passing += [(owner, key) for key in sorted(passes)]
        for key, _ in owner.named_buffers(recurse=False, remove_duplicate=False):
            if key not in passes:
                persistent[f"{prefix}.{key}" if prefix else key] = (owner, key)
    return persistent, passing
