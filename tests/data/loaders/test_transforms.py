"""Batched transforms against torchvision and plain slicing, image by image."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms import v2

from lit_fed.data.loaders.transforms import (
    Augmentation,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomTransform,
    Resize,
    crop_and_flip,
)
from lit_fed.errors import ConfigError


def images(count: int, channels: int = 3, height: int = 7, width: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_and_flip_equals_padding_slicing_and_mirroring_each_image(padding, dtype):
    x = images(40).to(dtype)
    generator = torch.Generator().manual_seed(1)
    transform = Augmentation([RandomCrop(padding), RandomHorizontalFlip()])
    draws = transform.draw(40, generator)
    top, left, flip = draws
    assert {int(top.min()), int(left.min())} == {0}
    assert {int(top.max()), int(left.max())} == {2 * padding}
    expected = []
    for i in range(40):
        one = v2.functional.crop(v2.functional.pad(x[i], [padding]), int(top[i]), int(left[i]), 7, 9)
        expected.append(v2.functional.horizontal_flip(one) if flip[i] else one)
    assert torch.equal(transform.apply(x, draws), torch.stack(expected))


def test_a_composition_in_another_order_applies_its_parts_in_turn():
    x = images(20)
    transform = Augmentation([RandomHorizontalFlip(), RandomCrop(2)])
    draws = transform.draw(20, torch.Generator().manual_seed(1))
    expected = []
    for i in range(20):
        one = v2.functional.horizontal_flip(x[i]) if draws[0, i] else x[i]
        expected.append(v2.functional.pad(one, [2])[:, draws[1, i] : draws[1, i] + 7, draws[2, i] : draws[2, i] + 9])
    assert torch.equal(transform.apply(x, draws), torch.stack(expected))


@pytest.mark.parametrize("transform", [RandomCrop(2), RandomHorizontalFlip()])
def test_a_single_transform_equals_its_composition(transform: RandomTransform):
    x = images(10)
    draws = transform.draw(10, torch.Generator().manual_seed(3))
    assert draws.shape == (transform.num_draws, 10)
    assert torch.equal(transform.apply(x, draws), Augmentation([transform]).apply(x, draws))


def test_flip_probability_is_one_half_and_offsets_are_uniform():
    generator = torch.Generator().manual_seed(0)
    flips = RandomHorizontalFlip().draw(10_000, generator)
    # Standard deviation of the mean of 10,000 fair coins: 0.5/100 = 0.005; five of those.
    assert abs(flips.float().mean() - 0.5) < 0.025
    counts = torch.bincount(RandomCrop(4).draw(9_000, generator).flatten())
    # 18,000 offsets over 9 values: 2,000 each, standard deviation sqrt(18000·1/9·8/9) = 42; five of those.
    assert counts.shape == (9,)
    assert (counts - 2000).abs().max() < 5 * 42.2


def test_normalize_equals_torchvision():
    x = images(5, 3)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    expected = v2.functional.normalize(v2.functional.to_dtype(x, torch.float32, scale=True), mean, std)
    torch.testing.assert_close(Normalize(mean, std)(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_normalize_casts_windows_to_float32_and_leaves_the_stored_data_alone(dtype):
    x = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]], dtype=dtype)  # one window of 2 channels × 2 steps
    stored = x.clone()
    y = Normalize((1.0, 1.0), (1.0, 2.0), max_value=1.0)(x)
    # (1−1)/1, (2−1)/1; (3−1)/2, (5−1)/2
    torch.testing.assert_close(y, torch.tensor([[[0.0, 1.0], [1.0, 2.0]]]))
    assert y.dtype == Normalize(max_value=1.0)(x).dtype == torch.float32
    assert torch.equal(x, stored)


def test_resize_equals_torchvision():
    x = images(2, 3, 8, 8).float()
    expected = v2.functional.resize(x, [16, 16], antialias=True)
    torch.testing.assert_close(Resize(16)(x), expected)
    assert Resize(8)(x) is x


def test_crop_and_flip_does_not_change_its_input():
    x = images(4)
    before = x.clone()
    ones = torch.ones(4, dtype=torch.int64)
    crop_and_flip(x, 1, ones, ones, ones)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RandomCrop(-1), "RandomCrop.padding is -1"),
        (lambda: Normalize((0.0,), (0.0,)), "std"),
        (lambda: Normalize((0.0,), (1.0, 1.0)), "mean has 1 values and std has 2"),
        (lambda: Normalize(max_value=0), "max_value is 0"),
        (lambda: Resize(0), "Resize.size is 0"),
    ],
)
def test_errors_name_the_setting(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
