"""The weighted mean against float64 arithmetic: in any order, over any processes, for any type."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Fabric

from lit_fed.engine.method import reducers
from lit_fed.engine.method.reducers import ByPrefix, Gather, Reducer, WeightedMean
from lit_fed.engine.wire.payload import ClientUpdate, Flat
from lit_fed.engine.wire.workers import ClientParallelStrategy, Workers
from tests.support import assert_same

ALONE = Workers(Fabric(accelerator="cpu", devices=1))

Clients = list[tuple[int, list[int]]]  # weight, and values in units of 2⁻¹²

# A float32 holds 24 bits, so |k| < 2²³ is exact; times a weight below 2¹⁴ and summed over 2³ clients it stays below
# 2⁴⁰ units, far inside float64's 2⁵³: every sum below is exact, in any order.
UNIT = 2.0**-12
client = st.tuples(st.integers(1, 2**14 - 1), st.lists(st.integers(-(2**23) + 1, 2**23 - 1), min_size=6, max_size=6))
cohort = st.lists(client, min_size=1, max_size=8)


@pytest.fixture(autouse=True, scope="module", params=[reducers.MOST_VALUES, 3], ids=["small", "large"])
def sums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models are summed as one vector, and as tensors one by one where they count as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers, "MOST_VALUES", request.param)
        yield


def updates(clients: Clients) -> list[ClientUpdate]:
    made = []
    for client_id, (weight, values) in enumerate(clients):
        x = torch.tensor([value * UNIT for value in values])
        payload = {"a": x[:4].reshape(2, 2), "b": x[4:], "steps": torch.tensor(values[0])}
        made.append(ClientUpdate(client_id, payload, weight))
    return made


def mean(made: list[ClientUpdate], reducer: Reducer[Any] | None = None, workers: Workers = ALONE) -> Any:
    reducer = reducer or WeightedMean()
    for update in made:
        reducer.add(update)
    return reducer.result(workers)


def in_two_processes(work: Callable[[Workers], Any]) -> Any:
    """Run a function in two forked processes that talk over gloo; returns what the first one returns."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ClientParallelStrategy(start_method="fork"))
    return fabric.launch(lambda launched: work(Workers(launched)))


@given(cohort)
def test_mean_is_numpys_in_float64(clients: Clients) -> None:
    found = mean(updates(clients))
    weights = np.array([weight for weight, _ in clients], dtype=np.float64)
    values = np.array([values for _, values in clients], dtype=np.float64) * UNIT
    expected = (weights[:, None] * values).sum(0) / weights.sum()
    assert found["a"].dtype == torch.float32
    np.testing.assert_array_equal(found["a"].numpy().ravel(), expected[:4].astype(np.float32))
    np.testing.assert_array_equal(found["b"].numpy(), expected[4:].astype(np.float32))
    assert found["steps"].item() == int(np.rint(expected[0] / UNIT))


@given(cohort, st.randoms(use_true_random=False))
def test_any_order_of_clients_gives_the_same_bits(clients: Clients, random: Any) -> None:
    shuffled = updates(clients)
    random.shuffle(shuffled)
    assert_same(mean(shuffled), mean(updates(clients)))


def as_vectors(made: list[ClientUpdate], which: list[bool], likes: list[bool]) -> list[ClientUpdate]:
    """Some of the updates also as one vector, some of which share the layout of the first."""
    first = Flat.copy_of(made[0].payload, {})
    assert first is not None
    for update, is_flat, is_like in zip(made, which, likes, strict=False):
        update.flat = Flat.copy_of(update.payload, first.layout if is_like else {}) if is_flat else None
    return made


choices = st.lists(st.booleans(), min_size=8, max_size=8)


@settings(deadline=None)
@given(cohort, choices, choices, st.integers(1, 40), st.integers(1, 9))
def test_vectors_give_the_bits_of_tensors(
    clients: Clients, which: list[bool], likes: list[bool], block: int, part: int
) -> None:
    def made() -> list[ClientUpdate]:
        return [update.with_payload({n: update.payload[n] for n in ("a", "b")}) for update in updates(clients)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers, "_BLOCK_VALUES", block)
        patch.setattr(reducers, "_PART", part)
        assert_same(mean(as_vectors(made(), which, likes)), mean(made()))


@settings(deadline=None)
@given(cohort, choices, choices, st.integers(1, 40), st.permutations(["a", "c.a", "c.b", "b"]))
def test_vectors_in_parts_give_the_bits_of_tensors(
    clients: Clients, which: list[bool], likes: list[bool], block: int, names: list[str]
) -> None:
    def made() -> list[ClientUpdate]:
        found = []
        for update in updates(clients):
            both = {**update.payload, "c.a": update.payload["a"] * 2, "c.b": -update.payload["b"]}
            found.append(update.with_payload({name: both[name] for name in names}))
        return found

    def parts() -> Reducer[Any]:
        return ByPrefix(WeightedMean(), {"c.": WeightedMean(uniform=True)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers, "_BLOCK_VALUES", block)
        found = mean(as_vectors(made(), which, likes), parts())
        assert_same(found, mean(made(), parts()))
    # By hand, exact in float64: Σ n a / Σ n, and 2 Σ a / K.
    a = np.array([values[:4] for _, values in clients], dtype=np.float64) * UNIT
    weights = np.array([weight for weight, _ in clients], dtype=np.float64)
    expected = {"a": (weights @ a) / weights.sum(), "c.a": 2 * a.sum(0) / len(clients)}
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].numpy().ravel(), values.astype(np.float32))


def test_neighbours_in_a_vector_are_summed_as_vectors() -> None:
    parts = ByPrefix(WeightedMean(), {"c.": WeightedMean()})
    payload = {"a": torch.ones(2), "b": torch.ones(1), "c.a": torch.ones(3)}
    shapes = {name: tensor.shape for name, tensor in payload.items()}
    assert parts._find(shapes) == {
        "": ({"a": torch.Size([2]), "b": torch.Size([1])}, 0, 3),
        "c.": ({"a": torch.Size([3])}, 3, 3),
    }
    scattered = {name: shapes[name] for name in ("a", "c.a", "b")}
    assert parts._find(scattered) == {}


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@given(st.lists(st.tuples(st.integers(1, 10**6), finite), min_size=1, max_size=20))
def test_mean_of_any_float32_is_within_float64_rounding(clients: list[tuple[int, float]]) -> None:
    # Each of K products (exact: 24 + 20 bits) is added with a relative error of at most 2⁻⁵³ of a partial sum, which is
    # at most Σ|n x|; the division adds one more. float32 then rounds by at most 2⁻²⁴ relative or 2⁻¹⁵⁰ absolute.
    found = mean([ClientUpdate(i, {"x": torch.tensor([x])}, n) for i, (n, x) in enumerate(clients)])["x"].item()
    total = sum(n for n, _ in clients)
    exact = sum(n * Fraction(x) for n, x in clients) / total
    size = sum(n * abs(Fraction(x)) for n, x in clients) / total
    bound = (len(clients) + 1) * Fraction(2) ** -53 * size * (1 + Fraction(2) ** -24)
    assert abs(Fraction(found) - exact) <= bound + Fraction(2) ** -24 * abs(exact) + Fraction(2) ** -150


def test_mean_by_hand() -> None:
    # (1·(1, 0) + 3·(0, 2)) / 4 = (0.25, 1.5); uniformly (0.5, 1).
    made = [ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, 1), ClientUpdate(1, {"w": torch.tensor([0.0, 2.0])}, 3)]
    assert mean(made)["w"].tolist() == [0.25, 1.5]
    assert mean(made, WeightedMean(uniform=True))["w"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("dtype", "spacing"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float64, 2.0**-52)]
)
def test_mean_keeps_the_type_and_rounds_once(dtype: torch.dtype, spacing: float) -> None:
    # Between 1 and 1 + s, neighbours in the type: weights 1 and 3 give 1 + 0.75·s → 1 + s; 3 and 1 give 1 + 0.25·s → 1.
    low, high = torch.tensor([1.0], dtype=dtype), torch.tensor([1.0 + spacing], dtype=dtype)
    for weights, expected in (((1, 3), 1.0 + spacing), ((3, 1), 1.0)):
        found = mean([ClientUpdate(0, {"x": low}, weights[0]), ClientUpdate(1, {"x": high}, weights[1])])["x"]
        assert found.dtype == dtype
        assert found.item() == expected


def test_small_types_are_summed_in_float64() -> None:
    # 1000 clients at 60,000: their sum is far beyond float16's 65,504; and 1 + 256·2⁻⁸ would stop at 2 in bfloat16.
    sent = {"h": torch.tensor([60000.0], dtype=torch.float16), "b": torch.tensor([2.0**-8], dtype=torch.bfloat16)}
    made = [ClientUpdate(i, sent) for i in range(1000)]
    assert_same(mean(made), sent)


def test_integers_are_rounded_to_the_nearest() -> None:
    # (1·3 + 3·4)/4 = 3.75 → 4; (1·3 + 1·4)/2 = 3.5 → 4 and (4 + 5)/2 = 4.5 → 4, halves to even; 2³¹ needs 64 bits.
    for first, second, weights, expected in (
        (3, 4, (1, 3), 4),
        (3, 4, (1, 1), 4),
        (4, 5, (1, 1), 4),
        (2**31, 2**31, (1, 2), 2**31),
    ):
        made = [
            ClientUpdate(i, {"n": torch.tensor(v)}, w)
            for i, (v, w) in enumerate(zip((first, second), weights, strict=True))
        ]
        found = mean(made)["n"]
        assert found.dtype == torch.int64
        assert found.item() == expected


def test_a_client_of_weight_zero_changes_nothing() -> None:
    made = [ClientUpdate(0, {"x": torch.ones(1)}, 0), ClientUpdate(1, {"x": torch.full((1,), 5.0)}, 2)]
    assert mean(made)["x"].item() == 5.0


def test_no_update_and_no_weight() -> None:
    assert WeightedMean().result(ALONE) is None
    assert Gather().result(ALONE) is None
    with pytest.raises(ValueError, match="weights of this round's updates sum to 0"):
        mean([ClientUpdate(0, {"x": torch.ones(1)}, 0)])


def test_clients_that_send_other_tensors_are_named() -> None:
    one = ClientUpdate(0, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(ValueError, match=r"client 7 sends different tensors from .* they differ in \['b', 'c'\]"):
        mean([one, ClientUpdate(7, {"a": torch.ones(2), "c": torch.ones(2)})])
    # A shape that broadcasts must not slip through either.
    with pytest.raises(ValueError, match=r"client 7 sends 'b' in shape \(1,\), the clients before it in \(2,\)"):
        mean([one, ClientUpdate(7, {"a": torch.ones(2), "b": torch.ones(1)})])


def test_no_update_is_kept() -> None:
    reducer = WeightedMean()
    references = []
    for client_id in range(5):
        tensor = torch.full((3,), float(client_id))
        references.append(weakref.ref(tensor))
        reducer.add(ClientUpdate(client_id, {"x": tensor}))
        tensor.fill_(float("nan"))  # as the next client does with the module's memory
        del tensor
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    result = reducer.result(ALONE)
    assert result is not None
    assert result["x"].tolist() == [2.0] * 3


def test_gather_keeps_copies_sorted_by_client() -> None:
    reducer = Gather()
    memory = torch.zeros(2)
    for client_id in (3, 1, 2):
        reducer.add(ClientUpdate(client_id, {"x": memory.fill_(client_id)}, weight=client_id, metrics={"m": 1.0}))
    memory.fill_(-1)
    gathered = reducer.result(ALONE)
    assert gathered is not None
    assert [(u.client_id, u.weight, u.metrics, u.payload["x"].tolist()) for u in gathered] == [
        (k, k, {"m": 1.0}, [k, k]) for k in (1, 2, 3)
    ]


# ---------------------------------------------------------------------- two processes


def test_any_split_over_two_processes_gives_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    cases: list[Clients] = []
    for _ in range(60):
        size = int(rng.integers(1, 9))
        values = rng.integers(-(2**23) + 1, 2**23, (size, 6)).tolist()
        cases.append(list(zip(rng.integers(1, 2**14, size).tolist(), values, strict=True)))
    owners = [rng.integers(0, 2, len(case)).tolist() for case in cases]
    owners[0], owners[1] = [0] * len(cases[0]), [1] * len(cases[1])  # one process without a client, either one

    def work(workers: Workers) -> list[list[bool]]:
        same = []
        for case, owner in zip(cases, owners, strict=True):
            made = updates(case)
            mine = [update for update in made if owner[update.client_id] == workers.rank]
            found, expected = mean(mine, workers=workers), mean(made)
            same.append(
                list(found) == list(expected)
                and all(torch.equal(found[n], expected[n]) and found[n].dtype == expected[n].dtype for n in expected)
            )
        return workers.gather(same)

    assert in_two_processes(work) == [[True] * 60, [True] * 60]


def test_two_processes_agree_on_nothing_and_on_errors() -> None:
    def message(made: list[ClientUpdate], workers: Workers) -> str:
        try:
            return str(mean(made, workers=workers))
        except ValueError as error:
            return str(error)

    def work(workers: Workers) -> list[list[str]]:
        found = [message([], workers), message([ClientUpdate(0, {"x": torch.ones(2)}, 0)], workers)]
        names = ({"x": torch.ones(2)}, {"y": torch.ones(2)})
        shapes = ({"x": torch.ones(2)}, {"x": torch.ones(2, 1)})
        found += [message([ClientUpdate(workers.rank, sent[workers.rank])], workers) for sent in (names, shapes)]
        return workers.gather(found)

    for nothing, weightless, names, shapes in in_two_processes(work):
        assert nothing == "None"
        assert "sum to 0" in weightless
        assert names == "clients of different processes send different tensors; they differ in ['x', 'y']"
        assert shapes == "clients of different processes send different tensors; they differ in ['x']"


def test_gather_over_two_processes() -> None:
    def work(workers: Workers) -> list[Any]:
        made = [ClientUpdate(k, {"x": torch.full((2,), float(k))}, k) for k in range(5) if k % 2 == workers.rank]
        result = mean(made, Gather(), workers)
        return workers.gather([(u.client_id, u.weight, u.payload["x"].tolist()) for u in result])

    expected = [(k, k, [float(k)] * 2) for k in range(5)]
    assert in_two_processes(work) == [expected, expected]
