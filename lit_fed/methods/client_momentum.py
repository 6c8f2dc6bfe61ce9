"""FedAvg of the clients' momenta.

Karimireddy, He, Jaggi: "Learning from History for Byzantine Robust Optimization", ICML 2021.
The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import torch

import lit_fed.algorithm as fed
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.server import decay

MOMENTUM = "momentum."  # in a client's state: m_i
BEGUN = "begun"  # in a client's state: 1 from its first round on


class ClientMomentum(FedAvg):
    r"""Clients send the mean of their movements over rounds: :math:`m_i \leftarrow \beta m_i + (1 - \beta) \Delta_i`.

    :math:`\Delta_i = w_i - w_g` is the movement of a client's local work, and the client sends :math:`w_g + m_i`. The
    mean over rounds has less noise than a round's movement, so honest updates lie closer together and an attacker
    that hides among them gains less. It is the momentum that centred clipping is meant for
    (`lit_fed.robust.CentredClipping`), and works under any rule, and under the mean.

    Args:
        beta: β in [0, 1); 0 is FedAvg.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If β is not in [0, 1).

    Note:
        The paper's workers send momenta of gradients; with one step of SGD a round, Δ is the gradient times −η. In a
        client's first round :math:`m_i = \Delta_i`, as in the authors' code, where later steps add β m + g without the
        factor 1 − β of the paper. A client keeps its momentum over rounds in which it does not take part. Buffers are
        sent as they are.
    """

    def __init__(self, beta: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta = decay("beta", beta)

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """m_i = 0, of no weight in the first round."""
        shared = client.model.tensors(client.model.split.shared)
        begun = torch.zeros((), device=client.device)
        return {**fed.add_prefix(MOMENTUM, fed.zeros_like(shared)), BEGUN: begun}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send w_g + m_i; keep m_i."""
        payload, w_g = dict(super().finish(client).payload), client.received
        momentum, rest = fed.split_prefix(MOMENTUM, client.state)
        beta = self.beta * rest[BEGUN]
        momentum |= {n: m + (1 - beta) * (payload[n] - w_g[n] - m) for n, m in momentum.items() if n in payload}
        payload |= {n: w_g[n] + m for n, m in momentum.items() if n in payload}
        return fed.Update(payload, {**fed.add_prefix(MOMENTUM, momentum), BEGUN: torch.ones_like(rest[BEGUN])})
