"""The in-memory loader: order, coverage, reproducibility and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.data.loaders import tensor_loader
from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.data.loaders.transforms import Augmentation, Normalize, RandomCrop, RandomHorizontalFlip


def data(count: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count, dtype=torch.float32).reshape(count, 1), torch.arange(count)


@given(st.integers(0, 30), st.integers(1, 12), st.booleans(), st.booleans())
def test_batches_have_the_promised_sizes_and_cover_the_samples(count, batch_size, drop_last, shuffle):
    x, y = data()
    generator = torch.Generator().manual_seed(0) if shuffle else None
    indices = torch.arange(30).flip(0)[:count]
    loader = TensorLoader(x, y, indices, batch_size, generator, drop_last=drop_last)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert sum(len(targets) for _, targets in batches) == loader.num_samples
    assert all(len(targets) == batch_size for _, targets in batches[:-1])
    assert all(torch.equal(inputs[:, 0].long(), targets) for inputs, targets in batches)
    seen = torch.cat([targets for _, targets in batches]).tolist() if batches else []
    assert len(set(seen)) == len(seen)
    if not drop_last or count < batch_size:
        assert sorted(seen) == sorted(indices.tolist())
    elif count >= batch_size:
        assert loader.num_samples == count // batch_size * batch_size
    if not shuffle:
        assert seen == indices[: len(seen)].tolist()


def test_every_iteration_draws_on_from_the_generator():
    x, y = data()
    first = TensorLoader(x, y, torch.arange(30), 7, torch.Generator().manual_seed(5))
    second = TensorLoader(x, y, torch.arange(30), 7, torch.Generator().manual_seed(5))
    epochs = [[torch.cat([targets for _, targets in loader]) for _ in range(2)] for loader in (first, second)]
    assert torch.equal(epochs[0][0], epochs[1][0])
    assert torch.equal(epochs[0][1], epochs[1][1])
    assert not torch.equal(epochs[0][0], epochs[0][1])


def test_the_order_is_the_generators_permutation():
    x, y = data()
    indices = torch.arange(29, 9, -1)
    loader = TensorLoader(x, y, indices, 6, torch.Generator().manual_seed(1))
    expected = indices[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(torch.cat([targets for _, targets in loader]), expected)


@pytest.mark.parametrize(("count", "batch_size", "drop_last", "batches"), [
    (20, 6, False, 4),
    (20, 6, True, 3),
    (4, 6, False, 1),
    (18, 6, False, 3),
])  # fmt: skip
def test_every_fresh_batch_is_the_first_of_a_shuffle_of_its_own(count, batch_size, drop_last, batches):
    # As the public code of FedDr+ draws under LDA: a new iterator over the shuffled loader for every step.
    x, y = data()
    indices = torch.arange(29, 29 - count, -1)
    generator, reference = (torch.Generator().manual_seed(1) for _ in range(2))
    loader = TensorLoader(x, y, indices, batch_size, generator, drop_last=drop_last, fresh=True)
    assert len(loader) == batches
    found = [targets for _ in range(3) for _, targets in loader]
    assert len(found) == 3 * batches
    for targets in found:
        expected = indices[torch.randperm(count, generator=reference)[:batch_size]]
        assert torch.equal(targets, expected)
    assert loader.num_samples == batches * min(batch_size, count)


def test_fresh_batches_of_nobody_are_none():
    x, y = data()
    loader = TensorLoader(x, y, torch.arange(0), 6, torch.Generator(), fresh=True)
    assert (list(loader), len(loader), loader.num_samples) == ([], 0, 0)


def test_chunks_do_not_change_the_batches(monkeypatch):
    x = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50)
    augmentation = Augmentation([RandomCrop(2), RandomHorizontalFlip()])

    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        normalize = Normalize((0.5,) * 3, (0.2,) * 3)
        return list(TensorLoader(x, y, torch.arange(45), 6, generator, augmentation, normalize))

    at_once = batches()
    monkeypatch.setattr(tensor_loader, "_CHUNK_VALUES", 1)  # one batch at a time
    one_by_one = batches()
    monkeypatch.setattr(tensor_loader, "_CHUNK_VALUES", 3 * 8 * 8 * 13)  # two batches at a time
    two_by_two = batches()
    for a, b, c in zip(at_once, one_by_one, two_by_two, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert torch.equal(a[0], c[0])


def test_the_global_generator_and_the_stored_data_stay_as_they_are():
    x = torch.rand(20, 3, 4, 4)
    before, state = x.clone(), torch.random.get_rng_state()
    loader = TensorLoader(
        x, torch.arange(20), torch.arange(20), 4, torch.Generator(), Augmentation([RandomCrop(1)]), Normalize((0.5,))
    )
    for inputs, _ in loader:
        inputs.zero_()
    assert torch.equal(x, before)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_an_accelerator_gives_the_same_batches():
    x = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    y = torch.arange(50)
    augmentation = Augmentation([RandomCrop(2), RandomHorizontalFlip()])
    both = [
        list(
            TensorLoader(
                x.to(device), y.to(device), torch.arange(45), 6, torch.Generator().manual_seed(3), augmentation
            )
        )
        for device in ("cpu", "cuda")
    ]
    for a, b in zip(*both, strict=True):
        assert torch.equal(a[0], b[0].cpu())
        assert torch.equal(a[1], b[1].cpu())
