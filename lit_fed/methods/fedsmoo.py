"""FedSMOO.

Sun, Shen, Chen, Ding, Tao: "Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
Consistency and Smooth Landscape", ICML 2023, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import lit_fed.algorithm as fed
from lit_fed.methods.feddyn import FedDyn
from lit_fed.methods.fedsam import FedSAM, scaled_to

COMMON = "perturbation."  # in the broadcast: s; in the payload: μ_i − ŝ_i
MU = "perturbation_dual."  # in a client's state: μ_i
_MU, _LAST = "perturbation_dual", "perturbation"  # in a client's results, from step to step: μ_i and ŝ_i


class FedSMOO(FedSAM, FedDyn):
    r"""FedDyn whose clients take the gradient at weights perturbed towards a common perturbation s.

    In every step :math:`\hat s_i = \rho\, u / \|u\|` with :math:`u = \nabla f(w) - \mu_i - s`, and
    :math:`\mu_i \leftarrow \mu_i + \hat s_i - s`; the client steps along FedDyn's direction with the gradient at
    :math:`w + \hat s_i`. It sends :math:`\mu_i - \hat s_i` of its last step beside its model, and the server scales the
    mean: :math:`s \leftarrow \rho\, \bar\mu / \|\bar\mu\|`. Twice FedAvg's bytes, up and down.

    Args:
        rho: ρ; 0 is FedDyn.
        alpha: Weight α of FedDyn's regularisation, the paper's 1/β; 0 leaves it out.
        weighting: ``uniform`` as in the paper, or ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative ρ or α.

    Note:
        The authors' simulator sends :math:`\mu_i` and leaves :math:`\hat s_i` out as small. Groups of clients are
        refused, because :math:`\mu_i` moves with every step. Fine-tuning for a test has s = 0.
    """

    def __init__(
        self,
        rho: float = 0.1,
        alpha: float = 0.1,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(rho=rho, alpha=alpha, weighting=weighting, **kwargs)

    # ------------------------------------------------------------------ client

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """FedDyn's dual variable, and μ_i = 0."""
        shared = client.model.tensors(client.model.split.shared)
        return {**super().initial_state(client), **fed.add_prefix(MU, fed.zeros_like(shared))}

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model; μ_i begins where it ended."""
        mu = fed.split_prefix(MU, client.state)[0]
        client.results |= {_MU: mu, _LAST: fed.zeros_like(mu)}
        return super().start(client)

    def ascent(self, client: fed.Client, gradients: fed.Tensors) -> fed.Tensors:
        """The perturbation ŝ_i; moves μ_i."""
        mu, (common, _) = client.results.get(_MU, {}), fed.split_prefix(COMMON, client.received)
        pulls = {name: tensor + common[name] if name in common else tensor for name, tensor in mu.items()}
        found = scaled_to(self.rho, {name: g - pulls[name] if name in pulls else g for name, g in gradients.items()})
        moved = {name: mu[name] + found[name] for name in mu if name in found}
        client.results[_MU] = {**mu, **{n: t - common[n] if n in common else t for n, t in moved.items()}}
        client.results[_LAST] = {name: found[name] for name in moved}
        return found

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model and μ_i − ŝ_i; keep both dual variables."""
        made, mu, last = super().finish(client), client.results[_MU], client.results[_LAST]
        sent = fed.add_prefix(COMMON, {name: t - last[name] if name in last else t for name, t in mu.items()})
        return replace(made, payload={**made.payload, **sent}, state={**made.state, **fed.add_prefix(MU, mu)})

    # ------------------------------------------------------------------ server

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with s = 0."""
        server = super().setup(models, population)
        return {**server, "perturbation": fed.zeros_like(self.model.tensors(self.model.split.shared))}

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The global model and, for training, s."""
        model = super().broadcast(server, round_idx, kind, stage)
        return {**model, **fed.add_prefix(COMMON, server["perturbation"])} if stage == "train" else model

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move s, then the model as FedDyn."""
        duals, model = fed.split_prefix(COMMON, aggregate)
        for name, tensor in scaled_to(self.rho, duals).items():
            server["perturbation"][name].copy_(tensor)
        return super().step(server, model, cohort)
