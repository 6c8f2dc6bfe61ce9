"""A process that holds some clients' data only, and what it may know of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.data import IID, ClassesPerClient, Diabetes, Digits, Dirichlet, FederatedDataModule, Quantity, Shards
from lit_fed.errors import ConfigError


def ready(data: Any, clients: Any = None) -> Any:
    data.reserve(public_size=50, calibration_fraction=0.1)
    data.setup("fit", clients)
    return data


def same(first: Any, second: Any) -> bool:
    return all(
        torch.equal(a, b) for left, right in zip(first, second, strict=True) for a, b in zip(left, right, strict=True)
    )


@settings(max_examples=15)
@given(
    st.sampled_from([IID(), Dirichlet(1.0, min_samples=1), Shards(2), ClassesPerClient(2, 60), Quantity(5.0)]),
    st.sets(st.integers(0, 9), max_size=10),
    st.integers(0, 100),
)
def test_what_is_here_is_as_if_everybody_were(partition, clients, seed):
    kwargs: dict[str, Any] = {"num_clients": 10, "partition": partition, "val_fraction": 0.2, "seed": seed}
    full, some = ready(Digits(**kwargs)), ready(Digits(**kwargs), clients)
    assert list(some.census.clients) == sorted(clients)
    assert some.num_clients == 10
    assert some.record.sha256 == full.record.sha256
    np.testing.assert_array_equal(some.census.class_histogram(), full.census.class_histogram()[sorted(clients)])
    for client_id in clients:
        assert some.describe(client_id) == full.describe(client_id)
        assert some.census.num_samples(client_id) == full.census.num_samples(client_id)
        assert some.census.fingerprint(client_id) == full.census.fingerprint(client_id)
        np.testing.assert_array_equal(some.census.class_counts(client_id), full.census.class_counts(client_id))
        generators = [torch.Generator().manual_seed(4) for _ in range(2)]
        assert same(*(data.train_loader(client_id, g) for data, g in zip((full, some), generators, strict=True)))
        for name in ("val_loader", "test_loader", "calibration_loader"):
            assert same(getattr(full, name)(client_id), getattr(some, name)(client_id))
    assert same(full.test_loader(), some.test_loader())
    assert same(full.public_loader(), some.public_loader())
    assert [client_id for client_id, _ in some.record.rows()] == sorted(clients)


def test_others_are_refused_by_name():
    data = ready(Digits(num_clients=6, val_fraction=0.2), [4, 1])
    absent = "client 3's data are not here; setup was asked for clients 1, 4"
    for ask in (
        lambda: data.train_loader(3, torch.Generator()),
        lambda: data.val_loader(3),
        lambda: data.test_loader(3),
        lambda: data.calibration_loader(3),
        lambda: data.census.num_samples(3),
        lambda: data.census.class_counts(3),
        lambda: data.census.fingerprint(3),
        lambda: data.describe(3),
    ):
        with pytest.raises(ConfigError, match=absent):
            ask()
    with pytest.raises(ConfigError, match="client 6 does not exist"):
        data.test_loader(6)
    with pytest.raises(ConfigError, match=r"shared validation set needs the data of all clients; .* clients 1, 4 only"):
        data.val_loader()
    with pytest.raises(ConfigError, match="the pooled training set needs the data of all clients"):
        data.train_dataloader()


def test_others_samples_are_not_kept():
    data = ready(Diabetes(num_clients=6), [2])
    held = data.census.num_samples(2) + sum(len(y) for _, y in data.calibration_loader(2)) + 50
    assert len(data._x["train"]) == len(data._y["train"]) == held < 354
    labels = ready(Digits(num_clients=6), [2])._cut.strata
    assert (labels >= 0).sum() < len(labels) / 3
    data.move_to(torch.device("cpu"))
    assert data.describe(2) == ready(Diabetes(num_clients=6)).describe(2)


def test_a_server_needs_no_clients():
    data = ready(Digits(num_clients=6), [])
    assert list(data.census.clients) == []
    assert data.census.class_histogram().shape == (0, 10)
    assert data.record.picture() is None
    assert data.test_loader().num_samples > 0
    assert data.public_loader().num_samples == 50
    with pytest.raises(ConfigError, match="client 0's data are not here; setup was asked for no client"):
        data.census.num_samples(0)


def test_the_same_clients_again_are_no_error_and_others_are():
    data = ready(Digits(num_clients=6), [1, 2])
    data.setup("test")
    data.setup("test", (2, 1))
    assert list(data.census.clients) == [1, 2]
    with pytest.raises(ConfigError, match="set up for clients 1, 2 and cannot be set up again for client 3"):
        data.setup("fit", [3])
    with pytest.raises(ConfigError, match="client 9 does not exist"):
        ready(Digits(num_clients=6), [9])


def test_fingerprints_tell_clients_and_seeds_apart():
    def prints(seed: int) -> list[str]:
        data: FederatedDataModule = ready(Digits(num_clients=6, seed=seed))
        return [data.census.fingerprint(client_id) for client_id in range(6)]

    assert prints(0) == prints(0)
    assert len({*prints(0), *prints(1)}) == 12
    assert all(len(entry) == 64 for entry in prints(0))
