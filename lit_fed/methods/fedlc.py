"""FedLC.

Zhang, Li, Li, Xu, Wu, Ding, Wu: "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.
The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import calibrated_cross_entropy
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.regularizers import logits, look_up_counts, own_counts


class FedLC(FedAvg):
    r"""Cross-entropy of the logits less a margin that is larger for rarer classes: :math:`z_c - \tau n_c^{-1/4}`.

    :math:`n_c` counts the client's own training samples of class c; see `lit_fed.losses.calibrated_cross_entropy`.
    The loss takes the place of the task's own. Predictions use the logits as they are.

    Args:
        tau: Strength τ of the margins; 0 is FedAvg of the cross-entropy, over all classes.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative τ.

    Note:
        A class that the client lacks has an infinite margin, so its logit has no gradient. PFLlib counts the samples of
        all clients together, which is one margin for everybody and not the paper's.
    """

    needs = frozenset({"loss", "logits", "targets", "unweighted"})

    def __init__(self, tau: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tau = check_range("algorithm.tau", tau, least=0)

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model; look up the client's class counts."""
        look_up_counts(client)
        return super().start(client)

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The calibrated cross-entropy."""
        found = logits(client, batch)
        counts = own_counts(client, found)
        return {"calibrated": calibrated_cross_entropy(found, client.targets(batch), counts, self.tau)}
