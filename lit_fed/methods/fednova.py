"""FedNova.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Section 4. Both halves are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lit_fed.classifier import Classifier
from lit_fed.client import ClientContext, ClientModule
from lit_fed.errors import ConfigError
from lit_fed.methods.server import ServerOptimizer, scaled
from lit_fed.optimization import EffectiveSteps
from lit_fed.engine.payload import ClientUpdate, Payload
from lit_fed.engine.reducers import Reducer, WeightedMean
from lit_fed.engine.strategy import Workers

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

LOCAL_STEPS = "local_steps"
"""The name under which clients send how many steps their work amounts to."""


class CountsSteps(ClientModule):
    r"""The client's half for any module: sends, beside its model, :math:`a_i`, the steps its local work amounts to.

    Mix it into a module of your own, ``class Mine(CountsSteps, MyModule)``; it costs 4 bytes of uplink.

    Note:
        Where the paper has the vector of weights that a client's gradients get, this is the sum of its entries, by
        `lit_fed.optimization.EffectiveSteps`. Weight decay, clipping and a regularizer's pull are not counted. With a
        codec on the uplink the number is rounded like everything else.
    """

    effective_steps: EffectiveSteps

    def on_train_start(self) -> None:
        """Count from 0 for every client and round."""
        super().on_train_start()
        self.effective_steps = EffectiveSteps()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count the step."""
        super().on_before_optimizer_step(optimizer)
        self.effective_steps.count(optimizer)

    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        """The update of any client, and one number."""
        update = super().make_update(ctx)
        steps = torch.tensor(self.effective_steps.steps, dtype=torch.float32, device=self.device)
        update.payload = {**update.payload, LOCAL_STEPS: steps}
        return update


class FedNova(CountsSteps, Classifier):
    """A classifier that counts its steps; the server is `FedNovaServer`. Its settings are the classifier's."""


class FedNovaServer(ServerOptimizer):
    r"""Averages directions instead of movements.

    :math:`w \leftarrow w + \eta\,\tau_{\mathrm{eff}} \sum_i p_i \frac{\Delta_i}{a_i}` with
    :math:`\tau_{\mathrm{eff}} = \sum_i p_i a_i`, so that clients that take more local steps no longer pull the global
    model towards their own objective. Where all take equally many this is FedAvg.

    Logs ``server/effective_steps``, τ_eff.

    Args:
        server_lr: Learning rate η of the server; 1 leaves the equation as it is in the paper.
        weighting: :math:`p_i`: ``samples`` weighs a client by its number of training samples, ``uniform`` all alike.

    Raises:
        ConfigError: If the learning rate is not positive, or the clients do not count their steps.

    Note:
        Buffers are averaged as they are. A late update is normalised by its own steps, its movement measured from the
        present model like all others', so that equal steps give FedAvg with late updates too. A client that made no
        step gives no direction and counts with 0 steps.
    """

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start from the module's tensors."""
        if not isinstance(module, CountsSteps):
            raise ConfigError(
                f"algorithm FedNovaServer needs clients that count their steps, and model {type(module).__name__} does"
                " not; use FedNova, or mix lit_fed.methods.CountsSteps into it"
            )
        if not module.automatic_optimization:
            raise ConfigError(
                f"model {type(module).__name__} optimises manually, so its steps cannot be counted for FedNovaServer"
            )
        super().setup(module, data, fabric)

    def reducer(self) -> Reducer[Payload]:
        """A mean of normalised movements."""
        return NormalizedMean({n: self.state[n] for n in self.module.layout.split.shared}, self.weighting == "uniform")

    def movement(self, delta: dict[str, Tensor], extra: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The combined movement times the learning rate."""
        return scaled(delta, self.server_lr), {"server/effective_steps": extra[LOCAL_STEPS]}


class NormalizedMean(WeightedMean):
    r"""The model :math:`w + \tau_{\mathrm{eff}} \sum_i p_i (x_i - w) / a_i`, in memory of one model.

    What is not in the origin is averaged as it is, the clients' steps among it, which gives τ_eff.

    Args:
        origin: w by name; constant while the reducer works.
        uniform: Weigh every client 1 instead of by ``update.weight``.
    """

    def __init__(self, origin: dict[str, Tensor], uniform: bool = False) -> None:
        super().__init__(uniform)
        self.origin = origin

    def add(self, update: ClientUpdate) -> None:
        """Add a client's normalised movement; the update itself is left as it is."""
        payload: dict[str, Tensor] = dict(update.payload)
        names = [name for name in payload if name in self.origin]
        if names:
            steps = payload[LOCAL_STEPS]
            moved = torch._foreach_sub([payload[name].detach() for name in names], [self.origin[n] for n in names])
            # Rounded to the parameters' type, an integer weight's product with it is exact in float64, and the sum
            # independent of the clients' order.
            directions = torch._foreach_div(moved, torch.where(steps > 0, steps, torch.inf))
            payload.update(zip(names, directions, strict=True))
        super().add(ClientUpdate(update.client_id, payload, update.weight))

    def result(self, workers: Workers) -> Payload | None:
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
