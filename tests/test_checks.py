"""One wording for the range of a number and the choices of a word."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.checks import check_choice, check_range
from lit_fed.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "bounds", "text"),
    [
        (0, {"least": 1}, "x.y is 0; it must be at least 1"),
        (1.0, {"least": 0, "below": 1}, "x.y is 1.0; it must be at least 0 and below 1"),
        (0, {"above": 0, "most": 1}, "x.y is 0; it must be above 0 and at most 1"),
        (math.nan, {"least": 1}, "x.y is nan; it must be at least 1"),
        (math.inf, {}, "x.y is inf; it must be a finite number"),
        (
            0,
            {"above": 0, "why": " seconds", "null": "for no limit"},
            "x.y is 0; it must be above 0 seconds, or None for no limit",
        ),
        (-1, {"least": 0, "below": 2**32}, "x.y is -1; it must be at least 0 and below 4294967296"),
        (None, {"least": 1}, "x.y is None; it must be at least 1"),
        ("1", {"least": 1}, "x.y is '1'; it must be at least 1"),
        (0.7, {"most": 0.5}, "x.y is 0.7; it must be at most 0.5"),
    ],
)
def test_a_value_outside_its_bounds_is_refused_by_name(value: object, bounds: Any, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_range("x.y", value, **bounds)
    assert str(refused.value) == text


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(-5, 5), st.integers(-5, 5))
def test_bounds_hold_for_any_number(value: float, lower: int, upper: int) -> None:
    cases: list[tuple[Any, bool]] = [
        ({"least": lower, "most": upper}, lower <= value <= upper),
        ({"above": lower, "below": upper}, lower < value < upper),
    ]
    for bounds, inside in cases:
        try:
            check_range("x", value, **bounds)
            accepted = True
        except ConfigError:
            accepted = False
        assert accepted == (inside and math.isfinite(value))


def test_infinity_passes_only_where_it_means_something() -> None:
    check_range("x", math.inf, least=0, infinite=True)
    for value, bounds in ((math.nan, {"infinite": True}), (-math.inf, {"least": 0, "infinite": True}), (math.inf, {})):
        with pytest.raises(ConfigError):
            check_range("x", value, **bounds)


def test_null_passes_only_where_it_means_something() -> None:
    check_range("x", None, least=1, null="for all samples")
    with pytest.raises(ConfigError):
        check_range("x", None, least=1)


def test_a_word_that_is_not_among_the_choices_is_refused_with_them() -> None:
    check_choice("x", "l1", ("l1", "ce"))
    with pytest.raises(ConfigError, match=r"^x is 'l2'; it must be 'l1' or 'ce'$"):
        check_choice("x", "l2", ("l1", "ce"))


def test_an_accepted_value_is_returned_as_it_is() -> None:
    value = 0.5
    assert check_range("x.y", value, least=0, most=1) is value
    assert check_range("x.y", None, least=0, null="for no limit") is None
    assert check_choice("x.y", "sum", ("mean", "sum")) == "sum"
