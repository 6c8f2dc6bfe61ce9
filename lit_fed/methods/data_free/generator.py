"""The server's generator: draw noise and labels, and make pseudo-samples from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lit_fed.algorithm import Payload
from lit_fed.networks.generators import Generator
from lit_fed.seeding import torch_generator

Draw = tuple[Tensor, Tensor]
"""Noise (B, n), uniform from 0 to 1, and labels (B,)."""


class PseudoSamples:
    """Makes samples with a generator and given weights.

    Args:
        network: The generator, on its device; its own weights are ignored.
    """

    def __init__(self, network: Generator) -> None:
        self.network = network

    @property
    def device(self) -> torch.device:
        """The generator's device."""
        return next(self.network.parameters()).device

    def batches(self, prior: Tensor, count: int, size: int, seed: tuple[Any, ...]) -> Iterator[Draw]:
        """Batches of noise and labels, drawn on the CPU: the same on every device and process.

        Args:
            prior: Weights of the classes (C,).
            count: Number of batches.
            size: Samples in a batch.
            seed: Seed and purpose of the random numbers.
        """
        random, weights = torch_generator(*seed), prior.double().cpu()
        for _ in range(count):
            noise = torch.rand(size, self.network.noise_size, generator=random)
            labels = torch.multinomial(weights, size, replacement=True, generator=random)
            yield noise.to(self.device), labels.to(self.device)

    def noise_like(self, labels: Tensor, tensors: Payload) -> Tensor:
        """Noise for labels, from the device's generator, in the weights' dtype."""
        dtype = next(iter(tensors.values())).dtype
        return torch.rand(len(labels), self.network.noise_size, device=labels.device, dtype=dtype)

    def make(self, tensors: Payload, noise: Tensor, labels: Tensor) -> Tensor:
        """Samples (B, …), in evaluation mode; differentiable in noise and weights.

        Args:
            tensors: The generator's weights.
            noise: (B, n).
            labels: (B,).
        """
        if self.network.training:
            self.network.eval()
        made: Tensor = functional_call(self.network, dict(tensors), (noise, labels))
        return made
