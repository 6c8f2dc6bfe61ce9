"""Counts of the clients' training samples: of the clients here by the cut, of the others by their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Cut
from lit_fed.data.population.client_report import ClientReport
from lit_fed.errors import ConfigError


class Census:
    """The counts of a population's clients.

    Args:
        cut: The samples of the clients here.
        num_classes: Number of classes; None for a regression.
        name: Names the data in errors.
    """

    def __init__(self, cut: Cut, num_classes: int | None, name: str) -> None:
        self._cut, self._num_classes, self._name = cut, num_classes, name
        self.reports: dict[int, ClientReport] = {}
        """By client, from other machines; a report takes precedence over the cut."""

    @property
    def clients(self) -> Sequence[int]:
        """The clients whose data are here, ascending."""
        return range(len(self._cut.train)) if self._cut.clients is None else sorted(self._cut.clients)

    @property
    def has_labels(self) -> bool:
        """Whether the class of each training sample is known."""
        return self._num_classes is not None and self._cut.strata is not None

    @property
    def is_complete(self) -> bool:
        """Whether all clients of the population are here, or have reported."""
        return self._cut.clients is None or bool(self.reports)

    def learn(self, reports: Mapping[int, ClientReport]) -> None:
        """Add the reports of remote clients."""
        self.reports |= reports

    def num_samples(self, client_id: int) -> int:
        """Training samples of one client."""
        if client_id in self.reports:
            return self.reports[client_id].samples
        return self._cut.of(client_id).train.size(client_id)

    def class_counts(self, client_id: int) -> IntArray:
        """Training samples of one client in each class, shape (num_classes,)."""
        if client_id in self.reports:
            return self.reports[client_id].counts(client_id)
        labels, num_classes = self._labels()
        return np.bincount(labels[self._cut.of(client_id).train[client_id]], minlength=num_classes)

    def class_histogram(self) -> IntArray:
        """Training samples per client and class, of the clients that have reported or else of those here."""
        if self.reports:
            return np.stack([self.class_counts(client_id) for client_id in sorted(self.reports)])
        labels, num_classes = self._labels()
        histogram = self._cut.train.histogram(labels, num_classes)
        return histogram if self._cut.clients is None else histogram[list(self.clients)]

    def public_accuracy(self, classes: IntArray) -> float:
        """The share of public samples whose label is the given class, shape (public_size,)."""
        labels, _ = self._labels()
        return float((labels[self._cut.public] == classes).mean())

    def fingerprint(self, client_id: int) -> str:
        """The SHA-256 of one client's training, validation and calibration indices."""
        if client_id in self.reports:
            return self.reports[client_id].fingerprint
        return self._cut.of(client_id).fingerprint(client_id)

    def _labels(self) -> tuple[IntArray, int]:
        """The class of each training sample, and the number of classes.

        Raises:
            ConfigError: The data have none.
        """
        labels, num_classes = self._cut.strata, self._num_classes
        if num_classes is None or labels is None:
            what = "has no classes" if num_classes is None else "does not have the class of each sample"
            raise ConfigError(f"{self._name} {what}; use data with classes, or a method that does not count them")
        return labels, num_classes
