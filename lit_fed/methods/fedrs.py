"""FedRS.

Li, Zhan: "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021. The server
is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import restricted_softmax
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.regularizers import logits, look_up_counts, own_counts


class FedRS(FedAvg):
    r"""Cross-entropy with the logits of the classes that the client lacks scaled down, :math:`\alpha z_c` for n_c = 0.

    A client cannot pull the weights of a class without samples, only push them; α restricts the push. See
    `lit_fed.losses.restricted_softmax`. The loss takes the place of the task's own. Predictions use the logits as they
    are.

    Args:
        alpha: Scale α in [0, 1] of the logits of absent classes; 1 is FedAvg of the cross-entropy.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If α is not in [0, 1].

    Note:
        The paper's logits have no bias; where the head has one, α scales it, too.
    """

    needs = frozenset({"loss", "logits", "targets", "unweighted"})

    def __init__(self, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, least=0, most=1)

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model; look up the client's class counts."""
        look_up_counts(client)
        return super().start(client)

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The cross-entropy of the restricted softmax."""
        found = logits(client, batch)
        counts = own_counts(client, found)
        return {"restricted": restricted_softmax(found, client.targets(batch), counts, self.alpha)}
