"""What a client, or an evaluation, sees of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lit_fed.data import Digits, View
from lit_fed.errors import ConfigError


def half(batch: Any) -> Any:
    x, y = batch
    return x[..., ::2, ::2], y


class HalfResolution(Digits):
    """Odd clients see every other pixel of every other line."""

    def view(self, client_id: int) -> View | None:
        return half if client_id % 2 else None

    def views(self) -> Mapping[str, View]:
        return {"full": lambda batch: batch, "half": half}


class Noisy(Digits):
    """Client 0 sees noise of its own."""

    def view(self, client_id: int) -> View | None:
        return (lambda batch: (batch[0] + torch.rand(()), batch[1])) if client_id == 0 else None


def ready(cls: type[Digits], **kwargs: Any) -> Any:
    data = cls(num_clients=4, **kwargs)
    data.reserve(public_size=40, calibration_fraction=0.1)
    data.setup()
    return data


def shapes(loader: Any) -> set[tuple[int, ...]]:
    return {tuple(x.shape[1:]) for x, _ in loader}


def test_a_client_sees_all_of_its_data_in_its_own_view():
    data = ready(HalfResolution, val_fraction=0.2)
    for client_id, shape in ((0, (1, 8, 8)), (1, (1, 4, 4))):
        loaders = (
            data.train_loader(client_id, torch.Generator()),
            data.val_loader(client_id),
            data.test_loader(client_id),
            data.calibration_loader(client_id),
            data.public_loader(client_id=client_id),
        )
        assert all(shapes(loader) == {shape} for loader in loaders)
    assert all(
        shapes(loader) == {(1, 8, 8)} for loader in (data.test_loader(), data.val_loader(), data.public_loader())
    )


def test_a_view_changes_neither_the_order_nor_the_sizes():
    plain, seen = ready(Digits, crop_padding=1), ready(HalfResolution, crop_padding=1)
    first, second = (data.train_loader(1, torch.Generator().manual_seed(3)) for data in (plain, seen))
    assert (len(first), first.num_samples) == (len(second), second.num_samples)
    for _ in range(2):  # epochs
        for (x, y), (small, same) in zip(first, second, strict=True):
            assert torch.equal(x[..., ::2, ::2], small)
            assert torch.equal(y, same)


def test_an_evaluation_names_a_view():
    data = ready(HalfResolution, val_fraction=0.2)
    assert list(data.views()) == ["full", "half"]
    assert shapes(data.test_loader(view="half")) == shapes(data.val_loader(view="half")) == {(1, 4, 4)}
    assert shapes(data.test_loader(1, view="full")) == {(1, 8, 8)}
    with pytest.raises(ConfigError, match="HalfResolution has no view named 'quarter'; it has full, half"):
        data.test_loader(view="quarter")
    with pytest.raises(ConfigError, match="Digits has no view named 'half'; it has none"):
        ready(Digits).test_loader(view="half")


class SharedInHalf(HalfResolution):
    def shared_view(self) -> View | None:
        return half


def test_what_is_nobodys_own_has_a_view_too():
    data = ready(SharedInHalf, val_fraction=0.2)
    shared = (data.test_loader(), data.val_loader(), data.public_loader(), data.train_dataloader())
    assert all(shapes(loader) == {(1, 4, 4)} for loader in (*shared, data.test_dataloader(), data.val_dataloader()))
    assert shapes(data.test_loader(0)) == {(1, 8, 8)}
    assert shapes(data.test_loader(view="full")) == {(1, 8, 8)}


def test_without_a_view_the_loader_is_the_bare_one():
    data = ready(HalfResolution)
    assert type(data.train_loader(0, torch.Generator())) is type(ready(Digits).train_loader(0, torch.Generator()))


def test_a_random_view_follows_the_loaders_generator_and_nothing_else():
    data, plain = ready(Noisy), ready(Digits)

    def epochs(seed: int) -> list[torch.Tensor]:
        pairs = (each.train_loader(0, torch.Generator().manual_seed(seed)) for each in (data, plain))
        noisy, bare = pairs
        return [x - y for _ in range(2) for (x, _), (y, _) in zip(noisy, bare, strict=True)]

    torch.manual_seed(1)
    first = epochs(5)
    state = torch.random.get_rng_state()
    again = epochs(5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    noise = [round(float(values.mean()), 5) for values in first]
    assert len(set(noise)) == len(noise)  # every batch of both epochs has its own
    assert all(torch.equal(a[0], b[0]) for a, b in zip(data.test_loader(0), data.test_loader(0), strict=True))
