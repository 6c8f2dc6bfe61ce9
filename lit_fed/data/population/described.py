"""What a data module tells of its population: sizes, classes or targets, fingerprints, rows and a picture.

It is what a server may know of clients whose data it does not have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning import LightningDataModule
from numpy.typing import NDArray

from lit_fed.data.loaders.transforms import Step
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Cut
from lit_fed.data.population.client_report import ClientReport
from lit_fed.data.population.contents import Contents, contents_of
from lit_fed.data.population.pictures import Names, partition_picture, render, sizes_picture, target_picture
from lit_fed.data.population.scale import Scale
from lit_fed.data.population.targets import quantiles
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class DescribedPopulation(LightningDataModule, ABC):
    """A population that can be described and drawn; the base of `FederatedDataModule`."""

    def __init__(self) -> None:
        super().__init__()
        self._cut: Cut | None = None
        self._sha256: str | None = None
        self._contents: Contents | None = None
        self._reports: dict[int, ClientReport] = {}

    # What a data set tells about itself.

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as the model sees it, such as (channels, height, width); known without `setup`."""

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all inputs that a model may see, in training and in evaluations; known without `setup`."""
        return (self.input_shape,)

    @property
    def num_classes(self) -> int | None:
        """The number of classes, None where there are none; known without `setup`."""
        return None

    def target_values(self, indices: IntArray) -> NDArray[np.float32] | None:
        """Targets of training samples that are numbers, to describe and draw them.

        Args:
            indices: Which samples, shape (n,).

        Returns:
            Shape (n,) or (n, k); None where targets are classes, or cannot be told without reading every sample.
        """
        del indices
        return None

    def read_contents(self) -> Iterator[NDArray[Any]]:
        """What is looked at to tell these data from others, as arrays with a sample in every row; by default nothing.

        Yield the same for the same data, whatever the machine: raw values rather than transformed ones. Floating-point
        numbers are compared up to rounding.
        """
        yield from ()

    # Counts.

    @property
    def clients(self) -> Sequence[int]:
        """The clients whose data are here, ascending: everybody, or those that `setup` was asked for."""
        cut = self._ready
        return range(len(cut.train)) if cut.clients is None else sorted(cut.clients)

    def report(self, client_id: int, histogram: bool = True) -> ClientReport:
        """What a server that has not its data may know of a client.

        Args:
            client_id: Which client; its data are here.
            histogram: Tell also how many samples of every class it has, where there are classes.
        """
        counts = tuple(self.class_counts(client_id).tolist()) if histogram and self._has_labels else None
        return ClientReport(
            self.num_samples(client_id), counts, self.fingerprint(client_id), self.input_scale(client_id)
        )

    def input_scale(self, client_id: int) -> Scale | None:
        """The scale of a client's inputs, where every end stores its own; None where a setting or one file says it."""
        del client_id
        return None

    def learn(self, reports: Mapping[int, ClientReport]) -> None:
        """Take in what clients elsewhere report; they are counted from then on, but have no loaders here."""
        self._reports |= reports

    def num_samples(self, client_id: int) -> int:
        """Training samples of one client."""
        if client_id in self._reports:
            return self._reports[client_id].samples
        return self._of(client_id).train.size(client_id)

    def class_counts(self, client_id: int) -> IntArray:
        """Training samples of one client in each class, shape (num_classes,).

        Raises:
            ConfigError: The data have no classes, or a client elsewhere does not tell.
        """
        if client_id in self._reports:
            return self._reports[client_id].counts(client_id)
        labels, num_classes = self._labels()
        return np.bincount(labels[self._of(client_id).train[client_id]], minlength=num_classes)

    def class_histogram(self) -> IntArray:
        """Training samples per client and class, shape (number of `clients`, num_classes).

        Where clients elsewhere have reported, it is theirs.

        Raises:
            ConfigError: The data have no classes, or a client elsewhere does not tell.
        """
        if self._reports:
            return np.stack([self.class_counts(client_id) for client_id in sorted(self._reports)])
        labels, num_classes = self._labels()
        histogram = self._ready.train.histogram(labels, num_classes)
        return histogram if self._ready.clients is None else histogram[list(self.clients)]

    @property
    def counts_everybody(self) -> bool:
        """Whether `class_histogram` is that of the whole population: all are here, or have reported."""
        return self._ready.clients is None or bool(self._reports)

    def public_accuracy(self, classes: IntArray) -> float:
        """How many of the public samples are of the classes that a server takes them for.

        The only use of the public set's labels, which no loader yields: a number to report, for nothing to learn from.

        Args:
            classes: One for each public sample, in the order of their positions, shape (public_size,).

        Raises:
            ConfigError: The data have no classes.
        """
        labels, _ = self._labels()
        return float((labels[self._ready.public] == classes).mean())

    # What goes into checkpoints, for `lit_fed.load_network`.

    def preprocessing(self) -> list[Step] | None:
        """What is done to stored inputs before the model sees them; None where that cannot be told in steps."""
        return None

    def stored_like(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and type of an input as `load_network`'s networks take it, such as ``((1, 28, 28), "uint8")``.

        Known after `setup`; None where nobody here can tell.
        """
        return None

    @property
    def class_names(self) -> list[str] | None:
        """What the classes are called, in their order; None where they have no names. Known after `setup`."""
        return None

    @property
    def client_names(self) -> list[str] | None:
        """What the clients are called, in their order; None where they have no names."""
        return None

    # What a run writes down.

    def partition_sha256(self) -> str:
        """The SHA-256 of the training, validation and calibration rows and of the public set; computed once.

        It is that of the whole population, also where only some clients are here.
        """
        if self._sha256 is None:
            self._sha256 = self._ready.digest()
        return self._sha256

    def contents(self) -> Contents:
        """The fingerprint of the data's values, whoever has them; computed once, from `read_contents`."""
        if self._contents is None:
            self._contents = contents_of(self.read_contents())
        return self._contents

    def fingerprint(self, client_id: int) -> str:
        """The SHA-256 of one client's training, validation and calibration indices."""
        if client_id in self._reports:
            return self._reports[client_id].fingerprint
        return self._of(client_id).fingerprint(client_id)

    def describe(self, client_id: int) -> dict[str, Any]:
        """One client in plain Python values: a row of ``partition.json``.

        Returns:
            Its ``name`` where clients have names; its training ``indices``, in the data set's own numbering; and their
            class ``histogram`` where there are classes, else the number of ``samples``, and the ``quantiles`` of their
            targets where these are numbers: minimum, quartiles and maximum, a list for each of k targets.
        """
        indices = self._of(client_id).train[client_id]
        names = self.client_names
        row: dict[str, Any] = {} if names is None else {"name": names[client_id]}
        row["indices"] = indices.tolist()
        if self._has_labels:
            return row | {"histogram": self.class_counts(client_id).tolist()}
        row["samples"] = len(indices)
        targets = self.target_values(indices)
        return row if targets is None else row | {"quantiles": quantiles(targets)}

    def partition_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each of `clients` as `describe` gives it, and what clients elsewhere have reported."""
        for client_id, report in sorted(self._reports.items()):
            yield client_id, asdict(report)
        for client_id in self.clients:
            yield client_id, self.describe(client_id)

    def partition_record(self) -> dict[str, Any]:
        """The partition in plain Python values: its ``sha256``, and all ``clients`` as `partition_rows` gives them."""
        return {"sha256": self.partition_sha256(), "clients": dict(self.partition_rows())}

    def figure(self) -> Figure | None:
        """Draw who has what: classes by client, the distribution of targets by client, or else sizes.

        Override it to draw something else; None draws nothing.
        """
        rows = list(self.clients)
        if not rows:
            return None
        ids, train = np.asarray(rows, dtype=np.int64), self._ready.train
        names = Names(self.client_names, self.class_names)
        if self._has_labels:
            return partition_picture(self.class_histogram(), ids, names)
        targets = self.target_values(train.indices)
        if targets is None:
            return sizes_picture(train.sizes[ids], ids, names)
        return target_picture(targets, np.searchsorted(ids, train.owners()), len(ids), ids, names)

    def picture(self) -> NDArray[np.uint8] | None:
        """What `figure` draws, as pixels, shape (height, width, 3)."""
        figure = self.figure()
        return None if figure is None else render(figure)

    def pictured(self) -> Mapping[str, Sequence[str]]:
        """Which of `FederatedDataModule.views` a run draws beside each other at its end, by the picture's name."""
        return {}

    @property
    def _ready(self) -> Cut:
        if self._cut is None:
            raise RuntimeError(f"{type(self).__name__} has not read its data yet: call setup() first")
        return self._cut

    def _of(self, client_id: int) -> Cut:
        """The cut, for one client's part of it.

        Raises:
            ConfigError: The client's data are not here.
        """
        cut = self._ready
        if cut.clients is not None:
            cut.check(client_id)
        return cut

    @property
    def _has_labels(self) -> bool:
        return self.num_classes is not None and self._ready.strata is not None

    def _labels(self) -> tuple[IntArray, int]:
        """The class of each training sample, and the number of classes.

        Raises:
            ConfigError: There are none.
        """
        labels, num_classes = self._ready.strata, self.num_classes
        if num_classes is None or labels is None:
            what = "has no classes" if num_classes is None else "does not tell the class of each sample"
            raise ConfigError(f"{type(self).__name__} {what}: use data with classes, or nothing that counts them")
        return labels, num_classes
