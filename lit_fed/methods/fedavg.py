"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lit_fed.algorithm as fed


class FedAvg(fed.Algorithm[fed.Payload]):
    r"""Averages the clients' models: :math:`w_{t+1} = \sum_{k \in S_t} \frac{n_k}{n} w^k_{t+1}`.

    The base of every method with one global model. Clients minimise the task's own loss, so any LightningModule works,
    including modules that optimise by hand.

    Args:
        weighting: ``samples`` weighs a client by its number of training samples, ``uniform`` gives equal weights.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.

    Raises:
        ConfigError: For another weighting.
    """

    needs = frozenset()

    def __init__(self, weighting: Literal["samples", "uniform"] = "samples", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weighting = weighting

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Take the task's parameters and buffers as the first global model."""
        self.model = fed.sole(models, self)
        return {"model": self.model.copy()}

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The shared part of the global model."""
        return {name: server["model"][name] for name in self.model.shared_names("down")}

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """A weighted mean."""
        return fed.WeightedMean(uniform=self.weighting == "uniform")

    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """A stale client's movement, added to the present model."""
        return self.moved(update, begun, server)

    def arrived(self, updates: fed.Updates, begun: fed.Payload, server: fed.Server) -> fed.Updates:
        """`arrive` of updates whose clients received the same, which leaves fresh ones as they are."""
        fresh = not updates.staleness and type(self).arrive is FedAvg.arrive
        return updates if fresh else super().arrived(updates, begun, server)

    def moved(
        self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server, share: float = 1.0
    ) -> fed.ClientUpdate:
        """The present model plus a share of the movement from the model that a client started from, if it is stale."""
        if not update.staleness:
            return update
        moved = {
            name: server["model"][name] + share * (tensor - begun[name])
            for name, tensor in update.payload.items()
            if name in begun and name in self.model.parameters
        }
        return update.with_payload({**update.payload, **moved})

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Replace the global model's shared tensors by their mean."""
        for name, mean in aggregate.items():
            server["model"][name].copy_(mean)
        return {}
