"""Warnings about a generator whose samples collapse or whose loss explodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_fed.algorithm import Server

WARNED = "warned"
"""Key of the server's state: names of the given warnings, so that a run, resumed or not, gives each warning once."""


class GeneratorCollapse(UserWarning):
    """A generator makes nearly the same sample of a class from any noise."""


class GeneratorExplosion(UserWarning):
    """A generator's loss is far above what guessing costs."""


def class_variances(samples: Tensor) -> Tensor:
    r"""The variance within each class, relative to the mean square of all values.

    .. math:: v_y = \frac{E_d\,\mathrm{Var}_{x \mid y}(x_d)}{E_{x, d}\,x_d^2}

    Args:
        samples: By class and number, (C, n, …), n at least 2.

    Returns:
        (C,): 0 if all samples of a class are equal; (n − 1)/n for independent values with mean 0.
    """
    flat = samples.flatten(2).double()
    within = flat.var(dim=1, correction=0).mean(1)
    return within / flat.square().mean().clamp_min(torch.finfo(flat.dtype).tiny)


def warn_of_collapse(server: Server, round_idx: int, classes: Sequence[int], variances: Tensor, below: float) -> None:
    """Warn, once per run, if the samples of a class hardly differ.

    Args:
        server: The server's state.
        round_idx: The round, counted from 0.
        classes: The classes of the variances.
        variances: `class_variances` (C,).
        below: Threshold of the warning.
    """
    least = int(variances.argmin())
    if not float(variances[least]) >= below:
        _once(
            server,
            GeneratorCollapse,
            f"round {round_idx}: the generator's samples of class {classes[least]} hardly differ, their relative "
            f"variance is {float(variances[least]):.2g} (algorithm.collapse_below is {below:g}); raise "
            "algorithm.diversity",
        )


def warn_of_explosion(server: Server, round_idx: int, cross_entropy: float, above: float) -> None:
    """Warn, once per run, if the clients' classifiers reject the samples' classes with near certainty.

    Args:
        server: The server's state.
        round_idx: The round, counted from 0.
        cross_entropy: The generator's mean cross-entropy of the round, in nats.
        above: Threshold of the warning.
    """
    if not cross_entropy <= above:
        _once(
            server,
            GeneratorExplosion,
            f"round {round_idx}: the generator's cross-entropy is {cross_entropy:.4g} "
            f"(algorithm.explosion_above is {above:g}), so the clients' training diverges; lower the learning rate or "
            "the weights of the pseudo-samples' losses",
        )


def _once(server: Server, kind: type[UserWarning], text: str) -> None:
    if kind.__name__ not in server[WARNED]:
        server[WARNED].append(kind.__name__)
        rank_zero_warn(f"{kind.__name__}: {text}", category=kind)
