"""No count below the threshold, nor one that a subtraction would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.federation.statistics.report import quantiles
from lit_fed.federation.statistics.site import Inquiry, empty
from lit_fed.federation.statistics.withheld import _hide_few, withheld
from tests.federation.statistics.test_federation import table, taken, write_table

RANGES = {"age": [20, 90], "dose": [999_990, 1_000_010], "flag": [0, 1]}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(2, 12))
def test_what_is_withheld_adds_up_to_nothing_or_to_the_threshold(counts: list[int], least: int) -> None:
    whole, told = np.array(counts, float), _hide_few(np.array(counts, float), least)
    hidden = np.isnan(told)
    assert (told[~hidden] == whole[~hidden]).all()
    assert not ((told > 0) & (told < least)).any()
    rest = whole.sum() - np.nansum(told)
    assert rest == 0 or rest >= min(least, whole.sum())
    assert hidden.sum() != 1 or whole.sum() < least or rest == whole.sum() >= least


def test_by_hand() -> None:
    """With a threshold of 5 the 2 is withheld, and the 6, the smallest of the others: 8 may be any two counts."""
    assert np.array_equal(_hide_few(np.array([9.0, 2, 0, 6, 7]), 5), [9, np.nan, 0, np.nan, 7], equal_nan=True)


@pytest.mark.parametrize("least", [2, 10, 25])
def test_no_count_of_the_file_is_below_the_threshold(tmp_path: Path, least: int) -> None:
    found = taken(table(write_table(tmp_path)), least=least, ranges=RANGES).as_dict()
    for row in [found["all"], *found["clients"].values()]:
        columns = row["columns"]
        counts = [row["samples"], *row["classes"], *(column["count"] for column in columns)]
        counts += [count for one in columns for count in (one["missing"], *one["cells"], one["below"], one["above"])]
        assert all(count is None or count == 0 or count >= least for count in counts)
        assert {column["minimum"] for column in columns} == {None}


def test_a_site_below_the_threshold_is_withheld_and_named(tmp_path: Path) -> None:
    """SiteStatistics c has about a tenth of 192 rows."""
    found = taken(table(write_table(tmp_path)), least=30, ranges=RANGES)
    row = found.as_dict()["clients"]["c"]
    assert row["samples"] is None
    assert set(row["classes"]) == {None}
    assert {column["mean"] for column in row["columns"]} == {None}
    assert "withheld: all of c" in found.text()
    rows = found.as_dict()
    assert rows["all"]["clients"] == 2
    assert rows["all"]["samples"] == rows["clients"]["a"]["samples"] + rows["clients"]["b"]["samples"]


def test_pixels_of_few_images_are_withheld() -> None:
    """20 pixels of one image in a cell, and at least 3 images asked for: 41 pixels take three."""
    site = empty(1, None, Inquiry(2, 3, np.array([[0.0, 1.0]])))
    site.samples, site.count[0], site.cells[0] = 10, 200, [0, 40, 160, 0]
    assert np.isnan(withheld(site, 3).cells[0, 1])
    site.cells[0] = [0, 41, 159, 0]
    assert withheld(site, 3).cells[0].tolist() == [0, 41, 159, 0]


def test_quantiles_say_how_far_withheld_cells_may_move_them(tmp_path: Path) -> None:
    """Of what sites tell: a count is told with its column, and values of withheld cells lie in one of them."""
    path = write_table(tmp_path, missing=False)
    exact, told = (taken(table(path), least=least, ranges=RANGES).as_dict() for least in (1, 8))
    assert told["all"]["samples"] == exact["all"]["samples"]
    for column, whole in zip(told["all"]["columns"], exact["all"]["columns"], strict=True):
        for bound, one in zip(column["quantiles"], whole["quantiles"], strict=True):
            assert bound["low"] is None or bound["low"] <= one["low"]
            assert bound["high"] is None or one["high"] <= bound["high"]


@given(st.lists(st.integers(0, 30), min_size=3, max_size=12), st.integers(1, 12))
def test_quantiles_lie_within_their_bounds(counts: list[int], least: int) -> None:
    """A value in the middle of each cell, as often as its count says; NumPy's quantile of all is within the bounds."""
    cells = np.array([0, *counts, 0], float)
    if not cells.sum() >= least:
        return
    told = _hide_few(cells, least)
    borders = np.arange(len(counts) + 1.0)
    values = np.repeat(np.arange(len(counts)) + 0.5, counts)
    for bound in quantiles(told, cells.sum(), borders, np.isnan(told)):
        true = float(np.quantile(values, float(bound["q"] or 0), method="inverted_cdf"))
        if not np.isnan(told).any():
            assert (bound["low"], bound["high"]) == (true - 0.5, true + 0.5)
        else:
            assert bound["low"] is None or bound["low"] < true
            assert bound["high"] is None or true < bound["high"]


def test_without_a_threshold_nothing_is_withheld() -> None:
    site: Any = empty(1, 2, Inquiry(2, 1, np.array([[0.0, 1.0]])))
    assert withheld(site, 1) is site
