"""A server that keeps the last model of every client, for methods that send a client what they make of the others'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import lit_fed.algorithm as fed
from lit_fed.methods.local_only import LocalOnly


class LastModels(LocalOnly):
    """Each client trains its own model, and the server keeps the last one of every client.

    These are n models in memory and in every checkpoint. Buffers stay with the clients.
    """

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """The initial model for every client."""
        model, count = fed.sole(models, self), population.num_clients
        last = {name: torch.stack([tensor] * count) for name, tensor in model.copy(model.split.personal).items()}
        return {"last": last, "seen": torch.zeros(count, dtype=torch.bool, device=next(iter(last.values())).device)}

    def finish(self, client: fed.Client) -> fed.Update:
        """The client's own model."""
        return fed.Update(client.model.tensors(client.model.split.personal))

    def reducer(self, server: fed.Server) -> fed.Reducer[Any]:
        """Every update."""
        return fed.Gather()

    def step(self, server: fed.Server, aggregate: Any, cohort: fed.Cohort) -> dict[str, float]:
        """Keep the clients' models."""
        for update in aggregate:
            server["seen"][update.client_id] = True
            for name, stack in server["last"].items():
                stack[update.client_id] = update.payload[name]
        return {}
