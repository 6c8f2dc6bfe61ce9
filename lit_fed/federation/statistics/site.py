"""A site's own statistics: sums, extremes and histograms of its clients' samples, in one pass of flat memory.

Sums of values and of squares are exact: they do not depend on batches, on the order of samples, or on how samples are
spread over clients and machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fed.data import FederatedDataModule, HuggingFace, Table
from lit_fed.errors import ConfigError

Floats = NDArray[np.float64]
Role = Literal["input", "size", "target"]

_BITS = 26  # halves of float64's significand, whose sums over 2^26 values are exact
_LOWEST = 1200  # exponents of float64 and of its significand's last bit are above its negative
_LARGEST = float(np.finfo(np.float32).max)
_MOST_VALUES = 2**22  # values of a column at a time


class Variable(NamedTuple):
    """A column of a table, a channel of images, a size, or a numerical target."""

    name: str
    role: Role


def columns_of(data: FederatedDataModule) -> list[Variable]:
    """The columns of a population, known without its samples; none of texts."""
    columns = list[Variable]()
    if getattr(data, "vocab_size", None) is None:
        kind = "channel" if len(data.input_shape) > 1 else "input"
        names = getattr(data, "feature_names", None) or [f"{kind} {place}" for place in range(data.input_shape[0])]
        columns += [Variable(name, "input") for name in names if name not in levels_of(data)]
        if type(data).image_sizes is not FederatedDataModule.image_sizes:  # else all images have the shape of an input
            columns += [Variable("height", "size"), Variable("width", "size")]
    if data.num_classes is None:
        count = 1 if data.output_shape == () else data.output_shape[0]
        names = getattr(data, "target_names", None) or [f"target {place}" for place in range(count)]
        columns += [Variable(name, "target") for name in names]
    return columns


def levels_of(data: FederatedDataModule) -> dict[str, list[str]]:
    """The levels of a table's categories, which are not numbers to take statistics of."""
    return data.features.levels if isinstance(data, Table | HuggingFace) else {}


@dataclass(frozen=True)
class Inquiry:
    """The question that every site gets.

    Args:
        bins: Cells of a histogram.
        least: Smallest number of samples in a cell that leaves a site.
        ranges: The histograms' least and largest value, (columns, 2); NaN where unknown. With an unknown range a site
            answers without histograms.
    """

    bins: int
    least: int
    ranges: Floats

    @property
    def has_ranges(self) -> bool:
        """Whether a site answers with histograms."""
        return not bool(np.isnan(self.ranges).any())


@dataclass
class SiteStatistics:
    """Statistics of some samples. A count of NaN is withheld, and so is everything else of its column.

    Args:
        samples: Number of samples.
        clients: Number of clients in it.
        classes: Samples by class; empty without classes.
        count: Finite values by column.
        missing: Other values by column.
        total: Exact sums by column.
        squares: Exact sums of squares by column.
        low: Least values; NaN if withheld.
        high: Largest values.
        cells: Values below the range, in each cell, and above, (columns, bins + 2); (0, bins + 2) without ranges.
        unit: The stored value that stands for 1, by column: sums times it are finite binary numbers.
        known: Range by the type of the stored values alone, (2, columns): 0 to 1 of bytes, else NaN.
        masked: Which cells a site withholds, (columns, bins + 2), like cells.
    """

    samples: float
    clients: int
    classes: Floats
    count: Floats
    missing: Floats
    total: list[Fraction]
    squares: list[Fraction]
    low: Floats
    high: Floats
    cells: Floats
    unit: Floats
    known: Floats
    masked: NDArray[np.bool_]


def empty(columns: int, classes: int | None, question: Inquiry) -> SiteStatistics:
    """Statistics of no samples."""
    zeros, nothing = np.zeros(columns), [Fraction()] * columns
    cells = np.zeros((columns if question.has_ranges else 0, question.bins + 2))
    low, high = np.full(columns, np.inf), np.full(columns, -np.inf)
    sums, known = (nothing, nothing.copy()), np.full((2, columns), np.nan)
    unit, masked = np.ones(columns), np.zeros(cells.shape, dtype=bool)
    return SiteStatistics(
        0, 0, np.zeros(classes or 0), zeros, zeros.copy(), *sums, low, high, cells, unit, known, masked
    )


def survey(data: FederatedDataModule, clients: Iterable[int], question: Inquiry) -> SiteStatistics:
    """Take the statistics of some clients' training samples together, without withholding anything."""
    columns = columns_of(data)
    site = empty(len(columns), data.num_classes, question)
    site.unit = np.array([unit_of(data, column) for column in columns])
    for place, values in read_into(site, data, columns, clients):
        _tally(site, question, place, values)
    return site


def read_into(
    site: SiteStatistics, data: FederatedDataModule, columns: Sequence[Variable], clients: Iterable[int]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Count some clients, their samples and classes, and yield batches of values (n, …), each with its column."""
    for client_id in clients:
        site.clients += 1
        site.classes += classes_of(data, client_id)
        for size, parts in batches_of(data, columns, client_id):
            site.samples += size
            yield from parts.items()


def classes_of(data: FederatedDataModule, client_id: int) -> Floats:
    """One client's samples by class, (num_classes,); NaN where the data know no sample's class."""
    if not data.census.has_labels:
        return np.full(data.num_classes or 0, np.nan)
    return data.census.class_counts(client_id).astype(np.float64)


def unit_of(data: FederatedDataModule, column: Variable) -> float:
    """The stored value of a column that stands for 1."""
    steps = data.preprocessing() if column.role == "input" else None
    return float(steps[0]["max_value"]) if steps and steps[0].get("step") == "normalize" else 1.0


Batch = tuple[int, Mapping[int, NDArray[Any]]]
"""Number of samples, and their values (n, …) by column."""


def batches_of(data: FederatedDataModule, columns: Sequence[Variable], client_id: int) -> Iterator[Batch]:
    """One client's training samples as stored."""
    places = {
        role: [p for p, column in enumerate(columns) if column.role == role] for role in ("input", "size", "target")
    }
    for heights_widths in data.stored_sizes(client_id):
        yield 0, dict(zip(places["size"], heights_widths.T, strict=True))
    levels = levels_of(data)
    stored_names = getattr(data, "feature_names", None) or places["input"]
    numbers = [place for place, name in enumerate(stored_names) if name not in levels]
    for batch in data.stored_loader(client_id):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ConfigError("a batch of the data is not (inputs, targets); statistics need pairs")
        x, y = batch
        size = len(x)
        parts = dict[int, NDArray[Any]]()
        if places["input"]:
            if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.shape[1] != len(stored_names):
                form = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise ConfigError(
                    f"a batch of inputs is {form}; statistics need {len(stored_names)} columns or channels"
                )
            stored = x.cpu().numpy()
            parts |= {place: stored[:, column] for place, column in zip(places["input"], numbers, strict=True)}
        if places["target"]:
            targets = y.cpu().numpy().reshape(size, -1)
            parts |= {place: targets[:, column] for column, place in enumerate(places["target"])}
        yield size, parts


def _tally(site: SiteStatistics, question: Inquiry, place: int, values: NDArray[Any]) -> None:
    """Add a batch of a column's values to a site's statistics."""
    flat = values.reshape(-1)
    if flat.dtype == np.uint8:
        site.known[:, place] = 0.0, 1.0 if site.unit[place] > 1 else 255.0
        weights = np.bincount(flat, minlength=256)
        _add(site, question, place, np.flatnonzero(weights).astype(np.float64), weights[weights > 0])
        return
    for start in range(0, len(flat), _MOST_VALUES):
        _add(site, question, place, flat[start : start + _MOST_VALUES].astype(np.float64))


def _add(
    site: SiteStatistics, question: Inquiry, place: int, values: Floats, weights: NDArray[np.int64] | None = None
) -> None:
    """Add values of a column, each taken ``weights`` times."""
    finite, unit = values[np.abs(values) <= _LARGEST], float(site.unit[place])  # which NaN is not
    site.missing[place] += len(values) - len(finite)
    site.count[place] += len(finite) if weights is None else int(weights.sum())
    if not len(finite):
        return
    scale = Fraction(unit)
    site.total[place] += exact_sum(finite, weights) / scale
    site.squares[place] += exact_squares(finite, weights) / (scale * scale)
    scaled = finite / unit
    site.low[place] = min(site.low[place], scaled.min())
    site.high[place] = max(site.high[place], scaled.max())
    if question.has_ranges:
        low, high = question.ranges[place]
        inside, _ = np.histogram(scaled, question.bins, (low, high), weights=weights)
        many = np.ones(len(scaled)) if weights is None else weights
        low, high = edges(low, high, question.bins)[[0, -1]]
        site.cells[place] += [many[scaled < low].sum(), *inside, many[scaled > high].sum()]


def edges(low: float, high: float, bins: int) -> Floats:
    """The edges (bins + 1,) of a histogram's cells; of a single value, a cell around it, as NumPy has them."""
    return np.histogram_bin_edges(np.zeros(0), bins, (low, high))


def exact_sum(values: Floats, weights: NDArray[np.int64] | None = None) -> Fraction:
    """The exact sum of at most 2^26 finite numbers, each taken ``weights`` times."""
    if weights is not None:
        return sum((Fraction(v) * w for v, w in zip(values.tolist(), weights.tolist(), strict=True)), Fraction())
    significands, exponents = np.frexp(values)
    whole = np.ldexp(significands, 2 * _BITS + 1).astype(np.int64)  # of 53 bits, exactly
    place = exponents.astype(np.int64) + _LOWEST
    high, low = np.bincount(place, whole >> _BITS), np.bincount(place, whole & (2**_BITS - 1))
    total = 0
    for at in np.flatnonzero((high != 0) | (low != 0)).tolist():
        total += ((int(high[at]) << _BITS) + int(low[at])) << at
    return Fraction(total, 1 << (_LOWEST + 2 * _BITS + 1))


def exact_squares(values: Floats, weights: NDArray[np.int64] | None = None) -> Fraction:
    """The exact sum of the squares of at most 2^26 finite numbers of float32's range, each taken ``weights`` times."""
    parts = values * (2**27 + 1)
    high = parts - (parts - values)  # 26 bits, and 26 bits are left: their products are exact (Veltkamp, 1968)
    low = values - high
    return sum(
        (times * exact_sum(part, weights) for times, part in ((1, high * high), (2, high * low), (1, low * low))),
        Fraction(),
    )


def joined(sites: Sequence[SiteStatistics], columns: int, classes: int | None, question: Inquiry) -> SiteStatistics:
    """Statistics of several sites together, of what no site withholds."""
    whole = empty(columns, classes, question)
    for site in sites:
        if math.isnan(site.samples):
            continue
        whole.samples += site.samples
        whole.clients += site.clients
        whole.classes += np.nan_to_num(site.classes)
        for place in np.flatnonzero(~np.isnan(site.count)).tolist():
            whole.count[place] += site.count[place]
            whole.missing[place] += site.missing[place]
            whole.total[place] += site.total[place]
            whole.squares[place] += site.squares[place]
            if len(site.cells):
                whole.cells[place] += np.nan_to_num(site.cells[place])
                whole.masked[place] |= np.isnan(site.cells[place])
        whole.low, whole.high = np.fmin(whole.low, site.low), np.fmax(whole.high, site.high)
        whole.known = np.where(np.isnan(whole.known), site.known, whole.known)
    return whole
