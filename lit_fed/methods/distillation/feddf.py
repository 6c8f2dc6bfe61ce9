"""FedDF.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.distillation.exchange import PUBLIC, PredictionExchange
from lit_fed.methods.distillation.mixing import Mixed
from lit_fed.methods.fedavg import FedAvg
from lit_fed.seeding import torch_generator


class Fused(NamedTuple):
    """A cohort's aggregate.

    Args:
        mean: The mean model.
        mixed: The ensemble's predictions on the public set.
    """

    mean: fed.Payload
    mixed: Mixed


class FedDF(PredictionExchange[Fused]):
    r"""Averages the models as FedAvg does, then distils the clients' ensemble into the mean on the public set.

    Clients train as in FedAvg and also send their logits on the public set. The student w starts at the mean and
    minimises :math:`\mathrm{CE}(\mathrm{softmax}\,\frac{1}{|S|}\sum_i f_i(x) \,\|\, \mathrm{softmax}\, f(x; w))`. Every
    process distils identically. Logs ``server/distillation``, the mean loss, beside the mixture's metrics.

    Args:
        optimizer: The server's optimizer, fresh each round.
        epochs: Passes over the public set in a round; 0 is FedAvg.
        aggregate: Mix ``logits``, as in the paper, or ``probabilities``.
        weighting: Weighting of the mean model, see `lit_fed.methods.fedavg.FedAvg`.
        kwargs: The settings of `lit_fed.methods.distillation.exchange.PredictionExchange`.

    Raises:
        ConfigError: For a negative number of epochs, or clients with several kinds of network.

    Note:
        The cross-entropy differs from the paper's divergence by the teacher's entropy, a constant. The paper stops by a
        validation set after at most 10,000 steps; here the number of epochs is fixed. The paper's server computes the
        logits from the weights it received, which costs no bytes; here clients send the logits, so that the server
        needs memory for one model only. The paper's form for several architectures, with one student for each, is not
        implemented.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
        epochs: int = 5,
        aggregate: Literal["probabilities", "logits"] = "logits",
        weighting: Literal["samples", "uniform"] = "samples",
        **kwargs: Any,
    ) -> None:
        super().__init__(aggregate, **kwargs)
        self.epochs = check_range("algorithm.epochs", epochs, least=0)
        self.optimizer = optimizer
        self.fusion = FedAvg(weighting)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Take the task's weights as the first global model."""
        self.model = fed.sole(models, self)
        return {**super().setup(models, population), **self.fusion.setup(models, population)}

    # ------------------------------------------------------------------ client

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """Training, then inference on the public set."""
        return [*super().phases(client), *([self.public_pass(client)] if client.stage == "train" else [])]

    def finish(self, client: fed.Client) -> fed.Update:
        """The model, and logits (P, C) on the public set."""
        return fed.Update({**super().finish(client).payload, **client.results[PUBLIC]})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The global model."""
        return self.fusion.broadcast(server, round_idx, kind, stage)

    def reducer(self, server: fed.Server) -> fed.Reducer[Fused]:
        """The mean of the models, and of the logits."""
        return _Fusion(self.fusion.reducer(server), self.mixture())

    def step(self, server: fed.Server, aggregate: Fused, cohort: fed.Cohort) -> dict[str, float]:
        """Average, then distil."""
        self.fusion.step(server, aggregate.mean, cohort)
        return self.take(server, aggregate.mixed) | self._distil(server, cohort.round_idx)

    def _distil(self, server: fed.Server, round_idx: int) -> dict[str, float]:
        population, targets = self.population, server["targets"]
        if not self.epochs:
            return {}
        assert population.server_loop is not None, "it is only in forecasts that nothing is run"

        def distillation(task: fed.Objective, batch: Any) -> Tensor:
            x, index = batch
            logits: Tensor = task(x)
            return F.cross_entropy(logits, targets[index].to(logits.dtype))

        seed = population.seed, "feddf", round_idx
        loader = population.data.public_loader(torch_generator(*seed))
        student, loss = population.server_loop.train(
            population.kinds.names[0], server["model"], loader, distillation,
            epochs=self.epochs, seed=seed, optimizer=self.optimizer,
        )  # fmt: skip
        for name in self.model.shared_names("up"):
            server["model"][name].copy_(student[name])
        return {"server/distillation": loss}


class _Fusion(fed.Reducer[Fused]):
    """The reducers of the models and of the predictions."""

    def __init__(self, models: fed.Reducer[fed.Payload], predictions: fed.Reducer[Mixed]) -> None:
        self._models, self._predictions = models, predictions

    def add(self, update: fed.ClientUpdate) -> None:
        """Add the model to one reducer and the predictions to the other."""
        model = {name: tensor for name, tensor in update.payload.items() if name != "logits"}
        self._models.add(fed.ClientUpdate(update.client_id, model, update.weight))
        self._predictions.add(update)

    def result(self, workers: fed.Workers) -> Fused | None:
        """The mean model and the mixture."""
        mean, mixed = self._models.result(workers), self._predictions.result(workers)
        return None if mean is None or mixed is None else Fused(mean, mixed)
