r"""Mix the clients' predictions by softmax weights as they arrive.

.. math:: p(x) = \sum_i w_i(x)\, p_i(x),\qquad w_i(x) = \frac{\exp(\tau\,\ell_i(x))}{\sum_j \exp(\tau\,\ell_j(x))}

The weights are known only after the last client has arrived. As in a streaming log-sum-exp, sums are relative to the
largest score so far, so memory is that of one client's predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

import lit_fed.algorithm as fed

_NO_DENSITY = -1e300  # stands for −∞, and has finite differences
_LOWEST = -1e4  # exp of anything below −745 is 0 in float64


@dataclass(slots=True)
class Mixed:
    """A cohort's mixture.

    Args:
        mean: The mixture (P, C), float64.
        concentration: χ(x) = Σ w² (P,): 1 over the number of clients for equal weights, 1 where one client decides.
        entropy: −Σ w log w (P,), in nats.
        weights: The weights (P,) of the watched clients that took part, by client.
    """

    mean: Tensor
    concentration: Tensor
    entropy: Tensor
    weights: dict[int, Tensor] = field(default_factory=dict)


class SoftmaxSum:
    r"""The sums of the mixture, relative to the largest score so far.

    With :math:`M(x)` the largest score and :math:`g_i = \tau(\ell_i - M)` it holds
    :math:`\sum e^{g_i} p_i`, :math:`\sum e^{g_i}`, :math:`\sum e^{2 g_i}` and :math:`\sum e^{g_i} g_i`, which give the
    mixture, χ and the entropy. A larger score rescales the sums. All values are float64.

    Args:
        temperature: τ ≥ 0, the paper's factor of the scores; 0 gives equal weights, infinity gives all weight to the
            largest score (shared by equal ones).

    Raises:
        ValueError: For a negative temperature.
    """

    def __init__(self, temperature: float) -> None:
        if not temperature >= 0:
            raise ValueError(f"temperature is {temperature}; it must not be negative")
        self.temperature = temperature
        self.peak: Tensor | None = None  # M (P,)
        self.sums = torch.empty(0)  # (P, C + 3): Σ e^g p, Σ e^g, Σ e^2g, Σ e^g g

    def add(self, values: Tensor, scores: Tensor) -> None:
        """Take in one client.

        Args:
            values: p (P, C).
            scores: ℓ (P,), −∞ for no score; the caller must not pass NaN.
        """
        scores = self.prepared(scores)
        unit = torch.ones_like(scores).unsqueeze(1)
        other = SoftmaxSum(self.temperature)
        other.peak, other.sums = scores, torch.cat([values.double(), unit, unit, torch.zeros_like(unit)], dim=1)
        self.merge(other)

    def prepared(self, scores: Tensor) -> Tensor:
        """Finite scores (P,), float64; all 0 if τ is 0."""
        return torch.zeros_like(scores, dtype=torch.float64) if not self.temperature else _finite(scores)

    def merge(self, other: SoftmaxSum) -> None:
        """Add the sums of another instance."""
        if other.peak is None:
            return
        if self.peak is None:
            self.peak, self.sums = other.peak.clone(), other.sums.clone()
            return
        peak = torch.maximum(self.peak, other.peak)
        self.sums, self.peak = self.relative_to(peak) + other.relative_to(peak), peak

    def relative_to(self, peak: Tensor) -> Tensor:
        """The sums (P, C + 3) relative to a score (P,) that is not smaller."""
        assert self.peak is not None
        gap = self.gap(self.peak, peak)
        factor = gap.exp()
        sums = self.sums * factor.unsqueeze(1)
        sums[:, -2] *= factor
        sums[:, -1] += gap * sums[:, -3]  # Σ e^(g+d) (g+d) = e^d (Σ e^g g + d Σ e^g)
        return sums

    def gap(self, scores: Tensor, peak: Tensor) -> Tensor:
        """τ(ℓ − M) (P,), at most 0 and never infinite."""
        distance = scores - peak
        if math.isinf(self.temperature):
            return torch.where(distance == 0, 0.0, _LOWEST).to(distance.dtype)
        return (self.temperature * distance).clamp_min(_LOWEST)

    def weight(self, scores: Tensor) -> Tensor:
        """The weights (P,) in the mixture of scores ℓ (P,) that were added."""
        assert self.peak is not None
        return self.gap(self.prepared(scores), self.peak).exp() / self.sums[:, -3]

    def result(self) -> Mixed:
        """The mixture of all added predictions."""
        total = self.sums[:, -3]
        mean = self.sums[:, :-3] / total.unsqueeze(1)
        return Mixed(mean, self.sums[:, -2] / total.square(), total.log() - self.sums[:, -1] / total)


class SoftmaxMix(fed.Reducer[Mixed]):
    r"""Mixes the predictions in clients' updates, :math:`\sum_i \mathrm{softmax}_i(\tau\,\ell_i)\,p_i`.

    Memory is O(P·C) for any cohort; a watched client adds O(P).

    Args:
        read: Takes the values (P, C) to mix and their scores (P,) from a client's payload.
        temperature: τ, see `SoftmaxSum`.
        watched: Clients whose weights are kept.

    Raises:
        ValueError: If clients send predictions of different shapes.

    Note:
        The order of the clients and their spread over processes change the result in the last bits of float64. Rounded
        to float32, as broadcasts are, it is the same unless a value lies within some 10⁻¹⁶ of the middle between two
        float32 numbers, which are 10⁻⁷ apart: about one value in 10⁹. With τ = 0 or ∞ sums of float32 values are exact
        as long as they are within a factor 2²⁹ of each other.
    """

    def __init__(
        self,
        read: Callable[[fed.Payload], tuple[Tensor, Tensor]],
        temperature: float,
        watched: Collection[int] = (),
    ) -> None:
        self._read = read
        self._sum = SoftmaxSum(temperature)
        self._watched = frozenset(watched)
        self._scores: dict[int, Tensor] = {}

    def add(self, update: fed.ClientUpdate) -> None:
        """Take in one client's predictions."""
        values, scores = self._read(update.payload)
        known = self._sum.sums.shape
        if self._sum.peak is not None and (values.shape[0], values.shape[1] + 3) != known:
            raise ValueError(
                f"client {update.client_id} sends predictions in shape {tuple(values.shape)}, the clients before it in"
                f" {(known[0], known[1] - 3)}"
            )
        self._sum.add(values, scores)
        if update.client_id in self._watched:
            self._scores[update.client_id] = self._sum.prepared(scores)

    def result(self, workers: fed.Workers) -> Mixed | None:
        """The mixture over all processes."""
        self._merge(workers)
        if self._sum.peak is None:
            return None
        mixed = self._sum.result()
        for client_id in sorted(self._scores):
            mixed.weights[client_id] = self._sum.weight(self._scores[client_id].to(self._sum.peak.device))
        return mixed

    def _merge(self, workers: fed.Workers) -> None:
        if workers.world_size == 1:
            return
        peak = self._sum.peak
        parts = workers.gather((tuple(self._sum.sums.shape), None if peak is None else peak.cpu(), _cpu(self._scores)))
        shapes = {shape for shape, peak, _ in parts if peak is not None}
        if not shapes:
            return
        if len(shapes) > 1:
            raise ValueError(f"clients of different processes send predictions of different shapes: {sorted(shapes)}")
        peaks = [peak for _, peak, _ in parts if peak is not None]
        top = torch.stack(peaks).amax(0).to(workers.fabric.device)
        relative = workers.zeros(shapes.pop()) if peak is None else self._sum.relative_to(top)
        self._sum.sums, self._sum.peak = workers.all_reduce(relative), top
        self._scores = {client_id: scores for _, _, part in parts for client_id, scores in part.items()}


def _finite(scores: Tensor) -> Tensor:
    return scores.double().clamp(_NO_DENSITY, -_NO_DENSITY)


def _cpu(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {key: tensor.cpu() for key, tensor in tensors.items()}
