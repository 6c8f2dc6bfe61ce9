"""Views: batches as one client, or one evaluation, sees them; feature skew, the usual reason for a client's own view.

Under feature skew clients differ in P(x) and share P(y | x). A skew is a function of (client, number of clients) to a
view, applied to every batch of the client's own data in training and in tests, not to shared sets. To write one,
subclass `FeatureSkew`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.checks import check_range
from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.loaders.worker_loader import isolated_randomness
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

View = Callable[[Any], Any]
"""Transforms a whole batch, inputs and targets."""


def viewed(loader: Loader, view: View | None, generator: torch.Generator | None = None) -> Loader:
    """A loader whose batches go through a view, if there is one; see `ViewLoader`."""
    return loader if view is None else ViewLoader(loader, view, generator)


class ViewLoader:
    """Batches of another loader, each through a view.

    A random view draws from Python's, NumPy's or torch's CPU generators, which are seeded for every batch, in every
    iteration anew if the loader shuffles, and restored afterwards. A view does not change the loader's order and
    augmentation.

    Args:
        loader: The loader of the batches.
        view: The view.
        generator: The loader's own, not advanced here; None if its order is fixed.
    """

    def __init__(self, loader: Loader, view: View, generator: torch.Generator | None = None) -> None:
        self._loader, self._view, self._generator = loader, view, generator
        self.num_samples = loader.num_samples

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """One pass over the samples."""
        seed = 0
        if self._generator is not None:
            fork = torch.Generator()
            fork.set_state(self._generator.get_state())
            seed = int(torch.randint(2**62, (), generator=fork))
        for batch_idx, batch in enumerate(self._loader):
            with isolated_randomness(derive_seed(seed, "view", batch_idx)):
                seen = self._view(batch)
            yield seen


class FeatureSkew(Checked, ABC):
    """The way in which clients' inputs differ, applied after normalising."""

    @abstractmethod
    def change(self, client_id: int, num_clients: int) -> Callable[[Tensor], Tensor] | None:
        """A transform of the client's inputs, shape (B, …) preserved; None for the identity.

        It may draw from torch's CPU generator, which is seeded for every batch. Clients count from 0.
        """

    @abstractmethod
    def describe(self, client_id: int, num_clients: int) -> dict[str, float]:
        """The client's own values by name, for ``partition.json``."""

    def view(self, client_id: int, num_clients: int) -> View | None:
        """The client's view of a batch: `change` of its inputs."""
        change = self.change(client_id, num_clients)
        return None if change is None else partial(_of_inputs, change, type(self).__name__)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class NoiseLevels(FeatureSkew):
    r"""Client i of N adds noise of its own level: :math:`\hat x = x + \varepsilon`, with variance σ·i/N, i = 1 … N.

    Every batch has fresh noise. The last client has variance σ.

    Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, arXiv:2102.02079
    (its noise-based feature imbalance).

    Args:
        sigma: σ ≥ 0, in units of the normalised inputs, squared.

    Note:
        The paper counts parties from 1, so every client has noise. Its public code takes σ·i/(N − 1), i from 0, as
        the standard deviation.
    """

    def __init__(self, sigma: float = 0.1) -> None:
        check_range("NoiseLevels.sigma", sigma, least=0)
        self.sigma = sigma

    @override
    def change(self, client_id: int, num_clients: int) -> Callable[[Tensor], Tensor] | None:
        variance = self.sigma * (client_id + 1) / num_clients
        return partial(_add_noise, math.sqrt(variance)) if variance else None

    @override
    def describe(self, client_id: int, num_clients: int) -> dict[str, float]:
        return {"noise_variance": self.sigma * (client_id + 1) / num_clients}


class Rotations(FeatureSkew):
    """Clients rotate their images, taking the angles in turn.

    Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, arXiv:2006.04088
    (rotated MNIST, with the default angles).

    Args:
        angles: Degrees, counter-clockwise. Multiples of 90 move pixels of square images exactly; other angles fill the
            corners with 0, the mean of normalised pixels.
    """

    def __init__(self, angles: Sequence[float] = (0.0, 90.0, 180.0, 270.0)) -> None:
        self.angles = _finite("Rotations.angles", angles)

    @override
    def change(self, client_id: int, num_clients: int) -> Callable[[Tensor], Tensor] | None:
        angle = self.angles[client_id % len(self.angles)] % 360
        return partial(_rotate, angle) if angle else None

    @override
    def describe(self, client_id: int, num_clients: int) -> dict[str, float]:
        return {"angle": self.angles[client_id % len(self.angles)]}


class Brightness(FeatureSkew):
    r"""Clients see their inputs brighter or darker: :math:`\hat x = g x + o`; they take gains and offsets in turn.

    For measurements these are a sensor's gain and offset. It is a feature shift in the sense of Li et al., "FedBN:
    Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, arXiv:2102.07623.

    Args:
        offsets: o, in units of the normalised inputs.
        gains: g, above 0, as many as offsets; null for 1.
    """

    def __init__(self, offsets: Sequence[float] = (-0.5, 0.0, 0.5), gains: Sequence[float] | None = None) -> None:
        self.offsets = _finite("Brightness.offsets", offsets)
        self.gains = [1.0] * len(self.offsets) if gains is None else _finite("Brightness.gains", gains)
        if len(self.gains) != len(self.offsets):
            raise ConfigError(
                f"Brightness.gains has {len(self.gains)} values and offsets has {len(self.offsets)}; give equally many"
            )
        if any(gain <= 0 for gain in self.gains):
            raise ConfigError(f"Brightness.gains is {self.gains}; every gain must be above 0")

    @override
    def change(self, client_id: int, num_clients: int) -> Callable[[Tensor], Tensor] | None:
        gain, offset = self._own(client_id)
        return None if (gain, offset) == (1.0, 0.0) else partial(_scale, gain, offset)

    @override
    def describe(self, client_id: int, num_clients: int) -> dict[str, float]:
        gain, offset = self._own(client_id)
        return {"gain": gain, "offset": offset}

    def _own(self, client_id: int) -> tuple[float, float]:
        turn = client_id % len(self.offsets)
        return self.gains[turn], self.offsets[turn]


def _finite(name: str, values: Sequence[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{name} is {numbers}; it must be one finite number or more")
    return numbers


def _of_inputs(change: Callable[[Tensor], Tensor], name: str, batch: Any) -> Any:
    """A batch with its inputs changed: the batch itself, or its first entry."""
    x = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = f"{x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(
            f"data.skew {name} needs inputs of one floating-point tensor, and these are {kind}; leave it out"
        )
    return change(x) if x is batch else (change(x), *batch[1:])


def _add_noise(deviation: float, x: Tensor) -> Tensor:
    return x + deviation * torch.randn(x.shape).to(x)


def _rotate(angle: float, x: Tensor) -> Tensor:
    if x.ndim != 4:
        raise ConfigError(
            f"data.skew Rotations needs images, and an input has shape {tuple(x.shape[1:])}; leave it out"
        )
    if angle % 90 == 0 and x.shape[-1] == x.shape[-2]:
        return torch.rot90(x, int(angle // 90), (-2, -1))
    turned: Tensor = functional.rotate(x, angle, InterpolationMode.BILINEAR)
    return turned


def _scale(gain: float, offset: float, x: Tensor) -> Tensor:
    return gain * x + offset
