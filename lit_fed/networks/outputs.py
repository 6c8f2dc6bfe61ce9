"""Logits and features of a network from one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from lit_fed.networks.registry import classifier, features


class Outputs(NamedTuple):
    """What a classification network gives for a batch.

    Args:
        logits: (B, C).
        features: (B, d), what the classifier saw; None where they were not asked for.
    """

    logits: Tensor
    features: Tensor | None = None


def run(network: nn.Module, x: Tensor, with_features: bool) -> Outputs:
    """One forward pass.

    Args:
        network: Maps a batch to logits.
        x: The batch (B, …).
        with_features: Also return the features, for which the network must have them (`features`).
    """
    if not with_features:
        return Outputs(network(x))
    found = features(network, x)
    return Outputs(classifier(network)(found), found)


def run_with(tensors: Mapping[str, Tensor], network: nn.Module, x: Tensor, with_features: bool) -> Outputs:
    """`run` with other parameters and buffers in place of the network's, differentiable in them.

    Args:
        tensors: By name, with the prefix ``network.``; what is not named stays the network's own.
        network: Gives the architecture and the mode (training or evaluation).
        x: The batch (B, …).
        with_features: Also return the features.
    """
    found: Outputs = functional_call(_Runner(network), dict(tensors), (x, with_features))
    return found


class _Runner(nn.Module):
    """`run` as a module, which is what ``functional_call`` takes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, with_features: bool) -> Outputs:
        return run(self.network, x, with_features)
