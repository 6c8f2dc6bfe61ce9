"""Plain LightningDataModules as federations."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lit_fed.command.cli import main
from lit_fed.data import Digits, Dirichlet, Listed, Wrapped
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.tasks import Classifier
from tests.support import fit, rows

SITES = ("berlin", "hamburg", "ulm")


def samples(count: int, seed: int) -> TensorDataset:
    """The class is the sign of the first of four measurements."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


class MyData(LightningDataModule):
    """As Lightning's documentation writes one."""

    def __init__(self, batch_size: int = 16, noise: float = 0.0) -> None:
        super().__init__()
        self.batch_size, self.noise = batch_size, noise
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        if stage == "fit":
            self.train, self.val = samples(120, 0), samples(30, 1)
        if stage == "test":
            self.test = samples(40, 2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, self.batch_size)


class Visits(Dataset[dict[str, Any]]):
    """Two inputs a sample, a real target, and the site by name."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x, self.scan = torch.randn(count, 3, generator=generator), torch.randn(count, 2, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        y = self.x[index].sum() + self.scan[index].sum()
        return {"blood": self.x[index], "scan": self.scan[index], "y": y, "site": SITES[index % 3]}


class Clinic(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.parts = {"fit": Visits(60, 0), "test": Visits(20, 1)}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["fit"], 8, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["test"], 8)


class Sum(LightningModule):
    """A regression on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blood, self.scan = nn.Linear(3, 1), nn.Linear(4, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.blood(batch["blood"]) + self.scan(batch["scan"].flatten(1))
        return (found.squeeze(1) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ready(data: Wrapped) -> Any:
    data.setup()
    return data


def test_a_plain_module_is_cut_into_clients_and_keeps_its_sets() -> None:
    module = MyData()
    data = ready(Wrapped(module, num_clients=4))
    assert (data.num_classes, data.input_shape, data.output_shape, data.batch_size) == (2, (4,), (2,), 16)
    assert module.calls == ["prepare_data", "fit", "test"]
    assert [data.census.num_samples(k) for k in range(4)] == [30] * 4
    everything = torch.cat([x for k in range(4) for x, _ in data.train_loader(k, torch.Generator())])
    assert torch.equal(everything.sort(dim=0).values, samples(120, 0).tensors[0].sort(dim=0).values)
    assert data.test_loader().num_samples == 40
    assert torch.equal(torch.cat([x for x, _ in data.val_loader()]), samples(30, 1).tensors[0])
    # A quarter of the clients' classes each: of 30 validation samples the clients get a quarter, by IID's test split.
    assert sorted(data.val_loader(k).num_samples for k in range(4)) == [7, 7, 8, 8]
    assert data.has_val
    counts = data.census.class_histogram()
    assert counts.sum() == 120
    assert counts.sum(axis=0).tolist() == np.bincount(samples(120, 0).tensors[1]).tolist()


def test_validation_samples_match_a_clients_training_samples() -> None:
    # Client 0 trains on class 0 only, so that of the validation set it is shown class 0 only.
    labels = samples(120, 0).tensors[1].numpy()
    lists = [np.flatnonzero(labels == label).tolist() for label in (0, 1)]
    data = ready(Wrapped(MyData(), partition=Listed(lists)))
    for client_id in (0, 1):
        assert {int(label) for _, y in data.val_loader(client_id) for label in y} == {client_id}
        assert {int(label) for _, y in data.test_loader(client_id) for label in y} == {client_id}


def test_some_clients_only_have_their_own_validation_samples() -> None:
    here, everybody = ready(Wrapped(MyData(), num_clients=4)), Wrapped(MyData(), num_clients=4)
    everybody.setup(clients=[2])
    assert everybody.has_val
    ours, theirs = (torch.cat([x for x, _ in data.val_loader(2)]) for data in (everybody, here))
    assert torch.equal(ours, theirs)
    assert everybody.record.sha256 == here.record.sha256


def test_without_a_test_set_the_validation_set_is_it() -> None:
    class NoTest(MyData):
        test_dataloader = LightningDataModule.test_dataloader

    data = ready(Wrapped(NoTest(), num_clients=2, val_fraction=0.1))
    assert torch.equal(torch.cat([x for x, _ in data.test_loader()]), samples(30, 1).tensors[0])
    assert data.val_loader().num_samples == 12  # a tenth of 60 for each of two


def test_natural_clients_with_names_several_inputs_and_a_real_target(tmp_path: Path) -> None:
    data = Wrapped(Clinic(), client="site", strata=4)
    made = fit(tmp_path, Sum(), data, max_rounds=3)
    assert (data.num_clients, data.client_names) == (3, list(SITES))
    assert (data.num_classes, data.output_shape, data.input_shape) == (None, (), (3,))
    batch = next(iter(data.train_loader(1, torch.Generator())))
    assert set(batch["site"]) == {"hamburg"}
    assert batch["scan"].shape == (8, 2, 2)
    assert data.test_loader(2).num_samples == 6  # samples 2, 5, … 17 of 20
    losses = [float(row["global/loss"]) for row in rows(made.log_dir / "metrics.csv")]
    assert losses[-1] < losses[0]
    assert data.describe(2)["name"] == "ulm"
    assert len(data.describe(2)["quantiles"]) == 5


def test_strata_of_real_targets_are_what_partitions_cut_by() -> None:
    data = ready(Wrapped(Clinic(), num_clients=3, strata=3, partition=Dirichlet(0.3, min_samples=1)))
    targets = np.array([float(Visits(60, 0)[index]["y"]) for index in range(60)])
    strata = data._ready.strata
    assert np.bincount(strata).tolist() == [20, 20, 20]
    assert targets[strata == 0].max() <= targets[strata == 1].min() <= targets[strata == 1].max()
    np.testing.assert_allclose(data.target_values(np.arange(60)), targets, rtol=1e-6)


def test_from_datasets_and_collate_functions_of_either_kind_of_loader() -> None:
    def doubled(batch: list[Any]) -> Any:
        x, y = zip(*batch, strict=True)
        return 2 * torch.stack(x), torch.stack(y)

    class Collated(MyData):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train, 10, collate_fn=doubled)

    data = ready(Wrapped(Collated(), num_clients=1, batch_size=120))
    ((train, _),) = data.train_loader(0, torch.Generator())
    assert torch.equal(train.sort(dim=0).values, 2 * samples(120, 0).tensors[0].sort(dim=0).values)
    test = torch.cat([x for x, _ in data.test_loader()])
    assert torch.equal(test, samples(40, 2).tensors[0])
    plain = LightningDataModule.from_datasets(samples(20, 0), test_dataset=samples(10, 1), batch_size=5)
    data = ready(Wrapped(plain, num_clients=2))
    assert (data.batch_size, data.census.num_samples(0), data.test_loader().num_samples) == (5, 10, 10)


class Rows(Dataset[dict[str, Any]]):
    """Rows as ``Dataset.from_parquet`` of Hugging Face gives them: plain values, lists of any length."""

    def __init__(self, count: int) -> None:
        self.rows = [{"words": [index % 3] * (2 + index % 2), "label": index % 2} for index in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def padded(batch: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    words = [torch.tensor(row["words"], dtype=torch.float32) for row in batch]
    x = torch.stack([nn.functional.pad(one, (0, 4 - len(one))) for one in words])
    return x, torch.tensor([row["label"] for row in batch])


class Texts(LightningDataModule):
    collate_fn: Any = staticmethod(padded)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(24), 4, collate_fn=self.collate_fn)  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(8), 4, collate_fn=self.collate_fn)  # type: ignore[arg-type]


def test_samples_without_tensors_are_judged_by_the_batch_that_the_collate_function_makes(tmp_path: Path) -> None:
    data = Wrapped(Texts(), num_clients=3, partition=Dirichlet(0.5, min_samples=2))
    assert (data.input_shape, data.num_classes) == ((4,), 2)
    made = fit(tmp_path, Classifier("logistic", input_shape=(4,), num_classes=2), data)
    assert len(rows(made.log_dir / "metrics.csv")) == 2
    x, y = (torch.cat(parts) for parts in zip(*data.test_loader(), strict=True))  # two batches of four
    # 0 0, 1 1 1, 2 2, 0 0 0, 1 1, 2 2 2, 0 0, 1 1 1
    assert x[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert x[:, 2].tolist() == [0, 1, 0, 0, 0, 2, 0, 1]
    assert y.tolist() == [0, 1] * 4


class Counting(Dataset[tuple[Tensor, int]]):
    """Keeps its labels as torchvision's data sets do, rightly or not, and counts how often it is read."""

    def __init__(self, shift: int = 0) -> None:
        self.targets, self.shift, self.read = [0, 1, 2] * 20, shift, 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        return torch.zeros(2), (self.targets[index] + self.shift) % 3


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_that_a_data_set_keeps_are_believed_where_its_samples_say_the_same(shift: int) -> None:
    inner = Counting(shift)
    nested = ConcatDataset([Subset(inner, list(range(30))), Subset(inner, list(range(59, 29, -1)))])
    data = Wrapped(LightningDataModule.from_datasets(nested, test_dataset=Counting()), num_clients=2)
    data.setup()
    expected = [(index + shift) % 3 for index in [*range(30), *range(59, 29, -1)]]
    assert data._ready.strata is not None
    assert data._ready.strata.tolist() == expected
    assert (inner.read < 40) == (shift == 0)  # some samples are looked at; all where the list is of other labels


# --- the command line


def test_the_command_line_wraps_a_plain_module(tmp_path: Path) -> None:
    words = ["fit", "--model", "Classifier", "--model.network", "logistic", "--algorithm", "FedAvg"]
    words += [
        "--data",
        "tests.data.formats.test_wrapped.MyData",
        "--data.num_clients",
        "3",
        "--data.module.batch_size",
        "8",
    ]
    words += ["--trainer.max_rounds", "2", "--trainer.default_root_dir", str(tmp_path), "--trainer.logger", "false"]
    main(
        [*words, "--trainer.enable_progress_bar", "false", "--data.partition", "Dirichlet", "--trainer.evaluate_on=val"]
    )
    folder = tmp_path / "lightning_logs/version_0"
    assert len(rows(folder / "metrics.csv")) == 2
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    assert "class_path: lit_fed.data.Wrapped" in config
    assert "batch_size: 8" in config
    again = ["--ckpt_path", str(folder / "checkpoints/last.ckpt"), "--trainer.logger", "false"]
    main(["test", "-c", str(folder / "config.yaml"), *again])


def test_a_module_in_a_file_that_is_named_as_data_is_wrapped_too(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data.yaml").write_text("class_path: tests.data.formats.test_wrapped.MyData\n", encoding="utf-8")
    words = ["fit", "--model", "Classifier", "--algorithm", "FedAvg", "--data", str(tmp_path / "data.yaml")]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--print_config"])
    assert not ended.value.code
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert data["class_path"] == "lit_fed.data.Wrapped"
    assert data["init_args"]["module"]["class_path"] == "tests.data.formats.test_wrapped.MyData"


def test_a_trainer_is_told_to_wrap(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"MyData object.*; it has no clients; wrap its data: lit_fed\.data\.Wrapped\(My"
    ):
        fit(tmp_path, Sum(), MyData())  # type: ignore[arg-type]


# --- what cannot work


def giving(name: str, loader: Any) -> LightningDataModule:
    module = MyData()
    setattr(module, name, lambda: loader)
    return module


def setting(module: LightningDataModule, **attributes: Any) -> LightningDataModule:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(2), 0


class Streaming(MyData):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


class Broken(MyData):
    def setup(self, stage: str) -> None:
        raise FileNotFoundError("scans.h5 is gone")


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * x for x, _ in super().__iter__())


class Crooked(Visits):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"site": 0.5, "name": torch.zeros(index)}


ONE = samples(8, 0)


def doubled(batch: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(batch)
    return 2 * x, y


def tripled(batch: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(batch)
    return 3 * x, y


def begin(worker: int) -> None:
    torch.set_num_threads(1)


TABLE: dict[str, tuple[str, Any]] = {
    "dataset": ("kept", ONE),
    "batch_size": ("kept", 3),
    "shuffle": ("replaced", None),
    "sampler": ("refused", WeightedRandomSampler([1.0] * 8, 8)),
    "batch_sampler": ("refused", [[0, 1]]),
    "num_workers": ("kept", 1),
    "collate_fn": ("kept", doubled),
    "pin_memory": ("replaced", True),
    "drop_last": ("kept", True),
    "timeout": ("kept", 50),
    "worker_init_fn": ("kept", begin),
    "multiprocessing_context": ("kept", "fork"),
    "generator": ("replaced", torch.Generator()),
    "prefetch_factor": ("kept", 3),
    "persistent_workers": ("replaced", False),
    "pin_memory_device": ("replaced", ""),
    "in_order": ("replaced", False),
}
"""The arguments of a loader: what becomes of each, and a value that a user may give."""
OF_WORKERS = {"timeout": 50, "worker_init_fn": begin, "multiprocessing_context": "fork", "prefetch_factor": 3}


def test_the_table_of_the_page_has_every_argument_of_a_loader() -> None:
    page = (Path(__file__).parents[3] / "docs" / "own_data.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| `(\w+)` \| (kept|replaced|refused)", page, re.MULTILINE))
    assert found == {name: what for name, (what, _) in TABLE.items()}
    assert set(inspect.signature(DataLoader).parameters) <= found.keys()


@pytest.mark.parametrize("part", ["train", "val", "test", "predict"])
@pytest.mark.parametrize("name", [name for name, (what, _) in TABLE.items() if what != "refused"])
def test_every_argument_of_every_loader_is_kept_or_named(
    name: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    what, value = TABLE[name]
    plain = {"shuffle": part == "train", "persistent_workers": True, "num_workers": 1}
    given = {name: value} if name in ("dataset", "generator") else {name: value, "generator": None}
    if name == "shuffle":
        given = {"shuffle": part != "train"}
    if name not in ("persistent_workers", "num_workers", *OF_WORKERS):
        plain |= {"num_workers": 0, "persistent_workers": False}
    loaders = {one: DataLoader(samples(8, at), 4, shuffle=one == "train") for at, one in enumerate(PARTS)}
    loaders[part] = DataLoader(**{"dataset": samples(8, 5), "batch_size": 4} | plain | given)
    module = LightningDataModule()
    for one, loader in loaders.items():
        setattr(module, f"{one}_dataloader", lambda loader=loader: loader)
    data = Wrapped(module, num_clients=1)
    data.setup()
    found: Any = {
        "train": lambda: data.train_loader(0, torch.Generator()),
        "val": data.val_loader,
        "test": data.test_loader,
        "predict": data.predict_dataloader,
    }[part]()
    batches, dataset = list(found), loaders[part].dataset
    x = torch.cat([batch[0] for batch in batches])
    assert isinstance(dataset, TensorDataset)
    own = dataset.tensors[0] * (2 if name == "collate_fn" else 1)
    order = x[:, 0].argsort(), own[:, 0].argsort()
    assert len(batches) == (3 if name == "batch_size" else 2)
    if part == "train" or name != "shuffle":
        assert torch.equal(x[order[0]], own[order[1]])
    if part != "train":
        assert torch.equal(x, own), "in the order of the data set"
    # A loader of 8 samples in batches of 4 drops none; the test below has the others.
    printed = capsys.readouterr().out
    where = f"of MyData.{part}_dataloader".replace("MyData", "LightningDataModule")
    says_so = what == "replaced" and name not in ("pin_memory", "pin_memory_device")
    says_so |= name == "drop_last" and part != "train"
    assert (f"{name}" in printed and where in printed) == says_so, printed
    assert printed.count("the federation replaces") == says_so
    if part in ("train", "test") and (name in OF_WORKERS or name == "num_workers"):
        pool = data._pools[part == "train"]._loader
        assert pool.num_workers == 1
        if name == "worker_init_fn":
            assert pool.worker_init_fn.args == (begin,)  # type: ignore[union-attr]
        elif name == "multiprocessing_context":
            assert pool.multiprocessing_context.get_start_method() == "fork"
        elif name != "num_workers":
            assert getattr(pool, name) == OF_WORKERS[name]
    data.teardown("fit")


PARTS = ("train", "val", "test", "predict")


def test_settings_of_the_data_take_the_place_of_the_loaders(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"train": 7, "val": 3, "test": 5}

    class Sized(MyData):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train, sizes["train"], shuffle=True, drop_last=True, num_workers=1)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.val, sizes["val"], collate_fn=tripled)

        def test_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.test, sizes["test"], drop_last=True, collate_fn=doubled)

    data = ready(Wrapped(Sized(), num_clients=1, num_workers=0))
    # 120 = 17·7 + 1 training samples, of which the last batch is dropped; no test sample is.
    assert [len(x) for x, _ in data.train_loader(0, torch.Generator())] == [7] * 17
    assert [len(x) for x, _ in data.val_loader()] == [len(x) for x, _ in data.val_loader(0)] == [3] * 10
    assert [len(x) for x, _ in data.test_loader()] == [len(x) for x, _ in data.test_loader(0)] == [5] * 8
    val, test = (torch.cat([x for x, _ in loader]) for loader in (data.val_loader(), data.test_loader()))
    assert torch.equal(val, 3 * samples(30, 1).tensors[0])
    assert torch.equal(test, 2 * samples(40, 2).tensors[0])
    assert capsys.readouterr().out == (
        "the federation replaces persistent_workers of Sized.train_dataloader; drop_last=True of "
        "Sized.test_dataloader (docs/own_data.md has the table)\n"
    )
    few = Wrapped(Sized(), num_clients=1, num_workers=0, drop_last=False, test_batch_size=20, shared_batch_size=30)
    few = ready(few)
    assert [len(x) for x, _ in few.train_loader(0, torch.Generator())] == [7] * 17 + [1]
    assert [len(x) for x, _ in few.test_loader(0)] == [20, 20]
    assert [len(x) for x, _ in few.test_loader()] == [30, 10]
    assert [len(x) for x, _ in few.val_loader(0)] == [20, 10]


def test_a_client_with_less_than_a_batch_trains_in_spite_of_drop_last() -> None:
    plain = LightningDataModule.from_datasets(samples(9, 0), test_dataset=samples(4, 1))
    loader = DataLoader(samples(9, 0), 4, shuffle=True, drop_last=True)
    data = ready(Wrapped(setting(plain, train_dataloader=lambda: loader), num_clients=3))
    assert [len(x) for x, _ in data.train_loader(0, torch.Generator())] == [3]


def test_predictions_are_on_the_modules_own_loader(tmp_path: Path) -> None:
    class Predicting(MyData):
        def predict_dataloader(self) -> DataLoader[Any]:
            assert self.calls[-1] == "predict"
            return DataLoader(samples(11, 7), 4)

    task, data, method = Classifier("logistic", input_shape=(4,), num_classes=2), Wrapped(Predicting()), FedAvg()
    made = fit(tmp_path, task, data, method, max_rounds=1)
    made.predict(task, data, method, output=str(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as found:
        assert np.array_equal(found["label"], samples(11, 7).tensors[1].numpy())


def datasets(train: Dataset[Any], test: Dataset[Any] | None = None, **kwargs: Any) -> Wrapped:
    return Wrapped(LightningDataModule.from_datasets(train, test_dataset=test), **kwargs)


REFUSED: dict[str, tuple[Any, str]] = {
    "federation": (
        lambda: Wrapped(Digits()),
        "Digits is already a federated data module; use it as data, without Wrapped",
    ),
    "hook": (lambda: Wrapped(Streaming()), "overrides transfer_batch_to_device, which clients do not call; move it"),
    "part": (
        lambda: giving("train_dataloader", DataLoader(ONE, sampler=RandomSampler(ONE, num_samples=3))),
        "train_dataloader has the sampler RandomSampler of 3 of 8 samples, which clients do not use; leave it out",
    ),
    "own iteration": (
        lambda: giving("train_dataloader", Doubling(ONE)),
        "returns a Doubling that overrides __iter__, which clients do not call; move it to the data set or to",
    ),
    "several": (
        lambda: giving("train_dataloader", [DataLoader(ONE)]),
        "MyData.train_dataloader returns a list; return one torch.utils.data.DataLoader",
    ),
    "stream": (
        lambda: giving("train_dataloader", DataLoader(Stream())),
        "reads an IterableDataset, which cannot be split among clients; give a map-style",
    ),
    "sampler": (
        lambda: giving("train_dataloader", DataLoader(ONE, sampler=WeightedRandomSampler([1.0] * 8, 8))),
        "train_dataloader has the sampler WeightedRandomSampler, which clients do not use; leave it out",
    ),
    "batches": (
        lambda: giving("test_dataloader", DataLoader(ONE, batch_sampler=[[0, 1]])),
        "MyData.test_dataloader has a custom batch sampler (list), which clients do not use; give a batch_size",
    ),
    "single": (
        lambda: giving("test_dataloader", DataLoader(ONE, batch_size=None)),
        "a custom batch sampler (no batches)",
    ),
    "empty": (
        lambda: giving("val_dataloader", DataLoader(Subset(ONE, []))),
        "val_dataloader: its data set has no samples",
    ),
    "untrained": (LightningDataModule, "has no train_dataloader; give it one to train on"),
    "untested": (lambda: datasets(ONE), "has neither a test_dataloader nor a val_dataloader; give it one to test on"),
    "broken": (Broken, "data.module Broken failed in setup: FileNotFoundError: scans.h5 is gone"),
    "val": (
        lambda: Wrapped(MyData(), val_fraction=0.1),
        "MyData has 30 validation samples in a separate set; set the fraction to 0",
    ),
    "key": (
        lambda: Wrapped(Clinic(), client="city"),
        "a sample has no field 'city', as it is a dictionary of blood, scan, y, site; correct the setting",
    ),
    "position": (lambda: Wrapped(MyData(), target=2), "has no field 2, as it is a tuple of 2; correct the setting"),
    "real client": (lambda: Wrapped(MyData(), client=0), "is not a client; give names or integers"),
    "strata": (lambda: Wrapped(MyData(), strata=0), "data.strata is 0; it must be at least 1"),
    "no strata": (
        lambda: Wrapped(Clinic(), target="scan", strata=2),
        "data.strata is 2, and Clinic has no numerical target",
    ),
    "no tensor": (
        lambda: datasets(Rows(4), Rows(2)).input_shape,
        "a sample holds no tensor beside its target; give inputs as tensors, or a collate_fn that makes some",
    ),
    "no batch": (
        lambda: Wrapped(setting(Texts(), collate_fn=lambda batch: batch[5])).input_shape,
        "Texts.train_dataloader: collate_fn fails on one sample (IndexError: list index out of range); correct it",
    ),
    "names": (lambda: Wrapped(MyData(), class_names=["a"]), "class_names has 1 names for 2 classes; give one each"),
    "classes": (lambda: Wrapped(MyData(), num_classes=1), "label 1 of sample"),
    "shape": (
        lambda: datasets(Crooked(9, 0), ONE, target="name", strata=2),
        "the samples' field 'name' differs in shape; correct the setting",
    ),
    "float client": (
        lambda: datasets(Crooked(9, 0), Crooked(3, 0), client="site"),
        "0.5 at 'site' is not a client; give names or integers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_a_line(case: str) -> None:
    build, message = REFUSED[case]

    def use() -> None:
        made = build()
        data = made if isinstance(made, Wrapped) else Wrapped(made)
        _ = data.num_classes
        data.setup()

    with pytest.raises(ConfigError) as error:
        use()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
