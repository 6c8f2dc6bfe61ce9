"""The order of names does not depend on the process."""

from __future__ import annotations

from itertools import permutations

from lit_fed.data.naming import in_order


def test_names_that_are_one_number_have_one_order() -> None:
    wanted = ["-2", "+1", "01", "1", "08", "8"]
    assert all(in_order(names) == wanted for names in permutations(wanted))
