"""Partitions: how one data set becomes many clients'.

A `Partition` is a function of (labels, number of clients, seed), stateless and without side effects, and vectorised:
100,000 clients are cut in one sweep. To write one, subclass `Partition` and implement `assign`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from lit_fed.data.csr import CSR, ClientIndices, IntArray
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator


class Partition(ABC):
    """Cuts training samples into clients, and test samples to match.

    Every random choice derives from the seed that is passed in.
    """

    def __call__(self, labels: IntArray, num_clients: int, seed: int, client_ids: IntArray | None = None) -> CSR:
        """Cut the samples.

        Args:
            labels: Class of each sample, counted from 0, shape (n,).
            num_clients: How many clients to make.
            seed: The partition's seed.
            client_ids: The data set's own client of each sample, counted from 0, shape (n,), where it has one.

        Returns:
            Positions in `labels`, by client. Every client holds at least one.

        Raises:
            ConfigError: The labels cannot be cut like that.
        """
        labels = np.asarray(labels, dtype=np.int64)
        if num_clients < 1:
            raise ConfigError(f"data.num_clients is {num_clients}: a population needs at least 1 client")
        if len(labels) < num_clients:
            raise ConfigError(
                f"{len(labels)} training samples cannot be shared among {num_clients} clients: "
                "lower data.num_clients, data.public_size or use a larger data set"
            )
        if labels.min() < 0:
            position = int(labels.argmin())
            raise ConfigError(f"label {labels[position]} of sample {position} is negative: count classes from 0")
        return self.assign(labels, num_clients, seed, client_ids)

    @abstractmethod
    def assign(self, labels: IntArray, num_clients: int, seed: int, client_ids: IntArray | None) -> CSR:
        """Cut the samples; the arguments have been checked. See `__call__`."""

    def split_test(
        self,
        train: CSR,
        train_labels: IntArray,
        test_labels: IntArray,
        seed: int,
        test_client_ids: IntArray | None = None,
    ) -> ClientIndices:
        """Give each client test samples that match its training samples.

        The default draws per class min(training samples of the client, test samples of the class) random test samples
        without repetition; clients may share test samples. It is the test split that the public code of FedDr+ makes
        for its Dirichlet partition.

        Args:
            train: What `__call__` returned.
            train_labels: The labels that were cut, shape (n,).
            test_labels: Class of each test sample, shape (m,).
            seed: The partition's seed.
            test_client_ids: The data set's own client of each test sample, shape (m,), where it has one.

        Returns:
            Positions in `test_labels`, by client.
        """
        del test_client_ids
        return MatchedTestSplit(train, train_labels, test_labels, seed)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class MatchedTestSplit:
    """Per class min(n_train of the client, test samples of the class) random test samples, drawn when asked for.

    Nothing is stored per client: the choice is a function of (seed, client).

    Args:
        train: The clients' training samples.
        train_labels: Their labels, shape (n,).
        test_labels: Class of each test sample, shape (m,).
        seed: The partition's seed.
    """

    def __init__(self, train: CSR, train_labels: IntArray, test_labels: IntArray, seed: int) -> None:
        self._train, self._train_labels, self._seed = train, np.asarray(train_labels), seed
        self._num_classes = 1 + int(max(self._train_labels.max(initial=0), test_labels.max(initial=0)))
        self._by_class = class_index(np.asarray(test_labels), self._num_classes)

    def __len__(self) -> int:
        return len(self._train)

    def __getitem__(self, client_id: int) -> IntArray:
        """The client's test samples, ascending."""
        generator = numpy_generator(self._seed, "partition", "test", client_id)
        held = np.bincount(self._train_labels[self._train[client_id]], minlength=self._num_classes)
        parts = []
        for label in np.flatnonzero(held):
            pool = self._by_class[int(label)]
            parts.append(pool[generator.choice(len(pool), min(int(held[label]), len(pool)), replace=False)])
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


class IID(Partition):
    """Shuffle all samples and deal them out in equal parts; sizes differ by at most one.

    The test samples are dealt out the same way, in disjoint parts.
    """

    def assign(self, labels: IntArray, num_clients: int, seed: int, client_ids: IntArray | None) -> CSR:
        """See `Partition.__call__`."""
        return _deal(len(labels), num_clients, numpy_generator(seed, "partition", "iid"))

    def split_test(
        self,
        train: CSR,
        train_labels: IntArray,
        test_labels: IntArray,
        seed: int,
        test_client_ids: IntArray | None = None,
    ) -> ClientIndices:
        """See `Partition.split_test`; with fewer test samples than clients some clients get none."""
        return _deal(len(test_labels), len(train), numpy_generator(seed, "partition", "iid", "test"))


class Natural(Partition):
    """The data set's own clients: the writer, the phone, the person who recorded the sample.

    With fewer `num_clients` than the data set has, its first clients are used. Test samples follow the data set's own
    client of each test sample. Where it does not tell, or where no client has any because the test samples are from
    other clients (UCI-HAR's official split), the default of `Partition.split_test` takes over.
    """

    def assign(self, labels: IntArray, num_clients: int, seed: int, client_ids: IntArray | None) -> CSR:
        """See `Partition.__call__`.

        Raises:
            ConfigError: The data set knows no clients, or too few.
        """
        if client_ids is None:
            raise ConfigError(
                "partition Natural needs a data set that names the client of each sample (an array file's "
                "client_train, a folder per client), and this one does not: choose IID, Dirichlet, Shards …"
            )
        csr = CSR.from_owners(np.arange(len(labels)), np.asarray(client_ids, dtype=np.int64), num_clients)
        empty = np.flatnonzero(csr.sizes == 0)
        if len(empty):
            raise ConfigError(
                f"client {empty[0]} has no training samples under partition Natural: the data set has "
                f"{len(np.unique(client_ids))} clients with samples, lower data.num_clients (it is {num_clients}) "
                "or data.public_size"
            )
        return csr

    def split_test(
        self,
        train: CSR,
        train_labels: IntArray,
        test_labels: IntArray,
        seed: int,
        test_client_ids: IntArray | None = None,
    ) -> ClientIndices:
        """See `Partition.split_test`."""
        if test_client_ids is not None:
            owners = np.asarray(test_client_ids, dtype=np.int64)
            split = CSR.from_owners(np.arange(len(test_labels)), owners, len(train))
            if len(split.indices):
                return split
        return super().split_test(train, train_labels, test_labels, seed)


def class_index(labels: IntArray, num_classes: int) -> CSR:
    """The positions of each class, ascending; class ``c`` is row ``c``."""
    return CSR.from_owners(np.arange(len(labels)), np.asarray(labels, dtype=np.int64), num_classes)


def equal_sizes(total: int, parts: int) -> IntArray:
    """Sizes of `parts` pieces of `total`, the first ones larger by one where it does not divide."""
    return np.full(parts, total // parts, dtype=np.int64) + (np.arange(parts) < total % parts)


def _deal(num_samples: int, num_clients: int, generator: np.random.Generator) -> CSR:
    return CSR.from_sizes(generator.permutation(num_samples), equal_sizes(num_samples, num_clients))
