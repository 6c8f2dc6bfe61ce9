"""Statistics of a whole federation: what sites are asked, and what their answers come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lit_fed.checks import check_range
from lit_fed.data import FederatedDataModule
from lit_fed.data.population.naming import called
from lit_fed.errors import ConfigError
from lit_fed.federation.statistics.noise import Noise, sensitivity
from lit_fed.federation.statistics.report import Statistics
from lit_fed.federation.statistics.site import Floats, Inquiry, SiteStatistics, Variable, columns_of, joined, survey
from lit_fed.federation.statistics.withheld import withheld
from lit_fed.tracking import tracked

MOST_BINS = 1000
_MOST_SAMPLES = 2**40
_OTHERS = "*"


def first_question(
    columns: Sequence[Variable], bins: int, least: int, ranges: Mapping[str, Any] | None, noise: Noise | None
) -> Inquiry:
    """Check the command's settings, and make the question that sites get first.

    Args:
        columns: The columns.
        bins: Cells of a histogram.
        least: Smallest number of samples in a cell.
        ranges: Least and largest value by column; ``*`` stands for all other columns.
        noise: The noise, for which every range must be given, because extremes are single samples' values.
    """
    check_range("--bins", bins, least=1, most=MOST_BINS)
    check_range("--least", least, least=1, most=_MOST_SAMPLES)
    if noise is not None and least > 1:
        raise ConfigError(
            f"--least is {least}, and trainer.privacy adds noise, which hides single samples; leave it out"
        )
    given = dict(ranges or {})
    for name, range_ in given.items():
        if name != _OTHERS and name not in [column.name for column in columns]:
            known = ", ".join(column.name for column in columns[:8])
            raise ConfigError(f"--ranges names {name!r}, which is not a column; the data have {known or 'no columns'}")
        if (
            not isinstance(range_, list | tuple)
            or len(range_) != 2
            or not all(type(end) in (int, float) and math.isfinite(end) and abs(end) <= 1e37 for end in range_)
            or not range_[0] < range_[1]
        ):
            raise ConfigError(f"--ranges.{name} is {range_!r}; give the least and the largest value, such as [0, 120]")
    others = given.get(_OTHERS, [math.nan] * 2)
    question = Inquiry(bins, least, np.array([given.get(one.name, others) for one in columns], float).reshape(-1, 2))
    if noise is not None and not question.has_ranges:
        _refuse_unknown(columns, question.ranges, "with trainer.privacy values are cut to a range")
    return question


def second_question(columns: Sequence[Variable], question: Inquiry, whole: SiteStatistics) -> Inquiry:
    """The question with the ranges of all sites; the same where they were given."""
    found = np.stack([whole.low, whole.high], axis=1) if question.least <= 1 else whole.known.T
    found[~np.isfinite(found).all(axis=1) & (whole.count == 0)] = 0, 1  # of a column without values
    ranges = np.where(np.isnan(question.ranges), found, question.ranges)
    if not np.isfinite(ranges).all():
        _refuse_unknown(columns, ranges, f"with --least {question.least} a minimum would be a single sample's value")
    return replace(question, ranges=ranges)


def _refuse_unknown(columns: Sequence[Variable], ranges: Floats, why: str) -> None:
    name = columns[int(np.flatnonzero(~np.isfinite(ranges).all(axis=1))[0])].name
    raise ConfigError(f"--ranges lacks {name!r}; {why}, so that its least and largest value must be given")


Answers = Callable[[Inquiry], Mapping[str, SiteStatistics]]
"""Asks all sites, and returns their answers by name."""


def take_statistics(
    data: FederatedDataModule,
    ask: Answers,
    question: Inquiry,
    noise: Noise | None = None,
    noise_from: str = "each site",
    by_client: bool = True,
) -> Statistics:
    """Ask all sites, a second time where the ranges of histograms follow from the first answers.

    Args:
        data: The population, for its columns and names.
        ask: Asks all sites.
        question: The first question.
        noise: The noise that sites add; None for exact statistics.
        noise_from: The origin of the noise.
        by_client: Whether the answers are of single clients.
    """
    columns = columns_of(data)
    sites = ask(question)
    if not question.has_ranges:
        whole = joined([*sites.values()], len(columns), data.num_classes, question)
        question = second_question(columns, question, whole)
        sites = ask(question)
    whole = joined([*sites.values()], len(columns), data.num_classes, question)
    delta = sensitivity(len(columns), data.num_classes is not None)
    privacy = None if noise is None else noise.facts(noise_from, delta)
    return Statistics(columns, question, whole, sites, by_client, data.input_shape, data.class_names, privacy)


def simulated(
    data: FederatedDataModule,
    question: Inquiry,
    noise: Noise | None = None,
    by_client: bool = True,
    seed: int = 0,
) -> Statistics:
    """The statistics of a population whose clients are all here.

    Args:
        data: The population, after its `setup`.
        question: The first question, see `first_question`.
        noise: The noise; None for exact statistics.
        by_client: Whether every client is a site; else all clients are one.
        seed: Seed of the noise.
    """
    clients = list(range(data.num_clients))
    groups = {called(data, one): [one] for one in clients} if by_client else {"all": clients}

    def ask(asked: Inquiry) -> dict[str, SiteStatistics]:
        each = tracked(groups.items(), "statistics of clients", len(groups))
        if noise is not None:
            return {
                name: noise.survey(data, group, asked, noise.of_seed(seed, place))
                for place, (name, group) in enumerate(each)
            }
        return {name: withheld(survey(data, group, asked), asked.least) for name, group in each}

    return take_statistics(data, ask, question, noise, "the seed", by_client)
