"""Per-FedAvg.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg


class PerFedAvg(FedAvg):
    r"""Trains a model for its performance after one gradient step on a client's data.

    Half of every batch, D, gives the look-ahead step, the other half, D′, the gradient:
    :math:`w \leftarrow w - \beta\, \nabla f(w - \alpha \nabla f(w; D); D')`, the first-order form, without the
    step's derivative :math:`I - \alpha \nabla^2 f`. β is the optimizer's learning rate, f the task's own loss.
    Test clients after fine-tuning on their own training data (`PersonalTest`, with ``lr: α``), which is ordinary
    training.

    Args:
        alpha: α, the look-ahead step.
        first_order: Leave out the second derivative; false includes it at about twice the cost.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If α is negative.

    Note:
        The paper's two batches per step are two halves of one batch here, so ``data.batch_size`` is twice the paper's;
        a batch of one sample serves as both. Batch norm sees each half alone. A plain ``lightning.Trainer`` trains the
        same objective centrally. ``strategy=ddp`` is refused, because it would cut the halves. A regularizer is taken
        at the look-ahead parameters, on D′; the look-ahead step uses the loss alone.
    """

    needs = frozenset({"loss", "whole_batches"})

    def __init__(self, alpha: float = 0.01, first_order: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, least=0)
        self.first_order = first_order

    def terms(self, client: fed.Client, batch: Any, public: bool = False) -> fed.Terms:
        """The objective on the second half, after the step on the first."""
        if client.stage == "personal":
            return super().terms(client, batch, public)
        first, second = fed.halve_batch(batch)
        with client.at(self._ahead(client, first)):
            return super().terms(client, second, public)

    def _ahead(self, client: fed.Client, batch: Any) -> fed.Tensors:
        """The parameters after one gradient step on a batch; empty if the task skips it."""
        with client.muted():
            loss = client.run(batch).loss
        if loss is None:
            return {}
        gradients = client.gradients(loss, create_graph=not self.first_order)
        return {name: client.parameters[name] - self.alpha * g for name, g in gradients.items()}
