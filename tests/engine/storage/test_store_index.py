"""The index of clients' states, as a dictionary and as the table in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.engine.storage.store import VersionIndex, read_table

_NAMES = [*map(str, range(4)), "late-0", "late-1", str(2**62), f"late-{2**62}", "decoder-0", f"decoder-{2**61}"]
_VERSIONS = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
Changes = list[tuple[str, tuple[int, int] | None]]
_CHANGES: st.SearchStrategy[Changes] = st.lists(st.tuples(st.sampled_from(_NAMES), st.none() | _VERSIONS), max_size=40)


@given(_CHANGES, _CHANGES)
def test_any_changes_leave_the_table_of_a_dictionary(first: Changes, second: Changes) -> None:
    expected, index = dict[str, tuple[int, int]](), VersionIndex({})
    for changes in (first, second):
        for name, version in changes:
            if version is None:
                expected.pop(name, None)
                index.drop(name)
            else:
                expected[name] = version
                index.set(name, version)
        assert index.versions == read_table(index.table()) == expected
        index = VersionIndex(read_table(index.table()))  # as after a resume


def test_a_row_is_the_number_and_the_version_in_sixteen_bytes() -> None:
    index = VersionIndex({"7": (3, 5), "late-0": (0, 2**32 - 1), "decoder-7": (0, 1)})
    # 3 * 2**32 + 5; a late update of client n is -n - 1, and the server's memory of a client n + 2**62 + 1.
    assert index.table().tolist() == [[7, 12_884_901_893], [-1, 4_294_967_295], [4_611_686_018_427_387_912, 1]]
    assert index.table().nbytes == 3 * 16


def test_a_table_is_a_copy_and_holds_nothing_but_its_rows() -> None:
    index = VersionIndex({str(client): (0, client) for client in range(40)})
    for client in range(30):
        index.drop(str(client))
    table = index.table()
    before = table.clone()
    index.set("39", (9, 9))
    assert torch.equal(table, before)
    assert table.untyped_storage().nbytes() == 10 * 16, "a checkpoint stores the whole storage of a tensor"


@pytest.mark.parametrize("round_idx", [0, 1, 10**6])
def test_more_names_than_the_first_table_has_rows(round_idx: int) -> None:
    index = VersionIndex({})
    for client in range(1000):
        index.set(str(client), (round_idx, client))
    assert read_table(index.table()) == {str(client): (round_idx, client) for client in range(1000)}
