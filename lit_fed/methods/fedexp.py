"""FedExP.

Jhunjhunwala, Wang, Joshi: "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023, Algorithm 1. The
client's half is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import lit_fed.algorithm as fed
from lit_fed.methods.server import MovementMean, ServerOptimizer, norm, positive, scaled

SQUARED_NORM = "squared_norm"


class FedExP(ServerOptimizer):
    r"""Extrapolates: :math:`w \leftarrow w + \eta_g \bar\Delta`, further for clients that disagree more.

    :math:`\eta_g = \max\left(1, \frac{\sum_i p_i \|\Delta_i\|^2}{2(\|\bar\Delta\|^2 + \epsilon)}\right)` with
    :math:`\bar\Delta = \sum_i p_i \Delta_i`. Nothing is sent beyond FedAvg's models.

    The iterates oscillate, so evaluation, checkpoints and the final model use the mean of the last two; clients train
    from the last one.

    Logs ``server/step_size``, η_g.

    Args:
        epsilon: ε, which bounds the step for small movements.
        average_last_two: Whether the global model is the mean of the last two iterates, or the last.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`; its weighting is :math:`p_i`.

    Raises:
        ConfigError: If ε is not positive.

    Note:
        The paper's algorithm has :math:`p_i = 1/M`, which is ``uniform``; the authors' experiments weigh by samples,
        which is the default here, as in FedAvg. They also scale ε with the size of the cohort and with the learning
        rate; we do neither. As in their code, the global model after the first round is that round's iterate.
        Only parameters are extrapolated and averaged; buffers are the last round's mean.
    """

    def __init__(self, epsilon: float = 1e-3, average_last_two: bool = True, **kwargs: Any) -> None:
        super().__init__(server_lr=1.0, **kwargs)
        self.epsilon = positive("epsilon", epsilon)
        self.average_last_two = average_last_two

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start without a previous iterate."""
        return {**super().setup(models, population), "previous": None}

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The last iterate for training, otherwise the mean of the last two, if two exist."""
        iterate = super().broadcast(server, round_idx, kind, stage)
        if stage == "train":
            return iterate
        # A round's frozen tensors must be equal before and after its step, so only travelling tensors are averaged.
        previous: fed.Tensors = server["previous"] or {}
        means = {name: torch.lerp(previous[name], w, 0.5) for name, w in iterate.items() if name in previous}
        return {**iterate, **means}

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """A mean of models and of the clients' squared movements."""
        return SquaredNorms({n: server["model"][n] for n in self.model.split.shared}, self.weighting == "uniform")

    def movement(self, server: fed.Server, delta: fed.Tensors, extra: fed.Payload) -> tuple[fed.Tensors, fed.Tensors]:
        """The mean movement times η_g."""
        if not delta:
            return {}, {}
        if self.average_last_two:  # empty after the first step: the initial model is not an iterate
            began = server["previous"] is not None
            server["previous"] = {name: server["model"][name].clone() for name in delta if began}
        step_size = (extra[SQUARED_NORM].double() / (2 * (norm(delta).square() + self.epsilon))).clamp_min(1.0)
        return scaled(delta, step_size), {"server/step_size": step_size}


class SquaredNorms(MovementMean):
    r"""The weighted mean of the models, and of :math:`\|x_i - w\|^2` over their parameters as ``squared_norm``."""

    def measured(self, movement: fed.Tensors, payload: fed.Payload) -> fed.Tensors:
        """The square of a client's distance, in float32."""
        return {SQUARED_NORM: norm(movement).square().float()}
