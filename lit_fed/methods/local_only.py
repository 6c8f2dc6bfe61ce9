"""Training without a federation, the baseline of every method."""

from __future__ import annotations

from collections.abc import Mapping

import lit_fed.algorithm as fed


class LocalOnly(fed.Algorithm[fed.Payload]):
    """Clients keep everything, buffers too, and send nothing.

    Each client starts from the same initial model. There is no global model; `ClientTest` tests each client's model.
    Clients may have different networks.

    It takes the settings of every method: `lit_fed.algorithm.Algorithm`.
    """

    needs = frozenset()

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """An empty server state."""
        return {}

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """Everything stays."""
        return fed.Split(shared=(), personal=tuple(model.parameters))

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """Nothing."""
        return {}

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """A mean of nothing."""
        return fed.WeightedMean()

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Never called, because clients send no tensors."""
        return {}
