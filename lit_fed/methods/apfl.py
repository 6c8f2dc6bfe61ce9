"""APFL.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020, arXiv:2003.13461, Algorithm 1. The server is
FedAvg's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lightning import LightningModule
from torch import Tensor, nn

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg

OWN = "_apfl"  # after a parameter's name: the client's own one
MIXTURE = f"alpha{OWN}"  # α


class APFL(FedAvg):
    r"""Every client uses a mixture of the global model w and its own v, :math:`\bar v = \alpha v + (1 - \alpha) w`.

    In every step, with one learning rate η and at the values before it,

    .. math::

        w \leftarrow w - \eta \nabla \ell(w), \qquad v \leftarrow v - \eta\,\alpha\,\nabla \ell(\bar v), \qquad
        \alpha \leftarrow \alpha - \eta\,\langle \nabla \ell(\bar v), v - w \rangle.

    The global model is exactly FedAvg's. Tests use the client's :math:`\bar v`.

    Args:
        alpha: α, of a new client.
        adaptive: Whether α learns.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If α is not in [0, 1].

    Note:
        v and α are parameters of the task, in its own optimizer, so momentum and weight decay act on them too. An α
        that leaves [0, 1] counts as the bound, and waits there until the round ends. The mixture has the buffers of w,
        and draws its own masks of dropout. The authors' code adapts α in a round's first step only, by the gradients of
        both models, and adds 0.02 α; PFLlib trains v alone, and mixes once at the end of a round.
    """

    needs = frozenset({"loss"})

    def __init__(self, alpha: float = 0.5, adaptive: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, least=0, most=1)
        self.adaptive = adaptive

    def adapt(self, task: LightningModule) -> None:
        """Put v beside w in every module, where the task's optimizer finds it, and α beside the first."""
        if any(name.endswith(OWN) for name, _ in task.named_parameters()):
            return
        made: dict[nn.Parameter, nn.Parameter] = {}  # a shared parameter has one own
        for module in list(task.modules()):
            for name, w in list(module.named_parameters(recurse=False)):
                if w.requires_grad:
                    if self.adaptive and not made:
                        module.register_parameter(MIXTURE, nn.Parameter(w.new_tensor(self.alpha)))
                    module.register_parameter(f"{name}{OWN}", made.setdefault(w, nn.Parameter(w.detach().clone())))

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Give α its digits in the run's precision, which `adapt` does not know."""
        for model in models.values():
            for held in ({name: model.tensor(name) for name in model.parameters}, model.initial):
                for name in held:
                    if name.endswith(MIXTURE):
                        held[name].fill_(self.alpha)
        return super().setup(models, population)

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """V and α stay."""
        personal = tuple(name for name in model.parameters if name.endswith(OWN))
        return fed.Split(tuple(name for name in model.parameters if name not in personal), personal)

    # ------------------------------------------------------------------ client

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model, v and α for training, the mixture for tests."""
        begun = super().start(client)
        return begun if client.stage == "train" else {**begun, **self._mixed(begun)}

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss at w, and at the mixture with w constant."""
        terms = super().objective(client, batch)
        if client.stage != "train" or any(cast("Tensor | None", term) is None for term in terms.values()):
            return terms
        with client.muted():  # the mixture's buffers are copies
            tensors = {**self._mixed(client.parameters), **client.model.copy(client.model.buffers)}
            own = client.run(batch, tensors).loss
        assert own is not None, "the task did not skip this batch"
        return {**terms, "own": own}

    def _mixed(self, held: Mapping[str, Tensor]) -> fed.Tensors:
        """V̄ under the names of w."""
        found = next((held[name] for name in held if name.endswith(MIXTURE)), None)
        alpha = self.alpha if found is None else found.clamp(0, 1)
        pairs = ((name, held[f"{name}{OWN}"]) for name in held if f"{name}{OWN}" in held)
        return {name: alpha * v + (1 - alpha) * held[name].detach() for name, v in pairs}

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The global model; for tests also its first v, which it does not use."""
        own = self.model.split.personal if stage == "test" else ()
        return {**super().broadcast(server, round_idx, kind, stage), **{name: server["model"][name] for name in own}}

    def release(self, task: LightningModule) -> nn.Module:
        """The network without v."""
        network = super().release(task)
        for module in network.modules():
            for name in [name for name, _ in module.named_parameters(recurse=False) if name.endswith(OWN)]:
                delattr(module, name)
        return network
