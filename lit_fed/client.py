"""The client's half of a federation: a LightningModule that can receive, train locally and answer.

One module instance serves all clients of a process, one after the other. What makes a client itself is written into
the module before its local work (`ClientModule.receive`, `ClientModule.load_client_state_dict`) and taken out after it
(`ClientModule.make_update`, `ClientModule.client_state_dict`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.metrics.meter import Meter
from lit_fed.payload import ClientUpdate, Payload
from lit_fed.seeding import derive_seed, torch_generator

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

Stage = Literal["train", "personal", "test", "predict"]
BufferPolicy = Literal["average", "local", "server"]


@dataclass(frozen=True, slots=True)
class FineTuning:
    """How a model is adapted to a client before it is tested there.

    Args:
        epochs: Passes over the client's training data.
        lr: Learning rate of every parameter group; None keeps the round's own.
    """

    epochs: int = 1
    lr: float | None = None


@dataclass(slots=True)
class ClientContext:
    """Who is working, when, and on what.

    Args:
        client_id: The client, counted from 0.
        round_idx: The round, counted from 0.
        stage: ``train`` (local work of a round), ``personal`` (fine-tuning for evaluation), ``test`` or ``predict``.
        seed: The seed of the run.
        data: The population.
        fine_tuning: How to adapt the model, in the ``personal`` stage.
        phase: Name of the phase under way, empty before the first one.
    """

    client_id: int
    round_idx: int
    stage: Stage
    seed: int
    data: FederatedDataModule
    fine_tuning: FineTuning | None = None
    phase: str = ""

    def derive_seed(self, purpose: str) -> int:
        """A seed for one purpose of this client in this round."""
        return derive_seed(self.seed, self.stage, self.round_idx, self.client_id, purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator for one purpose of this client in this round."""
        return torch_generator(self.seed, self.stage, self.round_idx, self.client_id, purpose)

    def train_loader(self) -> Iterable[Any]:
        """The client's own training data, shuffled by this client's generator for this round."""
        return self.data.train_loader(self.client_id, self.generator("data"))

    @property
    def num_samples(self) -> int:
        """Number of the client's training samples."""
        return self.data.num_samples(self.client_id)


@dataclass(slots=True)
class Phase:
    """One stretch of local training, over one loader, with one fresh set of optimizers.

    Args:
        name: What the module sees as ``self.ctx.phase``.
        loader: Batches; iterated anew each epoch.
        epochs: How often to go through the loader. Give this or ``steps``.
        steps: How many batches to train on, going through the loader as often as that takes.
        trains: Names of the parameters that train in this phase; None for all that are not frozen.
    """

    name: str
    loader: Iterable[Any]
    epochs: int | None = None
    steps: int | None = None
    trains: Collection[str] | None = None

    def __post_init__(self) -> None:
        """Check that the length is given in exactly one way."""
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"phase {self.name!r} needs either epochs or steps, not both and not neither")


@dataclass(frozen=True)
class Split:
    """Which parameters travel, which stay with the client, and which neither train nor travel.

    Together the three name every parameter of the module exactly once.

    Args:
        shared: Trained, sent down and up.
        personal: Trained and kept in the client's state.
        frozen: As the server's model has them.
    """

    shared: tuple[str, ...]
    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


@dataclass(slots=True)
class _Work:
    """What a module works on at the moment; a plain object, because ``nn.Module`` makes setting attributes slow."""

    ctx: ClientContext | None = None
    received: Payload = field(default_factory=dict)
    personal: Payload = field(default_factory=dict)
    downloaded: dict[str, Tensor] | None = None
    meter: Meter | None = None


@dataclass(slots=True)
class _Layout:
    """The tensors behind a `Split`, looked up once a round instead of once a client."""

    split: Split
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)


class ClientModule(LightningModule):
    """A client's model and local objective.

    Subclasses write a LightningModule as ever (``training_step``, ``configure_optimizers`` returning fresh
    optimizers, ``test_step``, ``predict_step``, ``self.log``); every hook below has a default that makes it a FedAvg
    client. The same module also trains under a plain ``lightning.Trainer``.

    Args:
        local_epochs: Passes over the client's data per round; None with ``local_steps``.
        local_steps: Batches per round instead of epochs.

    Raises:
        ConfigError: If both or none are given, or they are below 1.

    Note:
        Buffers that a module writes in place (batch-norm statistics) follow the trainer's ``buffers`` policy:
        ``average`` sends and averages them, ``local`` keeps them in the client's state, ``server`` sends the server's
        down and never changes them.
    """

    divisible_batches = True
    """Whether the gradient of a batch is the mean of its parts' gradients, as ``strategy=ddp`` takes for granted."""

    def __init__(self, local_epochs: int | None = 1, local_steps: int | None = None) -> None:
        super().__init__()
        if local_steps is not None:
            local_epochs = None
        if local_epochs is None and local_steps is None:
            raise ConfigError("model: give local_epochs or local_steps")
        for key, value in (("local_epochs", local_epochs), ("local_steps", local_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"model.{key} is {value}; it must be at least 1")
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.buffer_policy: BufferPolicy = "average"
        self.work = _Work()
        self._layout: _Layout | None = None
        self.initial_tensors: dict[str, Tensor] = {}

    @property
    def ctx(self) -> ClientContext | None:
        """Who is working; None outside a federation."""
        return self.work.ctx

    @property
    def received(self) -> Payload:
        """The broadcast of this round as it arrived, unchanged while the client works; empty outside a federation."""
        return self.work.received

    @property
    def downloaded(self) -> dict[str, Tensor]:
        """The model as it stood when the client began: what the server sent, with the client's own personal part.

        Constant while the client works; teachers are made of it. Empty outside a federation. Frozen parameters are
        left out, because they never differ from the module's.
        """
        work = self.work
        if work.downloaded is None:
            known = self.layout.parameters.keys() | self.layout.buffers.keys()
            work.downloaded = {n: t for n, t in (*work.received.items(), *work.personal.items()) if n in known}
        return work.downloaded

    def enter(self, ctx: ClientContext, state: dict[str, Tensor] | None, broadcast: Payload) -> None:
        """Become one client: its own state, or the initial one where there is none, then what the server sent."""
        self.work.ctx = ctx
        self.load_client_state_dict(self.initial_client_state(ctx.client_id) if state is None else state)
        self.work.received = broadcast
        self.work.downloaded = None
        self.receive(broadcast)
        self.work.personal = {name: tensor.clone() for name, tensor in self.tensors(self.personal_names()).items()}

    # ------------------------------------------------------------------ hooks a method may override

    def split(self, round_idx: int) -> Split:
        """Which parameters travel, stay and freeze in a round; by default all of them travel.

        A pure function of the round, asked once per round and process.
        """
        return Split(shared=tuple(name for name, _ in self.named_parameters()))

    def receive(self, payload: Payload) -> None:
        """Take in the server's broadcast; by default copy every tensor into the parameter or buffer of its name.

        `received` keeps the broadcast itself: proximal terms and teachers read it there.
        """
        self.load_tensors(payload)

    def phases(self, ctx: ClientContext) -> list[Phase]:
        """The client's local work in order; by default one phase over its own data."""
        if ctx.fine_tuning is not None:
            return [Phase("fine_tuning", ctx.train_loader(), epochs=ctx.fine_tuning.epochs)]
        return [Phase("train", ctx.train_loader(), epochs=self.local_epochs, steps=self.local_steps)]

    def preparation(self, ctx: ClientContext) -> list[Phase]:
        """Local work between receiving a broadcast and being tested or used with it; by default none."""
        return []

    def on_phase_start(self, phase: Phase) -> None:
        """Called before each phase, before its optimizers are made; by default nothing."""

    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        """The client's answer; by default its shared tensors, weighted by its number of samples."""
        return ClientUpdate(ctx.client_id, self.shared_tensors(), weight=ctx.num_samples)

    def example_payload(self, ctx: ClientContext) -> Payload:
        """What an update holds, by names and shapes, for ``python cli.py cost``; tensors may be on the meta device.

        By default the update of a client that has not trained. A module whose updates need its data, such as
        predictions on a public set, answers with empty tensors of their size.
        """
        return self.make_update(ctx).payload

    def client_state_dict(self) -> dict[str, Tensor]:
        """What this client keeps until it next takes part; by default its personal parameters and local buffers."""
        return self.tensors(self.personal_names())

    def load_client_state_dict(self, state: dict[str, Tensor]) -> None:
        """Bring back what `client_state_dict` gave, or `initial_client_state` where the client is new."""
        self.load_tensors(state)

    def initial_client_state(self, client_id: int) -> dict[str, Tensor]:
        """The state of a client that never took part; by default the initial personal tensors, for every client."""
        return {name: self.initial_tensors[name] for name in self.personal_names()}

    def deployable(self) -> nn.Module:
        """The plain network for use outside lit_fed; by default ``self.network``, else the module itself."""
        network = getattr(self, "network", None)
        return network if isinstance(network, nn.Module) else self

    # ------------------------------------------------------------------ tensors by name

    def prepare_round(self, round_idx: int) -> None:
        """Look up the tensors of this round's split; called once per round and process."""
        if self._layout is None:
            self._layout = _Layout(Split(()), dict(self.named_parameters()), _persistent_buffers(self))
            self.initial_tensors = {n: t.detach().clone() for n, t in self.tensors(self.state_names()).items()}
        split = self.split(round_idx)
        _check_split(split, self._layout.parameters)
        self._layout.split = split
        self.set_trainable(None)

    @property
    def layout(self) -> _Layout:
        """The tensors of the current round by name."""
        if self._layout is None:
            self.prepare_round(0)
        assert self._layout is not None
        return self._layout

    def state_names(self) -> list[str]:
        """Names of all parameters and persistent buffers."""
        return [*self.layout.parameters, *self.layout.buffers]

    def shared_names(self, direction: Literal["up", "down"] = "up") -> list[str]:
        """Names of the tensors that travel: the shared parameters, and buffers as their policy says."""
        travels = self.buffer_policy == "average" or (self.buffer_policy == "server" and direction == "down")
        return [*self.layout.split.shared, *(self.layout.buffers if travels else ())]

    def personal_names(self) -> list[str]:
        """Names of the tensors that stay with the client: the personal parameters, and local buffers."""
        return [*self.layout.split.personal, *(self.layout.buffers if self.buffer_policy == "local" else ())]

    def tensor(self, name: str) -> Tensor:
        """A parameter (detached) or buffer; it aliases the module's memory."""
        parameter = self.layout.parameters.get(name)
        if parameter is not None:
            return parameter.detach()
        owner, key = self.layout.buffers[name]
        return owner._buffers[key]  # type: ignore[return-value]  # None was left out when the buffers were listed

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Several tensors by name, aliasing the module's memory."""
        return {name: self.tensor(name) for name in names}

    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors that go up to the server, aliasing the module's memory."""
        return self.tensors(self.shared_names("up"))

    def load_tensors(self, payload: Payload) -> None:
        """Copy tensors into the parameters and buffers of the same names, in place.

        Raises:
            ConfigError: For a name the module does not have, or another shape.
        """
        if not payload:
            return
        try:
            own = [self.tensor(name) for name in payload]
            torch._foreach_copy_(own, list(payload.values()))
        except (KeyError, RuntimeError) as error:
            raise ConfigError(_mismatch(self, payload)) from error

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore every parameter and buffer on leaving."""
        names = self.state_names()
        saved = {name: tensor.clone() for name, tensor in self.tensors(names).items()}
        try:
            yield
        finally:
            self.load_tensors(saved)

    def set_trainable(self, names: Collection[str] | None) -> None:
        """Let only the named parameters train, and forget all gradients; None means all that are not frozen."""
        frozen = self.layout.split.frozen
        for name, parameter in self.layout.parameters.items():
            trains = name not in frozen if names is None else name in names
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)
            parameter.grad = None

    # ------------------------------------------------------------------ logging

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Log as in Lightning; in a federation the value joins the client's mean over batches, without a device sync.

        Lightning's ``on_step``, ``prog_bar`` and the like have no meaning there and are accepted in silence.
        """
        if self.work.meter is not None:
            self.work.meter.add(name, value, batch_size)
        elif self._trainer is not None:
            super().log(name, value, *args, **kwargs, batch_size=batch_size)  # type: ignore[misc]  # args end before it

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values, see `log`."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)


def _persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each persistent buffer lives: modules may rebind their buffers, so the tensor itself is not kept."""
    found = {}
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = (owner, key)
    return found


def _check_split(split: Split, parameters: Collection[str]) -> None:
    named = [*split.shared, *split.personal, *split.frozen]
    if len(named) != len(set(named)) or set(named) != set(parameters):
        odd = sorted(set(named) ^ set(parameters)) or sorted({name for name in named if named.count(name) > 1})
        raise ConfigError(f"the split of parameters must name each parameter once; look at {', '.join(odd[:5])}")


def _mismatch(module: ClientModule, payload: Payload) -> str:
    known = set(module.state_names())
    for name, tensor in payload.items():
        if name not in known:
            return f"the model has no parameter or buffer named {name!r}; was it saved from another model?"
        if module.tensor(name).shape != tensor.shape:
            own = tuple(module.tensor(name).shape)
            return (
                f"{name!r} has shape {tuple(tensor.shape)} where the model has {own}; was it saved from another model?"
            )
    return "the model's tensors do not fit what was sent to it"
