"""What a server may know of a client whose data it does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.population.scale import Scale
from lit_fed.errors import ConfigError


@dataclass(frozen=True)
class ClientReport:
    """What a client tells of its data.

    Args:
        samples: Its training samples.
        histogram: Of them, those of each class; None where it does not tell, or there are no classes.
        fingerprint: The SHA-256 of its data's indices, by which it is known again.
        scale: Of its inputs, on which a population must agree; None where the settings say it.
    """

    samples: int
    histogram: tuple[int, ...] | None
    fingerprint: str
    scale: Scale | None = None

    def counts(self, client_id: int) -> IntArray:
        """The histogram as an array, shape (num_classes,).

        Args:
            client_id: Whose it is.

        Raises:
            ConfigError: The client does not tell.
        """
        if self.histogram is None:
            raise ConfigError(
                f"client {client_id} does not report how many samples of every class it has, which this method asks "
                "for: start its node with --histogram true, or use another method"
            )
        return np.asarray(self.histogram, dtype=np.int64)
