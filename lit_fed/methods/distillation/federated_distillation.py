"""Federated distillation: clients exchange predictions on a public set, never weights.

Algorithm 1 of Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026,
arXiv:2509.15147, with the average for ``Agg`` ("AVG" in the paper): the base of `lit_fed.methods.distillation.uwa` and
`lit_fed.methods.distillation.fedmd`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.distillation.exchange import PUBLIC, PredictionExchange
from lit_fed.methods.distillation.mixing import Mixed
from lit_fed.seeding import derive_seed, torch_generator

REFINE = "refine"  # the phase over the public set


class FederatedDistillation(PredictionExchange[Mixed]):
    r"""Clients train on their own data, answer with logits on the public set, and learn from the mixture.

    A round of Algorithm 1 is: private training by the task's own loss (there cross-entropy), public inference,
    aggregation, public refinement by :math:`\mathrm{CE}(p_{agg}(x) \,\|\, \mathrm{softmax}\, f_i(x))`. Here a client's
    work begins with the refinement on the previous round's mixture and continues with private training and inference. A
    client that is tested or predicts first refines on the newest mixture, which gives the model that its next private
    training starts from: a test after round r sees Algorithm 1's model after round r.

    Clients may have different networks (``trainer.kinds``). The server keeps only the mixture.

    Args:
        aggregate: Mix ``probabilities``, or ``logits`` and take the softmax of the mixture.
        first_epochs: Passes over a client's data in its first round; null for the same number as later.
        public_epochs: Passes over the public set per refinement.
        kwargs: The settings of `lit_fed.methods.distillation.exchange.PredictionExchange`.

    Raises:
        ConfigError: For less than one epoch, or another aggregate.

    Note:
        Clients of one kind start from the same weights. A client that missed rounds refines on the newest mixture only;
        a new client refines its initial weights on it before its first private training. The refinement uses a fresh
        private optimizer.
    """

    needs = frozenset({"loss", "forward", "public", "classes", "one_model"})

    def __init__(
        self,
        aggregate: Literal["probabilities", "logits"] = "probabilities",
        first_epochs: int | None = None,
        public_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(aggregate, **kwargs)
        check_range("algorithm.first_epochs", first_epochs, least=1, null="for the trainer's local work")
        self.public_epochs = check_range("algorithm.public_epochs", public_epochs, least=1)
        self.first_epochs = first_epochs

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """Everything stays, buffers too."""
        return fed.Split(shared=(), personal=tuple(model.parameters))

    # ------------------------------------------------------------------ client

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """The refinement, then private training and public inference, or fine-tuning, by the client's stage."""
        private = super().phases(client)
        if client.stage == "train":
            if client.is_new and self.first_epochs is not None:
                private = [fed.Phase("train", client.train_loader(), epochs=self.first_epochs)]
            return [*self.refinement(client), *private, self.public_pass(client)]
        for phase in private:  # fine-tuning draws the same numbers with and without a refinement before it
            if isinstance(phase, fed.Phase):
                phase.seed = client.derive_seed("training")
        return [*self.refinement(client), *private]

    def refinement(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """One phase over the public set, once a mixture exists."""
        if "targets" not in client.received:
            return []
        # Training refines on the mixture of the round before, a test on the last round's: the same random numbers.
        seed = client.seed, REFINE, client.round_idx - (client.stage == "train"), client.id
        loader = client.population.public_loader(torch_generator(*seed), client.id)
        return [fed.Phase(REFINE, loader, epochs=self.public_epochs, public=True, seed=derive_seed(*seed))]

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss on a private batch, the distance to the mixture on a public one."""
        if client.phase != REFINE:
            return super().objective(client, batch)
        x, index = batch
        return {"distillation": self.distillation(client.forward(x), client.received["targets"][index])}

    def distillation(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of logits (B, C) and the mixture's probabilities (B, C)."""
        return F.cross_entropy(logits, targets.to(logits.dtype))

    def finish(self, client: fed.Client) -> fed.Update:
        """Logits (P, C) on the public set."""
        return fed.Update(client.results[PUBLIC])

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The newest mixture (P, C), once one exists."""
        return {"targets": server["targets"]} if server["mixed"] else {}

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """Nothing in the first round, then a mixture (P, C)."""
        return {"targets": torch.empty_like(server["targets"], device="meta")} if round_idx else {}

    def reducer(self, server: fed.Server) -> fed.Reducer[Mixed]:
        """A mixture by `temperature`."""
        return self.mixture()

    def step(self, server: fed.Server, aggregate: Mixed, cohort: fed.Cohort) -> dict[str, float]:
        """Keep the mixture for the next broadcast."""
        return self.take(server, aggregate)
