"""IFCA.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1
with model averaging.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedpac import BesideMean
from lit_fed.seeding import derive_seed

CLUSTERS = "clusters."  # before a name, in the server's state and in the broadcast: the models of all clusters
CHOSEN = "chosen"  # in the payload and in a client's results: one-hot, the client's cluster; addressed: its index


class IFCA(FedAvg):
    r"""K models, of which every client trains the one with the lowest loss on its data.

    The server sends all models :math:`\theta_1, \dots, \theta_K` to every client of a round. A client takes
    :math:`j = \mathrm{arg} \min_k F_i(\theta_k)`, with F_i the mean loss over its training data, trains that model, and
    sends it with j. The server averages by cluster; a model that no client of the round took stays. K times FedAvg's
    bytes down, or with `probe_every` above 1 FedAvg's, except to clients that choose.

    Clients are tested with the model that they would train. There is no global model for the shared test set.

    Args:
        clusters: K; 1 is FedAvg.
        weighting: ``uniform`` as in the paper, or ``samples``, within a cluster.
        probe_every: 1: every client chooses in every round. k: in rounds 0, k, 2k, …; in the others a client gets the
            model of the cluster that it chose last, and chooses only if it never did.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For less than one cluster; before training, if the network's modules have no ``reset_parameters``.

    Note:
        The first model is the task's, the others begin with the modules' ``reset_parameters``. The loss is the training
        step's, in evaluation mode. Of equal losses the first cluster counts. `probe_every` is ours; where it is above
        1, a client is tested with the model of the cluster that it chose last.
    """

    needs = frozenset({"loss"})

    def __init__(
        self,
        clusters: int = 2,
        weighting: Literal["samples", "uniform"] = "uniform",
        probe_every: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting, **kwargs)
        self.clusters = check_range("algorithm.clusters", clusters, least=1)
        self.probe_every = check_range("algorithm.probe_every", probe_every, least=1)

    @property
    def addresses(self) -> bool:
        """Whether some clients get one model, and others all."""
        return self.probe_every > 1

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with K different models."""
        first: fed.Tensors = super().setup(models, population)["model"]
        made = [first, *(self._anew(derive_seed(population.seed, "IFCA", k)) for k in range(1, self.clusters))]
        if any(all(torch.equal(one[name], first[name]) for name in self.model.parameters) for one in made[1:]):
            raise ConfigError(
                "algorithm IFCA begins with models of different weights, and no module of the network has "
                "reset_parameters; define it, or set algorithm.clusters to 1"
            )
        server = fed.add_prefix(CLUSTERS, {name: torch.stack([one[name] for one in made]) for name in first})
        self.varying = frozenset(server)  # of what is addressed to a client: one model, or all
        taken = torch.full((population.num_clients,), -1, device=next(iter(server.values())).device)
        return {**server, "taken": taken} if self.addresses else server

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
        """The model with the lowest loss on the client's training data, or the only one that it got."""
        stacks = fed.split_prefix(CLUSTERS, client.received)[0]
        models = [dict(zip(stacks, tensors, strict=True)) for tensors in zip(*stacks.values(), strict=True)]
        found = [0.0]
        if client.data is not None and len(models) > 1:
            found, _ = sums_of_losses(client, client.train_loader(), models)
        best = min(range(len(found)), key=found.__getitem__)
        hot = F.one_hot(client.received.get(CHOSEN, torch.tensor(best)), self.clusters)
        client.results[CHOSEN] = {CHOSEN: hot.to(client.device, torch.float32)}
        return {**super().start(client), **models[best]}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model and its cluster."""
        made = super().finish(client)
        return replace(made, payload={**made.payload, **client.results[CHOSEN]})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The models of all clusters; nothing where they are addressed."""
        return {} if self.addresses else self._models(server)

    def _models(self, server: fed.Server) -> fed.Tensors:
        return {CLUSTERS + name: server[CLUSTERS + name] for name in self.model.shared_names("down")}

    def address(
        self, server: fed.Server, client_id: int, round_idx: int, kind: str, stage: fed.Stage = "train"
    ) -> fed.Payload:
        """The model that the client took last and its index, or the models of all clusters."""
        models, taken = self._models(server), server["taken"][client_id]
        if taken < 0 or (stage == "train" and round_idx % self.probe_every == 0):
            return models
        return {**{name: stack[taken].unsqueeze(0) for name, stack in models.items()}, CHOSEN: taken.clone()}

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """One model in the rounds in which only new clients choose."""
        if not self.addresses or round_idx % self.probe_every == 0:
            return self.broadcast(server, round_idx, kind)
        one = {name: stack[:1] for name, stack in self._models(server).items()}
        return {**one, CHOSEN: torch.zeros_like(server["taken"][0])}

    def reducer(self, server: fed.Server) -> fed.Reducer[Any]:
        """Sums by cluster, and each client's cluster where the server needs to know it."""
        sums = ByCluster(self.weighting == "uniform")
        return BesideMean(sums, {*self.model.names, CHOSEN}, {CHOSEN}) if self.addresses else sums

    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """A stale client's movement, added to its cluster's present model."""
        k = int(update.payload[CHOSEN].argmax())
        held = ((begun, 0 if CHOSEN in begun else k), (server, k))
        models = [{n: t[row] for n, t in fed.split_prefix(CLUSTERS, one)[0].items()} for one, row in held]
        return self.moved(update, models[0], {"model": models[1]})

    def step(self, server: fed.Server, aggregate: Any, cohort: fed.Cohort) -> dict[str, float]:
        """Replace the models of the clusters that the round has."""
        if self.addresses:
            aggregate, updates = aggregate
            for update in updates:
                server["taken"][update.client_id] = update.payload[CHOSEN].argmax()
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


def sums_of_losses(client: fed.Client, loader: Iterable[Any], models: Sequence[fed.Tensors]) -> tuple[list[float], int]:
    """Sums of each model's losses over the samples of a loader, and their number."""
    sums, count = torch.zeros(len(models), dtype=torch.float64, device=client.device), 0
    for batch in loader:
        here = fed.map_tensors(batch, lambda tensor: tensor.to(client.device))
        losses = [loss.double() for model in models if (loss := client.teach(here, model).loss) is not None]
        if losses:  # the task may skip a batch
            sums += fed.batch_size_of(here) * torch.stack(losses)
            count += fed.batch_size_of(here)
    found: list[float] = sums.tolist()
    return found, count
