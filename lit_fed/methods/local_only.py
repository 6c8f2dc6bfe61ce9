"""Training without a federation, the baseline of every method."""

from __future__ import annotations

from collections.abc import Mapping

from lit_fed.algorithm import Algorithm, Cohort, Model, Payload, Population, Reducer, Server, Split, Stage, WeightedMean


class LocalOnly(Algorithm[Payload]):
    """Clients keep everything, buffers too, and send nothing.

    Each client starts from the same initial model. There is no global model; `ClientTest` tests each client's model.
    Clients may have different networks.

    It takes the settings of every method: `lit_fed.algorithm.Algorithm`.
    """

    needs = frozenset()

    def setup(self, models: Mapping[str, Model], population: Population) -> Server:
        """An empty server state."""
        return {}

    def split(self, model: Model, round_idx: int) -> Split:
        """Everything stays."""
        return Split(shared=(), personal=tuple(model.parameters))

    def broadcast(self, server: Server, round_idx: int, kind: str, stage: Stage = "train") -> Payload:
        """Nothing."""
        return {}

    def reducer(self, server: Server) -> Reducer[Payload]:
        """A mean of nothing."""
        return WeightedMean()

    def step(self, server: Server, aggregate: Payload, cohort: Cohort) -> dict[str, float]:
        """Never called, because clients send no tensors."""
        return {}
