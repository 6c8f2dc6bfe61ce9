"""IFCA.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1
with model averaging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.seeding import derive_seed

CLUSTERS = "clusters."  # before a name, in the server's state and in the broadcast: the models of all clusters
CHOSEN = "chosen"  # in the payload and in a client's results: one-hot, the client's cluster


class IFCA(FedAvg):
    r"""K models, of which every client trains the one with the lowest loss on its data.

    The server sends all models :math:`\theta_1, \dots, \theta_K` to every client of a round. A client takes
    :math:`j = \mathrm{arg} \min_k F_i(\theta_k)`, with F_i the mean loss over its training data, trains that model, and
    sends it with j. The server averages by cluster; a model that no client of the round took stays. K times FedAvg's
    bytes down.

    Clients are tested with the model that they would train. There is no global model for the shared test set.

    Args:
        clusters: K; 1 is FedAvg.
        weighting: ``uniform`` as in the paper, or ``samples``, within a cluster.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For less than one cluster; before training, if the network's modules have no ``reset_parameters``.

    Note:
        The first model is the task's, the others begin with the modules' ``reset_parameters``. The loss is the training
        step's, in evaluation mode. Of equal losses the first cluster counts.
    """

    needs = frozenset({"loss"})

    def __init__(self, clusters: int = 2, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(weighting, **kwargs)
        self.clusters = check_range("algorithm.clusters", clusters, least=1)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with K different models."""
        first: fed.Tensors = super().setup(models, population)["model"]
        made = [first, *(self._anew(derive_seed(population.seed, "IFCA", k)) for k in range(1, self.clusters))]
        if any(all(torch.equal(one[name], first[name]) for name in self.model.parameters) for one in made[1:]):
            raise ConfigError(
                "algorithm IFCA begins with models of different weights, and no module of the network has "
                "reset_parameters; define it, or set algorithm.clusters to 1"
            )
        return fed.add_prefix(CLUSTERS, {name: torch.stack([one[name] for one in made]) for name in first})

    def _anew(self, seed: int) -> fed.Tensors:
        model = self.model
        device = next(iter(model.parameters.values())).device
        with model.preserved(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for module in model.task.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
            return model.copy()

    # ------------------------------------------------------------------ client

    def start(self, client: fed.Client) -> fed.Tensors:
        """The model with the lowest loss on the client's training data."""
        stacks = fed.split_prefix(CLUSTERS, client.received)[0]
        models = [{name: stack[k] for name, stack in stacks.items()} for k in range(self.clusters)]
        found = self._losses(client, models) if client.data is not None and self.clusters > 1 else [0.0]
        chosen = min(range(len(found)), key=found.__getitem__)
        hot = F.one_hot(torch.tensor(chosen), self.clusters).to(client.device, torch.float32)
        client.results[CHOSEN] = {CHOSEN: hot}
        return {**super().start(client), **models[chosen]}

    def _losses(self, client: fed.Client, models: list[fed.Tensors]) -> list[float]:
        """Sums of each model's losses over the client's samples."""
        sums = torch.zeros(len(models), dtype=torch.float64, device=client.device)
        for batch in client.train_loader():
            here = fed.map_tensors(batch, lambda tensor: tensor.to(client.device))
            losses = [loss.double() for model in models if (loss := client.teach(here, model).loss) is not None]
            if losses:  # the task may skip a batch
                sums += fed.batch_size_of(here) * torch.stack(losses)
        found: list[float] = sums.tolist()
        return found

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model and its cluster."""
        made = super().finish(client)
        return replace(made, payload={**made.payload, **client.results[CHOSEN]})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The models of all clusters."""
        return {f"{CLUSTERS}{name}": server[CLUSTERS + name] for name in self.model.shared_names("down")}

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """Sums by cluster."""
        return ByCluster(self.weighting == "uniform")

    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """A stale client's movement, added to its cluster's present model."""
        k = int(update.payload[CHOSEN].argmax())
        models = [{n: t[k] for n, t in fed.split_prefix(CLUSTERS, held)[0].items()} for held in (begun, server)]
        return self.moved(update, models[0], {"model": models[1]})

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Replace the models of the clusters that the round has."""
        shares = aggregate[CHOSEN]
        found = shares > 0
        for name, sums in aggregate.items():
            if name != CHOSEN:
                mean = sums[found] / shares[found].view(-1, *[1] * (sums.dim() - 1))
                held = server[CLUSTERS + name]
                held[found] = (mean if held.is_floating_point() else mean.round()).to(held.dtype)
        return {"server/clusters": float(found.sum())}


class ByCluster(fed.WeightedMean):
    """Means of every tensor times the one-hot cluster, (K, …), in float64, and of the one-hot cluster (K,)."""

    def add(self, update: fed.ClientUpdate) -> None:
        """Put a client's tensors into its cluster's row."""
        hot = update.payload[CHOSEN].double()
        rows = {n: hot.view(-1, *[1] * t.dim()) * t.double() for n, t in update.payload.items() if n != CHOSEN}
        super().add(update.with_payload({**rows, CHOSEN: hot}))
