"""Published transformers as parameters without a forward pass, to count on torch's meta device.

The shapes are from the models' papers and the configurations in the package transformers; counting needs neither
weights nor this package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lit_fed.errors import ConfigError


class Projections(nn.Module):
    """Projections of queries, keys, values and the output.

    Args:
        dim: Width.
        bias: Whether the projections have biases.
    """

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim, bias)
        self.key = nn.Linear(dim, dim, bias)
        self.value = nn.Linear(dim, dim, bias)
        self.out = nn.Linear(dim, dim, bias)


class Blueprint(nn.Module):
    """The parameters of an encoder, or of an encoder and a decoder.

    Args:
        dim: Width.
        feedforward: Width between the two feed-forward layers of a block.
        encoder: Blocks with one attention.
        decoder: Blocks with self-attention and cross-attention.
        vocabulary: Token embeddings; 0 for none.
        positions: Learned positions of each stack.
        segments: Segment embeddings.
        image: Channels and patch size of an image embedding; None for text.
        bias: Whether layers and norms have biases.
        position_bias: Entries of a table of relative position biases in each stack.
        pooler: A layer on the first token.
        tied: The number of modules that share the token embedding. It is one parameter, but counts three times in a
            sum over the modules of an encoder-decoder.
    """

    def __init__(
        self,
        dim: int,
        feedforward: int,
        encoder: int,
        decoder: int = 0,
        vocabulary: int = 0,
        positions: int = 0,
        segments: int = 0,
        image: tuple[int, int] | None = None,
        bias: bool = True,
        position_bias: int = 0,
        pooler: bool = False,
        tied: int = 1,
    ) -> None:
        super().__init__()
        self.tokens = nn.ModuleList()
        if vocabulary:
            self.tokens.extend([nn.Embedding(vocabulary, dim)] * tied)
        if segments:
            self.segments = nn.Embedding(segments, dim)
        if image is not None:
            channels, patch = image
            self.patches = nn.Conv2d(channels, dim, patch, patch)
            self.class_token = nn.Parameter(torch.empty(dim))
        self.stacks = nn.ModuleList()
        for blocks, attentions in ((encoder, 1), (decoder, 2)):
            if not blocks:
                continue
            stack = nn.Module()
            if positions:
                stack.positions = nn.Embedding(positions, dim)
            if position_bias:
                stack.position_bias = nn.Parameter(torch.empty(position_bias))
            stack.norm = nn.LayerNorm(dim, bias=bias)
            stack.blocks = nn.ModuleList(self._block(dim, feedforward, attentions, bias) for _ in range(blocks))
            self.stacks.append(stack)
        if pooler:
            self.pooler = nn.Linear(dim, dim)

    @staticmethod
    def _block(dim: int, feedforward: int, attentions: int, bias: bool) -> nn.Module:
        block = nn.Module()
        block.attention = nn.ModuleList(Projections(dim, bias) for _ in range(attentions))
        block.feedforward = nn.ModuleList([nn.Linear(dim, feedforward, bias), nn.Linear(feedforward, dim, bias)])
        block.norms = nn.ModuleList(nn.LayerNorm(dim, bias=bias) for _ in range(attentions + 1))
        return block


BLUEPRINTS: dict[str, dict[str, Any]] = {
    # Dosovitskiy et al. 2021, 224 pixels: 7² patches and the class token
    "vit-base-patch32": {"dim": 768, "feedforward": 3072, "encoder": 12, "image": (3, 32), "positions": 50,
                         "pooler": True},
    # Devlin et al. 2019
    "bert-base": {"dim": 768, "feedforward": 3072, "encoder": 12, "vocabulary": 30522, "positions": 512, "segments": 2,
                  "pooler": True},
    # Clark et al. 2020
    "electra-base": {"dim": 768, "feedforward": 3072, "encoder": 12, "vocabulary": 30522, "positions": 512,
                     "segments": 2},
    # Raffel et al. 2020: 32 buckets of relative positions for each of 8 heads
    "t5-small": {"dim": 512, "feedforward": 2048, "encoder": 6, "decoder": 6, "vocabulary": 32128, "bias": False,
                 "position_bias": 32 * 8, "tied": 3},
    # Lewis et al. 2020: positions are offset by 2
    "bart-base": {"dim": 768, "feedforward": 3072, "encoder": 6, "decoder": 6, "vocabulary": 50265, "positions": 1026,
                  "tied": 3},
}  # fmt: skip
"""The architectures of FedFrozen's Table 2."""


def build_blueprint(name: str) -> nn.Module:
    """Build a published architecture on the meta device, without memory for parameters."""
    if name not in BLUEPRINTS:
        raise ConfigError(f"architecture {name!r} is unknown; choose one of {', '.join(BLUEPRINTS)}")
    with torch.device("meta"):
        return Blueprint(**BLUEPRINTS[name])
