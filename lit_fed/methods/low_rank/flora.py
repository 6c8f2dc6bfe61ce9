"""FLoRA.

Wang, Shen, He, Sun, Wang, Lyu, Li: "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024.
"""

from __future__ import annotations

import torch
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.methods.low_rank.adapted import LEFT, RIGHT, Merging
from lit_fed.networks.adapters import fresh_factor
from lit_fed.seeding import derive_seed


class FLoRA(Merging):
    r"""Stacks the clients' adapters, adds their product to the base, and begins new adapters in every round.

    :math:`W_0 \leftarrow W_0 + \tilde B\tilde A`, with :math:`\tilde B = [p_1s_1B_1, …, p_Ks_KB_K]` and
    :math:`\tilde A = [A_1; …; A_K]`, so that the base becomes the mean of the clients' weights. Then A is drawn anew,
    and B is zero. Kinds of network may have adapters of different rank.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the model has no adapters, or kinds differ in more than their rank.

    Note:
        The paper scales A by p and needs one s = α/r; here each client's s counts, so that the sum is exact for any α.
        A is drawn as at first, uniform in ±1/√n, by the run's seed and the round.
    """

    @override
    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Average the head; merge the products; begin new adapters."""
        super().step(server, aggregate, cohort)
        for base, left in fed.split_prefix(LEFT, aggregate)[0].items():
            self.merge(server, base, left, aggregate[RIGHT + base])
        for kind, model in server["models"].items():
            for one in self.adapters[kind]:
                drawn = torch.empty(model[one.lora_a].shape)  # on the CPU, for the same numbers on every device
                seed = derive_seed(self.population.seed, "flora", cohort.round_idx, one.lora_a)
                model[one.lora_a].copy_(fresh_factor(drawn, torch.Generator().manual_seed(seed)))
                model[one.lora_b].zero_()
        return {}
