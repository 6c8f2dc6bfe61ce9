"""Generators: shapes, what depends on what, settings that cannot be."""

import pytest
import torch
from torch import nn

from lit_fed.errors import ConfigError
from lit_fed.networks import ImageGenerator, LatentGenerator, SmallCNN
from lit_fed.networks.generators import _Enlarge


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (2, 9, 14)])
def test_images_have_the_shape_of_the_data(shape: tuple[int, ...]) -> None:
    made = ImageGenerator(shape, num_classes=3, noise_size=4, width=2)(torch.rand(5, 4), torch.arange(5) % 3)
    assert made.shape == (5, *shape)


def test_images_come_normalised() -> None:
    made = ImageGenerator((1, 8, 8), num_classes=3)(torch.rand(64, 64), torch.arange(64) % 3)
    torch.testing.assert_close(made.mean(), torch.zeros(()), rtol=0, atol=1e-5)  # by the batch norm that ends it
    torch.testing.assert_close(made.var(unbiased=False), torch.ones(()), rtol=0, atol=1e-2)  # its ε of 1e-5


def test_parameters_of_the_latent_generator_by_hand() -> None:
    # 10 + 3 inputs to 5 units: 13·5 + 5; batch norm 2·5; 5 to 7 features: 5·7 + 7.
    found = LatentGenerator(num_features=7, num_classes=3, noise_size=10, hidden=5)
    assert sum(parameter.numel() for parameter in found.parameters()) == 13 * 5 + 5 + 10 + 5 * 7 + 7
    assert found(torch.rand(4, 10), torch.tensor([0, 1, 2, 0])).shape == (4, 7)


def test_the_label_matters() -> None:
    found, noise = LatentGenerator(2, 3).eval(), torch.rand(1, 32)
    assert not torch.equal(found(noise, torch.tensor([0])), found(noise, torch.tensor([1])))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ImageGenerator\.input_shape is \(64,\); .* generate features"):
        ImageGenerator((64,), 10)
    with pytest.raises(ConfigError, match="width is 0"):
        ImageGenerator((1, 8, 8), 10, width=0)
    with pytest.raises(ConfigError, match="noise_size is 0"):
        LatentGenerator(4, 10, noise_size=0)
    with pytest.raises(ConfigError, match="hidden is 0"):
        LatentGenerator(4, 10, hidden=0)


def test_cnns_of_three_widths_have_features_of_one_length() -> None:
    # Width w on 8×8: 9w + w, then 18w² + 2w, then 8w·64 + 64, and 64·10 + 10 of the head.
    for width in (16, 8, 4):
        found = SmallCNN(width=width, num_features=64)
        assert found.forward_features(torch.zeros(2, 1, 8, 8)).shape == (2, 64)
        expected = 10 * width + 18 * width**2 + 2 * width + 8 * width * 64 + 64 + 650
        assert sum(parameter.numel() for parameter in found.parameters()) == expected


@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 4)), ((16, 16), (64, 64)), ((4, 7), (9, 14))])
def test_enlarging_is_torch_s_upsampling_bit_for_bit(before: tuple[int, int], after: tuple[int, int]) -> None:
    ours, theirs = (torch.randn(5, 6, *before, generator=torch.manual_seed(0)).requires_grad_() for _ in range(2))
    made, expected = _Enlarge(after)(ours), nn.Upsample(size=after)(theirs)
    assert torch.equal(made, expected)
    weights = torch.randn(made.shape)
    ours_grad, theirs_grad = (torch.autograd.grad(y, x, weights)[0] for y, x in ((made, ours), (expected, theirs)))
    assert torch.equal(ours_grad, theirs_grad)


def test_enlarging_copies_no_map_to_another_memory_format() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _Enlarge((64, 64))(torch.randn(2, 6, 32, 32))
    ran = {event.key for event in profiler.key_averages()}
    assert "aten::upsample_nearest2d" in ran
    assert "aten::copy_" not in ran
