"""Facts about a population that need no training.

They are counts of samples, one scale of inputs, fingerprints of the data's values, and the report from which a server
without a client's data knows them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Cut
from lit_fed.errors import ConfigError
from lit_fed.printing import counted
from lit_fed.seeding import numpy_generator

Scale = Literal["bytes", "unit", "signed", "other"]
"""Bytes, of which 255 stands for 1; numbers in [0, 1]; images with numbers below 0; others, in use as they are."""
SCALES: tuple[Scale, ...] = ("bytes", "unit", "signed", "other")
BYTES = np.dtype(np.uint8)
BRIGHTEST = 2.0  # of images scaled to [0, 1], as resizing may overshoot


def scale_of(
    inputs: NDArray[Any], what: str, are_images: bool, max_value: float | None, has_mean: bool
) -> dict[str, Scale]:
    """The scale by an array's dtype and values, under the array's name and range.

    Args:
        inputs: Stored inputs.
        what: The file and the array, for errors.
        are_images: Whether the inputs are images.
        max_value: The setting ``data.max_value``.
        has_mean: Whether ``data.mean`` is set, which allows any numbers.

    Returns:
        Nothing for an empty array, or if the setting decides.
    """
    if not inputs.size:
        return {}
    if inputs.dtype == np.uint8:
        return {} if max_value is not None else {what: "bytes"}
    low, high = inputs.min(), inputs.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return {}  # refused later, by sample
    holds = f"{what} holds {inputs.dtype} from {low:g} to {high:g}"
    if max_value is not None:
        if are_images and inputs.dtype.kind == "f" and max_value > BRIGHTEST and low >= 0 and 0 < high <= 1:
            raise ConfigError(
                f"{holds}, which data.max_value {max_value:g} makes black; store all images on one scale, or set it "
                "to null"
            )
        return {}
    if are_images and not has_mean and low >= 0 and high > BRIGHTEST:
        raise ConfigError(
            f"{holds}; set data.max_value to the value of white, such as 255, or to 1 to use the values as they are"
        )
    ranged = f"{what} ({low:g} to {high:g})"
    if low < 0:
        return {ranged: "signed" if are_images else "other"}
    return {ranged: "unit" if inputs.dtype.kind == "f" and high <= 1 else "other"}


def common_scale(scales: Mapping[str, Scale | None]) -> Scale | None:
    """The common scale of a population's parts, given by name; parts without a scale are None.

    ``unit`` for bytes beside floating-point numbers in [0, 1]; None if no part has a scale.
    """
    first = {scale: what for what, scale in reversed(list(scales.items())) if scale is not None}
    outside = first.get("other", first.get("signed"))
    if "bytes" in first and outside is not None:
        raise ConfigError(
            f"{outside} holds numbers outside 0 to 1, and {first['bytes']} holds bytes; store both alike, or "
            "set data.max_value to the value that stands for 1 in both"
        )
    if "unit" in first and "signed" in first:
        raise ConfigError(
            f"{first['signed']} holds numbers below 0, and {first['unit']} holds numbers in 0 to 1 alone; store all "
            "images on one scale, or set data.max_value to 1 if they are"
        )
    return next((scale for scale in ("other", "signed", "unit", "bytes") if scale in first), None)


def on_scale(inputs: NDArray[Any], scale: Scale | None) -> NDArray[Any]:
    """Inputs on a population's scale: bytes become numbers in [0, 1] for ``unit``."""
    return inputs.astype(np.float32) / np.float32(255) if inputs.dtype == np.uint8 and scale == "unit" else inputs


_MOST_BYTES = 2**28  # of an array, for which SHA-256 takes 0.2 s; larger arrays are sampled
_MOST_BLOCKS = 256
_TOLERANCE = 1e-5  # processors differ by about 1e-6 through their order of operations, other data by far more


@dataclass(frozen=True)
class Contents:
    """A fingerprint of data's values.

    Args:
        sha256: Hash of integers, such as labels, pixels and tokens.
        sums: Of floating-point numbers, a seeded weighted sum of each block of samples.
        sizes: The same sums of absolute values, as the scale of differences.
    """

    sha256: str
    sums: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.sums, self.sizes)
        plain = all(isinstance(part, tuple) and all(isinstance(n, float) for n in part) for part in numbers)
        if not isinstance(self.sha256, str) or not plain or len(self.sums) != len(self.sizes):
            raise TypeError("not a fingerprint of data")

    def is_of(self, other: Contents) -> bool:
        """Whether two fingerprints are equal up to rounding."""
        if self.sha256 != other.sha256 or len(self.sums) != len(other.sums):
            return False
        mine, two, size = (np.asarray(numbers) for numbers in (self.sums, other.sums, self.sizes))
        with np.errstate(invalid="ignore"):
            close = (np.abs(mine - two) <= _TOLERANCE * size) | (mine == two) | (np.isnan(mine) & np.isnan(two))
        return bool(close.all())


def contents_of(arrays: Iterable[NDArray[Any]]) -> Contents:
    """The fingerprint of arrays (n, …) of numbers with a sample per row, in a fixed order.

    Of an array above 256 MiB a random choice of rows counts, which depends on their number alone.
    """
    digest = hashlib.sha256()
    sums, sizes = [], []
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype.kind}".encode())
        rows = array[chosen_rows(len(array), _MOST_BYTES // max(array[:1].nbytes, 1))]
        if array.dtype.kind != "f":
            digest.update(np.ascontiguousarray(rows).data if rows.size else b"")
        elif rows.size:
            starts = np.linspace(0, len(rows), min(len(rows), _MOST_BLOCKS), endpoint=False).astype(np.int64)
            sums += np.add.reduceat(_one_number_a_row(rows), starts).tolist()
            sizes += np.add.reduceat(_one_number_a_row(np.abs(rows)), starts).tolist()
    return Contents(digest.hexdigest(), tuple(sums), tuple(sizes))


def chosen_rows(count: int, most: int) -> IntArray | slice:
    """All rows, or a fixed random choice, ascending."""
    if count <= most:
        return slice(None)
    generator = numpy_generator(0, "data", "contents", count)
    return np.sort(generator.choice(count, max(most, 1), replace=False)).astype(np.int64)


def _one_number_a_row(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Each row's product with a random vector, times a random weight per row, to notice permutations of either axis."""
    flat = rows.reshape(len(rows), -1)
    if flat.dtype == np.float16:
        flat = flat.astype(np.float32)
    generator = numpy_generator(0, "data", "contents", "weights")
    across = generator.uniform(0.5, 1.5, flat.shape[1]).astype(flat.dtype)
    down = generator.uniform(0.5, 1.5, len(flat))
    with np.errstate(invalid="ignore", over="ignore"):
        weighed: NDArray[np.float64] = (flat @ across).astype(np.float64) * down
    return weighed


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
        """The histogram as an array, shape (num_classes,)."""
        if self.histogram is None:
            raise ConfigError(
                f"client {client_id} does not report its samples of each class, which this method needs; start its "
                "node with --histogram true, or use another method"
            )
        return np.asarray(self.histogram, dtype=np.int64)


class Census:
    """The counts of a population's clients; of remote clients, which have no loaders here, by their reports.

    Args:
        cut: The samples of the clients here.
        num_classes: Number of classes; None for a regression.
        name: Names the data in errors.
        fingerprint_of: Gives the SHA-256 of the data of a client here.
        input_scale: Gives the scale of its inputs.
        agree: Takes the scales of remote clients, by their names.
    """

    def __init__(
        self,
        cut: Cut,
        num_classes: int | None,
        name: str,
        fingerprint_of: Callable[[int], str],
        input_scale: Callable[[int], Scale | None],
        agree: Callable[[Mapping[str, Scale | None]], None],
    ) -> None:
        self._cut, self._num_classes, self._name = cut, num_classes, name
        self._fingerprint_of, self._input_scale, self._agree = fingerprint_of, input_scale, agree
        self.reports: dict[int, ClientReport] = {}
        """By client, from other machines; a report takes precedence over the cut."""

    @property
    def clients(self) -> Sequence[int]:
        """The clients whose data are here, ascending: all, or the clients passed to `setup`."""
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
        """Count remote clients by their reports from now on, and take the scale of the whole population.

        Raises:
            ConfigError: The population has no common scale.
        """
        self.reports |= reports
        self._agree({f"client {client_id}": report.scale for client_id, report in sorted(reports.items())})

    def leave_out(self, absent: Collection[int], cut: Cut) -> None:
        """Count no sample of absent clients, by a cut without them and by their reports."""
        self._cut = cut
        for client_id in self.reports.keys() & set(absent):
            report = self.reports[client_id]
            none = None if report.histogram is None else (0,) * len(report.histogram)
            self.reports[client_id] = replace(report, samples=0, histogram=none)

    def report(self, client_id: int, histogram: bool = True) -> ClientReport:
        """The facts that a server without the client's data may know, with or without its class `histogram`."""
        counts = tuple(self.class_counts(client_id).tolist()) if histogram and self.has_labels else None
        scale = self._input_scale(client_id)
        return ClientReport(self.num_samples(client_id), counts, self.fingerprint(client_id), scale)

    def num_samples(self, client_id: int) -> int:
        """Training samples of one client."""
        if client_id in self.reports:
            return self.reports[client_id].samples
        return self._cut.of_client(client_id).train.size(client_id)

    def samples(self, client_ids: Sequence[int]) -> list[int]:
        """Training samples of each of some clients."""
        if self.reports or self._cut.clients is not None:
            return [self.num_samples(client_id) for client_id in client_ids]
        return self._cut.train.sizes_of(client_ids)

    def class_counts(self, client_id: int) -> IntArray:
        """Training samples of one client in each class, shape (num_classes,).

        Raises:
            ConfigError: The data have no classes, or the client does not report its counts.
        """
        if client_id in self.reports:
            return self.reports[client_id].counts(client_id)
        labels, num_classes = self._labels()
        return np.bincount(labels[self._cut.of_client(client_id).train[client_id]], minlength=num_classes)

    def class_histogram(self) -> IntArray:
        """Training samples per client and class, shape (number of `clients`, num_classes).

        After remote clients have reported, their counts instead.

        Raises:
            ConfigError: The data have no classes, or a client does not report its counts.
        """
        if self.reports:
            return np.stack([self.class_counts(client_id) for client_id in sorted(self.reports)])
        labels, num_classes = self._labels()
        histogram = self._cut.train.histogram(labels, num_classes)
        return histogram if self._cut.clients is None else histogram[list(self.clients)]

    def public_accuracy(self, classes: IntArray) -> float:
        """The share of public samples whose label a server has guessed, shape (public_size,).

        The only use of the public set's labels, which no loader yields: a number to report, not to learn from.

        Raises:
            ConfigError: The data have no classes.
        """
        labels, _ = self._labels()
        return float((labels[self._cut.public] == classes).mean())

    def fingerprint(self, client_id: int) -> str:
        """The SHA-256 of one client's training, validation and calibration samples, or of their indices."""
        if client_id in self.reports:
            return self.reports[client_id].fingerprint
        return self._fingerprint_of(client_id)

    def untaught(self) -> str | None:
        """A line on clients that are tested on a class whose samples were all held out; None without any."""
        if not (count := self._cut.untaught):
            return None
        kind = "stratum" if self._num_classes is None else "class"
        return (
            f"{counted(count, 'client')} of {len(self._cut.train):,} are tested on a {kind} whose samples were all "
            "held out for validation or calibration; lower data.val_fraction or algorithm.calibration_fraction"
        )

    def _labels(self) -> tuple[IntArray, int]:
        """The class of each training sample, and the number of classes."""
        labels, num_classes = self._cut.strata, self._num_classes
        if num_classes is None or labels is None:
            what = "has no classes" if num_classes is None else "does not have the class of each sample"
            raise ConfigError(f"{self._name} {what}; use data with classes, or a method that does not count them")
        return labels, num_classes
