"""Views: batches as one client, or one evaluation, sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.loaders.worker_loader import isolated_randomness
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
