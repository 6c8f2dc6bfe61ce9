"""Points as heatmaps and back: targets, decoding, and the codecs that pair them.

The heatmap of a point is a Gaussian around it, one map per point, smaller than the image by the stride. Points are
(x, y) in pixels, where 0 is the centre of the first pixel; sizes are (height, width), as in shapes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lit_fed.arguments import Checked
from lit_fed.checks import check_choice, check_range
from lit_fed.errors import ConfigError

Decoding = Literal["dark", "quarter", "argmax"]


def gaussian_maps(centres: Tensor, size: tuple[int, int], sigma: float = 2.0) -> Tensor:
    r"""Gaussians of height 1 around points.

    .. math:: H(x, y) = \exp\left(-\frac{(x - c_x)^2 + (y - c_y)^2}{2\sigma^2}\right)

    within 3σ of the pixel nearest to the centre, 0 elsewhere.

    Args:
        centres: c (…, 2), (x, y) in pixels of the map; they may lie between pixels, or outside.
        size: (h, w) of the map.
        sigma: σ in pixels of the map.

    Returns:
        (…, h, w).
    """
    columns, rows = (_bells(centres[..., axis], size[1 - axis], sigma) for axis in (0, 1))
    return rows.unsqueeze(-1) * columns.unsqueeze(-2)


def peaks(heatmaps: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each map and its pixel.

    Args:
        heatmaps: (…, h, w).

    Returns:
        Pixels (…, 2), (x, y), int64, and values (…).
    """
    scores, places = heatmaps.flatten(-2).max(dim=-1)
    width = torch.full_like(places, heatmaps.shape[-1])  # a tensor, as ONNX divides by no size
    return torch.stack([places % width, places // width], dim=-1), scores


def quarter_offset(heatmaps: Tensor, pixels: Tensor) -> Tensor:
    """Move each peak by a quarter of a pixel to its larger neighbour, along x and along y; not at the border.

    Newell, Yang, Deng: "Stacked Hourglass Networks for Human Pose Estimation", ECCV 2016.

    Args:
        heatmaps: (…, h, w).
        pixels: Peaks (…, 2), as `peaks` gives them.

    Returns:
        (…, 2) floating point.
    """
    height, width = heatmaps.shape[-2:]
    inside = (pixels > 0) & (pixels < _sides(pixels, width - 1, height - 1))
    middle = torch.minimum(pixels.clamp_min(1), _sides(pixels, width - 2, height - 2).clamp_min(0))
    flat, (x, y) = heatmaps.flatten(-2), middle.unbind(-1)

    def at(x: Tensor, y: Tensor) -> Tensor:
        place = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).unsqueeze(-1)
        return flat.gather(-1, place).squeeze(-1)

    slopes = torch.stack([at(x + 1, y) - at(x - 1, y), at(x, y + 1) - at(x, y - 1)], dim=-1)
    return pixels + 0.25 * slopes.sign() * inside


def dark(heatmaps: Tensor, pixels: Tensor, kernel: int = 11) -> Tensor:
    r"""Refine each peak by one Newton step on the logarithm of the smoothed map.

    .. math:: \hat p = p - \left(\nabla^2 \ln H'(p)\right)^{-1} \nabla \ln H'(p)

    with H' the map after a Gaussian filter and central differences of one pixel. It is exact for a Gaussian.

    Zhang et al.: "Distribution-Aware Coordinate Representation for Human Pose Estimation", CVPR 2020, Eq. 9; the
    differences follow Huang et al.: "The Devil is in the Details", CVPR 2020 (UDP).

    Args:
        heatmaps: (…, h, w), at least 3×3 pixels.
        pixels: Peaks (…, 2), as `peaks` gives them.
        kernel: Width of the filter in pixels, odd; its standard deviation is .3((kernel − 1)/2 − 1) + .8, the rule of
            OpenCV that the public code relies on.

    Returns:
        (…, 2) floating point, within a pixel of the peak; the peak itself where the map is not concave around it.

    Note:
        At the border the public code pads, with zeros or by reflection, and errs by .5 to 1 pixels within 2 pixels of
        it, more than the peak itself. Here the filter is only as wide as fits around all three pixels of a difference,
        and the outermost pixels take the differences of their inner neighbours: the smoothed Gaussian stays symmetric,
        and the result exact. In the interior the result equals the public code's.
    """
    maps = heatmaps.float()
    size = _sides(pixels, maps.shape[-1], maps.shape[-2])
    middle = torch.minimum(pixels.clamp_min(1), size - 2)
    reach = torch.minimum(middle - 1, size - 2 - middle).clamp(max=kernel // 2)
    columns, rows = (_smoothers(middle[..., a], reach[..., a], maps.shape[-1 - a], kernel) for a in (0, 1))
    logs = (rows @ maps @ columns.transpose(-1, -2)).clamp_min(1e-10).log()  # (…, 3, 3) around the middle
    here, right, left = logs[..., 1, 1], logs[..., 1, 2], logs[..., 1, 0]
    below, above = logs[..., 2, 1], logs[..., 0, 1]
    slope_x, slope_y = (right - left) / 2, (below - above) / 2
    bend_x, bend_y = right - 2 * here + left, below - 2 * here + above
    bend_xy = (logs[..., 2, 2] - logs[..., 0, 2] - logs[..., 2, 0] + logs[..., 0, 0]) / 4
    determinant = bend_x * bend_y - bend_xy**2
    concave = (determinant > 1e-6) & (bend_x < 0)
    step = torch.stack([bend_xy * slope_y - bend_y * slope_x, bend_xy * slope_x - bend_x * slope_y], dim=-1)
    refined = middle + step / torch.where(concave, determinant, 1.0).unsqueeze(-1)
    refined = torch.minimum(torch.maximum(refined, pixels - 1.0), pixels + 1.0)
    return torch.where(concave.unsqueeze(-1), refined, pixels.float())


class HeatmapCodec(Checked, ABC):
    """Points to heatmaps, the targets of training, and heatmaps to points.

    Args:
        stride: Pixels of the image per pixel of a heatmap.
        sigma: Standard deviation of the Gaussians, in pixels of the heatmap.
        sigma_height: Height, in pixels, of the heatmaps with standard deviation `sigma`; other heights scale it in
            proportion, so that a person's Gaussians match at all resolutions. None for `sigma` at every height, as in
            the public code of ViTPose and RAF.
        decoding: Sub-pixel decoding: ``dark``, ``quarter`` for a quarter pixel towards the larger neighbour, or
            ``argmax`` for the pixel of the largest value.
        kernel: Width of DARK's filter in pixels.

    Raises:
        ConfigError: If a value is out of range.
    """

    def __init__(
        self,
        stride: int = 4,
        sigma: float = 2.0,
        decoding: Decoding = "dark",
        kernel: int = 11,
        sigma_height: int | None = None,
    ) -> None:
        name = type(self).__name__
        check_range(f"{name}.stride", stride, least=1, why=" pixel")
        check_range(f"{name}.sigma", sigma, above=0, why=" pixels")
        check_range(f"{name}.sigma_height", sigma_height, least=1, why=" pixel", null="for sigma at every size")
        check_choice(f"{name}.decoding", decoding, ("dark", "quarter", "argmax"))
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"{name}.kernel is {kernel}; it must be odd, such as 11")
        self.stride, self.sigma, self.decoding, self.kernel = stride, sigma, decoding, kernel
        self.sigma_height = sigma_height

    def heatmap_size(self, input_size: Sequence[int]) -> tuple[int, int]:
        """The size (h, w) of the heatmaps of an image of size (H, W).

        Raises:
            ConfigError: If the stride does not divide the size, or a side has fewer than 3 heatmap pixels.
        """
        height, width = input_size
        if height % self.stride or width % self.stride or min(height, width) < 3 * self.stride:
            raise ConfigError(
                f"an image has {height}×{width} pixels; for heatmaps of stride {self.stride} both sides must be "
                f"multiples of {self.stride}, at least {3 * self.stride}"
            )
        return height // self.stride, width // self.stride

    def encode(self, keypoints: Tensor, visible: Tensor, size: Sequence[int]) -> Tensor:
        """Heatmaps of points.

        Args:
            keypoints: (B, K, 2), (x, y) in pixels of the image.
            visible: (B, K); a map of zeros where it is 0.
            size: (H, W) of the image.

        Returns:
            (B, K, h, w).
        """
        small = self.heatmap_size(size)
        maps = gaussian_maps(self.centres(keypoints, size), small, self._sigma_of(small))
        return torch.where((visible > 0)[..., None, None], maps, 0.0)

    def weights(self, keypoints: Tensor, visible: Tensor, size: Sequence[int]) -> Tensor:
        """Weights of the maps: 1 for visible points inside of the heatmaps, else 0.

        Args:
            keypoints: (B, K, 2), (x, y) in pixels of the image.
            visible: (B, K).
            size: (H, W) of the image.

        Returns:
            (B, K) floating point.
        """
        height, width = small = self.heatmap_size(size)
        nearest, reach = torch.floor(self.centres(keypoints, size) + 0.5), math.floor(3 * self._sigma_of(small))
        across, down = nearest.unbind(-1)
        shown = (nearest >= -reach).all(dim=-1) & (across <= width - 1 + reach) & (down <= height - 1 + reach)
        return (shown & (visible > 0)).float()

    def decode(self, heatmaps: Tensor, input_size: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Points of heatmaps.

        Args:
            heatmaps: (B, K, h, w).
            input_size: (H, W) of the image.

        Returns:
            Points (B, K, 2), (x, y) in pixels of the image, and each map's largest value (B, K).
        """
        pixels, scores = peaks(heatmaps)
        match self.decoding:
            case "dark":
                places = dark(heatmaps, pixels, self.kernel)
            case "quarter":
                places = quarter_offset(heatmaps, pixels)
            case "argmax":
                places = pixels.float()
        return _scaled(places, self._steps(input_size, heatmaps.shape[-2:])), scores

    def unflip(self, heatmaps: Tensor, flip_pairs: Sequence[Sequence[int]]) -> Tensor:
        """Mirror the heatmaps of a mirrored image back, for the mean in the flip test.

        Args:
            heatmaps: (B, K, h, w), of an image mirrored left to right.
            flip_pairs: Pairs of points that mirroring swaps, such as the left and the right hand, counted from 0.

        Returns:
            (B, K, h, w).
        """
        order = list(range(heatmaps.shape[1]))
        for left, right in flip_pairs:
            order[left], order[right] = right, left
        return heatmaps[:, order].flip(-1)

    def flip_tested(
        self, network: Callable[[Tensor], Tensor], images: Tensor, flip_pairs: Sequence[Sequence[int]]
    ) -> Tensor:
        """The mean of a network's heatmaps of images (B, C, H, W) and of their mirror images, (B, K, h, w)."""
        return (network(images) + self.unflip(network(images.flip(3)), flip_pairs)) / 2

    def _sigma_of(self, size: tuple[int, int]) -> float:
        return self.sigma if self.sigma_height is None else self.sigma * size[0] / self.sigma_height

    @abstractmethod
    def centres(self, keypoints: Tensor, size: Sequence[int]) -> Tensor:
        """Places of the Gaussians of points (B, K, 2) of an image of size (H, W), in pixels of the heatmap."""

    @abstractmethod
    def _steps(self, input_size: Sequence[int], size: Sequence[int]) -> tuple[float, float]:
        """Pixels of the image per pixel of the heatmap, for x and for y."""


class UDP(HeatmapCodec):
    """Unbiased: the first and the last pixel of the heatmap are the first and the last of the image.

    An image of W pixels is W − 1 long, so that a heatmap's pixel is (W − 1)/(w − 1) of the image's, to encode and
    to decode. Gaussians lie between pixels, where the points are.

    Huang, Zhu, Guo, Huang: "The Devil is in the Details: Delving into Unbiased Data Processing for Human Pose
    Estimation", CVPR 2020.

    Args:
        kwargs: See `HeatmapCodec`.
    """

    def centres(self, keypoints: Tensor, size: Sequence[int]) -> Tensor:
        """See `HeatmapCodec.centres`."""
        across, down = self._steps(size, self.heatmap_size(size))
        return _scaled(keypoints, (1 / across, 1 / down))

    def _steps(self, input_size: Sequence[int], size: Sequence[int]) -> tuple[float, float]:
        return (input_size[1] - 1) / (size[1] - 1), (input_size[0] - 1) / (size[0] - 1)


class MSRA(HeatmapCodec):
    """The older form: a heatmap's pixel is `stride` of the image's, and Gaussians sit on the nearest pixel.

    Xiao, Wu, Wei: "Simple Baselines for Human Pose Estimation and Tracking", ECCV 2018; their code decodes with a
    quarter pixel's offset.

    Args:
        kwargs: See `HeatmapCodec`.

    Note:
        Rounding costs up to half a heatmap's pixel, 2 pixels of the image, which no decoding recovers.
    """

    def __init__(
        self,
        stride: int = 4,
        sigma: float = 2.0,
        decoding: Decoding = "quarter",
        kernel: int = 11,
        sigma_height: int | None = None,
    ) -> None:
        super().__init__(stride, sigma, decoding, kernel, sigma_height)

    def centres(self, keypoints: Tensor, size: Sequence[int]) -> Tensor:
        """See `HeatmapCodec.centres`."""
        return torch.floor(keypoints / self.stride + 0.5)

    def unflip(self, heatmaps: Tensor, flip_pairs: Sequence[Sequence[int]]) -> Tensor:
        """See `HeatmapCodec.unflip`.

        A point x is mirrored to W − 1 − x and encoded at w − (x + 1)/4, which mirrored back is x/4 − 3/4: the maps are
        moved one pixel to the right, as in the public code.
        """
        flipped = super().unflip(heatmaps, flip_pairs)
        return torch.cat([flipped[..., :1], flipped[..., :-1]], dim=-1)

    def _steps(self, input_size: Sequence[int], size: Sequence[int]) -> tuple[float, float]:
        return input_size[1] / size[1], input_size[0] / size[0]


def _sides(pixels: Tensor, width: int, height: int) -> Tensor:
    """Two numbers for every point (…, 2); unlike a new tensor, without a transfer or a fixed size in exports."""
    return torch.stack([torch.full_like(pixels[..., 0], width), torch.full_like(pixels[..., 1], height)], dim=-1)


def _scaled(points: Tensor, factors: tuple[float, float]) -> Tensor:
    """Points (…, 2) with x and y scaled by Python numbers, without a transfer to the device."""
    return torch.stack([points[..., 0] * factors[0], points[..., 1] * factors[1]], dim=-1)


def _bells(centres: Tensor, length: int, sigma: float) -> Tensor:
    """The Gaussian along one axis, shape (…, length)."""
    places = torch.arange(length, device=centres.device, dtype=centres.dtype)
    centres = centres.unsqueeze(-1)
    near = (places - torch.floor(centres + 0.5)).abs() <= 3 * sigma
    return torch.exp(-((places - centres) ** 2) / (2 * sigma**2)) * near


def _smoothers(middle: Tensor, reach: Tensor, length: int, kernel: int) -> Tensor:
    """Filters that smooth the three pixels around a centre along one axis, shape (…, 3, length).

    Args:
        middle: The centre pixel, shape (…).
        reach: Half-width of each filter, in pixels, shape (…).
        length: Pixels of the axis.
        kernel: Full width of the filter, which sets its standard deviation.
    """
    sigma = 0.3 * ((kernel - 1) / 2 - 1) + 0.8
    three = middle.unsqueeze(-1) + torch.arange(-1, 2, device=middle.device)
    distance = three.unsqueeze(-1) - torch.arange(length, device=middle.device)
    values = torch.exp(-(distance**2) / (2 * sigma**2)) * (distance.abs() <= reach[..., None, None])
    return values / values.sum(dim=-1, keepdim=True)
