"""Position embeddings of tokens by convolutions, for grids of any size.

Tian, Wu, Dai, Hu, Qiao, Jiang: "ResFormer: Scaling ViTs with Multi-Resolution Training", CVPR 2023, Section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block  # type: ignore[attr-defined]  # it re-exports the first
from torch import Tensor, nn


class GlobalPositions(nn.Module):
    """ResFormer's global position embedding (GPE): a depthwise 3×3 convolution of a sin-cos map, added to the tokens.

    The map depends only on the shape of the grid: positions run from 0 to 2π over any height and width (`sin_cos_map`).
    10·C parameters: 9 weights and a bias per channel.

    Args:
        channels: Length C of a token, a multiple of 4.
        size: Rows and columns of the grid on which it is computed; other grids interpolate it bicubically, as a
            table. None computes it on each grid, as in the paper.
    """

    def __init__(self, channels: int, size: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=channels)

    def forward(self, grid: Tensor) -> Tensor:
        """Add the positions to tokens (B, C, h, w)."""
        size = (grid.shape[2], grid.shape[3])
        known = sin_cos_map(self.channels, self.size or size, grid.device)
        places: Tensor = self.conv(known.to(self.conv.weight.dtype)[None])
        if places.shape[2:] != grid.shape[2:]:
            places = F.interpolate(places.float(), size=size, mode="bicubic", antialias=True).to(places.dtype)
        return grid + places


def sin_cos_map(channels: int, size: tuple[int, int], device: torch.device, temperature: float = 10_000.0) -> Tensor:
    r"""Sines and cosines of the places of a grid, (channels, h, w).

    Row y of h stands at :math:`2\pi\,(y+1)/h`, a column likewise. The first half of the channels encodes rows,
    the second columns; in each half, entry i is the sine (i even) or cosine (i odd) of the place over
    :math:`T^{2\lfloor i/2\rfloor/(C/2)}`.

    Args:
        channels: C, a multiple of 4.
        size: Rows h and columns w.
        device: Device of the map.
        temperature: T.
    """
    half = channels // 2
    entry = torch.arange(half, device=device)
    period = temperature ** (2 * (entry // 2) / half)

    def waves(length: int) -> Tensor:
        place = 2 * math.pi * torch.arange(1, length + 1, device=device) / length
        angle = place / period[:, None]
        return torch.where(entry[:, None] % 2 == 0, angle.sin(), angle.cos())

    height, width = size
    rows = waves(height)[:, :, None].expand(half, height, width)
    columns = waves(width)[:, None, :].expand(half, height, width)
    return torch.cat((rows, columns))


class LocalAttention(Attention):
    """Attention with ResFormer's local position embedding (LPE) on the values.

    A depthwise 3×3 convolution of the values in their grid, over the channels of a head and shared by the heads, is
    added to the attention's output before the projection. It starts at zero, which is plain attention.

    Args:
        dim: Length of a token.
        num_heads: Heads; each has dim / num_heads channels d, and the convolution 10·d parameters.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads=num_heads, qkv_bias=True)
        width = dim // num_heads
        self.lpe = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)
        nn.init.zeros_(self.lpe.weight)
        assert self.lpe.bias is not None
        nn.init.zeros_(self.lpe.bias)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]  # the grid is new
        """(B, p + h·w, dim) to the same, where p tokens before the grid's (h, w) have no position."""
        batch, tokens, dim = x.shape
        prefix = tokens - grid[0] * grid[1]
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        laid_out = v[:, :, prefix:].transpose(2, 3).reshape(batch * self.num_heads, -1, *grid)
        local = self.lpe(laid_out).reshape(batch, self.num_heads, -1, grid[0] * grid[1]).transpose(2, 3)
        mixed = mixed + F.pad(local, (0, 0, prefix, 0))
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class LocalBlock(Block):
    """timm's transformer block with `LocalAttention`; its settings are timm's."""

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.attn = LocalAttention(dim, num_heads)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]  # the grid is new
        """(B, p + h·w, dim) to the same."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid)))
        out: Tensor = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return out
