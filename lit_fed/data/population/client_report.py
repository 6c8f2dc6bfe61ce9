"""The facts that a server without a client's data may know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.population.scale import Scale
from lit_fed.errors import ConfigError


@dataclass(frozen=True)
class ClientReport:
    """A client's report of its data.

    Args:
        samples: Number of training samples.
        histogram: Training samples of each class; None if withheld, or in a regression.
        fingerprint: SHA-256 of its data's indices, to recognise it by.
        scale: Scale of its inputs, on which a population must agree; None if the settings fix it.
    """

    samples: int
    histogram: tuple[int, ...] | None
    fingerprint: str
    scale: Scale | None = None

    def counts(self, client_id: int) -> IntArray:
        """The histogram as an array, shape (num_classes,).

        Raises:
            ConfigError: The client withholds its histogram.
        """
        if self.histogram is None:
            raise ConfigError(
                f"client {client_id} does not report its samples of each class, which this method needs; start its "
                "node with --histogram true, or use another method"
            )
        return np.asarray(self.histogram, dtype=np.int64)
