"""FedTGP.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedproto import COUNTS, KNOWN, PROTOTYPES, Prototypes
from lit_fed.methods.server import positive
from lit_fed.seeding import derive_seed, torch_generator


class FedTGP(Prototypes[list[fed.ClientUpdate]]):
    r"""`lit_fed.methods.fedproto.Prototypes` that the server trains to lie apart.

    A network of the server makes every class's prototype from an embedding, :math:`\hat P_c = \mathrm{MLP}(e_c)`, and
    trains on the clients' prototypes :math:`C_i^y` with
    :math:`-\log \frac{\exp(-\|C_i^y - \hat P_y\| - \delta)}{\exp(-\|C_i^y - \hat P_y\| - \delta) + \sum_{c \ne y}
    \exp(-\|C_i^y - \hat P_c\|)}`. The margin δ is the largest distance of a class's mean prototype to its nearest other
    class, at most `margin`.

    Args:
        lam: λ of the clients' distance.
        server_epochs: Passes over the round's prototypes.
        server_lr: The server's learning rate, of plain SGD.
        server_batch_size: Prototypes in a step.
        margin: The bound of δ; also δ where a round has fewer than two classes.
        kwargs: The settings of `lit_fed.methods.fedproto.Prototypes`.

    Raises:
        ConfigError: For a setting out of range; before training, as for FedProto.

    Note:
        As in the authors' code the hidden layer is as long as the features, and every class has a prototype after the
        first round, also one that no client has sent. λ, the server's epochs and the bound of δ are those of the
        authors' published command; their program's own defaults are 1, 1,000 and 100.
    """

    def __init__(
        self,
        lam: float = 10.0,
        server_epochs: int = 100,
        server_lr: float = 0.01,
        server_batch_size: int = 10,
        margin: float = 100.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(lam=lam, **kwargs)
        self.server_epochs = check_range("algorithm.server_epochs", server_epochs, least=1)
        self.server_batch_size = check_range("algorithm.server_batch_size", server_batch_size, least=1)
        self.margin = check_range("algorithm.margin", margin, least=0)
        self.server_lr = positive("server_lr", server_lr)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with random embeddings and layers."""
        server = super().setup(models, population)
        classes, length = server[PROTOTYPES].shape
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(population.seed, "FedTGP", "generator"))
            made = nn.Sequential(
                nn.Embedding(classes, length), nn.Linear(length, length), nn.ReLU(), nn.Linear(length, length)
            )
        self.generator = made.to(server[PROTOTYPES])
        return {**server, "generator": {name: tensor.clone() for name, tensor in made.state_dict().items()}}

    def reducer(self, server: fed.Server) -> fed.Reducer[list[fed.ClientUpdate]]:
        """Every client's prototypes."""
        return fed.Gather()

    def step(self, server: fed.Server, aggregate: list[fed.ClientUpdate], cohort: fed.Cohort) -> dict[str, float]:
        """Train the network on the round's prototypes, and make all classes' prototypes."""
        sent = [update.payload[PROTOTYPES][update.payload[COUNTS] > 0] for update in aggregate]
        points = torch.cat(sent).to(server[PROTOTYPES])
        labels = torch.cat([update.payload[COUNTS].nonzero().flatten() for update in aggregate]).to(points.device)
        if not len(points):
            return {}
        margin = min(largest_gap(points, labels), self.margin)
        self.generator.load_state_dict(server["generator"])
        optimizer = torch.optim.SGD(self.generator.parameters(), lr=self.server_lr)
        classes = torch.arange(len(server[KNOWN]), device=points.device)
        random = torch_generator(self.population.seed, "FedTGP", cohort.round_idx)
        losses = []
        for _ in range(self.server_epochs):
            for rows in torch.randperm(len(points), generator=random).to(points.device).split(self.server_batch_size):
                loss = margin_loss(points[rows], labels[rows], self.generator(classes), margin)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        for name, tensor in self.generator.state_dict().items():
            server["generator"][name].copy_(tensor)
        server[PROTOTYPES].copy_(self.generator(classes).detach())
        server[KNOWN].fill_(1.0)
        server["begun"] = True
        return {"server/margin": margin, "server/prototype_loss": float(losses[-1])}


def margin_loss(points: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Cross-entropy of minus the distances, with a margin added to the true class's.

    Args:
        points: C (B, d).
        labels: Classes (B,).
        prototypes: P̂ (C, d), differentiated through.
        margin: δ.
    """
    distances = torch.cdist(points, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    return F.cross_entropy(-distances - margin * F.one_hot(labels, len(prototypes)), labels)


def largest_gap(points: Tensor, labels: Tensor) -> float:
    """The largest distance of a class's mean point to its nearest other class; infinite for a single class."""
    means = torch.stack([points[labels == label].mean(0) for label in labels.unique()])
    distances = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    return float(distances.fill_diagonal_(torch.inf).amin(1).max())
