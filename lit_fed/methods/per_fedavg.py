"""Per-FedAvg.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

from lit_fed.algorithm import Client, Tensors, Terms, halve_batch
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg


class PerFedAvg(FedAvg):
    r"""Trains a model to be good after one gradient step on a client's data.

    Half of every batch, D, makes the step that is looked ahead, the other half, D′, the gradient that is used:
    :math:`w \leftarrow w - \beta\, \nabla f(w - \alpha \nabla f(w; D); D')`, the first-order form, in which the step's
    own derivative :math:`I - \alpha \nabla^2 f` is left out. β is the optimizer's learning rate, f the task's own loss.
    A client is to be tested after fine-tuning on its own training data (`PersonalTest`, with ``lr: α``), which is
    ordinary training.

    Args:
        alpha: α, the step that is looked ahead.
        first_order: Leave the second derivative out; false keeps it, which costs about twice as much.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If α is negative.

    Note:
        Two batches a step, as in the paper, are two halves of one here, so ``data.batch_size`` is twice the paper's; a
        batch of one sample serves as both. Batch norm sees each half by itself. Under a plain ``lightning.Trainer``
        the same objective is trained centrally. A batch's halves cannot be cut over processes: ``strategy=ddp`` is
        refused. A regularizer looks ahead with the objective, at D′; the step that is looked ahead is the loss's alone.
    """

    needs = frozenset({"loss", "whole_batches"})

    def __init__(self, alpha: float = 0.01, first_order: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("algorithm.alpha", alpha, least=0)
        self.alpha = alpha
        self.first_order = first_order

    def terms(self, client: Client, batch: Any, public: bool = False) -> Terms:
        """The objective on the second half, after the step on the first."""
        if client.stage == "personal":
            return super().terms(client, batch, public)
        first, second = halve_batch(batch)
        with client.at(self._ahead(client, first)):
            return super().terms(client, second, public)

    def _ahead(self, client: Client, batch: Any) -> Tensors:
        """The parameters after one gradient step on a batch; none where the task skips it."""
        with client.muted():
            loss = client.run(batch).loss
        if loss is None:
            return {}
        gradients = client.gradients(loss, create_graph=not self.first_order)
        return {name: client.parameters[name] - self.alpha * g for name, g in gradients.items()}
