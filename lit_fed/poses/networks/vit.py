"""A vision transformer for poses that takes images of any resolution, with its heads and position embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import Attention, Block  # type: ignore[attr-defined]  # it re-exports the first
from torch import Tensor, nn

from lit_fed.checks import check_choice, check_range
from lit_fed.errors import ConfigError
from lit_fed.networks.base import loaded_from
from lit_fed.poses.networks.weights import read_weights


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


class DeconvolutionHead(nn.Sequential):
    """The classic head: deconvolutions that double the map, each with a norm and ReLU, then a 1×1 convolution.

    Xiao, Wu, Wei: "Simple Baselines for Human Pose Estimation and Tracking", ECCV 2018. Kernel 4, stride 2, padding 1.

    Args:
        channels: Channels of the feature map.
        num_joints: Heatmaps K.
        upsample: Size of a heatmap over that of the feature map, a power of two.
        width: Channels of the deconvolutions.
        norm: ``batch``, or ``group`` for group norm of 32 groups, which has no buffers.
    """

    def __init__(
        self, channels: int, num_joints: int, upsample: int = 4, width: int = 256, norm: str = "batch"
    ) -> None:
        if upsample < 1 or upsample & (upsample - 1):
            raise ConfigError(
                f"DeconvolutionHead.upsample is {upsample}; it must be a power of two, else set head: shuffle"
            )
        check_choice("DeconvolutionHead.norm", norm, ("batch", "group"))
        layers: list[nn.Module] = []
        for _ in range(int(math.log2(upsample))):
            deconvolution = nn.ConvTranspose2d(channels, width, kernel_size=4, stride=2, padding=1, bias=False)
            nn.init.normal_(deconvolution.weight, std=0.001)
            layers += [deconvolution, nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(32, width), nn.ReLU()]
            channels = width
        super().__init__(*layers, _final(channels, num_joints))


class ShuffleHead(nn.Sequential):
    """A 1×1 convolution whose channels become pixels: small, and exact for any enlargement.

    Shi et al.: "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural
    Network", CVPR 2016.

    Args:
        channels: Channels of the feature map.
        num_joints: Heatmaps K.
        upsample: Size of a heatmap over that of the feature map.
    """

    def __init__(self, channels: int, num_joints: int, upsample: int = 4) -> None:
        super().__init__(_final(channels, num_joints * upsample**2), nn.PixelShuffle(upsample))


def make_head(kind: str, channels: int, num_joints: int, upsample: int, norm: str) -> nn.Module:
    """A head by name: ``deconvolution`` or ``shuffle``."""
    check_range("num_joints", num_joints, least=1)
    check_choice("head", kind, ("deconvolution", "shuffle"))
    if kind == "deconvolution":
        return DeconvolutionHead(channels, num_joints, upsample, norm=norm)
    return ShuffleHead(channels, num_joints, upsample)


def check_grid(network: str, image: Tensor, in_channels: int, cell: int) -> None:
    """Refuse images that a network cannot cut into a grid.

    Args:
        network: Name for the error message.
        image: (B, in_channels, H, W).
        in_channels: Channels of the network's input.
        cell: Pixels that the height and the width must be multiples of.
    """
    if image.ndim != 4 or image.shape[1] != in_channels:
        raise ConfigError(f"network {network} takes images (B, {in_channels}, H, W) and got {tuple(image.shape)}")
    height, width = image.shape[2:]
    if min(height, width) < cell:
        raise ConfigError(f"network {network}: an image of {height}×{width} pixels is smaller than a patch of {cell}")
    if height % cell or width % cell:
        raise ConfigError(
            f"network {network}: an image of {height}×{width} pixels cannot be cut into patches of {cell}; choose "
            f"resolutions that are multiples of {cell}"
        )


def _final(channels: int, maps: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, maps, kernel_size=1)
    nn.init.normal_(conv.weight, std=0.001)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv


class PoseViT(nn.Module):
    """ViTPose's encoder and head, whose position embeddings are ResFormer's convolutions or a table.

    Xu, Zhang, Zhang, Tao: "ViTPose: Simple Vision Transformer Baselines for Human Pose Estimation", NeurIPS 2022; with
    `lit_fed.poses.networks.vit.GlobalPositions` and `lit_fed.poses.networks.vit.LocalAttention` in place of
    the table, it is the network of RAF. Patches become tokens, which transformer blocks mix; a head makes heatmaps
    (B, K, H/s, W/s) of their grid, ``s = stride``. Height and width may be any multiples of the patch.

    The defaults are ViT-S as in ViTPose-S: 21,597,696 parameters, of which GPE and LPE have 3,840 each, and a head of
    2,626,576 for 16 joints.

    Args:
        num_classes: Joints K, each with a heatmap.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the largest images; the grid of the table is that of these images.
        patch_size: Side of a patch in pixels.
        padding: Pixels of padding around the image, fewer than half a patch.
        embed_dim: Length of a token, a multiple of 4 and of `num_heads`.
        depth: Blocks.
        num_heads: Heads of the attention.
        mlp_ratio: Width of a block's hidden layer over the token's length.
        drop_path: Rate of stochastic depth of the last block; it grows linearly from 0 at the first.
        positions: ``convolutional`` (GPE and LPE), ``global`` (GPE alone), or ``absolute``: a learnt table,
            interpolated bicubically for other grids.
        position_grid: Rows and columns of the grid on which GPE is computed; other grids interpolate it. Null computes
            it on each grid, as ResFormer does.
        class_token: Add a token without a position, which is added to all other tokens at the end.
        head: ``deconvolution`` or ``shuffle``.
        upsample: Size of a heatmap over that of the grid; s is the patch over it.
        norm: Norm of the deconvolutions: ``batch`` or ``group``.
        weights: A file of initial weights of MAE, ViTPose or lit_fed, see `lit_fed.poses.networks.weights`.
        weights_of: The part that the file must hold: ``all``, or the ``backbone``; the head is then random.

    Note:
        The authors' code keeps an unused table of 74,112 weights beside GPE: 21,671,808 with it. We leave it out.
        Adding the class token to the grid at the end follows their code.
    """

    def __init__(
        self,
        num_classes: int = 16,
        in_channels: int = 3,
        input_shape: Sequence[int] = (3, 256, 192),
        patch_size: int = 16,
        padding: int = 2,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.1,
        positions: str = "convolutional",
        position_grid: Sequence[int] | None = None,
        class_token: bool = True,
        head: str = "deconvolution",
        upsample: int = 4,
        norm: str = "batch",
        weights: str | Path | None = None,
        weights_of: str = "all",
    ) -> None:
        super().__init__()
        _check(patch_size, padding, embed_dim, num_heads, upsample, positions, position_grid)
        self.in_channels, self.patch_size, self.stride = in_channels, patch_size, patch_size // upsample
        shape = tuple(input_shape)
        self.check_shape(shape)
        self.grid = (shape[1] // patch_size, shape[2] // patch_size)
        self.patch_embed = nn.Conv2d(in_channels, embed_dim, patch_size, patch_size, padding)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        by_table, self.local = positions == "absolute", positions == "convolutional"
        known = (position_grid[0], position_grid[1]) if position_grid else None
        self.gpe = None if by_table else GlobalPositions(embed_dim, known)
        places = self.grid[0] * self.grid[1] + class_token
        self.pos_embed = nn.Parameter(torch.zeros(1, places, embed_dim)) if by_table else None
        make_block: Any = LocalBlock if self.local else Block
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        rates = [drop_path * block / max(depth - 1, 1) for block in range(depth)]
        self.blocks = nn.ModuleList(
            make_block(embed_dim, num_heads, mlp_ratio=mlp_ratio, qkv_bias=True, drop_path=rate, norm_layer=norm_layer)
            for rate in rates
        )
        self.norm = norm_layer(embed_dim)
        self._start()
        self.head = make_head(head, embed_dim, num_classes, upsample, norm)
        if weights is not None:
            held = read_weights(Path(weights), self.state_dict(), self.grid, weights_of)
            self.load_state_dict(held, strict=False)
            own: dict[str, Any] = self.state_dict(keep_vars=True)
            for name in held:
                loaded_from(own[name], str(weights))

    def _start(self) -> None:
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse images of a shape (channels, height, width)."""
        check_grid("PoseViT", torch.empty(0, *shape), self.in_channels, self.patch_size)

    def forward_features(self, x: Tensor) -> Tensor:
        """The last block's tokens as a grid: (B, in_channels, H, W) to (B, embed_dim, H/patch, W/patch)."""
        check_grid("PoseViT", x, self.in_channels, self.patch_size)
        laid_out = self.patch_embed(x)
        if self.gpe is not None:
            laid_out = self.gpe(laid_out)
        grid: tuple[int, int] = (laid_out.shape[2], laid_out.shape[3])
        tokens = laid_out.flatten(2).transpose(1, 2)
        prefix = 0
        if self.cls_token is not None:
            tokens, prefix = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), tokens), dim=1), 1
        if self.pos_embed is not None:
            tokens = tokens + resample_abs_pos_embed(self.pos_embed, list(grid), list(self.grid), prefix)
        for block in self.blocks:
            tokens = block(tokens, grid) if self.local else block(tokens)
        tokens = self.norm(tokens)
        if prefix:
            tokens = tokens[:, prefix:] + tokens[:, :prefix]
        feature_map: Tensor = tokens.transpose(1, 2).unflatten(2, grid)
        return feature_map

    def forward(self, x: Tensor) -> Tensor:
        """Heatmaps of a batch: (B, in_channels, H, W) to (B, K, H/stride, W/stride)."""
        heatmaps: Tensor = self.head(self.forward_features(x))
        return heatmaps

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The layer of a parameter, for timm's learning rates by layer: the stem, each block, then all others."""
        del coarse
        return {"stem": r"^(?:cls_token|pos_embed|patch_embed|gpe)", "blocks": r"^blocks\.(\d+)"}

    def no_weight_decay(self) -> set[str]:
        """The parameters that encode positions, which ViTPose and ResFormer exclude from weight decay."""
        places = ("cls_token", "pos_embed", "gpe.", ".lpe.")
        return {name for name, _ in self.named_parameters() if any(place in name for place in places)}


pose_vit_tiny = partial(
    PoseViT,
    patch_size=4,
    padding=0,
    embed_dim=64,
    depth=3,
    num_heads=4,
    mlp_ratio=2.0,
    drop_path=0.0,
    class_token=False,
    head="shuffle",
)
"""For images of 32×24 to 64×48 on a CPU: heatmaps as large as the image, 119,360 parameters for 14 joints."""


def _check(
    patch_size: int,
    padding: int,
    embed_dim: int,
    num_heads: int,
    upsample: int,
    positions: str,
    position_grid: Sequence[int] | None,
) -> None:
    if not 0 <= 2 * padding < patch_size:
        raise ConfigError(
            f"PoseViT.padding is {padding}; it must be at least 0 and below half of patch_size, {patch_size}; more "
            "adds tokens outside of the image"
        )
    if embed_dim % 4 or embed_dim % num_heads:
        raise ConfigError(f"PoseViT.embed_dim is {embed_dim}; it must be a multiple of 4 and of num_heads, {num_heads}")
    if upsample < 1 or patch_size % upsample:
        raise ConfigError(f"PoseViT.upsample is {upsample}; it must divide patch_size, {patch_size}")
    check_choice("PoseViT.positions", positions, ("convolutional", "global", "absolute"))
    if position_grid is not None and (positions == "absolute" or len(position_grid) != 2 or min(position_grid) < 1):
        raise ConfigError(
            f"PoseViT.position_grid is {list(position_grid)}; it must be the rows and columns of a grid, for "
            f"convolutional or global positions, and positions is {positions!r}"
        )
