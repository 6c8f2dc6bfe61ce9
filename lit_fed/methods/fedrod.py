"""FedROD.

Chen and Chao: "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022,
Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import balanced_softmax
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.frozen_heads.frozen import linear_head, put_head
from lit_fed.methods.regularizers import features, look_up_counts, own_counts


class FedROD(FedAvg):
    r"""A generic classifier h_g for everybody, and a personal one h_p of each client, on one representation f.

    With logits :math:`z_g = h_g(f)` and :math:`z_p = h_p(f)`, f and h_g train on the balanced softmax
    (`lit_fed.losses.balanced_softmax`) of :math:`z_g` with the client's class counts, and in the same steps h_p on
    :math:`\mathrm{CE}(\mathrm{sg}(z_g) + h_p(\mathrm{sg}(f)), y)`, with sg no gradient. Clients predict by
    :math:`z_g + z_p`. The global model predicts by :math:`z_g`.

    Args:
        hidden: null for a linear h_p, which stays with the client; a number for an h_p that a hyper-network makes from
            the client's shares of classes, with one hidden layer of that size. The hyper-network is averaged, so that a
            new client has a personal classifier, too.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For less than one hidden unit; before training, for a head that is not linear.

    Note:
        A linear h_p begins at 0, as in the global model; PFLlib's begins as a copy of h_g. One optimizer trains all, so
        gradient clipping by norm, too, sees all. In fine-tuning for a test, an h_p from a hyper-network trains itself.
    """

    needs = frozenset({"loss", "features", "targets", "head", "unweighted"})

    def __init__(self, hidden: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = check_range("algorithm.hidden", hidden, least=1, null="for a linear personal classifier")

    def adapt(self, task: LightningModule) -> None:
        """Put the personal classifier, and the hyper-network, beside the task's head."""
        head = fed.head_of(task, self.head)
        if head is None or isinstance(head, TwoHeads):
            return
        linear = linear_head(task, head, "algorithm FedROD adds to the head")
        put_head(task, head, TwoHeads(linear, self.hidden))

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """A linear h_p stays; one that is made neither trains nor travels."""
        own = tuple(_names(model, "personal."))
        shared = tuple(name for name in model.parameters if name not in own)
        return fed.Split(shared, own) if self.hidden is None else fed.Split(shared, frozen=own)

    # ------------------------------------------------------------------ client

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model with the client's h_p; the hyper-network makes it for a test."""
        look_up_counts(client)
        begun = super().start(client)
        if self.hidden is None or client.stage == "train":
            return begun
        return {**begun, **dict(zip(_names(client.model, "personal."), _personal_head(client, begun), strict=True))}

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """One phase; in fine-tuning it trains h_p, not the hyper-network."""
        phases = super().phases(client)
        for phase in phases if client.fine_tuning is not None and self.hidden is not None else ():
            assert isinstance(phase, fed.Phase), "as fine-tuning is"
            hyper = set(_names(client.model, "hyper."))
            phase.trains = [name for name in client.parameters if name not in hyper]
        return phases

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The generic and the personal loss, without parameters in common."""
        f, y, parameters = features(client, batch), client.targets(batch), client.parameters
        generic = F.linear(f, *(parameters[name] for name in _names(client.model, "generic.")))
        if self.hidden is None or client.stage != "train":
            own = [parameters[name] for name in _names(client.model, "personal.")]
        else:
            own = _personal_head(client, parameters)
        personal = F.linear(f.detach(), *own)
        return {
            "generic": balanced_softmax(generic, y, own_counts(client, generic)),
            "personal": F.cross_entropy(generic.detach() + personal, y),
        }

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The shared part; for tests also a linear h_p of 0, with which the global model predicts by z_g."""
        own = self.model.split.personal if stage == "test" else ()
        return {**super().broadcast(server, round_idx, kind, stage), **{name: server["model"][name] for name in own}}


class TwoHeads(nn.Module):
    """Logits :math:`z_g + z_p` (B, C) of features (B, d); the personal classifier begins at 0.

    Args:
        generic: The generic classifier.
        hidden: Hidden units of a hyper-network beside them; None for none.
    """

    def __init__(self, generic: nn.Linear, hidden: int | None) -> None:
        super().__init__()
        self.generic, self.personal = generic, copy.deepcopy(generic)
        for parameter in self.personal.parameters():
            nn.init.zeros_(parameter).requires_grad_(hidden is None)
        if hidden is not None:
            made = sum(parameter.numel() for parameter in generic.parameters())
            layers = nn.Linear(generic.out_features, hidden), nn.ReLU(), nn.Linear(hidden, made)
            self.hyper = nn.Sequential(*layers).to(generic.weight)

    def forward(self, features: Tensor) -> Tensor:
        """The personalised logits."""
        logits: Tensor = self.generic(features) + self.personal(features)
        return logits


def _names(model: fed.Model, part: str) -> list[str]:
    """Names of the parameters of a part of the head: ``generic.``, ``personal.`` or ``hyper.``."""
    place = next(name for name, module in model.task.named_modules() if isinstance(module, TwoHeads))
    return [name for name in model.parameters if name.startswith(f"{place}.{part}")]


def _personal_head(client: fed.Client, held: Mapping[str, Tensor]) -> list[Tensor]:
    """The weight (C, d) and the bias (C,), if h_g has one, that the hyper-network gives for the client's classes."""
    first, shift, second, shift_out = (held[name] for name in _names(client.model, "hyper."))
    counts = own_counts(client, first)
    shares = counts.to(first.dtype) / counts.sum().clamp(min=1)
    shapes = [client.parameters[name].shape for name in _names(client.model, "generic.")]
    flat = F.linear(F.linear(shares, first, shift).relu(), second, shift_out)
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
