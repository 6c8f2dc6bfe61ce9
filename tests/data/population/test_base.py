"""The population: splits that do not overlap, loaders that keep their promises, and a plain Trainer."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.data import (
    IID,
    Arrays,
    ClassesPerClient,
    Digits,
    Dirichlet,
    FederatedDataModule,
    Natural,
    Rotations,
    Shards,
    TensorDataModule,
)
from lit_fed.errors import ConfigError


class Numbered(TensorDataModule):
    """Inputs that are their own index; test inputs count on from 10,000,000."""

    num_classes = 4
    input_shape = (1,)

    def __init__(self, count: int = 400, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count

    def load_arrays(self) -> Arrays:
        x_train, x_test = np.arange(self.count)[:, None], 10_000_000 + np.arange(100)[:, None]
        clients = np.arange(self.count) % 5 if self.partition.keeps_clients else None
        return Arrays(x_train, np.arange(self.count) % 4, x_test, np.arange(100) % 4, clients, source="numbers.npz")


def ready(module: FederatedDataModule, public_size: int = 0, calibration_fraction: float = 0.0) -> Any:
    module.reserve(public_size, calibration_fraction)
    module.prepare_data()
    module.setup("fit")
    return module


class Viewed(Numbered):
    def view(self, client_id: int) -> Any:
        return None if client_id else lambda batch: batch


class Made(Numbered):
    def make_loader(self, batches: Any) -> Any:
        return super().make_loader(batches)


class Chosen(Numbered):
    def train_loader(self, client_id: int, generator: torch.Generator) -> Any:
        return super().train_loader(client_id, generator)


def test_one_loader_has_the_samples_of_several_clients() -> None:
    data = ready(Numbered(num_clients=5, partition=Dirichlet(0.5), val_fraction=0.1))
    loader, counts = data.cohort_loader([3, 0, 4])
    alone = [inputs_of(data.train_loader(one, torch.Generator())) for one in (3, 0, 4)]
    assert counts.tolist() == [len(one) for one in alone]
    parts = np.split(np.array(inputs_of(loader)), counts.cumsum()[:-1])
    assert [sorted(part.tolist()) for part in parts] == [sorted(one) for one in alone]
    with pytest.raises(ConfigError, match="client 5 does not exist"):
        data.cohort_loader([0, 5])


def test_clients_that_are_elsewhere_are_refused_by_name() -> None:
    data: Any = Numbered(num_clients=5)
    data.setup("fit", clients=[1, 3])
    assert sorted(inputs_of(data.cohort_loader([3])[0])) == sorted(inputs_of(data.train_loader(3, torch.Generator())))
    with pytest.raises(ConfigError, match="client 2's data are not here"):
        data.cohort_loader([1, 2])


@pytest.mark.parametrize(
    "own", [Viewed, Made, Chosen, partial(Numbered, skew=Rotations([0.0])), partial(Numbered, fresh_batches=True)]
)
def test_there_is_no_common_loader_where_loaders_may_differ(own: Any) -> None:
    assert ready(own(num_clients=5)).cohort_loader([0, 1]) is None


def inputs_of(loader: Any) -> list[int]:
    return [int(value) for x, _ in loader for value in x.flatten()]


@settings(max_examples=30)
@given(
    st.sampled_from([IID(), Dirichlet(1.0, min_samples=1), Shards(2), Natural(), ClassesPerClient(2)]),
    st.floats(0, 0.5),
    st.floats(0, 0.4),
    st.integers(0, 80),
    st.integers(0, 1000),
)
def test_train_validation_calibration_and_public_sets_do_not_overlap(partition, val, calibration, public, seed):
    num_clients = 5 if isinstance(partition, Natural) else 8
    if isinstance(partition, (Shards, ClassesPerClient)):
        public = min(public, 40)  # every class must remain large enough
    module = Numbered(num_clients=num_clients, partition=partition, val_fraction=val, seed=seed)
    data = ready(module, public, calibration)
    seen: list[int] = []
    for client_id in range(num_clients):
        train = inputs_of(data.train_loader(client_id, torch.Generator()))
        assert len(train) == data.census.num_samples(client_id) > 0
        seen += train
        if data.has_val:
            seen += inputs_of(data.val_loader(client_id))
        if data.has_calibration:
            seen += inputs_of(data.calibration_loader(client_id))
    if data.has_public:
        seen += inputs_of(data.public_loader())
    if data.has_val:
        assert sorted(inputs_of(data.val_loader())) == sorted(
            value for k in range(num_clients) for value in inputs_of(data.val_loader(k))
        )
    assert sorted(seen) == list(range(400))


def test_targets_belong_to_their_inputs():
    data = ready(Numbered(num_clients=4, val_fraction=0.1), calibration_fraction=0.1)
    loaders = [data.train_loader(1, torch.Generator()), data.val_loader(), data.calibration_loader(2)]
    for loader in [*loaders, data.test_loader(), data.test_loader(3)]:
        for x, y in loader:
            assert torch.equal(x[:, 0] % 4, y)  # 10,000,000 is a multiple of 4


def test_the_public_loader_yields_positions_and_reaches_no_labels():
    data = ready(Numbered(num_clients=4, batch_size=7, test_batch_size=25), public_size=60)
    fixed = data.public_loader()
    assert (len(fixed), fixed.num_samples) == (3, 60)
    indices = torch.cat([index for _, index in fixed])
    assert torch.equal(indices, torch.arange(60))
    assert indices.dtype == torch.int64
    order = inputs_of(fixed)
    for x, index in data.public_loader(torch.Generator().manual_seed(1)):
        assert [order[i] for i in index] == x[:, 0].tolist()
    stored = vars(fixed).values()
    tensors = [value for value in stored if isinstance(value, torch.Tensor)]
    # Inputs of the public samples alone, positions, positions: nothing else is held.
    assert [tuple(tensor.shape) for tensor in tensors] == [(60, 1), (60,), (60,)]
    assert all(torch.equal(tensor.flatten(), torch.arange(60)) for tensor in tensors if tensor.ndim == 1)


def test_a_stratified_public_set_has_as_many_of_every_class():
    data = ready(Numbered(num_clients=4, stratified_public=True), public_size=62)
    # Samples are of class i mod 4: 62 over 4 classes is 15 each and 2 left over, for the first two.
    assert np.bincount([i % 4 for i in inputs_of(data.public_loader())]).tolist() == [16, 16, 15, 15]
    drawn = [i % 4 for i in inputs_of(ready(Numbered(num_clients=4), public_size=62).public_loader())]
    assert np.bincount(drawn).tolist() != [16, 16, 15, 15]


def test_shared_sets_have_a_batch_size_of_their_own():
    data = ready(Numbered(num_clients=4, val_fraction=0.2, test_batch_size=10, shared_batch_size=40))
    # 100 test samples, 25 a client; 400 training samples of which 100 a client, 20 of those held out.
    assert [len(x) for x, _ in data.test_loader()] == [40, 40, 20]
    assert [len(x) for x, _ in data.test_loader(0)] == [10, 10, 5]
    assert [len(x) for x, _ in data.val_loader()] == [40, 40]
    assert [len(x) for x, _ in data.val_loader(0)] == [10, 10]
    assert Numbered(test_batch_size=10).shared_batch_size == 10


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fractions", [(0.0, 0.0), (0.4, 0.0), (0.2, 0.3)])
def test_clients_that_are_tested_on_what_they_never_train_on_are_counted(seed, fractions):
    skewed = Numbered(80, num_clients=8, partition=Dirichlet(0.2, min_samples=2), seed=seed, val_fraction=fractions[0])
    data = ready(skewed, 8, fractions[1])
    unseen = 0
    for client_id in range(8):
        tested = {int(label) for _, labels in data.test_loader(client_id) for label in labels}
        trained = {int(label) for _, labels in data.train_loader(client_id, torch.Generator()) for label in labels}
        unseen += not tested <= trained
    assert bool(unseen) == (fractions != (0, 0))
    line = data.census.untaught()
    assert unseen == (0 if line is None else int(line.split()[0]))
    assert line is None or "of 8 are tested on a class whose samples were all held out for validation" in line


def test_everything_is_a_function_of_the_seed():
    settings_ = {"num_clients": 8, "val_fraction": 0.2, "partition": Dirichlet(0.5, min_samples=1)}
    records = [ready(Numbered(seed=seed, **settings_), public_size=40).record.as_dict() for seed in (0, 0, 1)]
    assert records[0] == records[1]
    assert records[0]["sha256"] != records[2]["sha256"]


def test_the_record_lists_training_indices_and_histograms():
    data = ready(Numbered(num_clients=5, partition=Natural(), val_fraction=0.25))
    record = data.record.as_dict()
    assert len(record["sha256"]) == 64
    assert list(record["clients"]) == list(range(5))
    for client_id, entry in record["clients"].items():
        assert sorted(entry["indices"]) == sorted(inputs_of(data.train_loader(client_id, torch.Generator())))
        # Client k holds the 80 numbers that leave k when divided by 5, 60 after a quarter is held out.
        assert all(index % 5 == client_id for index in entry["indices"])
        assert len(entry["indices"]) == sum(entry["histogram"]) == 60
        assert entry["histogram"] == np.bincount([i % 4 for i in entry["indices"]], minlength=4).tolist()
    np.testing.assert_array_equal(data.census.class_histogram(), [e["histogram"] for e in record["clients"].values()])
    json.dumps(record)


def test_subsets_are_random_choices_of_the_asked_size():
    data = ready(Numbered(num_clients=4, max_train_samples=100, max_test_samples=20))
    pooled, test = inputs_of(data.train_dataloader()), inputs_of(data.test_loader())
    assert len(set(pooled)) == 100
    assert len(set(test)) == 20
    assert pooled != list(range(100))
    for client_id in range(4):
        assert set(inputs_of(data.test_loader(client_id))) <= set(test)


def test_setup_is_idempotent_and_required():
    data = Numbered(num_clients=4)
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        data.census.num_samples(0)
    record = ready(data).record.as_dict()
    data.setup("test")
    data.reserve()  # what was reserved before, nothing
    assert data.record.as_dict() == record


def test_fresh_batches_concern_training_only():
    data = ready(Numbered(num_clients=4, batch_size=30, fresh_batches=True, test_batch_size=30))
    loader = data.train_loader(0, torch.Generator().manual_seed(0))
    sizes = [len(y) for _, y in loader]
    assert sizes == [30] * len(loader)
    assert sum(sizes) > data.census.num_samples(0), "the last batch is filled too"
    plain = ready(Numbered(num_clients=4, batch_size=30, test_batch_size=30))
    for one, other in zip(data.test_loader(0), plain.test_loader(0), strict=True):
        assert torch.equal(one[0], other[0])


def test_drop_last_concerns_training_only():
    data = ready(Numbered(num_clients=4, batch_size=30, drop_last=True, test_batch_size=30))
    assert data.train_loader(0, torch.Generator()).num_samples == 90  # of 100
    assert data.test_loader().num_samples == 100


def test_100_000_clients_cost_no_more_per_call_than_ten():
    data = ready(Numbered(count=400_000, num_clients=100_000), calibration_fraction=0.25)
    assert data.num_clients == 100_000
    generator = torch.Generator()

    def per_call() -> float:
        start = time.perf_counter()
        for client_id in range(99_000, 99_200):
            data.train_loader(client_id, generator)
            data.census.num_samples(client_id)
        return (time.perf_counter() - start) / 200

    # Anything that walks over 100,000 clients takes a millisecond at least; a stall must not fail the test.
    assert min(per_call() for _ in range(5)) < 2e-4
    assert [data.census.num_samples(k) for k in (0, 99_999)] == [3, 3]  # 4 less ⌊0.25·4⌋
    assert len(inputs_of(data.calibration_loader(99_999))) == 1
    assert sum(len(y) for _, y in data.test_loader(99_999)) <= 4


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.seen += len(y)
        return torch.nn.functional.cross_entropy(self.layer(x.flatten(1)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0].flatten(1)).sum())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("count", float(len(batch[1])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0].flatten(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("val_fraction", [0.0, 0.1])
def test_a_plain_trainer_sees_the_pooled_data(val_fraction, tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **quiet
    )
    data, model = Digits(num_clients=5, batch_size=64, val_fraction=val_fraction), Line()
    trainer.fit(model, datamodule=data)
    assert model.seen == sum(data.census.num_samples(k) for k in range(5))
    assert trainer.test(model, datamodule=data, verbose=False)[0]["count"] == data.test_loader().num_samples
    assert len(torch.cat(trainer.predict(model, datamodule=data))) == data.test_loader().num_samples


class Mislabeled(Numbered):
    num_classes = 3


class Uneven(Numbered):
    def load_arrays(self) -> Arrays:
        return Arrays(
            np.zeros((5, 1)), np.zeros(4, dtype=int), np.zeros((1, 1)), np.zeros(1, dtype=int), source="a.npz"
        )


class OddClients(Numbered):
    def load_arrays(self) -> Arrays:
        x, y = np.zeros((5, 1)), np.zeros(5, dtype=int)
        return Arrays(x, y, x, y, np.zeros(3, dtype=int), source="a.npz")


class FloatLabels(Numbered):
    def load_arrays(self) -> Arrays:
        return Arrays(np.zeros((5, 1)), np.zeros(5), np.zeros((1, 1)), np.zeros(1), source="a.npz")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Numbered(batch_size=0), "data.batch_size is 0"),
        (lambda: Numbered(test_batch_size=0), "data.test_batch_size is 0"),
        (lambda: Numbered(shared_batch_size=0), "data.shared_batch_size is 0"),
        (lambda: ready(Numbered(stratified_public=True, max_train_samples=200), 196), "needs 49 samples of class"),
        (lambda: Numbered(val_fraction=1.0), "data.val_fraction is 1.0"),
        (lambda: Numbered().reserve(calibration_fraction=-0.1), "algorithm.calibration_fraction is -0.1"),
        (lambda: Numbered(val_fraction=0.5).reserve(calibration_fraction=0.5), "leave nothing"),
        (lambda: ready(Numbered(), 5).reserve(6), "cut with algorithm.public_size 5 and algorithm.calibration"),
        (lambda: ready(Numbered()).reserve(0, 0.1), "cannot be cut again with 0 and 0.1"),
        (lambda: Numbered(num_clients=0), "data.num_clients is 0"),
        (lambda: Numbered().reserve(-1), "algorithm.public_size is -1"),
        (lambda: Numbered(max_train_samples=0), "data.max_train_samples is 0"),
        (lambda: ready(Numbered(), 400), "algorithm.public_size 400 leaves none of the 400"),
        (lambda: ready(Numbered(num_clients=401)), "400 training samples cannot be shared among 401"),
        (lambda: ready(Mislabeled()), "training labels of numbers.npz: label 3 of sample 3 is not in 0 … 2"),
        (lambda: ready(Uneven()), "a.npz: 5 train samples but 4 labels"),
        (lambda: ready(OddClients()), "a.npz: 3 client ids for 5 samples"),
        (lambda: ready(FloatLabels()), "training labels of a.npz have shape (5,) of float64; they must be integers"),
        (lambda: ready(Numbered()).val_loader(), "set data.val_fraction"),
        (lambda: ready(Numbered()).calibration_loader(0), "set algorithm.calibration_fraction"),
        (lambda: ready(Numbered()).public_loader(), "set algorithm.public_size"),
        (lambda: ready(Numbered()).train_loader(10, torch.Generator()), "client 10 does not exist"),
        (lambda: ready(Numbered()).test_loader(-1), "client -1 does not exist"),
    ],
)
def test_errors_say_what_is_wrong(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_public_accuracy_counts_right_classes_and_gives_no_labels():
    data = ready(Numbered(num_clients=4), public_size=60)
    labels = data._cut.strata[data._cut.public]
    guess = labels.copy()
    guess[:15] = (guess[:15] + 1) % data.num_classes
    assert data.census.public_accuracy(guess) == 0.75  # 45 of 60


def test_fractions_that_leave_a_client_one_sample_are_said(capsys):
    ready(Numbered(num_clients=5, partition=Natural(), val_fraction=0.99))
    # 80 samples a client, of which ⌊79.2⌋ = 79 are held out
    assert capsys.readouterr().out == (
        "data.val_fraction 0.99 and algorithm.calibration_fraction 0 leave client 0 and 4 other clients one sample to "
        "train on, of 80\n"
    )
    ready(Numbered(num_clients=5, partition=Natural(), val_fraction=0.97))
    assert capsys.readouterr().out == ""


class Owned(Numbered):
    """As `Numbered` with five clients, of whom client k has the test samples k, k + 5, …."""

    def load_arrays(self) -> Arrays:
        made = super().load_arrays()
        owners = np.arange(100) % 5
        return Arrays(made.train.x, made.train.y, made.test.x, made.test.y, made.train.clients, owners, made.source)


@pytest.mark.parametrize("partition", [IID(), Natural()], ids=["dealt", "their own"])
def test_absent_clients_take_their_samples_out_of_every_set(partition: Any) -> None:
    def make() -> Any:
        return ready(Owned(num_clients=5, partition=partition, val_fraction=0.25), 0, 0.1)

    whole, rest = make(), make()
    rest.leave_out([1, 3])
    for client_id in (1, 3):
        assert rest.census.num_samples(client_id) == rest.census.class_counts(client_id).sum() == 0
        for part in ("val_loader", "test_loader", "calibration_loader"):
            assert inputs_of(getattr(rest, part)(client_id)) == []
    for client_id in (0, 2, 4):
        for part in ("val_loader", "test_loader", "calibration_loader", "stored_loader"):
            assert inputs_of(getattr(rest, part)(client_id)) == inputs_of(getattr(whole, part)(client_id))
    others = {value for client_id in (0, 2, 4) for value in inputs_of(whole.val_loader(client_id))}
    assert set(inputs_of(rest.val_loader())) == others
    owned = {10_000_000 + row for row in range(100) if row % 5 in (1, 3)} if isinstance(partition, Natural) else set()
    assert set(inputs_of(rest.test_loader())) == set(inputs_of(whole.test_loader())) - owned
    assert len(inputs_of(rest.train_dataloader())) == 3 * 80 * 0.65  # a quarter and a tenth of each are held out
    assert rest.record.sha256 == whole.record.sha256
    rest.leave_out([3, 1])
    with pytest.raises(ConfigError, match=r"set up without clients 1, 3 and cannot be set up again without no client"):
        rest.leave_out([])


def test_a_public_set_of_clients_own_samples_does_not_tell_whose_they_are():
    data = ready(Numbered(num_clients=5, partition=Natural()), 40)
    with pytest.raises(ConfigError, match="the public set does not tell whose its samples are"):
        data.leave_out([1])
    dealt = ready(Numbered(num_clients=5), 40)
    before = inputs_of(dealt.public_loader())
    dealt.leave_out([1])  # a sample of the public set was never a client's
    assert inputs_of(dealt.public_loader()) == before
