"""Targets that are numbers: what is read, how it is cut, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils.data import Dataset

from lit_fed.data import (
    IID,
    ArrayFile,
    Arrays,
    DatasetModule,
    Datasets,
    Diabetes,
    Dirichlet,
    Natural,
    Quantity,
    Shards,
    TensorDataModule,
    quantile_strata,
)
from lit_fed.errors import ConfigError


class Measured(TensorDataModule):
    """Targets as they are given; sample i has the input i."""

    input_shape = (1,)

    def __init__(self, targets: Any, shape: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(**{"num_clients": 2, **kwargs})
        self.targets, self.shape = np.asarray(targets), shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.shape

    def load_arrays(self) -> Arrays:
        x = np.arange(len(self.targets), dtype=np.float32)[:, None]
        return Arrays(x, self.targets, x, self.targets, source="m.npz")


def ready(data: Any) -> Any:
    data.setup()
    return data


def everything(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(loader)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_diabetes_is_standardised_by_its_training_part():
    data = Diabetes(num_clients=3)
    assert (data.num_classes, data.input_shape, data.output_shape, data.in_channels) == (None, (10,), (), 10)
    x, y = everything(ready(data).train_dataloader())
    x_test, y_test = everything(data.test_loader())
    assert (len(y), len(y_test)) == (354, 88)  # 442 patients, a fifth, rounded down, to test on
    assert x.dtype == y.dtype == torch.float32
    assert y.shape == (354,)
    for column in (*x.T, y):
        assert abs(column.mean()) < 1e-6
        assert column.std(correction=0) == pytest.approx(1, abs=1e-5)
    # scikit-learn's documentation: targets of 25 to 346; the smallest and the largest are 321 apart, however scaled.
    both = torch.cat([y, y_test])
    raw = both.double() * (321 / (both.max() - both.min()).double())
    raw = raw - raw.min() + 25
    torch.testing.assert_close(raw, raw.round(), atol=1e-3, rtol=0)
    assert raw.mean() == pytest.approx(152.13348, abs=1e-3)
    assert x_test.shape == (88, 10)


def test_diabetes_has_one_test_set_whatever_the_settings():
    settings = ({"seed": 0}, {"seed": 1, "strata": 3})
    first, second = (everything(ready(Diabetes(num_clients=5, **each)).test_loader()) for each in settings)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_dirichlet_cuts_a_regression_by_quantiles_of_its_target():
    data = ready(Diabetes(num_clients=5, partition=Dirichlet(0.1)))
    means = [everything(data.train_loader(k, torch.Generator()))[1].mean().item() for k in range(5)]
    assert np.std(means) > 0.3  # IID clients of some 70 patients would differ by 1/√70 ≈ 0.12
    assert sum(data.census.num_samples(k) for k in range(5)) == 354
    for client_id in range(5):  # test patients are drawn from the same strata
        own, test = (everything(loader)[1] for loader in (data.train_loader(client_id, torch.Generator()),
                                                          data.test_loader(client_id)))  # fmt: skip
        assert test.min() > own.min() - 1
    assert len(ready(Diabetes(num_clients=5, partition=Shards(1))).census.clients) == 5


@given(hnp.arrays(np.float64, st.integers(10, 100), elements=st.floats(-5, 5), unique=True), st.integers(1, 10))
def test_quantile_strata_are_of_equal_size_and_in_order(targets, num_strata):
    strata, again = quantile_strata(targets, targets, num_strata)
    np.testing.assert_array_equal(strata, again)
    counts = np.bincount(strata, minlength=num_strata)
    assert counts.max() - counts.min() <= 1
    assert len(counts) == num_strata
    assert (np.diff(strata[np.argsort(targets)]) >= 0).all()


def test_quantile_strata_by_hand():
    # 8 targets in 4 strata: these begin at 0, 2, 4 and 6.
    strata, test = quantile_strata(np.arange(8.0), np.array([-9.0, 1.9, 2.0, 99.0]), 4)
    assert strata.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert test.tolist() == [0, 0, 1, 3]


def test_a_client_is_described_by_the_quartiles_of_its_targets():
    data = ready(Measured(np.arange(5.0), num_clients=1))
    # 0 … 4: minimum 0, quartiles 1, 2, 3, maximum 4
    row = data.describe(0)
    assert sorted(row.pop("indices")) == [0, 1, 2, 3, 4]
    assert row == {"samples": 5, "quantiles": [0, 1, 2, 3, 4]}
    wide = ready(Measured(np.stack([np.arange(5.0), 10 * np.arange(5.0)], axis=1), (2,), num_clients=1))
    assert wide.describe(0)["quantiles"] == [[0, 1, 2, 3, 4], [0, 10, 20, 30, 40]]
    assert next(iter(wide.test_loader()))[1].shape == (5, 2)
    json.dumps(wide.record.as_dict())


class Sequences(Dataset[Any]):
    """Samples that are no pair of tensors."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        points = {"at": torch.full((2,), float(index)), "seen": index % 2}
        return torch.full((3,), float(index)), points, index


class Named(Sequences):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index)), "y": index}


class SequenceModule(DatasetModule):
    input_shape = (3,)
    kind: type[Sequences] = Sequences

    def build_datasets(self) -> Datasets:
        return Datasets(self.kind(), None, self.kind(), None, source="sequences")

    def finish_batch(self, inputs: Any) -> Any:
        return inputs | {"x": -inputs["x"]} if isinstance(inputs, dict) else -inputs


class NamedModule(SequenceModule):
    kind = Named


def test_batches_carry_what_the_task_wants():
    data = SequenceModule(num_clients=2, partition=IID())
    data.reserve(public_size=2)
    x, points, index = next(iter(ready(data).train_loader(0, torch.Generator())))
    assert torch.equal(-x[:, 0].long(), index)
    assert torch.equal(points["at"][:, 1].long(), index)
    assert torch.equal(points["seen"], index % 2)
    x, position = next(iter(data.public_loader()))
    assert (x.shape, position.tolist()) == ((2, 3), [0, 1])
    named = NamedModule(num_clients=2)
    named.reserve(public_size=2)
    batch = next(iter(ready(named).test_loader()))
    assert torch.equal(-batch["x"][:, 0].long(), batch["y"])
    with pytest.raises(ConfigError, match=r"a public set needs samples \(x, y\)"):
        next(iter(named.public_loader()))


def test_where_nothing_is_known_sizes_are_told_and_nothing_else():
    data = ready(SequenceModule(num_clients=3, partition=Quantity(5.0, min_samples=1)))
    rows = data.record.as_dict()["clients"]
    assert [row["samples"] for row in rows.values()] == [len(row["indices"]) for row in rows.values()]
    assert sum(row["samples"] for row in rows.values()) == 12
    assert all(set(row) == {"indices", "samples"} for row in rows.values())


def archive(folder: Path, **changes: Any) -> str:
    arrays = {"x_train": np.eye(12, 4), "y_train": np.arange(12) / 2, "x_test": np.eye(6, 4), "y_test": np.arange(6.0)}
    np.savez(folder / "a.npz", **(arrays | changes))
    return str(folder / "a.npz")


def test_an_archive_with_floating_point_targets_is_a_regression(tmp_path):
    data = ArrayFile(path=archive(tmp_path), num_clients=2)
    assert (data.num_classes, data.output_shape) == (None, ())
    _, y = everything(ready(data).train_dataloader())
    assert sorted(y.tolist()) == [i / 2 for i in range(12)]
    joined = ready(ArrayFile(path=archive(tmp_path), num_clients=2, test_fraction=0.5))
    assert len(everything(joined.test_loader())[1]) == 9  # half of 18
    two = {"y_train": np.ones((12, 2)), "y_test": np.ones((6, 2)), "client_train": np.arange(12) // 4}
    natural = ArrayFile(path=archive(tmp_path, **two), partition=Natural())
    assert (natural.output_shape, natural.num_clients) == ((2,), 3)
    assert ready(natural).census.num_samples(1) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ready(Measured(np.arange(5))), "training targets of m.npz are int64; give floating"),
        (lambda: ready(Measured(np.array(["a", "b"]))), "training targets of m.npz are <U1; they must be floating"),
        (lambda: ready(Measured(np.ones((5, 1)))), "have shape (5, 1), and output_shape is (); it must be (1,)"),
        (lambda: ready(Measured(np.ones((5, 2, 2)), (2, 2))), "it must be (n,), or (n, k)"),
        (lambda: ready(Measured([1.0, np.nan, 2.0])), "training targets of m.npz: that of sample 1 is not finite"),
        (lambda: ready(Measured(np.ones(50), partition=Dirichlet())), "needs the class (or another stratum) of each"),
        (lambda: ready(Diabetes(partition=Natural())), "names the client of each sample"),
        (lambda: Diabetes(strata=0), "data.strata is 0"),
        (lambda: ready(Diabetes(strata=355)), "data.strata is 355; it must be at least 1 and at most 354"),
        (lambda: ready(Diabetes()).census.class_counts(0), "Diabetes has no classes"),
        (lambda: ready(Diabetes()).census.class_histogram(), "Diabetes has no classes"),
        (lambda: ready(Diabetes()).census.public_accuracy(np.zeros(0)), "Diabetes has no classes"),
    ],
)
def test_errors_say_what_is_wrong(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
