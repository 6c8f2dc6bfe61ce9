"""Heatmaps against closed forms: what is encoded, and what comes back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.poses import MSRA, UDP, HeatmapCodec, dark, gaussian_maps, peaks, quarter_offset

SIZE = (256, 192)


def points(count: int, low: float, high: tuple[float, float], seed: int = 0) -> Tensor:
    """(1, count, 2) in pixels of the picture, from `low` to `high` (x, y)."""
    generator = torch.Generator().manual_seed(seed)
    return low + torch.rand(1, count, 2, generator=generator) * (torch.tensor(high) - low)


def there_and_back(codec: HeatmapCodec, found: Tensor, size: tuple[int, int] = SIZE) -> Tensor:
    """Decoded minus encoded, in pixels of the picture."""
    return codec.decode(codec.encode(found, torch.ones(found.shape[:2]), size), size)[0] - found


def on_heatmap(codec: HeatmapCodec, x: float, y: float) -> Tensor:
    """The heatmap of a point given in pixels of the heatmap, 64 × 48."""
    steps = (191 / 47, 255 / 63) if isinstance(codec, UDP) else (4, 4)
    return codec.encode(torch.tensor([[[x * steps[0], y * steps[1]]]]), torch.ones(1, 1), SIZE)[0, 0]


def test_targets_by_hand():
    # The nearest pixel is .3 away each way: exp(−(.09 + .09)/(2·2²)) = exp(−.0225) = .97775.
    unbiased = on_heatmap(UDP(), 10.3, 20.7)
    assert unbiased.shape == (64, 48)
    assert float(unbiased.max()) == pytest.approx(0.97775, abs=1e-5)
    assert unbiased.argmax() == 21 * 48 + 10
    assert float(unbiased[22, 12]) == pytest.approx(math.exp(-(1.7**2 + 1.3**2) / 8), abs=1e-5)
    rounded = on_heatmap(MSRA(), 10.3, 20.7)
    assert float(rounded.max()) == 1.0
    assert rounded.argmax() == 21 * 48 + 10
    assert float(rounded[22, 12]) == pytest.approx(math.exp(-5 / 8), abs=1e-6)


def test_targets_end_at_three_sigma_and_at_the_border():
    inside = gaussian_maps(torch.tensor([20.0, 20.0]), (64, 48))
    assert int((inside > 0).sum()) == 13**2  # 6 pixels on every side
    corner = gaussian_maps(torch.tensor([-1.0, 0.0]), (64, 48))
    assert int((corner > 0).sum()) == 6 * 7  # columns 0 … 5, rows 0 … 6
    assert float(corner[0, 0]) == pytest.approx(math.exp(-1 / 8))


def test_sigma_follows_the_resolution_where_asked_to():
    codec = UDP(stride=1, sigma=2.0, sigma_height=64)
    visible = torch.ones(1, 1)
    for size, beside in (((64, 48), math.exp(-1 / 8)), ((32, 24), math.exp(-1 / 2)), ((128, 96), math.exp(-1 / 32))):
        heatmap = codec.encode(torch.tensor([[[10.0, 10.0]]]), visible, size)[0, 0]  # σ of 2, 1 and 4 pixels
        assert float(heatmap[10, 11]) == pytest.approx(beside, abs=1e-6)
    # At 32×24 three σ reach 3 pixels: a point 4 columns outside leaves nothing, at 64×48 it does.
    outside = torch.tensor([[[-4.0, 10.0]]])
    assert codec.weights(outside, visible, (32, 24)).tolist() == [[0.0]]
    assert codec.weights(outside, visible, (64, 48)).tolist() == [[1.0]]


def test_what_is_not_visible_gives_zeros_and_what_lies_outside_no_weight():
    codec = UDP()
    # The last column that the map of a point at column −6 could reach is 0; at −7 nothing is left of it.
    x = torch.tensor([50.0, 50.0, -6 * 191 / 47, -7 * 191 / 47])
    found = torch.stack([x, torch.full((4,), 90.0)], dim=-1)[None]
    visible = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    maps = codec.encode(found, visible, SIZE)
    assert [bool(m.any()) for m in maps[0]] == [True, False, True, False]
    assert codec.weights(found, visible, SIZE).tolist() == [[1.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("size", [(256, 192), (128, 96), (64, 48), (32, 24)])
def test_dark_brings_a_target_back_everywhere(size):
    # A Gaussian's logarithm is a parabola, of which one Newton step finds the top; that its tails are cut and smoothed
    # costs up to .001 pixels of the heatmap. The border needs no exception.
    height, width = size
    error = there_and_back(UDP(), points(3000, 0.0, (width - 1, height - 1)), size)
    assert float(error.abs().max()) < 0.01


def test_nothing_is_shifted_at_the_border():
    # Points of all subpixel places within 2 pixels of the heatmap's border, 8 of the picture's, on each side.
    codec, plain = UDP(), UDP(decoding="argmax")
    for low, high in ((0.0, (8.0, 255.0)), (0.0, (191.0, 8.0)), (183.0, (191.0, 255.0))):
        near = points(2000, low, high)
        near = near[(near[..., 1] <= 255.0)][None]
        error, coarse = there_and_back(codec, near), there_and_back(plain, near)
        assert float(error.mean(dim=(0, 1)).abs().max()) < 0.001
        assert float(error.abs().max()) < 0.01
        # half a pixel of the heatmap, (191/47)/2 = 2.03 of the picture, is the most that the peak alone is off
        assert 1.5 < float(coarse.abs().max()) < 2.04
        assert float(error.norm(dim=-1).mean()) < float(coarse.norm(dim=-1).mean())


def test_dark_is_the_public_filter_in_the_interior():
    # kernel 11 gives σ = .3·(5 − 1) + .8 = 2; written out with a plain convolution on a map of two bumps.
    heatmap = gaussian_maps(torch.tensor([20.3, 30.6]), (64, 48)) + 0.3 * gaussian_maps(
        torch.tensor([23.0, 28.0]), (64, 48)
    )
    place = torch.arange(-5.0, 6.0)
    bell = torch.exp(-(place**2) / 8)
    bell = bell / bell.sum()
    smooth = torch.nn.functional.conv2d(heatmap[None, None], torch.outer(bell, bell)[None, None], padding=5)[0, 0].log()
    (x, y) = (int(v) for v in peaks(heatmap)[0])
    gradient = torch.stack([smooth[y, x + 1] - smooth[y, x - 1], smooth[y + 1, x] - smooth[y - 1, x]]) / 2
    cross = (smooth[y + 1, x + 1] - smooth[y - 1, x + 1] - smooth[y + 1, x - 1] + smooth[y - 1, x - 1]) / 4
    hessian = torch.tensor(
        [
            [smooth[y, x + 1] - 2 * smooth[y, x] + smooth[y, x - 1], cross],
            [cross, smooth[y + 1, x] - 2 * smooth[y, x] + smooth[y - 1, x]],
        ]
    )
    expected = torch.tensor([x, y]) - torch.linalg.solve(hessian, gradient)
    torch.testing.assert_close(dark(heatmap, peaks(heatmap)[0]), expected, rtol=1e-4, atol=1e-4)


def test_what_has_no_peak_is_where_its_largest_value_is():
    flat = torch.zeros(2, 3, 16, 12)
    flat[0, 0, 5, 7] = -1.0
    assert torch.equal(dark(flat, peaks(flat)[0]), peaks(flat)[0].float())
    noise = torch.randn(50, 16, 16, 12, generator=torch.Generator().manual_seed(0))
    pixels, scores = peaks(noise)
    assert torch.equal(scores, noise.amax((-2, -1)))
    assert float((dark(noise, pixels) - pixels).abs().max()) <= 1.0


def test_a_quarter_pixel_by_hand():
    heatmap = torch.zeros(1, 2, 5, 6)
    heatmap[0, 0, 2, 3], heatmap[0, 0, 2, 4], heatmap[0, 0, 1, 3] = 1.0, 0.5, 0.25
    heatmap[0, 1, 0, 5] = 1.0  # in the corner: not moved
    found = quarter_offset(heatmap, peaks(heatmap)[0])
    assert found.tolist() == [[[3.25, 1.75], [5.0, 0.0]]]
    codec = MSRA()
    assert codec.decode(heatmap, (20, 24))[0].tolist() == [[[13.0, 7.0], [20.0, 0.0]]]
    assert codec.decode(heatmap, (20, 24))[1].tolist() == [[1.0, 1.0]]


def test_rounding_costs_the_older_form_half_a_pixel():
    error = there_and_back(MSRA(decoding="argmax"), points(3000, 8.0, (180.0, 244.0)))
    # uniform in ±2 pixels: E|e| = 1
    assert float(error.abs().max()) <= 2.0
    assert float(error.abs().mean()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("codec", [UDP(), MSRA()])
def test_a_mirrored_picture_gives_the_same_points(codec):
    # Points 0 and 1 change places. UDP agrees to round-off; MSRA is a quarter of a pixel off before it rounds.
    found = points(2, 40.0, (150.0, 200.0))
    mirrored = torch.stack([191 - found[..., 0], found[..., 1]], dim=-1)[:, [1, 0]]
    ones = torch.ones(1, 2)
    maps, back = codec.encode(found, ones, SIZE), codec.unflip(codec.encode(mirrored, ones, SIZE), [(0, 1)])
    if isinstance(codec, UDP):
        torch.testing.assert_close(back, maps, rtol=0, atol=1e-5)
    else:
        assert float((peaks(back)[0] - peaks(maps)[0]).abs().max()) <= 1
        # moved the other way, or not at all, the mean shift over all subpixel places would be 3/4 or more
        many = torch.stack([torch.linspace(40, 44, 401)[:-1], torch.full((400,), 90.0)], dim=-1)[None]
        other = torch.stack([191 - many[..., 0], many[..., 1]], dim=-1)
        both = [codec.encode(p, torch.ones(1, 400), SIZE) for p in (many, other)]
        shift = (peaks(codec.unflip(both[1], []))[0] - peaks(both[0])[0])[..., 0].float().mean()
        assert float(shift) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stride": 0}, "UDP.stride is 0; it must be at least 1 pixel"),
        ({"sigma": 0.0}, "UDP.sigma is 0.0; it must be above 0 pixels"),
        ({"sigma_height": 0}, "UDP.sigma_height is 0; it must be at least 1 pixel"),
        ({"kernel": 10}, "UDP.kernel is 10; it must be odd, such as 11"),
        ({"decoding": "drak"}, "UDP.decoding is 'drak'; it must be 'dark', 'quarter' or 'argmax'"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        UDP(**settings)


def test_pictures_without_heatmaps():
    message = "an image has 250×192 pixels; for heatmaps of stride 4 both sides must be multiples of 4, at least 12"
    with pytest.raises(ConfigError, match=message):
        UDP().heatmap_size((250, 192))
    with pytest.raises(ConfigError, match="an image has 16×8 pixels; for heatmaps of stride 4"):
        UDP().heatmap_size((16, 8))
