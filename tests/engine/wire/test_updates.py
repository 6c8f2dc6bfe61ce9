"""A table of updates: what a row of it says, parts of it, and what takes it whole in place of its rows."""

from __future__ import annotations

import pytest
import torch
from lightning import Fabric

from lit_fed.engine.loop.ledger import DriftMeter
from lit_fed.engine.method.reducers import ByPrefix, Reducer, WeightedMean
from lit_fed.engine.wire.payload import Arrival, Broadcast, ClientUpdate, Flat, FlatPayload, Payload
from lit_fed.engine.wire.updates import Updates, together
from lit_fed.engine.wire.workers import Workers
from tests.support import assert_same

ALONE = Workers(Fabric(accelerator="cpu", devices=1))
LAYOUT = {"w": torch.Size([2]), "up.b": torch.Size([1, 1]), "s": torch.Size([])}
VALUES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]])


def table() -> Updates:
    metrics = [{"train/loss": float(client_id)} for client_id in (4, 7, 9)]
    return Updates([4, 7, 9], "small", [1, 2, 3], metrics, Flat(LAYOUT, VALUES.clone()), uplink_bytes=[16, 16, 17])


def one_by_one() -> list[ClientUpdate]:
    """The same updates, each made by hand."""
    rows = []
    for client_id, weight, count, (a, b, c, d) in zip((4, 7, 9), (1, 2, 3), (16, 16, 17), VALUES.tolist(), strict=True):
        payload = {"w": torch.tensor([a, b]), "up.b": torch.tensor([[c]]), "s": torch.tensor(d)}
        metrics = {"train/loss": float(client_id)}
        rows.append(ClientUpdate(client_id, payload, weight, metrics, "small", uplink_bytes=count))
    return rows


def test_a_row_is_the_client_s_update() -> None:
    made = table()
    made.staleness, made.probabilities = 2, [0.5, 0.25, None]
    for row, expected, probability in zip(made, one_by_one(), (0.5, 0.25, None), strict=True):
        assert_same(dict(row.payload), dict(expected.payload))
        assert row.flat is not None
        assert row.flat.layout is LAYOUT
        assert (row.client_id, row.weight, row.metrics, row.kind, row.uplink_bytes, row.staleness, row.probability) == (
            expected.client_id, expected.weight, expected.metrics, "small", expected.uplink_bytes, 2, probability,
        )  # fmt: skip
    assert len(made) == 3
    assert_same(dict(made.example), dict(one_by_one()[0].payload))


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("chosen", [[], [1], [0, 2], [0, 1, 2]])
def test_some_rows_keep_their_own_numbers(of_rows: bool, chosen: list[int]) -> None:
    whole = Updates.of(one_by_one()) if of_rows else table()
    some = whole.only(chosen)
    expected = [one_by_one()[idx] for idx in chosen]
    assert some.client_ids == [one.client_id for one in expected]
    for row, own in zip(some, expected, strict=True):
        assert_same(dict(row.payload), dict(own.payload))
        assert (row.weight, row.metrics, row.uplink_bytes) == (own.weight, own.metrics, own.uplink_bytes)


@pytest.mark.parametrize("made", [table(), Updates.of(one_by_one())], ids=["matrix", "rows"])
def test_a_tensor_of_all_rows(made: Updates) -> None:
    assert made.stack("w").tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    assert made.stack("up.b").tolist() == [[[3.0]], [[7.0]], [[11.0]]]
    assert made.stack("s").tolist() == [4.0, 8.0, 12.0]


def test_rows_of_one_layout_become_a_matrix_again_and_others_do_not() -> None:
    again = Updates.of(list(table()))
    assert again.vectors is not None
    assert again.vectors.layout is LAYOUT
    assert torch.equal(again.vectors.values, VALUES)
    assert Updates.of(one_by_one()).vectors is None
    other = Flat({"w": torch.Size([4])}, torch.ones(4))
    assert Updates.of([*table(), ClientUpdate(1, FlatPayload(other), flat=other)]).vectors is None


def test_only_what_is_addressed_parts_a_table() -> None:
    sent = {"w": torch.zeros(2)}
    ((whole, received),) = table().by_received(Broadcast(0, {"small": sent}))
    assert len(whole) == 3
    assert received is sent
    own = {client_id: Arrival({}, {"mine": torch.tensor(client_id)}, 8) for client_id in (4, 7, 9)}
    parts = list(table().by_received(Broadcast(0, {"small": sent}, addressed=own)))
    assert [(part.client_ids, int(got["mine"])) for part, got in parts] == [([4], 4), ([7], 7), ([9], 9)]


def test_a_reducer_takes_a_table_as_its_rows() -> None:
    # Weights 1, 2, 3: (1·1 + 2·5 + 3·9) / 6 = 38/6 for the first column, and one more for each after it.
    for made in (table(), Updates.of(one_by_one())):
        mean = WeightedMean()
        mean.extend(made)
        found = mean.result(ALONE)
        assert found is not None
        assert found["w"].tolist() == pytest.approx([38 / 6, 44 / 6])
        assert float(found["s"]) == pytest.approx(56 / 6)
    parted = ByPrefix(WeightedMean(), {"up.": WeightedMean(uniform=True)})
    parted.extend(table())
    found = parted.result(ALONE)
    assert found is not None
    assert float(found["up.b"]) == pytest.approx((3 + 7 + 11) / 3)
    assert found["w"].tolist() == pytest.approx([38 / 6, 44 / 6])


def test_a_reducer_with_an_add_of_its_own_sees_every_row() -> None:
    class Doubled(WeightedMean):
        def add(self, update: ClientUpdate) -> None:
            super().add(update.with_payload({name: 2 * tensor for name, tensor in update.payload.items()}))

    class Parted(ByPrefix):
        def add(self, update: ClientUpdate) -> None:
            super().add(update.with_payload({name: 2 * tensor for name, tensor in update.payload.items()}))

    for mean in (Doubled(), Parted(WeightedMean(), {"up.": WeightedMean()})):
        mean.extend(table())
        found = mean.result(ALONE)
        assert found is not None
        assert found["w"].tolist() == pytest.approx([76 / 6, 88 / 6])


@pytest.mark.parametrize("mean", [WeightedMean(), ByPrefix(WeightedMean(), {"up.": WeightedMean()})])
def test_an_add_that_is_put_on_a_reducer_sees_every_row(
    mean: Reducer[Payload], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, add = list[int](), mean.add

    def noted(update: ClientUpdate) -> None:
        seen.append(update.client_id)
        add(update)

    monkeypatch.setattr(mean, "add", noted)
    mean.extend(table())
    assert seen == [4, 7, 9]


def test_the_drift_of_a_table_is_that_of_its_rows() -> None:
    sent = {"w": torch.tensor([1.0, 2.0]), "up.b": torch.zeros(1, 1), "s": torch.tensor(0.0)}
    results = []
    for parts in ([table()], [Updates.of([row]) for row in one_by_one()], [table().only([0]), table().only([1, 2])]):
        meter = DriftMeter(buffers=["s"])
        for part in parts:
            meter.add(part, sent)
        results.append(meter.result([meter.moves()], ALONE))
    # Movements (0, 0, 3), (4, 4, 7), (8, 8, 11); of the buffer 4, 8, 12.
    norms = [3.0, 81**0.5, 249**0.5]
    for found in results:
        assert found["drift/update_norm_mean"] == pytest.approx(sum(norms) / 3)
        assert found["drift/buffer_norm_mean"] == pytest.approx(8.0)
        assert found["drift/cosine_mean"] == pytest.approx(results[0]["drift/cosine_mean"])


def test_matrices_together() -> None:
    assert torch.equal(together([VALUES[:1], VALUES[1:]]), VALUES)
    assert together([VALUES]) is VALUES
