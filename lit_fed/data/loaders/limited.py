"""A loader of the first batches of every pass over another one."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.data.loaders.worker_loader import WorkerLoader


def limited(loader: Any, num_batches: int) -> Any:
    """A loader of at most some batches in every pass, which are the first of the whole loader's pass.

    A loader of this package stays of its class, for those that read it by its parts, and loads no other samples.
    """
    if len(loader) <= num_batches:
        return loader
    if not isinstance(loader, TensorLoader | WorkerLoader):
        return FirstBatches(loader, num_batches)
    shorter = copy(loader)
    shorter.num_samples = num_batches * loader.batch_size
    return shorter


class FirstBatches:
    """The first batches of every pass over a loader.

    Args:
        loader: The loader.
        num_batches: Number of batches, below the loader's.
    """

    def __init__(self, loader: Any, num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._num_batches)
