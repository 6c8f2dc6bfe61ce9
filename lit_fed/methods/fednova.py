"""FedNova.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.optim import Adadelta, Adagrad, RMSprop, Rprop

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.server import MovementMean, ServerOptimizer, scaled
from lit_fed.private_names import foreach

LOCAL_STEPS = "local_steps"
"""Name in the payload of the number of effective steps."""

UNEVEN = (Adadelta, Adagrad, RMSprop, Rprop)
"""Optimizers whose steps along a constant gradient shrink or grow, so that their number is not a length."""


class FedNova(ServerOptimizer):
    r"""Averages directions instead of movements.

    A client sends, beside its model, :math:`a_i`, its number of effective steps: 4 bytes of uplink. The server
    moves :math:`w \leftarrow w + \eta\,\tau_{\mathrm{eff}} \sum_i p_i \frac{\Delta_i}{a_i}` with
    :math:`\tau_{\mathrm{eff}} = \sum_i p_i a_i`, so that clients that take more local steps no longer pull the global
    model towards their own objective. For equal numbers of steps this is FedAvg.

    Logs ``server/effective_steps``, τ_eff.

    It takes the settings of `lit_fed.methods.server.ServerOptimizer`: the learning rate η, with which 1 gives the
    paper's equation, and :math:`p_i`, the weighting.

    Raises:
        ConfigError: For an optimizer whose steps are `UNEVEN`.

    Note:
        :math:`a_i` is the sum of the entries of the paper's vector of gradient weights, by
        `lit_fed.algorithm.EffectiveSteps`. Weight decay, clipping and a regularizer's pull are not counted. A codec on
        the uplink rounds the number too.

        Buffers are averaged as they are. A late update is normalised by its own steps, its movement measured from the
        present model like all others', so that equal steps give FedAvg with late updates too. A client without steps
        has no direction and counts with 0 steps.
    """

    needs = frozenset({"one_optimizer"})
    nonnegative = frozenset({LOCAL_STEPS})

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Refuse steps that cannot be counted."""
        server = super().setup(models, population)
        optimizer = self.model.optimizer
        if optimizer is not None and issubclass(optimizer, UNEVEN):
            raise ConfigError(
                f"model {fed.task_name(self.model.task)} has {optimizer.__name__}, and algorithm FedNova counts steps, "
                "which must be of even length; use torch.optim.SGD, Adam or AdamW"
            )
        return server

    def finish(self, client: fed.Client) -> fed.Update:
        """The model, and one number."""
        update = super().finish(client)
        steps = torch.tensor(client.steps.steps, dtype=torch.float32, device=client.device)
        return replace(update, payload={**update.payload, LOCAL_STEPS: steps})

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """A mean of normalised movements."""
        return NormalizedMean({n: server["model"][n] for n in self.model.split.shared}, self.weighting == "uniform")

    def movement(self, server: fed.Server, delta: fed.Tensors, extra: fed.Payload) -> tuple[fed.Tensors, fed.Tensors]:
        """The combined movement times the learning rate."""
        return scaled(delta, self.server_lr), {"server/effective_steps": extra[LOCAL_STEPS]}


class NormalizedMean(MovementMean):
    r"""The model :math:`w + \tau_{\mathrm{eff}} \sum_i p_i (x_i - w) / a_i`, in memory of one model.

    Tensors outside of the origin are averaged, including the clients' steps, which gives τ_eff.
    """

    def measured(self, movement: fed.Tensors, payload: fed.Payload) -> fed.Tensors:
        """A client's normalised movement, rounded to the parameters' type."""
        steps = payload[LOCAL_STEPS]
        directions = foreach.div(list(movement.values()), torch.where(steps > 0, steps, torch.inf))
        return dict(zip(movement, directions, strict=True))

    def result(self, workers: fed.Workers) -> fed.Payload | None:
        """The combined model, beside the means of everything else."""
        mean = super().result(workers)
        if mean is None:
            return None
        tau = mean[LOCAL_STEPS].double()
        combined = {
            name: (origin + mean[name].double() * tau).to(origin.dtype)
            for name, origin in self.origin.items()
            if name in mean
        }
        return {**mean, **combined}
