"""A partition in which clients see different numerical targets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import CSR, ClientIndices
from lit_fed.data.partitions.partition import Partition, Samples, equal_sizes
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator


class Continuous(Partition):
    """Clients hold different ranges of a numerical target, as strictly as asked for, in equal numbers.

    With z the standardised targets and ε ~ N(0, 1), samples are sorted by b = σ·z + (1 − σ)·ε and cut into equal parts:
    client 0 has the smallest. b and z have the correlation σ/√(σ² + (1 − σ)²). With σ = 0 it is `IID`, with σ = 1
    clients hold disjoint ranges. Test samples get a b likewise, and go to the client in whose range it lies, so that
    the parts are disjoint, and a client may get none.

    ``ContinuousPartitioner`` of ``flwr_datasets``. Of several targets per sample the first counts.

    Args:
        strictness: σ, from 0 to 1.
    """

    def __init__(self, strictness: float = 0.5) -> None:
        check_range("Continuous.strictness", strictness, least=0, most=1)
        self.strictness = strictness

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse samples that cannot be sorted.

        Raises:
            ConfigError: They have no numerical targets, or all the same.
        """
        order = np.argsort(self._scores(samples, samples, seed, "train"), kind="stable")
        return CSR.from_sizes(order, equal_sizes(samples.size, num_clients))

    @override
    def split_test(self, train: CSR, train_samples: Samples, test_samples: Samples, seed: int) -> ClientIndices:
        edges = np.sort(self._scores(train_samples, train_samples, seed, "train"))[train.offsets[1:-1]]
        scores = self._scores(test_samples, train_samples, seed, "test")
        owners = np.searchsorted(edges, scores, side="right").astype(np.int64)
        return CSR.from_owners(np.arange(test_samples.size), owners, len(train))

    def _scores(self, samples: Samples, like: Samples, seed: int, part: str) -> NDArray[np.float64]:
        """The b of each sample, standardised like other samples, shape (n,)."""
        if samples.targets is None or like.targets is None:
            raise ConfigError(
                f"partition Continuous needs the numerical target of each sample, which {samples.source} does not "
                "tell; choose Dirichlet for classes or strata, or a data set in memory with numerical targets"
            )
        mean, std = like.targets.mean(dtype=np.float64), like.targets.std(dtype=np.float64)
        if not std > 0:
            raise ConfigError(
                f"all {like.size} training targets of {like.source} are {mean:g}, and partition Continuous sorts by "
                "them; choose IID"
            )
        noise = numpy_generator(seed, "partition", "continuous", part).standard_normal(samples.size)
        scores: NDArray[np.float64] = self.strictness * (samples.targets - mean) / std + (1 - self.strictness) * noise
        return scores
