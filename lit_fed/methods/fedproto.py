"""FedProto.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from lightning import LightningModule
from torch import Tensor, nn

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.losses import feature_distillation
from lit_fed.methods.frozen_heads.frozen import linear_head, put_head
from lit_fed.methods.regularizers import features, taught_features

AggregateT = TypeVar("AggregateT")

PROTOTYPES, KNOWN, COUNTS = "prototypes", "known", "labels/counts"


class Prototypes(fed.Algorithm[AggregateT]):
    r"""Clients send the mean features of their classes, and draw their features to the server's: :math:`\ell + \lambda
    \cdot \mathrm{mean}_d (f(x) - \bar C^y)^2`, a mean over the batch.

    Nothing else travels, so clients may have different networks (``trainer.kinds``) with features of one length. A
    client's prototype :math:`C_i^c` is the mean feature of its samples of class c after training, in a pass of its own
    in evaluation mode. A sample whose class has no global prototype has no distance. Clients are tested by the nearest
    prototype, :math:`\mathrm{arg} \min_c \|f(x) - \bar C^c\|`; until there is one, by their own classifier.

    Args:
        lam: λ.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.
    """  # noqa: D205

    needs = frozenset({"loss", "features", "targets", "head", "classes"})
    nonnegative = frozenset({COUNTS})

    def __init__(self, lam: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam = check_range("algorithm.lam", lam, least=0)

    def adapt(self, task: LightningModule) -> None:
        """Make the head compare with prototypes in evaluation."""
        head = fed.head_of(task, self.head)
        if head is None or isinstance(head, PrototypeHead):
            return
        linear = linear_head(task, head, f"algorithm {type(self).__name__} compares the features of the head")
        put_head(task, head, PrototypeHead(linear))

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start without prototypes."""
        shapes = {kind: _head(model.task)[1].prototypes.shape for kind, model in models.items()}
        first, (classes, length) = next(iter(shapes.items()))
        for kind, (_, other) in shapes.items():
            if other != length:
                raise ConfigError(
                    f"algorithm {type(self).__name__} joins networks by their features, and trainer.kinds {first!r} "
                    f"and {kind!r} have {length} and {other} features; give them one length (small_cnn: num_features; "
                    "mlp: the last of hidden)"
                )
        self.population = population
        weight = next(iter(next(iter(models.values())).parameters.values()))
        like = torch.empty(0, device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
        return {PROTOTYPES: like.new_zeros(classes, length), KNOWN: like.new_zeros(classes), "begun": False}

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """Everything stays, buffers too."""
        return fed.Split(shared=(), personal=tuple(model.parameters))

    # ------------------------------------------------------------------ client

    def start(self, client: fed.Client) -> fed.Tensors:
        """The client's model with the newest prototypes."""
        place = _head(client.model.task)[0]
        newest = {f"{place}.{name}": tensor for name, tensor in client.received.items()}
        return {**super().start(client), **newest}

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """Training, then the pass that gathers the prototypes."""
        phases = super().phases(client)
        if client.stage != "train":
            return phases
        classes, length = _head(client.model.task)[1].prototypes.shape
        example = {"sums": torch.empty(classes, length, device="meta"), COUNTS: torch.empty(classes, device="meta")}
        return [*phases, fed.Pass(PROTOTYPES, client.train_loader(), _gathered, gather="sum", example=example)]

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss, and the distance to the prototypes."""
        terms = super().objective(client, batch)
        if KNOWN not in client.received or not self.lam:
            return terms
        f, y = features(client, batch), client.targets(batch)
        known = client.received[KNOWN][y].bool().unsqueeze(1)
        near = torch.where(known, client.received[PROTOTYPES][y], f.detach())
        return {**terms, PROTOTYPES: self.lam * feature_distillation(f, near)}

    def finish(self, client: fed.Client) -> fed.Update:
        """The prototypes (C, d) and the samples of each class (C,)."""
        found = client.results[PROTOTYPES]
        counts = found[COUNTS]
        return fed.Update({PROTOTYPES: found["sums"] / counts.clamp(min=1).unsqueeze(1), COUNTS: counts})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The prototypes and the classes that have one, once there are any."""
        return {name: server[name] for name in (PROTOTYPES, KNOWN)} if server["begun"] else {}

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """Nothing in the first round."""
        return {name: server[name] for name in (PROTOTYPES, KNOWN)} if round_idx else {}


class FedProto(Prototypes[fed.Payload]):
    r"""`Prototypes`, whose server takes their mean by class: :math:`\bar C^c = \sum_i n_i^c C_i^c / \sum_i n_i^c`.

    Args:
        weighting: ``samples`` as in the paper, or ``uniform``, the plain mean over the clients that have the class.
        kwargs: The settings of `Prototypes`.

    Raises:
        ConfigError: For a negative λ or another weighting; before training, for a head that is not linear, or kinds
            whose features differ in length.

    Note:
        The authors' code, PFLlib and HtFLlib take the plain mean, and gather prototypes while weights move. A class
        that nobody of a round has keeps its prototype. In tests, a class without one is never predicted.
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "samples", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weighting = weighting

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """Sums by class."""
        return ByClass(self.weighting == "uniform")

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Take the mean of every class that the round has."""
        weights = aggregate[COUNTS]
        found = weights > 0
        server[PROTOTYPES][found] = (aggregate[PROTOTYPES] / weights.unsqueeze(1))[found].to(server[PROTOTYPES].dtype)
        server[KNOWN][found] = 1.0
        server["begun"] = True
        return {"server/prototypes": float(server[KNOWN].sum())}


class ByClass(fed.WeightedMean):
    """Means over clients of :math:`w_i^c C_i^c` and :math:`w_i^c`, in float64.

    Args:
        plain: :math:`w_i^c = 1` where the client has the class, else its number of samples.
    """

    def __init__(self, plain: bool) -> None:
        super().__init__(uniform=True)
        self._plain = plain

    def add(self, update: fed.ClientUpdate) -> None:
        """Weigh a client's prototypes."""
        counts = update.payload[COUNTS].double()
        weights = (counts > 0).double() if self._plain else counts
        sums = update.payload[PROTOTYPES].double() * weights.unsqueeze(1)
        super().add(update.with_payload({PROTOTYPES: sums, COUNTS: weights}))


class PrototypeHead(nn.Module):
    """A linear classifier in training; in evaluation, minus the distance of the features (B, d) to each prototype.

    Without prototypes it is the classifier. A class without one is less likely than every other.

    Args:
        linear: The classifier.
    """

    prototypes: Tensor
    known: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer(PROTOTYPES, torch.zeros_like(linear.weight, requires_grad=False))
        self.register_buffer(KNOWN, torch.zeros_like(linear.weight[:, 0], requires_grad=False))

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B, C)."""
        logits: Tensor = self.linear(features)
        if self.training:
            return logits
        dtype = torch.promote_types(logits.dtype, torch.float32)  # half precision has no cdist everywhere
        near = -torch.cdist(features.to(dtype), self.prototypes.to(dtype)).to(logits.dtype)
        near = torch.where(self.known > 0, near, near.amin(1, keepdim=True) - 100)
        return torch.where(self.known.any(), near, logits)


def _head(task: LightningModule) -> tuple[str, PrototypeHead]:
    """The name and the module of the head that `Prototypes.adapt` made."""
    return next((name, module) for name, module in task.named_modules() if isinstance(module, PrototypeHead))


def _gathered(client: fed.Client, batch: Any) -> fed.Tensors:
    """Sums of features by class (C, d), and samples of each class (C,), of a batch."""
    found, y = taught_features(client, batch, {}), client.targets(batch)
    classes = len(_head(client.model.task)[1].known)
    sums = found.new_zeros(classes, found.shape[1]).index_add_(0, y, found)
    return {"sums": sums, COUNTS: torch.bincount(y, minlength=classes).to(sums.dtype)}
