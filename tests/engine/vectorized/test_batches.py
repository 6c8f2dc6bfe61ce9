"""The batches of a group against those that each client's own loader gives."""

from __future__ import annotations

from itertools import chain, repeat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.engine.vectorized.batches import Gathered, Rows

BATCH = 3
ROWS = torch.arange(100)


def loader(client_id: int, count: int, drop_last: bool, fresh: bool, shuffled: bool) -> TensorLoader:
    """Client k holds the rows from 20 k on."""
    generator = torch.Generator().manual_seed(client_id) if shuffled or fresh else None
    rows = torch.arange(20 * client_id, 20 * client_id + count)
    return TensorLoader(
        ROWS.float().unsqueeze(1), ROWS, rows, BATCH, generator, drop_last=drop_last, fresh=fresh
    )  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.floats(0.1, 3), st.sampled_from([0, 2, 3]), st.data())
def test_a_group_takes_what_every_client_takes(
    counts: list[int], epochs: float, pad_to: int, data: st.DataObject
) -> None:
    drop_last, shuffled = data.draw(st.booleans()), data.draw(st.booleans())
    counts = [max(counts[0], 1), *counts[1:]]
    made = [[loader(k, n, drop_last, False, shuffled) for k, n in enumerate(counts)] for _ in range(2)]
    steps = sorted(((-(-len(one) * epochs // 1), k) for k, one in enumerate(made[0])), reverse=True)
    order, lengths = [k for _, k in steps], [int(length) for length, _ in steps]
    gathered = Gathered(Rows.of_loaders([made[0][k] for k in order]), lengths)
    own = [chain.from_iterable(repeat(made[1][k])) for k in order]
    for step in range(lengths[0]):
        active = sum(length > step for length in lengths)
        (x, y), sizes = gathered.take(step, active, pad_to)
        for place in range(active):
            expected_x, expected_y = next(own[place])
            assert sizes[place] == len(expected_y)
            assert x[place, : sizes[place]].equal(expected_x)
            assert y[place, : sizes[place]].equal(expected_y)
            rows = y[place].tolist()  # what pads it is its own
            assert all(20 * order[place] <= row < 20 * order[place] + counts[order[place]] for row in rows)


@settings(deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 9), st.booleans())
def test_a_cohorts_rows_are_those_of_every_clients_loader(counts: list[int], steps: int, drop_last: bool) -> None:
    counts = sorted([max(counts[0], 1), *counts[1:]], reverse=True)
    own = [loader(k, n, drop_last, False, True) for k, n in enumerate(counts)]
    together = TensorLoader(
        ROWS.float().unsqueeze(1), ROWS, torch.cat([one.indices for one in own]), BATCH, drop_last=drop_last
    )
    lengths = [steps if len(one) else 0 for one in own]
    gathered = Gathered(Rows.of_cohort(together, np.array(counts), range(len(counts))), lengths)
    assert gathered.each == [len(one) for one in own]
    batches = [chain.from_iterable(repeat(one)) for one in own]
    for step in range(steps):
        (_, y), sizes = gathered.take(step, active := sum(length > step for length in lengths), 0)
        for place in range(active):
            assert y[place, : sizes[place]].equal(next(batches[place])[1])


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_shuffles_of_their_own(drop_last: bool) -> None:
    made = [[loader(k, n, drop_last, True, True) for k, n in enumerate((7, 4))] for _ in range(2)]
    lengths = [2 * len(one) for one in made[0]]
    gathered, own = Gathered(Rows.of_loaders(made[0]), lengths), [chain.from_iterable(repeat(one)) for one in made[1]]
    for step in range(lengths[0]):
        active = sum(length > step for length in lengths)
        (_, y), sizes = gathered.take(step, active, 0)
        assert [y[place, : sizes[place]].tolist() for place in range(active)] == [
            next(own[place])[1].tolist() for place in range(active)
        ]
