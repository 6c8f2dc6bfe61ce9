"""Pictures taken from images: points go where the picture shows them, at every resolution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.poses.data.warp import Boxes, Means, PoseView, checked_size


def boxes(count: int, seed: int = 0) -> Boxes:
    """Turned, mirrored, larger and smaller, around the middle of an image of 160×120."""
    g = torch.Generator().manual_seed(seed)
    return Boxes(
        centre=torch.tensor([59.5, 79.5]) + 6 * torch.randn(count, 2, generator=g),
        extent=100 + 40 * torch.rand(count, generator=g),
        rotation=torch.randn(count, generator=g),
        flip=(torch.arange(count) % 2).float(),
    )


def blobs(points: Tensor) -> Tensor:
    """Images (n, 1, 160, 120), each with a bright spot of σ = 3 at its point (n, 2)."""
    y, x = torch.meshgrid(torch.arange(160.0), torch.arange(120.0), indexing="ij")
    distance = (x - points[:, 0, None, None]) ** 2 + (y - points[:, 1, None, None]) ** 2
    return torch.exp(-distance / 18)[:, None]


def centroids(pictures: Tensor) -> Tensor:
    """The mean place (x, y) of the light in each picture."""
    light = pictures[:, 0] / pictures[:, 0].sum((1, 2), keepdim=True)
    height, width = light.shape[1:]
    x, y = (light.sum(1) * torch.arange(width)).sum(1), (light.sum(2) * torch.arange(height)).sum(1)
    return torch.stack([x, y], dim=1)


@pytest.mark.parametrize("size", [(256, 192), (64, 48), (48, 36), (64, 64)])
def test_a_point_is_where_the_picture_shows_it(size):
    where = boxes(12)
    points = where.centre + torch.randn(12, 2, generator=torch.Generator().manual_seed(1)) * 8
    found = centroids(where.pictures(blobs(points), size, Means(1, 4)))
    expected = where.points(points[:, None], size)[:, 0]
    # Of a spot of some pixels the mean of bilinear values is off by less than a twentieth of a pixel.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


def test_points_by_hand():
    # A box of 100 pixels around (50, 60), shown at 20×15: a fifth of the size, (50, 60) in the middle, (7, 9.5).
    # A point 10 right and 20 below comes 2 right and 4 below: (9, 13.5).
    where = Boxes(torch.tensor([[50.0, 60.0]]), torch.tensor([100.0]))
    assert where.points(torch.tensor([[[60.0, 80.0]]]), (20, 15)).tolist() == [[[9.0, 13.5]]]
    # Turned by a quarter, 10 right of the middle becomes 2 above it: the picture's right is the image's lower side.
    turned = Boxes(where.centre, where.extent, torch.tensor([math.pi / 2]))
    torch.testing.assert_close(turned.points(torch.tensor([[[60.0, 60.0]]]), (20, 15)), torch.tensor([[[7.0, 7.5]]]))
    # Mirrored, it is 2 left of the middle.
    mirrored = Boxes(where.centre, where.extent, flip=torch.ones(1))
    assert mirrored.points(torch.tensor([[[60.0, 60.0]]]), (20, 15)).tolist() == [[[5.0, 9.5]]]


def test_levels_show_the_same_field():
    where, points = boxes(6), torch.rand(6, 5, 2) * 120
    high, low = where.points(points, (256, 192)), where.points(points, (64, 48))
    # Edge to edge: pixel x of the small picture covers 4x … 4x + 3 of the large one.
    torch.testing.assert_close((high + 0.5) / 4 - 0.5, low, rtol=0, atol=1e-4)


@pytest.mark.parametrize("means", [Means(4, 1), Means(2, 2), Means(1, 4)])
def test_a_pixel_is_the_mean_of_what_it_covers(means):
    image = torch.rand(2, 3, 128, 96)
    whole = Boxes(torch.tensor([[47.5, 63.5]] * 2), torch.tensor([128.0] * 2))
    expected = image.view(2, 3, 32, 4, 24, 4).mean((3, 5))
    torch.testing.assert_close(whole.pictures(image, (32, 24), means), expected, rtol=1e-5, atol=1e-5)


def test_without_means_a_pixel_is_the_value_in_its_middle():
    # The middle of a block of 4×4 lies between its four inner pixels.
    image = torch.rand(1, 1, 16, 12)
    found = Boxes(torch.tensor([[5.5, 7.5]]), torch.tensor([16.0])).pictures(image, (4, 3))
    inner = image.view(1, 1, 4, 4, 3, 4)[:, :, :, 1:3, :, 1:3].mean((3, 5))
    torch.testing.assert_close(found, inner)


def test_what_leaves_the_image_is_black_and_means_need_no_multiple():
    image = torch.ones(1, 1, 17, 13)  # 17 = 4·4 + 1
    found = Boxes(torch.tensor([[6.0, 8.0]]), torch.tensor([34.0])).pictures(image, (34, 26), Means(1, 1))
    assert float(found[0, 0, :7].max()) == 0.0
    assert float(found[0, 0, 10:24, 8:18].min()) == 1.0
    small = Boxes(torch.tensor([[6.0, 8.0]]), torch.tensor([17.0])).pictures(image, (4, 3), Means(4, 1))
    torch.testing.assert_close(small, torch.ones(1, 1, 4, 3))


def batch(training: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two images of 40×30; joints 0 and 1 change places in a mirror."""
    person = {
        "canvas": torch.arange(2 * 3 * 40 * 30).remainder(251).to(torch.uint8).view(2, 3, 40, 30),
        "centre": torch.tensor([[14.5, 19.5], [10.0, 20.0]]),
        "extent": torch.tensor([40.0, 20.0]),
    }
    if training:
        person |= {"rotation": torch.zeros(2), "flip": torch.tensor([0.0, 1.0])}
    else:
        person["origin"] = torch.tensor([[100.0, 200.0], [0.0, 0.0]])
    truth = {
        "keypoints": torch.tensor([[[4.0, 8.0], [20.0, 30.0]], [[10.0, 12.0], [16.0, 24.0]]]),
        "visible": torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        "head_size": torch.tensor([6.0, math.nan]),
        "area": torch.tensor([100.0, 50.0]),
        "image_id": torch.tensor([7, 9]),
    }
    return person, truth


def view(*sizes: tuple[int, int], **kwargs: Any) -> PoseView:
    return PoseView(sizes, [Means()] * len(sizes), lambda images: images / 255, (1, 0), **kwargs)


def test_a_client_sees_its_own_level_and_all_below_with_the_same_box():
    seen = view((40, 30), (20, 15), (8, 6))(batch(training=True))
    assert [tuple(level["image"].shape) for level in (seen, *seen["levels"])] == [
        (2, 3, 40, 30),
        (2, 3, 20, 15),
        (2, 3, 8, 6),
    ]
    # The second person is mirrored and twice as large: x = 14.5 + 2·(10 − joint's x), joints change places.
    assert seen["keypoints"].tolist() == [[[4.0, 8.0], [20.0, 30.0]], [[2.5, 27.5], [14.5, 3.5]]]
    assert seen["visible"].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert seen["head_size"][0] == 6.0
    assert seen["head_size"][1].isnan()
    for level, factor in zip(seen["levels"], (2, 5), strict=True):
        torch.testing.assert_close(level["keypoints"], (seen["keypoints"] + 0.5) / factor - 0.5)
        assert float(level["head_size"][0]) == pytest.approx(6.0 / factor)
        assert torch.equal(level["visible"], seen["visible"])
    # Not a resized top: at 8×6 a pixel is the bilinear value in its middle, of the image itself.
    canvas = batch()[0]["canvas"][0].float().view(3, 8, 5, 6, 5)[:, :, 2, :, 2] / 255
    torch.testing.assert_close(seen["levels"][1]["image"][0], canvas)


def test_an_evaluation_leads_back_to_the_original_image():
    seen = view((20, 15))(batch())
    assert seen["levels"] == []
    # The first person's image begins at (100, 200) of the original.
    back = seen["center"][:, None] + seen["scale"][:, None, None] * (seen["keypoints"] - torch.tensor([7.0, 9.5]))
    torch.testing.assert_close(back[0], torch.tensor([[104.0, 208.0], [120.0, 230.0]]))
    assert seen["area"].tolist() == [25.0, 50.0]  # a quarter of 100; as large as it was
    assert seen["image_id"].tolist() == [7, 9]


@pytest.mark.parametrize("way", ["bilinear", "area", "bicubic"])
def test_a_small_picture_shown_large_has_its_points_there(way):
    person, truth = batch()
    truth["keypoints"][0, 0] = torch.tensor([13.0, 22.0])
    spots = blobs(truth["keypoints"][:, 0])[:, :, :40, :30] * 250
    person["canvas"] = spots.to(torch.uint8).repeat(1, 3, 1, 1)
    small, large = (view((20, 15), shown_as=shown, interpolation=way)((person, truth)) for shown in (None, (80, 60)))
    assert large["image"].shape == (2, 3, 80, 60)
    native = view((80, 60))((person, truth))
    for name in ("keypoints", "head_size", "area", "scale"):
        torch.testing.assert_close(large[name], native[name], equal_nan=True)
    # The first person's joint, away from the border, is where the light is.
    torch.testing.assert_close(centroids(large["image"])[0], large["keypoints"][0, 0], rtol=0, atol=0.25)
    expected = torch.nn.functional.interpolate(small["image"], (80, 60), mode=way)
    assert torch.equal(large["image"], expected)


def test_public_batches_have_positions_and_no_truth():
    image, positions = view((20, 15))((batch()[0], torch.tensor([4, 2])))
    assert image.shape == (2, 3, 20, 15)
    assert positions.tolist() == [4, 2]


@pytest.mark.parametrize("size", [[0, 48], [64], [64, -1]])
def test_resolutions_that_are_none(size):
    with pytest.raises(ConfigError, match=r"data.resolutions has \[.*\]; it must be \[height, width\], both at least"):
        checked_size(size, "resolutions")
