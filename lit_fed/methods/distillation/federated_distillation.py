"""Federated distillation: clients exchange predictions on a public set, never weights.

Algorithm 1 of Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026,
arXiv:2509.15147, with the average for ``Agg`` (there "AVG"): the base of `lit_fed.methods.uwa`,
`lit_fed.methods.fedmd` and `lit_fed.methods.feddf`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from lightning import Fabric
from torch import Tensor

from lit_fed.algorithm import Algorithm
from lit_fed.classifier import Classifier
from lit_fed.client import ClientContext, ClientModule, Phase, Split
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.local import seed_device
from lit_fed.mixing import Mixed, SoftmaxMix
from lit_fed.networks.choice import Assignment, NetworkChoice
from lit_fed.networks.registry import build_network
from lit_fed.engine.payload import ClientUpdate, Payload
from lit_fed.seeding import derive_seed, torch_generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lit_fed.data import FederatedDataModule

REFINE = "refine"  # the phase over the public set
MOST_WATCHED = 64  # clients whose weights are pictured


class FederatedDistillation(Classifier):
    r"""A client that trains on its own data, answers with logits on the public set, and learns from the mixture.

    A round of Algorithm 1 is: private training by cross-entropy, public inference, aggregation, public refinement by
    :math:`\mathrm{CE}(p_{agg}(x) \,\|\, \mathrm{softmax}\, f_i(x))`. Here a client's work begins with the refinement
    on what the round before gave and goes on with private training and inference. Where a client is tested or used, it
    first refines on the newest mixture (`preparation`), which gives the very model that its next private training will
    start from: what is tested after round r is Algorithm 1's model after round r.

    Clients may have networks of their own (`networks`): one instance of each is kept, whatever the number of clients,
    and a client's state holds its own network only, buffers too.

    Args:
        network: Every client's network, by name or a module, where `networks` is null.
        networks: Names of networks that clients take in turn, or a mapping from names to the ids of their clients.
        num_classes: Taken from the data where null.
        in_channels: Taken from the data where null.
        input_shape: Shape of one sample, channels first; taken from the data where null.
        network_args: Further arguments for the network; with `networks`, a mapping from names to theirs.
        first_epochs: Passes over its data when a client first takes part; null for as many as later.
        public_epochs: Passes over the public set per refinement.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For less than one epoch, or networks that cannot be.

    Note:
        Clients of one architecture start from the same weights. A client that missed rounds refines on the newest
        mixture only, and one that is new refines its initial weights on it before its first private training: it
        downloads it anyhow. The refinement uses the private optimizer, made anew. Predictions are made in float32
        whatever the precision of training.
    """

    network: NetworkChoice

    def __init__(
        self,
        network: str | torch.nn.Module = "small_cnn",
        networks: list[str] | dict[str, list[int]] | None = None,
        num_classes: int | None = None,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        network_args: dict[str, Any] | None = None,
        first_epochs: int | None = None,
        public_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        if isinstance(network, torch.nn.Module) and networks is None:
            networks_by_name = {type(network).__name__: network}
            assignment = Assignment(list(networks_by_name))
        else:
            assignment = Assignment([str(network)] if networks is None else networks)
            args = network_args or {}
            args = {assignment.names[0]: args} if networks is None else args
            if unknown := sorted(args.keys() - set(assignment.names)):
                raise ConfigError(f"model.network_args names {unknown[0]!r}, which model.networks does not")
            networks_by_name = {
                name: build_network(name, num_classes or 10, in_channels or 1, input_shape, **args.get(name, {}))
                for name in assignment.names
            }
        super().__init__(network=NetworkChoice(networks_by_name), num_classes=num_classes, **kwargs)
        for key, value in (("first_epochs", first_epochs), ("public_epochs", public_epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"model.{key} is {value}; it must be at least 1")
        self.assignment = assignment
        self.first_epochs = first_epochs
        self.public_epochs = public_epochs
        self._is_new = False

    def check_population(self, data: FederatedDataModule) -> None:
        """Refuse data without what the method needs.

        Raises:
            ConfigError: Without a public set, or where a client has no network.
        """
        if not data.has_public:
            raise ConfigError(f"model {type(self).__name__} needs a public set; set data.init_args.public_size above 0")
        self.assignment.check(data.num_clients)

    # ------------------------------------------------------------------ which tensors are whose

    def enter(self, ctx: ClientContext, state: dict[str, Tensor] | None, broadcast: Payload) -> None:
        """Become a client, with its network."""
        self.network.current = self.assignment[ctx.client_id]
        self._is_new = state is None
        super().enter(ctx, state, broadcast)

    def split(self, round_idx: int) -> Split:
        """Everything stays."""
        return Split(shared=(), personal=tuple(name for name, _ in self.named_parameters()))

    def shared_names(self, direction: Literal["up", "down"] = "up") -> list[str]:
        """None, whatever ``trainer.buffers`` says."""
        return []

    def personal_names(self) -> list[str]:
        """Parameters and buffers of the client's own network."""
        prefix = f"network.{self.network.prefix}"
        return [name for name in self.state_names() if name.startswith(prefix)]

    def receive(self, payload: Payload) -> None:
        """Nothing to copy: what the others predict is read in the refinement."""

    def own_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Those of the client's own network."""
        return self.network.chosen.parameters()

    # ------------------------------------------------------------------ local work

    def phases(self, ctx: ClientContext) -> list[Phase]:
        """The refinement on the round before's mixture, then private training; for fine-tuning, only that."""
        private = super().phases(ctx)
        if ctx.fine_tuning is not None:
            return private
        if self._is_new and self.first_epochs is not None:
            private = [Phase("train", ctx.train_loader(), epochs=self.first_epochs)]
        return [*self.refinement(ctx), *private]

    def preparation(self, ctx: ClientContext) -> list[Phase]:
        """The refinement on the newest mixture."""
        return self.refinement(ctx)

    def refinement(self, ctx: ClientContext) -> list[Phase]:
        """One phase over the public set; none before there is a mixture."""
        if "targets" not in self.received:
            return []
        order = torch_generator(*self._refinement_seed(ctx))
        return [Phase(REFINE, ctx.data.public_loader(order), epochs=self.public_epochs)]

    def on_phase_start(self, phase: Phase) -> None:
        """Start the refinement from a stream of random numbers that is the same in training and in a test."""
        super().on_phase_start(phase)
        if phase.name == REFINE and self.ctx is not None:
            seed_device(derive_seed(*self._refinement_seed(self.ctx)), self.device)

    @staticmethod
    def _refinement_seed(ctx: ClientContext) -> tuple[Any, ...]:
        """Training refines on the mixture of the round before, everything else on the last round's."""
        return ctx.seed, REFINE, ctx.round_idx - (ctx.stage == "train"), ctx.client_id

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The local objective on a private batch, the distance to the mixture on a public one."""
        if self.ctx is None or self.ctx.phase != REFINE:
            return super().training_step(batch, batch_idx)
        x, index = batch
        loss = self.distillation(self(x), self.received["targets"][index])
        self.log("train/distillation", loss)
        return loss

    def distillation(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of logits (B, C) and the mixture's probabilities (B, C)."""
        return F.cross_entropy(logits, targets.to(logits.dtype))

    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        """Logits (P, C) on the public set."""
        return ClientUpdate(ctx.client_id, self.answer(ctx), weight=ctx.num_samples)

    def answer(self, ctx: ClientContext) -> dict[str, Tensor]:
        """What is sent; subclasses add to it."""
        return {"logits": self.infer(ctx.data.public_loader())[0]}

    def example_payload(self, ctx: ClientContext) -> Payload:
        """Logits (P, C), empty."""
        return {"logits": torch.empty(ctx.data.public_size, self.num_classes, device="meta")}

    @torch.no_grad()
    def infer(self, loader: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Logits (n, C), float32, in eval mode, and what comes with the samples (n,)."""
        training, dtype = self.training, next(self.network.chosen.parameters()).dtype
        self.eval()
        logits, others = [torch.zeros(0, self.num_classes, device=self.device)], []
        for x, other in loader:
            x = x.to(self.device, dtype if x.is_floating_point() else None)
            logits.append(self(x).float())
            others.append(other.to(self.device))
        self.train(training)
        return torch.cat(logits), torch.cat(others) if others else torch.zeros(0, dtype=torch.long)


class DistillationServer(Algorithm[Mixed]):
    r"""Mixes the clients' predictions and keeps nothing else: :math:`p_{agg}(x) = \sum_i w_i(x)\, p_i(x)`.

    Here all weights are alike, :math:`w_i = 1/|S|`, the paper's AVG. Logs ``server/teacher_acc`` (the mixture's
    accuracy on the public set), ``server/chi`` (:math:`\chi = E_x \sum_i w_i(x)^2`) and ``server/weight_entropy``
    (:math:`-E_x \sum_i w_i \log w_i`, in nats).

    Args:
        aggregate: Mix ``probabilities``, or ``logits`` and take the softmax of the mixture.

    Raises:
        ConfigError: For another aggregate.
    """

    temperature = 0.0

    def __init__(self, aggregate: Literal["probabilities", "logits"] = "probabilities") -> None:
        if aggregate not in ("probabilities", "logits"):
            raise ConfigError(f"algorithm.aggregate is {aggregate!r}; it must be 'probabilities' or 'logits'")
        self.aggregate = aggregate
        self.targets: Tensor | None = None  # (P, C), float32

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start without a mixture.

        Raises:
            ConfigError: If the clients do not exchange predictions, or the data have no public set.
        """
        if not isinstance(module, FederatedDistillation):
            raise ConfigError(
                f"algorithm {type(self).__name__} needs a model that exchanges predictions, such as "
                f"FederatedDistillation; this one is {type(module).__name__}"
            )
        module.check_population(data)
        self.data, self.device, self.num_classes = data, fabric.device, module.num_classes

    def broadcast(self, round_idx: int) -> Payload:
        """The mixture of the round before (P, C); nothing in the first round."""
        return {} if self.targets is None else {"targets": self.targets}

    def example_broadcast(self, round_idx: int) -> Payload:
        """Nothing in the first round, then a mixture (P, C), empty."""
        return {"targets": torch.empty(self.data.public_size, self.num_classes, device="meta")} if round_idx else {}

    def reducer(self) -> SoftmaxMix:
        """A mixture by `temperature`."""
        return SoftmaxMix(self.read, self.temperature, self.watched())

    def watched(self) -> Sequence[int]:
        """Clients whose weights are looked at one by one."""
        return ()

    def read(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """What a client's answer contributes (P, C), and its scores (P,)."""
        logits = payload["logits"].double()
        values = logits.softmax(1) if self.aggregate == "probabilities" else logits
        return values, logits.new_zeros(len(logits))

    def step(self, aggregate: Mixed, round_idx: int, num_clients: int) -> dict[str, float]:
        """Take the mixture for the next broadcast."""
        self.targets = self.teach(aggregate.mean).float()
        classes = self.targets.argmax(1).cpu().numpy()
        return {
            "server/teacher_acc": self.data.public_accuracy(classes),
            "server/chi": float(aggregate.concentration.mean()),
            "server/weight_entropy": float(aggregate.entropy.mean()),
        }

    def teach(self, mean: Tensor) -> Tensor:
        """What clients learn from: the mixture as probabilities (P, C)."""
        return mean if self.aggregate == "probabilities" else mean.softmax(1)

    def global_state(self) -> dict[str, Tensor]:
        """None: the server owns no model."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The mixture."""
        return {"targets": self.targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved mixture.

        Raises:
            CheckpointError: If it is of another public set or other classes.
        """
        targets: Tensor | None = state.get("targets")
        expected = (self.data.public_size, self.num_classes)
        if targets is not None and tuple(targets.shape) != expected:
            raise CheckpointError(
                f"the checkpoint's mixture has shape {tuple(targets.shape)}, the data need {expected}"
            )
        self.targets = None if targets is None else targets.to(self.device)
