"""FedFrozen.

Du, Li, Feng, Feng: "FedFrozen: Two-Stage Federated Optimization via Attention Kernel Freezing", 2026, Algorithm 1.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from lightning import LightningModule
from torch import nn

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.attention_freezing.projections import merged, separate_attention
from lit_fed.methods.fedavg import FedAvg
from lit_fed.networks.adapters import adapters_of


class FedFrozen(FedAvg):
    r"""Trains a transformer whole for some rounds, then with its attention kernel frozen.

    From round :math:`T_\text{warm}` on, counted from 0, the query and key projections
    :math:`\Phi = (W^Q, W^K)`, weights and biases, stay at :math:`\bar\Phi = \Phi^{T_\text{warm}}`: they neither train
    nor travel. All other parameters continue to train. The local objective is
    :math:`F_k(\Phi, \theta) + \tfrac\lambda2\|\theta\|^2`, with :math:`F_k` the task's own loss and θ the value
    projections (Eq. 5).

    Args:
        warmup_rounds: :math:`T_\text{warm}`, rounds in which everything trains; 0 freezes from the start, and
            ``trainer.max_rounds`` is FedAvg.
        value_ridge: λ; 0 for none, as in the paper's experiments on real data.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If a setting is negative; before training, if the model has no attention that
            `lit_fed.methods.attention_freezing.separate_attention` understands, or one adapter for queries, keys and
            values.

    Note:
        θ includes the biases of the value projections, in both phases. Frozen parameters are part
        of the server's model and are not counted as sent from round :math:`T_\text{warm}` on, as in the paper's cost
        table. A deployment sends :math:`\bar\Phi` once more, to each client that works in phase 2;
        ``lit-fed cost`` says how much that is.

        The trained model holds fused projections in parts; `release` returns a copy with fused projections.
    """

    def __init__(self, warmup_rounds: int = 5, value_ridge: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.warmup_rounds = check_range("algorithm.warmup_rounds", warmup_rounds, least=0)
        self.value_ridge = check_range("algorithm.value_ridge", value_ridge, least=0)

    @property
    def all_needs(self) -> frozenset[str]:
        """A loss, if a ridge is added to it; one model, because clients of two stages send different tensors."""
        return super().all_needs | {"one_model"} | ({"loss"} if self.value_ridge else set())

    def adapt(self, task: LightningModule) -> None:
        """Split the attention into query, key and value parameters."""
        for one in adapters_of(task):
            if re.search(r"\b(qkv|kv|in_proj_weight)\b", one.base):
                raise ConfigError(
                    f"algorithm FedFrozen needs attention without an adapter that moves queries, keys and values, as "
                    f"{one.base} has; leave it out of model.adapter.targets"
                )
        try:
            self.attention = separate_attention(task)
        except ConfigError as error:
            raise ConfigError(f"algorithm FedFrozen needs attention in model {fed.task_name(task)}: {error}") from None
        if not any(task.get_parameter(name).requires_grad for name in self.attention.kernel):
            raise ConfigError(
                f"algorithm FedFrozen needs attention that trains in model {fed.task_name(task)}, and "
                f"{self.attention.kernel[0]!r} and all other queries and keys are frozen; choose FedAvg"
            )

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """All parameters travel during the warm-up, all but queries and keys after it."""
        frozen = self.attention.kernel if round_idx >= self.warmup_rounds else ()
        return fed.Split(tuple(name for name in model.parameters if name not in frozen), frozen=frozen)

    def release(self, task: LightningModule) -> nn.Module:
        """A copy of the network with fused projections, as it was built."""
        return merged(super().release(task))

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss and the ridge on the value block."""
        terms = super().objective(client, batch)
        if self.value_ridge:
            values = [client.parameters[name].square().sum() for name in self.attention.value]
            terms["value_ridge"] = 0.5 * self.value_ridge * torch.stack(values).sum()
        return terms
