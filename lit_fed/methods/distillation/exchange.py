"""The base of federated distillation: clients predict a public set, and the server mixes the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.distillation.mixing import Mixed, SoftmaxMix

AggregateT = TypeVar("AggregateT")

PUBLIC = "public"  # the pass over the public set, and the key of its logits in a client's results


class PredictionExchange(fed.Algorithm[AggregateT]):
    r"""Clients send logits on the public set (P, C), the server mixes them: :math:`p_{agg}(x) = \sum_i w_i(x)\,p_i(x)`.

    Here all weights are equal, :math:`w_i = 1/|S|`. Logs ``server/teacher_acc`` (the mixture's accuracy on the public
    set), ``server/chi`` (:math:`\chi = E_x \sum_i w_i(x)^2`) and ``server/weight_entropy``
    (:math:`-E_x \sum_i w_i \log w_i`, in nats).

    Args:
        aggregate: Mix ``probabilities``, or ``logits`` and take the softmax of the mixture.
        public_size: Training samples set aside, before the partition, as the public set.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.

    Note:
        Predictions run in the precision of the weights, regardless of the training precision, and travel in float32. A
        client with its own view sees the public set through this view.
    """

    needs = frozenset({"forward", "public", "classes", "one_model"})

    temperature = 0.0
    """Temperature τ of the clients' scores (`read`), see `lit_fed.methods.distillation.mixing.SoftmaxSum`."""

    def __init__(
        self, aggregate: Literal["probabilities", "logits"] = "probabilities", public_size: int = 100, **kwargs: Any
    ) -> None:
        super().__init__(public_size=public_size, **kwargs)
        self.aggregate = aggregate

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start without a mixture."""
        self.population, self.num_classes = population, population.num_classes
        for kind, model in models.items():
            self._check_logits(kind, model)
        return {"targets": torch.zeros(population.public_size, self.num_classes), "mixed": False}

    def _check_logits(self, kind: str, model: fed.Model) -> None:
        loop = self.population.server_loop
        if loop is None:
            return
        batches = islice(self.population.data.public_loader(), 1)
        shape = tuple(loop.predict(kind, {}, batches).shape)
        if len(shape) != 2 or shape[1] != self.num_classes:
            raise ConfigError(
                f"algorithm {type(self).__name__} mixes class scores, so forward(x) of model "
                f"{fed.task_name(model.task)} must give logits (B, {self.num_classes}) for the data's "
                f"{self.num_classes} classes; it gives {shape}"
            )

    # ------------------------------------------------------------------ client

    def public_pass(self, client: fed.Client) -> fed.Pass:
        """The pass that reads the client's logits (P, C) on the public set."""
        example = {"logits": torch.empty(self.population.public_size, self.num_classes, device="meta")}
        return fed.Pass(PUBLIC, client.population.public_loader(client_id=client.id), logits_of, example=example)

    # ------------------------------------------------------------------ server

    def read(self, payload: fed.Payload) -> tuple[Tensor, Tensor]:
        """A client's predictions (P, C) to mix, and their scores (P,)."""
        logits = payload["logits"].double()
        values = logits.softmax(1) if self.aggregate == "probabilities" else logits
        return values, logits.new_zeros(len(logits))

    def mixture(self, watched: Sequence[int] = ()) -> SoftmaxMix:
        """A new mixture by `temperature`, which also keeps the weights of the watched clients."""
        return SoftmaxMix(self.read, self.temperature, watched)

    def teach(self, mean: Tensor) -> Tensor:
        """The targets of distillation: the mixture as probabilities (P, C)."""
        return mean if self.aggregate == "probabilities" else mean.softmax(1)

    def take(self, server: fed.Server, mixed: Mixed) -> dict[str, float]:
        """Keep the mixture as the server's ``targets`` (P, C), float32, and return its metrics."""
        server["targets"].copy_(self.teach(mixed.mean))
        server["mixed"] = True
        return {
            "server/teacher_acc": self.population.public_accuracy(server["targets"].argmax(1)),
            "server/chi": float(mixed.concentration.mean()),
            "server/weight_entropy": float(mixed.entropy.mean()),
        }


def logits_of(client: fed.Client, batch: Any) -> fed.Tensors:
    """The client's logits (B, C) for the inputs of a batch ``(x, …)``, float32."""
    return {"logits": client.forward(batch[0]).float()}
