"""The bounded sum: each client's part, whatever it sends, and the same sum in any order and of any types."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Fabric
from torch import Tensor

from lit_fed.algorithm import ClientUpdate
from lit_fed.engine.wire.payload import Flat, layout_of
from lit_fed.engine.wire.workers import Workers
from lit_fed.privacy.bounded_sum import BoundedSum, Frame, Released, clip

WORKERS = Workers(Fabric(accelerator="cpu", devices=1))
CPU = torch.device("cpu")
values = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=3, max_size=3)


def update(client_id: int, *numbers: float) -> ClientUpdate:
    payload = {"w": torch.tensor(numbers[:2]), "b": torch.tensor(numbers[2:])}
    return ClientUpdate(client_id, payload, flat=Flat.copy_of(payload, {}))


def total(updates: list[ClientUpdate], norm: float, received: dict[str, Tensor]) -> Released:
    reducer = BoundedSum(Frame(layout_of(updates[0].payload), received), norm, CPU)
    for one in updates:
        reducer.add(one)
    return reducer.result(WORKERS)


@settings(max_examples=100)
@given(st.lists(values, min_size=1, max_size=4), st.floats(1e-3, 1e3), st.randoms())
def test_no_client_moves_the_sum_by_more_than_the_bound(sent: list[list[float]], norm: float, random: object) -> None:
    received = {"w": torch.tensor([1.0, -1.0]), "b": torch.tensor([0.5])}
    updates = [update(position, *numbers) for position, numbers in enumerate(sent)]
    without = total(updates, norm, received).total
    added = total([*updates, update(9, 1e30, -1e30, 3.0)], norm, received).total - without
    assert float(added.norm()) <= norm
    random.shuffle(updates)  # type: ignore[attr-defined]
    assert total(updates, norm, received).total.equal(without)


def test_an_update_is_clipped_by_hand() -> None:
    received = {"w": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0])}
    sent = update(0, 4.0, 4.0, 0.0)  # (3, 4, 0) away, of norm 5
    (clipped,) = clip([sent], Frame(layout_of(sent.payload), received), 2.5)
    assert clipped.payload["w"].tolist() == [2.5, 2.0]
    assert clipped.flat is not None
    assert clipped.flat.values.tolist() == [2.5, 2.0, 0.0]


@settings(max_examples=100)
@given(st.lists(values, min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_clipping_many_updates_gives_the_bits_of_one_by_one(sent: list[list[float]], norm: float) -> None:
    received = {"w": torch.tensor([1.0, -1.0]), "b": torch.tensor([0.5])}
    near = [1.0, -1.0, 0.5 + norm / 2]  # always one that is not clipped
    updates = [update(position, *numbers) for position, numbers in enumerate([*sent, near])]
    matrix = torch.stack([one.flat.values for one in updates if one.flat is not None])
    grouped = [
        replace(one, flat=Flat(one.flat.layout, row)) for one, row in zip(updates, matrix.unbind(0), strict=True)
        if one.flat is not None
    ]  # fmt: skip
    frame = Frame(layout_of(updates[0].payload), received)
    alone = [clip([one], frame, norm)[0] for one in updates]
    assert alone[-1] is updates[-1]
    for many in (clip(updates, frame, norm), clip(grouped, frame, norm)):
        for one, other in zip(alone, many, strict=True):
            assert all(one.payload[name].equal(other.payload[name]) for name in ("w", "b"))
            assert one.flat is not None
            assert other.flat is not None
            assert one.flat.values.equal(other.flat.values)
    assert total(alone, norm, received).total.equal(total(clip(grouped, frame, norm), norm, received).total)


def test_clipping_keeps_the_types_of_each_tensor() -> None:
    payload = {"w": torch.full((2,), 3.0, dtype=torch.bfloat16), "b": torch.full((1,), 3.0, dtype=torch.float64)}
    sent = ClientUpdate(0, payload)
    frame = Frame(layout_of(payload), {"w": torch.zeros(2, dtype=torch.bfloat16)})
    (clipped,) = clip([sent], frame, 0.5)
    assert layout_of(clipped.payload) == layout_of(payload)
    # A third of 27 = 3 · 9 is each coordinate's square: 3 / √27 · ½ = .288675.
    assert clipped.payload["b"].item() == 3 / 27**0.5 * 0.5
    assert clipped.flat is None
    summed = total([clipped], 0.5, {"w": torch.zeros(2, dtype=torch.bfloat16)})
    assert float(summed.total.norm()) <= 0.5
    assert layout_of(frame.payload(summed.total)[0]) == layout_of(payload)


def test_an_update_without_a_vector_is_summed_as_one_with_it() -> None:
    received = {"w": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0])}
    one, other = update(0, 4.0, 4.0, 0.0), update(0, 4.0, 4.0, 0.0)
    other.flat = None
    assert total([one], 2.5, received).total.equal(total([other], 2.5, received).total)


@settings(max_examples=100)
@given(st.floats(1e-3, 1e3), st.floats(0, 1e4), st.booleans())
def test_sums_of_8192_updates_are_exact_whatever_the_norm(norm: float, std: float, below: bool) -> None:
    bound = math.nextafter(2.0 ** math.ceil(math.log2(norm)), 0) if below else norm  # just below a power of two
    frame = Frame(layout_of({"w": torch.zeros(1)}), {"w": torch.zeros(1)})
    grid = BoundedSum(frame, bound, CPU, std).result(WORKERS).grid
    assert 8192 * bound / grid <= 2**53
    assert std / grid <= 2**40


def test_an_odd_sum_of_8192_updates_is_counted_to_the_last_unit() -> None:
    norm = math.nextafter(1.0, 0)
    reducer = BoundedSum(Frame({"w": (torch.float64, torch.Size([1]))}, {"w": torch.zeros(1).double()}), norm, CPU)
    numbers = [norm] * 8191 + [2.0**-40]
    for client_id, number in enumerate(numbers):
        reducer.add(ClientUpdate(client_id, {"w": torch.tensor([number], dtype=torch.float64)}))
    found = reducer.result(WORKERS)
    # Each is cut to 2^40 - 1 units; one unit is added.
    assert int(found.total.item() / found.grid) == 8191 * (2**40 - 1) + 1


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.floats(1e-3, 1e4))
def test_a_noised_sum_has_no_bit_below_its_grid_and_moves_by_what_the_sum_moves(
    seed: int, norm: float, multiplier: float
) -> None:
    frame = Frame(layout_of({"w": torch.zeros(64)}), {"w": torch.zeros(64)})
    noise = torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * multiplier * norm
    without, added = BoundedSum(frame, norm, CPU, multiplier * norm), BoundedSum(frame, norm, CPU, multiplier * norm)
    added.add(ClientUpdate(0, {"w": torch.full((64,), norm)}))
    one, other = without.result(WORKERS), added.result(WORKERS)
    for released in (one, other):
        assert (released.noised(noise) / released.grid).frac().count_nonzero() == 0
    assert (other.noised(noise) - one.noised(noise)).equal(other.total)


def test_vectors_of_some_places_by_hand() -> None:
    """Of (1, 2 | 3, 4) the places 3 and 0 are summed: movements (4, 3), of norm 5, and (0, 1), bounded by 2.5.

    (2, 1.5) + (0, 1) = (2, 2.5); payload (3, 2 | 3, 6) of vector (6, 3). Clipping before it is of all values.
    """
    received = {"v": torch.tensor([1.0, 2.0]), "w": torch.tensor([3.0, 4.0])}
    frame = Frame(layout_of(received), received, torch.tensor([3, 0]))
    assert frame.origin(CPU).tolist() == [4, 1]
    sent = [
        {"v": torch.tensor([4.0, 2.0]), "w": torch.tensor([3.0, 8.0])},
        {"v": torch.tensor([2.0, 2.0]), "w": received["w"]},
    ]
    reducer = BoundedSum(frame, 2.5, CPU)
    for client_id, payload in enumerate(sent):
        reducer.add(ClientUpdate(client_id, payload))
    released = reducer.result(WORKERS)
    assert (released.total.tolist(), released.clipped, released.count) == ([2.0, 2.5], 1, 2)
    made, _ = frame.payload(torch.tensor([6.0, 3.0]))
    assert {name: tensor.tolist() for name, tensor in made.items()} == {"v": [3, 2], "w": [3, 6]}
    away = ClientUpdate(0, {"v": torch.tensor([1.0, 5.0]), "w": torch.tensor([3.0, 8.0])})
    (clipped,) = clip([away], frame.whole, 2.5)
    assert {name: tensor.tolist() for name, tensor in clipped.payload.items()} == {"v": [1, 3.5], "w": [3, 6]}
