"""Data sets behind worker processes: one pool for all clients, the same samples for any number of workers."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lit_fed.data import IID, ClientFolders, DatasetModule, Datasets
from lit_fed.data.loaders.worker_loader import Key, WorkerPool
from lit_fed.errors import ConfigError


class Noisy(Dataset[Any]):
    """Samples disturbed by every global generator there is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = [random.random(), np.random.random(), float(torch.rand(()))]  # noqa: NPY002
        return torch.tensor([float(index), *noise]), index % 4


class NoisyModule(DatasetModule):
    num_classes = 4
    input_shape = (4,)

    def build_datasets(self) -> Datasets:
        return Datasets(Noisy(60), np.arange(60) % 4, Noisy(20), np.arange(20) % 4)


def noisy(num_workers: int, **kwargs: Any) -> NoisyModule:
    data = NoisyModule(num_workers=num_workers, num_clients=3, batch_size=8, **kwargs)
    data.reserve(public_size=12)
    data.setup()
    return data


def epochs(data: Any) -> list[torch.Tensor]:
    """Two epochs of every client, and everything else there is."""
    batches: list[torch.Tensor] = []
    for client_id in range(data.num_clients):
        loader = data.train_loader(client_id, torch.Generator().manual_seed(client_id))
        for _ in range(2):
            batches += [tensor for batch in loader for tensor in batch]
    for loader in (data.test_loader(), data.test_loader(1), data.public_loader(torch.Generator().manual_seed(9))):
        batches += [tensor for batch in loader for tensor in batch]
    return batches


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_results_do_not_depend_on_the_number_of_workers():
    random.seed(1)
    torch.manual_seed(1)
    alone = epochs(noisy(0))
    random.seed(2)
    torch.manual_seed(2)
    data = noisy(2)
    assert_equal(alone, epochs(data))
    data.teardown("fit")


def test_samples_are_disturbed_anew_in_each_epoch_and_each_by_its_own_seed():
    loader = noisy(0).train_loader(0, torch.Generator())
    first, second = (torch.cat([x for x, _ in loader]) for _ in range(2))
    first, second = first[first[:, 0].argsort()], second[second[:, 0].argsort()]
    assert torch.equal(first[:, 0], second[:, 0])
    for column in (1, 2, 3):
        values = [*first[:, column].tolist(), *second[:, column].tolist()]
        assert len(set(values)) == len(values)


def test_the_global_generators_stay_as_they_are():
    data = noisy(0)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state())  # noqa: NPY002
    epochs(data)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state())  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_one_pool_of_workers_serves_all_clients():
    data = noisy(2)
    processes = set()
    for client_id in (0, 1, 2, 0):
        list(data.train_loader(client_id, torch.Generator()))
        iterator = data._pools[True]._loader._iterator
        processes.add(tuple(worker.pid for worker in iterator._workers))
    assert len(processes) == 1
    data.teardown("fit")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_abandoned_iteration_leaves_no_trace(num_workers):
    data, fresh = noisy(num_workers), noisy(0)
    next(iter(data.train_loader(0, torch.Generator())))
    again = list(data.train_loader(1, torch.Generator().manual_seed(4)))
    expected = list(fresh.train_loader(1, torch.Generator().manual_seed(4)))
    assert_equal([t for batch in again for t in batch], [t for batch in expected for t in batch])
    data.teardown("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterations_in_any_turn_give_the_batches_of_each_alone(num_workers):
    data, alone = noisy(num_workers), noisy(0)
    sizes = {client_id: len(alone.train_loader(client_id, torch.Generator())) for client_id in range(3)}

    def opened(data: Any) -> dict[int, Any]:
        return {k: data.train_loader(k, torch.Generator().manual_seed(k)) for k in range(3)}

    expected = {k: [*loader, *loader] for k, loader in opened(alone).items()}  # two passes
    iterators = {k: itertools.chain.from_iterable(itertools.repeat(loader)) for k, loader in opened(data).items()}
    left = iter(data.train_loader(0, torch.Generator()))  # an iteration that nobody ends
    next(left)
    turns = [k for k in range(3) for _ in range(2 * sizes[k])]
    found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for k in [0, 1, 2, *random.Random(0).sample(turns, len(turns))][: len(turns)]:
        if len(found[k]) < 2 * sizes[k]:
            found[k].append(next(iterators[k]))
    assert sum(map(len, found.values())) > 3 * max(sizes.values())
    for k, batches in found.items():
        wanted = expected[k][: len(batches)]
        assert_equal([t for batch in batches for t in batch], [t for batch in wanted for t in batch])
    del left, iterators
    assert_equal(epochs(data), epochs(alone))
    data.teardown("fit")


class Failing(Noisy):
    """Sample 3 cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 3:
            raise self.error
        return super().__getitem__(index)

    def __init__(self, error: Exception) -> None:
        super().__init__(8)
        self.error = error


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [ConfigError("sample 3 is damaged"), StopIteration(), ValueError("torn")])
def test_after_a_batch_that_fails_the_others_are_right(error: Exception, num_workers: int) -> None:
    pool = WorkerPool({"train": Failing(error)}, num_workers)
    keys = [[Key("train", index, index, None)] for index in range(8)]
    good = [batch for key in (keys[:3], keys[4:]) for batch in WorkerPool({"train": Noisy(8)}, 0).batches(key)]
    other = pool.batches(keys[4:])
    found = [next(other)]
    said = {ConfigError: "^sample 3 is damaged$", StopIteration: "StopIteration", ValueError: "torn"}[type(error)]
    failing = pool.batches(keys[:4])
    before = [next(failing) for _ in range(3)]
    with pytest.raises(type(error) if type(error) is not StopIteration else RuntimeError, match=said):
        next(failing)
    found += other
    assert_equal([t for batch in before + found for t in batch], [t for batch in good for t in batch])


def masked(samples: list[Any]) -> Any:
    """As a collate function that hides words at random."""
    x, y = default_collate(samples)
    return x * torch.bernoulli(torch.full_like(x, 0.5)), y


class Masked(NoisyModule):
    def build_datasets(self) -> Datasets:
        x = torch.arange(1.0, 61).view(60, 1)
        whole = TensorDataset(x, torch.arange(60) % 4)
        return Datasets(whole, np.arange(60) % 4, whole, np.arange(60) % 4)

    def collate(self, training: bool) -> Any:
        return masked if training else None


def test_a_collate_function_may_draw_whatever_the_number_of_workers():
    both = []
    for num_workers in (0, 2):
        data = Masked(num_clients=3, batch_size=8, num_workers=num_workers)
        data.setup()
        torch.manual_seed(num_workers)
        both.append([x for _ in range(2) for x, _ in data.train_loader(0, torch.Generator())])
        data.teardown("fit")
    assert_equal(*both)
    assert 0 < sum(int((x == 0).sum()) for x in both[0]) < 40


def test_tensors_in_memory_are_batched_as_pytorch_collates_their_samples():
    x, y = torch.randn(40, 3), torch.arange(40)
    order = torch.randperm(40).tolist()

    class Memory(NoisyModule):
        num_classes = None

        def build_datasets(self) -> Datasets:
            whole = Subset(TensorDataset(x, y), order)
            return Datasets(whole, None, whole, None)

    data = Memory(num_clients=1, batch_size=9, test_batch_size=7)
    data.setup()
    wanted = list(DataLoader(Subset(TensorDataset(x, y), order), 7))
    for found, plain in zip(data.test_loader(), wanted, strict=True):
        assert type(found) is type(plain) is list
        assert_equal(found, plain)
    # Two epochs of the workers' loader, whose generator draws an order and then a seed for each sample.
    generator, epochs_found = torch.Generator().manual_seed(3), []
    loader = data.train_loader(0, torch.Generator().manual_seed(3))
    own = data._ready.train[0]
    for _ in range(2):
        epochs_found += [y for _, y in loader]
        rows = own[torch.randperm(len(own), generator=generator).numpy()]
        torch.randint(2**62, (len(own),), generator=generator)
        assert torch.equal(torch.cat(epochs_found)[-len(own) :], torch.tensor(order)[rows])


def test_public_batches_carry_positions_and_no_labels():
    data = noisy(0)
    x, index = (torch.cat(parts) for parts in zip(*data.public_loader(torch.Generator().manual_seed(0)), strict=True))
    fixed = torch.cat([x for x, _ in data.public_loader()])
    assert sorted(index.tolist()) == list(range(12))
    assert torch.equal(fixed[index][:, 0], x[:, 0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_fresh_batch_is_the_first_of_a_shuffle_of_its_own(num_workers):
    data = NoisyModule(num_clients=3, batch_size=8, fresh_batches=True, partition=IID(), num_workers=num_workers)
    data.setup()
    loader = data.train_loader(0, torch.Generator().manual_seed(0))
    own = data._ready.train[0]  # 20 samples
    reference = torch.Generator().manual_seed(0)
    expected = [own[torch.randperm(20, generator=reference)[:8]].tolist() for _ in range(3)]
    assert [x[:, 0].int().tolist() for x, _ in loader] == expected
    data.teardown("fit")


def test_drop_last_keeps_a_client_that_fills_no_batch():
    data = NoisyModule(num_clients=3, batch_size=15, drop_last=True, partition=IID())
    data.setup()
    assert data.train_loader(0, torch.Generator()).num_samples == 15  # of 20
    data.batch_size = 50
    assert len(list(data.train_loader(0, torch.Generator()))) == 1


def write_folders(root: Path, split: bool) -> None:
    """Client k, class c, image i is one colour: (100·k, 100·c, 20·i)."""
    for k, client in enumerate(("anna", "bert")):
        for c, name in enumerate(("cat", "dog")):
            for i in range(5):
                part = ("test" if i == 4 else "train") if split else ""
                folder = root / client / part / name
                folder.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (6, 6), (100 * k, 100 * c, 20 * i)).save(folder / f"{i}.png")
    (root / "notes.txt").write_text("no image")


@pytest.mark.parametrize("split", [False, True])
def test_client_folders_are_the_clients(split, tmp_path):
    write_folders(tmp_path, split)
    data = ClientFolders(root=str(tmp_path), image_size=4, test_fraction=0.2)
    assert (data.num_clients, data.num_classes, data.input_shape) == (2, 2, (3, 4, 4))
    assert data.class_names == ["cat", "dog"]
    normalize = {"step": "normalize", "mean": [0.0], "std": [1.0], "max_value": 255.0}
    assert data.preprocessing() == [normalize]
    data.setup()
    for client_id in range(2):
        assert data.census.num_samples(client_id) == 8
        assert data.test_loader(client_id).num_samples == 2
        for loader in (data.train_loader(client_id, torch.Generator()), data.test_loader(client_id)):
            for x, y in loader:
                pixels = (x * 255).round()
                assert x.dtype == torch.float32
                assert (pixels[:, 0] == 100 * client_id).all()
                assert torch.equal(pixels[:, 1, 0, 0], 100.0 * y)
                if split:
                    assert ((pixels[:, 2, 0, 0] == 80) == (loader.num_samples == 2)).all()


def test_client_folders_do_not_depend_on_the_number_of_workers(tmp_path):
    write_folders(tmp_path, split=False)
    settings: dict[str, Any] = {"image_size": 6, "crop_padding": 2, "horizontal_flip": True}
    both = []
    for num_workers in (0, 2):
        data = ClientFolders(root=str(tmp_path), batch_size=3, num_workers=num_workers, **settings)
        data.reserve(public_size=2)
        data.setup()
        both.append(epochs(data))
        data.teardown("fit")
    assert_equal(*both)


def test_the_folder_of_one_client_in_grey_and_cut_anew(tmp_path):
    write_folders(tmp_path, split=True)
    shutil.rmtree(tmp_path / "bert")
    data = ClientFolders(
        root=str(tmp_path), grayscale=True, partition=IID(), num_clients=4, mean=[0.5], std=[0.5], image_size=5
    )
    data.setup()
    assert [data.census.num_samples(k) for k in range(4)] == [2] * 4
    x, _ = next(iter(data.test_loader()))
    assert x.shape == (2, 1, 5, 5)
    assert x.min() >= -1


def test_folders_that_cannot_work(tmp_path):
    for build, message in (
        (lambda: ClientFolders(root=str(tmp_path / "absent")).num_classes, "is not a folder"),
        (lambda: ClientFolders(root=str(tmp_path)).num_classes, "holds no client folders"),
        (lambda: ClientFolders(test_fraction=1.0), "data.test_fraction is 1.0"),
        (lambda: ClientFolders(image_size=0), "data.image_size is 0"),
        (lambda: ClientFolders(num_workers=-1), "data.num_workers is -1"),
        (lambda: ClientFolders(mean=[0.5, 0.5], std=[0.5, 0.5]), "data.mean has 2 values"),
    ):
        with pytest.raises(ConfigError, match=message):
            build()
    (tmp_path / "anna" / "cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no images"):
        _ = ClientFolders(root=str(tmp_path)).num_classes
    write_folders(tmp_path, split=False)
    (tmp_path / "anna" / "cat" / "0.png").write_bytes(b"not a picture")
    for num_workers in (0, 1):
        data = ClientFolders(root=str(tmp_path), test_fraction=0.2, num_workers=num_workers)
        data.setup()
        with pytest.raises(ConfigError, match=r"0\.png cannot be decoded") as error:
            epochs(data)
        assert "\n" not in str(error.value)
        assert str(error.value).startswith(str(tmp_path))
        data.teardown("fit")
    (tmp_path / "carl" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no train and test folders, and others have"):
        _ = ClientFolders(root=str(tmp_path)).num_classes
