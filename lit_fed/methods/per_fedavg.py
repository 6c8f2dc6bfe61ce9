"""Per-FedAvg.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1. The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_fed.classifier import Classifier
from lit_fed.errors import ConfigError


class PerFedAvg(Classifier):
    r"""A classifier trained to be good after one gradient step on a client's data.

    Half of every batch, D, makes the step that is looked ahead, the other half, D′, the gradient that is used:
    :math:`w \leftarrow w - \beta\, \nabla f(w - \alpha \nabla f(w; D); D')`, the first-order form, in which the step's
    own derivative :math:`I - \alpha \nabla^2 f` is left out. β is the optimizer's learning rate. A client is to be
    tested after fine-tuning on its own training data (`lit_fed.protocols.PersonalTest`, with ``lr: α``), which is
    ordinary training.

    Args:
        alpha: α, the step that is looked ahead.
        first_order: Leave the second derivative out; false keeps it, which costs about twice as much.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: If α is negative.

    Note:
        Two batches a step, as in the paper, are two halves of one here, so ``data.batch_size`` is twice the paper's; a
        batch of one sample serves as both. Batch norm sees each half by itself. Under a plain ``lightning.Trainer``
        the same objective is trained centrally. A batch's halves cannot be cut over processes: ``strategy=ddp`` is
        refused.
    """

    divisible_batches = False

    def __init__(self, alpha: float = 0.01, first_order: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if alpha < 0:
            raise ConfigError(f"model.alpha is {alpha}; it must not be negative")
        self.alpha = alpha
        self.first_order = first_order

    def loss_terms(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The objective after the step that is looked ahead."""
        if self.ctx is not None and self.ctx.stage == "personal":
            return super().loss_terms(batch)
        x, y = batch
        half = (len(y) + 1) // 2
        ahead = self._look_ahead((x[:half], y[:half]))
        second = (x[half:], y[half:]) if len(y) > 1 else batch
        return self.regularized(second[0], self.outputs(second[0], ahead), second[1])

    def _look_ahead(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The parameters after one gradient step on a batch."""
        loss = torch.stack(list(self.objective(self.outputs(batch[0]), batch[1]).values())).sum()
        own = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(loss, list(own.values()), create_graph=not self.first_order)
        return {name: w - self.alpha * g for (name, w), g in zip(own.items(), gradients, strict=True)}
