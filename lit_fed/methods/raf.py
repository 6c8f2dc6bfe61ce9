r"""RAF, resolution-adaptive federated learning.

Lim, Lee, Lee, Cho: "Mitigating Resolution-Drift in Federated Learning: Case of Keypoint Detection", 2025, Algorithm 1
and Eqs. 4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.losses import resolution_distillation
from lit_fed.losses.terms import Upsampling
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.regularizers import logits
from lit_fed.protocols import EvalSubset, Evaluation, Federation, Protocol, global_loops

Truth = Literal["top", "every"]


class RAF(fed.Regularizer):
    r"""Distillation from each of a batch's resolutions to the next lower one, over any method's objective.

    :math:`\mathcal{L}_{\mathrm{task}}(y^{(0)}) + \alpha \sum_{i \ge 1} \mathrm{mean}\bigl(\mathrm{sg}(y^{(i-1)}) -
    U\,y^{(i)}\bigr)^2 + \tfrac{\gamma}{2 K h w}\|w\|^2`, where :math:`y^{(0)}` are the task's K×h×w outputs at the
    client's own resolution, :math:`y^{(i)}` the outputs at its lower resolutions (``levels`` of the task), and U
    enlarges by `upsampling`. A client of the lowest resolution has the method's own objective. The term does not
    need a federation: under a plain ``lightning.Trainer`` it is the paper's "CL + KD".

    Logs ``train/raf`` and, with `gamma`, ``train/l2``, both with their weights.

    Args:
        weight: α.
        gamma: γ of Eq. 4, over all trainable parameters; above 0, the optimizer must not have weight decay.
        truth: Resolutions of the objective below: ``top``, as in the paper's Eq. 4, or ``every``, with all terms
            divided by their number, as in its public code.
        objective_weight: The weight of the objective below.
        upsampling: U, ``nearest`` as in its public code, or ``bilinear``; see `resolution_distillation`.

    Raises:
        ConfigError: If a weight is negative, or for another `truth` or `upsampling`.

    Note:
        The public code has an optimizer with weight decay 0.1 in place of γ. It takes each distance's mean over the
        batch, joints and pixels of the higher level, and so it is here, where Eqs. 4 and 5 sum: over K·h·w, the paper's
        objective weighs the i-th distance by :math:`h_{i-1} w_{i-1} / (h w)`, at its three levels by 1 and 9/16, and
        this objective weighs both by 1. With two levels it is the paper's over K·h·w, and γ with it. A task's
        ``map_weights(batch)`` (B, K) says which of the lower level's outputs count, in both: as in the public code,
        labelled joints whose Gaussian reaches into the picture. Batch norm sees each resolution as a separate batch.
        Eqs. 13 and 14 do not hold as printed, and nothing here builds on these equations: a scalar case gives losses of
        2.25 and 4.5, and gradients of −6 and 6.
    """

    name = "raf"
    needs = frozenset({"loss", "outputs", "levels"})

    def __init__(
        self,
        weight: float = 1.0,
        gamma: float = 0.0,
        truth: Truth = "top",
        objective_weight: float = 1.0,
        upsampling: Upsampling = "nearest",
    ) -> None:
        super().__init__(weight, objective_weight)
        self.gamma = check_range("RAF.gamma", gamma, least=0)
        self.truth = truth
        self.upsampling = upsampling
        if gamma:
            self.needs = self.needs | {"no_decay"}

    def terms(self, client: fed.Client, batch: Any, objective: Callable[[fed.Client, Any], fed.Terms]) -> fed.Terms:
        """The terms of the objective below, at the top or at every resolution, the distillation, and the decay."""
        terms, levels = objective(client, batch), client.levels(batch)
        share = 1.0
        if self.truth == "every" and levels:
            share = 1.0 / (1 + len(levels))
            with client.muted():  # the task logs the client's own resolution only
                terms_by_level = [terms, *(objective(client, level) for level in levels)]
            if not any(map(_skipped, terms_by_level)):
                terms = {
                    name: share * torch.stack([terms_there[name] for terms_there in terms_by_level]).sum()
                    for name in terms
                }
        if _skipped(terms):
            return terms
        if self.objective_weight != 1.0:
            terms = {name: self.objective_weight * term for name, term in terms.items()}
        if self.weight and levels:
            terms[self.name] = self.weight * share * self.term(client, batch)
        if self.gamma:
            trained = (parameter for parameter in client.parameters.values() if parameter.requires_grad)
            numbers = logits(client, batch)[0].numel()  # K·h·w at the client's own resolution
            total = torch.stack([parameter.square().sum() for parameter in trained]).sum()
            terms["l2"] = 0.5 * self.gamma / numbers * total
        return terms

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """The sum over neighbouring resolutions of the distance of the lower one's outputs to the higher one's."""
        teacher, distances = logits(client, batch), []
        weigh: Any = getattr(client.model.task, "map_weights", None)
        with client.muted():
            for level in client.levels(batch):
                student = logits(client, level)
                counts = 1.0 if weigh is None else weigh(level)[..., None, None]
                distances.append(resolution_distillation(counts * student, counts * teacher, self.upsampling))
                teacher = student
        return torch.stack(distances).sum()


class FedRAF(FedAvg):
    r"""RAF as in its paper: FedAvg, uniform, whose clients distil from high to low resolutions.

    Clients minimise `RAF`, which is also a ``regularizer`` for other methods.

    Args:
        alpha: Weight α of the distillation; 0 is FedAvg.
        gamma: Weight γ of :math:`\tfrac12\|w\|^2` in Eq. 4, see `RAF`; above 0, the optimizer must not have weight
            decay.
        truth: ``top`` or ``every``, see `RAF`.
        weighting: ``uniform`` as in the paper, or ``samples``.
        upsampling: ``nearest`` or ``bilinear``, see `RAF`.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If α or γ is negative, or for another `truth` or `upsampling`.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        gamma: float = 0.0,
        truth: Truth = "top",
        weighting: Literal["samples", "uniform"] = "uniform",
        upsampling: Upsampling = "nearest",
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting, **kwargs)
        self.raf = RAF(check_range("algorithm.alpha", alpha, least=0), gamma, truth, upsampling=upsampling)
        self.needs = self.raf.needs

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss, the distillation and the decay."""
        return self.raf.terms(client, batch, super().objective)


class ClusterTest(Protocol):
    r"""Separation of views of the test data, such as resolutions, in the global model's features (Fig. 11).

    - ``clusters/<group>``: the mean silhouette of the views in a group of the data's ``pictured()``,
      :math:`(b - a) / \max(a, b)` with a sample's mean distances a to the samples of its view and b to the samples of
      the nearest other view: 1 for separate clusters, 0 for touching ones, below 0 for mixed ones;
    - ``clusters/<one>_<next>``: the same for two neighbours in the group.

    With several kinds, ``clusters_<kind>/…``. NaN for features that are not finite. The task's ``test_features`` gives
    the features (n, d) of a batch.

    Raises:
        ConfigError: Before training, for data with fewer than two views, or a task without ``test_features``.

    Note:
        The paper shows the features by t-SNE, without a measure; silhouettes of the features are ours.
    """

    name = "clusters"

    def check(self, federation: Federation) -> None:
        """Refuse data with one view, and tasks without features; try one batch."""
        if not (groups := _groups(federation)):
            raise ConfigError(
                "protocol ClusterTest compares views of the test data, such as data.test_resolutions, and "
                f"{type(federation.data).__name__} has fewer than two; leave the protocol out"
            )
        for loop in federation.loops.values():
            if not hasattr(loop.model.task, "test_features"):
                raise ConfigError(
                    f"protocol ClusterTest needs a task with test_features, and {type(loop.model.task).__name__} has "
                    "none; leave the protocol out"
                )
            loader = federation.data.test_loader(view=next(iter(groups.values()))[0])
            _features(loop, [next(iter(loader))])

    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Measure, identically on every process."""
        data, evaluation = federation.data, Evaluation()
        for name, loop in global_loops(self.name, federation, round_idx, evaluation):
            for group, ways in _groups(federation).items():
                loaders = {way: data.test_loader(view=way) if subset == "test" else data.val_loader(view=way)
                           for way in ways}  # fmt: skip
                features = {way: _features(loop, loader) for way, loader in loaders.items()}
                evaluation.metrics[f"{name}/{group}"] = silhouette(*features.values())
                for first, following in pairwise(ways):
                    value = silhouette(features[first], features[following])
                    evaluation.metrics[f"{name}/{first}_{following}"] = value
        return evaluation


def silhouette(*clusters: Tensor) -> float:
    """The mean silhouette of all points; NaN for points that are not finite.

    Args:
        clusters: Points of each, shape (n, d).
    """
    from sklearn.metrics import silhouette_score  # takes a second

    points = torch.cat(clusters).double().cpu().numpy()
    which = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
    return float(silhouette_score(points, which)) if np.isfinite(points).all() else float("nan")


def _groups(federation: Federation) -> dict[str, list[str]]:
    """The groups of views of the test data to compare."""
    return {group: list(ways) for group, ways in federation.data.pictured().items() if len(ways) > 1}


@torch.no_grad()
def _features(loop: fed.LocalLoop, loader: Iterable[Any]) -> Tensor:
    """The task's features of all batches, (n, d)."""
    task: Any = loop.model.task
    with loop.mode("predict"), loop.autocast():
        return torch.cat([task.test_features(batch) for batch in loop.batches(loader)])


def _skipped(terms: fed.Terms) -> bool:
    """Whether the task skips the batch by returning None."""
    return any(cast("Tensor | None", term) is None for term in terms.values())
