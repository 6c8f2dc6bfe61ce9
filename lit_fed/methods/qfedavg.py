"""q-FedAvg.

Li, Sanjabi, Beirami, Smith: "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.server import MovementMean, norm
from lit_fed.seeding import seed_device

LOSS = "loss"  # in a client's results and in the payload: F_k
INVERSE_RATE = "inverse_rate"  # in the payload: L
STRETCH = "stretch"  # in the aggregate: the inverse of the step


class LossFirst(FedAvg):
    """Clients take their loss at the model that they receive, before they train, and send it beside their model.

    The loss is the training step's mean over the client's training samples, in evaluation mode and without a
    regularizer; 0 for a client without batches. It takes one more pass over the data, and 4 bytes of uplink.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: During training, if a client's loss is below 0.
    """

    needs = frozenset({"loss"})
    nonnegative = frozenset({LOSS})

    def start(self, client: fed.Client) -> fed.Tensors:
        """The received model; take its loss before training."""
        begun = super().start(client)
        if client.stage == "train":
            client.results[LOSS] = {LOSS: _loss(client, begun)}
        return begun

    def finish(self, client: fed.Client) -> fed.Update:
        """The model, and its loss before training."""
        made = super().finish(client)
        return replace(made, payload={**made.payload, **client.results[LOSS]})


def _loss(client: fed.Client, model: fed.Tensors) -> Tensor:
    """The mean loss of a model over a client's training samples, 0-d."""
    parameter, samples = next(iter(client.model.parameters.values())), 0
    total = torch.zeros((), dtype=torch.promote_types(parameter.dtype, torch.float32), device=client.device)
    with client.rehearsed():
        seed_device(client.derive_seed(LOSS), client.device)
        for batch in client.train_loader():
            here = fed.map_tensors(batch, lambda t: t.to(parameter if t.is_floating_point() else client.device))
            loss, size = client.teach(here, model).loss, fed.batch_size_of(here)
            if loss is not None:  # the task may skip a batch
                total += size * loss.to(total)
                samples += size
    if total < 0:
        raise ConfigError(
            "the client's loss is below 0, and the algorithm weighs clients by their losses; use a loss that is at "
            "least 0"
        )
    return total / max(samples, 1)


class QFedAvg(LossFirst):
    r"""Minimises :math:`\sum_k \frac{p_k}{q + 1} F_k^{q + 1}`: the larger q, the more clients with large losses count.

    With :math:`F_k` the client's loss at the received model w, before training, and :math:`L = 1 / \eta` from its
    learning rate, :math:`\Delta_k = F_k^q L (w - \bar w_k)` and
    :math:`h_k = q F_k^{q - 1} \| L (w - \bar w_k) \|^2 + L F_k^q`, the server moves
    :math:`w \leftarrow w - \sum_k p_k \Delta_k / \sum_k p_k h_k`. q = 0 is FedAvg of the same weighting.

    Logs ``server/step_size``, :math:`\sum_k p_k L F_k^q / \sum_k p_k h_k`: the share of the way to the mean of the
    models with weights :math:`p_k F_k^q`.

    Args:
        q: The strength of fairness; the paper has 0.001 to 15, by data set.
        weighting: :math:`p_k`: ``uniform`` as in the paper's algorithm, which draws clients by their samples instead,
            or ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative q; during training, if a client's loss is below 0.

    Note:
        As in the authors' code (``litian96/fair_flearn``), losses are raised by 1e-10. There the learning rate is a
        setting for the whole run; here it is the first one of a client's round, so that L follows a schedule. Momentum
        does not change L. A client sends it as 4 more bytes. Buffers are the mean with weights :math:`p_k F_k^q`. A
        late update's movement is measured from the present model, its loss at the model that the client received. A
        codec on the uplink rounds loss and L, too.
    """

    needs = frozenset({"loss", "one_optimizer"})
    nonnegative = frozenset({LOSS, INVERSE_RATE})

    def __init__(self, q: float = 1.0, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(weighting, **kwargs)
        self.q = check_range("algorithm.q", q, least=0)

    def finish(self, client: fed.Client) -> fed.Update:
        """The model, its loss before training, and L; 0 for a client without steps."""
        made, steps = super().finish(client), client.steps
        inverse = torch.tensor(steps.steps / steps.distance if steps.distance else 0.0, device=client.device)
        return replace(made, payload={**made.payload, INVERSE_RATE: inverse})

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """A mean by the clients' losses."""
        return FairMean(self.q, self.weighting == "uniform", {n: server["model"][n] for n in self.model.split.shared})

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move towards the mean; replace the buffers."""
        share = 1 / aggregate[STRETCH]
        for name, held in server["model"].items():
            if name in aggregate:
                mean = aggregate[name]
                held.copy_(torch.lerp(held.double(), mean.double(), share) if name in self.model.parameters else mean)
        return {"server/step_size": float(share)}


class FairMean(MovementMean):
    r"""The mean with weights :math:`p_k F_k^q`, and by these of :math:`h_k / (L F_k^q)` as ``stretch``, in float64.

    Args:
        q: The power.
        alike: Whether :math:`p_k` is 1, and not ``update.weight``.
        origin: The model w, by name; constant while the reducer works.
    """

    def __init__(self, q: float, alike: bool, origin: fed.Tensors) -> None:
        super().__init__(origin)
        self.q, self.alike = q, alike

    def measured(self, movement: fed.Tensors, payload: fed.Payload) -> fed.Tensors:
        """The stretch, from a client's movement."""
        return {STRETCH: 1 + self.q * norm(movement).square() * payload[INVERSE_RATE] / (payload[LOSS] + 1e-10)}

    def add(self, update: fed.ClientUpdate) -> None:
        """Weigh a client's tensors by its loss."""
        weight = (1.0 if self.alike else update.weight) * (float(update.payload[LOSS]) + 1e-10) ** self.q
        super().add(replace(update, weight=weight))
