"""Values of torchmetrics objects; NaN where the samples leave a metric undefined, for which torchmetrics has a number.

torchmetrics returns 0 for the AUROC of one class, for R² of constant targets and for the recall without a positive; it
warns of some, and on the first process only. The states of the metrics tell.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import ExplainedVariance, Metric, R2Score, RelativeSquaredError, SpearmanCorrCoef
from torchmetrics import classification as of_classes
from torchmetrics.utilities.data import dim_zero_cat

_AREAS = (of_classes.BinaryAUROC, of_classes.MulticlassAUROC, of_classes.MultilabelAUROC)
_CURVES = (
    of_classes.BinaryPrecisionRecallCurve,
    of_classes.MulticlassPrecisionRecallCurve,
    of_classes.MultilabelPrecisionRecallCurve,
)
_COUNTS = (of_classes.BinaryStatScores, of_classes.BinaryConfusionMatrix)
_MATTHEWS = (of_classes.BinaryMatthewsCorrCoef, of_classes.MulticlassMatthewsCorrCoef)


def value_of(metric: Metric) -> float:
    """Value of a metric; NaN where it is undefined."""
    return math.nan if is_undefined(metric) else float(metric.compute())


def is_undefined(metric: Metric) -> bool:
    """Whether a metric, or a metric inside it, is undefined for the samples that it has seen."""
    return any(_is_undefined(part) for part in metric.modules() if isinstance(part, Metric) and part.update_called)


def _is_undefined(metric: Any) -> bool:
    """Whether a metric divides 0 by 0 for the samples that it has seen, or NaN is its value anyway.

    Note:
        A mean over classes counts classes without samples as torchmetrics does: an AUROC counts them with 0, and is
        undefined here; recall, F1 and average precision leave them out.
    """
    if isinstance(metric, R2Score | RelativeSquaredError):
        least = 1e-4 if isinstance(metric, R2Score) else 0.0  # below which torchmetrics takes targets as constant
        squares, total, count = metric.sum_squared_error, metric.sum_error, metric.total
        return bool(count < 2) or _is_constant(squares, total, count, least)
    if isinstance(metric, ExplainedVariance):
        return _is_constant(metric.sum_squared_target, metric.sum_target, metric.num_obs)
    if isinstance(metric, SpearmanCorrCoef):
        columns = (dim_zero_cat(metric.preds), dim_zero_cat(metric.target))
        return any(bool((column == column[0]).all(0).any()) for column in columns)
    if isinstance(metric, _CURVES):
        return _lacks_class(metric)
    if isinstance(metric, _MATTHEWS):
        return any(int(metric.confmat.sum(axis).count_nonzero()) < 2 for axis in (0, 1))
    if isinstance(metric, of_classes.MulticlassRecall) and (metric.average, metric.num_classes) == ("macro", 2):
        return not all((dim_zero_cat(metric.tp) + dim_zero_cat(metric.fn)).tolist())  # a mean of both, and not of one
    if isinstance(metric, _COUNTS) and getattr(metric, "zero_division", None) == 0:
        try:
            metric.zero_division = math.nan
            return bool(type(metric).compute(cast("Any", metric)).isnan().any())  # past the cache of its value
        finally:
            metric.zero_division = 0
    return False


def _is_constant(squares: Tensor, total: Tensor, count: Any, least: float = 0.0) -> bool:
    """Whether numbers of a sum of squares, a sum and a count do not vary beyond the rounding of the squares."""
    varied, rounding = squares - total.square() / count, 4 * torch.finfo(squares.dtype).eps * squares
    return bool((varied <= rounding.clamp_min(least)).any())


def _lacks_class(metric: Any) -> bool:
    """Whether a curve lacks the samples of a class that counts."""
    listed, average = metric.thresholds is None, getattr(metric, "average", None)
    if not listed:
        found = metric.confmat[0].sum(-1).reshape(-1, 2)
    elif isinstance(target := dim_zero_cat(metric.target), Tensor) and hasattr(metric, "num_classes"):
        counts = torch.bincount(target.flatten(), minlength=metric.num_classes)
        found = torch.stack([len(target) - counts, counts], dim=1)
    else:
        target = target.reshape(len(target), -1)
        found = torch.stack([(target == 0).sum(0), (target == 1).sum(0)], dim=1)
    found = found.sum(0, keepdim=True) if average == "micro" else found
    if average == "weighted":
        found = found[found[:, 1] > 0]
    negatives, positives = found[:, 0], found[:, 1]
    if isinstance(metric, _AREAS):
        return bool((found == 0).any()) or not len(found)
    if listed and len(found) > 1:  # torchmetrics leaves out absent classes, unless all samples are of the first
        return not bool(positives[1:].any())
    return bool((positives == 0).any()) or not len(negatives)
