"""Queries, keys and values are told apart, and telling them apart changes no number that a network computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.methods.attention_freezing import merged, separate_attention
from lit_fed.networks import MLP

TINY: dict[str, dict[str, Any]] = {  # timm's ways to hold projections, at a size for tests
    "vit_tiny_patch16_224": {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "vit_relpos_small_patch16_224": {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "beit_base_patch16_224": {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "cait_xxs24_224": {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3},  # class attention
    "swin_tiny_patch4_window7_224": {
        "img_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)
    },
}  # fmt: skip


def numel(network: nn.Module, names: tuple[str, ...]) -> int:
    return sum(network.get_parameter(name).numel() for name in names)


@pytest.mark.parametrize("name", TINY)
def test_a_separated_transformer_computes_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model(name, **TINY[name]).eval()
    x = torch.randn(2, 3, *network.patch_embed.img_size)
    before, state = network(x), {key: tensor.clone() for key, tensor in network.state_dict().items()}
    names = separate_attention(network)
    assert torch.equal(network(x), before)
    assert separate_attention(network) == names, "a second time it changes nothing"
    whole = merged(network).state_dict()
    assert whole.keys() == state.keys()
    assert all(torch.equal(whole[key], state[key]) for key in state)


def test_a_fused_projection_by_hand() -> None:
    # Two blocks of width 24: 24·24 weights and 24 biases each for queries, keys and values.
    network = timm.create_model("vit_tiny_patch16_224", **TINY["vit_tiny_patch16_224"])
    fused = network.blocks[1].attn.qkv.weight.detach().clone()
    names = separate_attention(network)
    assert [numel(network, part) for part in (names.query, names.key, names.value)] == [2 * 24 * 25] * 3
    part = network.get_parameter("blocks.1.attn.qkv.parametrizations.weight.original1")
    assert "blocks.1.attn.qkv.parametrizations.weight.original1" in names.key
    assert torch.equal(part, fused[24:48])
    assert not any(set(names.kernel) & set(group) for group in (names.value,))


def test_moving_only_values_leaves_the_kernel_as_it_is() -> None:
    """AdamW with weight decay and momentum, first with all parameters, then without queries and keys."""
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", **TINY["vit_tiny_patch16_224"])
    names = separate_attention(network)
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)

    def steps(parameters: list[nn.Parameter]) -> None:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()

    steps(list(network.parameters()))
    kernel = {name: network.get_parameter(name).detach().clone() for name in names.kernel}
    for name in names.kernel:
        network.get_parameter(name).requires_grad_(False)
    rows = network.blocks[0].attn.qkv.weight.detach().clone()
    steps([parameter for parameter in network.parameters() if parameter.requires_grad])
    assert all(torch.equal(network.get_parameter(name), tensor) for name, tensor in kernel.items())
    after = network.blocks[0].attn.qkv.weight.detach()
    assert torch.equal(after[:48], rows[:48])
    assert not torch.equal(after[48:], rows[48:])


@pytest.mark.parametrize(
    ("settings", "query", "key"),
    [
        ({}, 8 * 8 + 8, 8 * 8 + 8),
        ({"bias": False}, 8 * 8, 8 * 8),
        ({"kdim": 12, "vdim": 5}, 8 * 8 + 8, 8 * 12 + 8),  # three weights, one bias
        ({"add_bias_kv": True}, 8 * 8 + 8, 8 * 8 + 8 + 8),  # a learned key beside the sequence's
    ],
)
def test_torch_multihead_attention(settings: dict[str, Any], query: int, key: int) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True, **settings).eval()
    inputs = [torch.randn(2, 3, width) for width in (8, settings.get("kdim", 8), settings.get("vdim", 8))]
    before = module(*inputs)[0]
    names = separate_attention(module)
    assert torch.equal(module(*inputs)[0], before)
    assert (numel(module, names.query), numel(module, names.key)) == (query, key)


def test_torch_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 3, 8)
    before = network(x)
    names = separate_attention(network)
    assert len(names.query) == len(names.key) == len(names.value) == 4
    torch.testing.assert_close(network(x), before)  # torch's fast path may sum in another order


class Separate(nn.Module):
    """The layout of BERT, BART, T5 or DistilBERT: three projections side by side."""

    def __init__(self, query: str, key: str, value: str, bias: bool) -> None:
        super().__init__()
        for name in (query, key, value, "out"):
            self.add_module(name, nn.Linear(4, 4, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "layout",
    [("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin")],
)
def test_projections_that_are_separate(layout: tuple[str, str, str]) -> None:
    network = nn.Sequential(nn.Linear(4, 4), Separate(*layout, bias=layout[0] != "q"))
    names = separate_attention(network)
    tensors = ["weight"] if layout[0] == "q" else ["weight", "bias"]
    assert names.query == tuple(f"1.{layout[0]}.{tensor}" for tensor in tensors)
    assert names.key == tuple(f"1.{layout[1]}.{tensor}" for tensor in tensors)
    assert names.value == tuple(f"1.{layout[2]}.{tensor}" for tensor in tensors)


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=11, **small))
    names = separate_attention(bert)
    assert numel(bert, names.query) == numel(bert, names.key) == 2 * (8 * 8 + 8)
    t5 = transformers.T5Model(
        transformers.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    )
    assert numel(t5, separate_attention(t5).query) == 3 * 2 * 8 * 8  # self and cross attention, without biases


def test_no_attention() -> None:
    with pytest.raises(ConfigError, match="the 4 parameters of MLP include no query and key projections"):
        separate_attention(MLP(10, 1, (1, 8, 8)))


def test_rows_that_are_sorted_by_head() -> None:
    network = timm.create_model("tiny_vit_5m_224")
    with pytest.raises(ConfigError, match=r"attn\.qkv \(timm\.models\.tiny_vit\.Attention\) holds 384 rows"):
        separate_attention(network)


def test_pretrained_weights_from_a_file_and_without_one(tmp_path: Path) -> None:
    pytest.importorskip("timm", "1.0.31")  # reads weights
    from lit_fed.networks import build_network

    small = {key: value for key, value in TINY["vit_tiny_patch16_224"].items() if key != "img_size"}
    published = build_network("vit_tiny_patch16_224", 7, 3, (3, 8, 8), **small)
    torch.save(published.state_dict(), tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": 7, "input_size": (3, 8, 8)}
    settings = small | {"pretrained": True, "pretrained_cfg_overlay": overlay}
    found = build_network("vit_tiny_patch16_224", 10, 1, (1, 8, 8), **settings)
    assert torch.equal(found.blocks[0].attn.qkv.weight, published.blocks[0].attn.qkv.weight)  # type: ignore[union-attr,index]
    assert found.head.weight.shape == (10, 24)  # type: ignore[union-attr]
    # One channel is worth three equal ones: timm sums the first layer over them.
    colours = published.patch_embed.proj.weight  # type: ignore[union-attr]
    torch.testing.assert_close(found.patch_embed.proj.weight, colours.sum(1, keepdim=True))  # type: ignore[union-attr]
    overlay["file"] = str(tmp_path / "missing.pth")
    told = r"missing\.pth does not exist; .* network_args\.pretrained_cfg_overlay\.file"
    with pytest.raises(ConfigError, match=told):
        build_network("vit_tiny_patch16_224", 10, 1, (1, 8, 8), **settings)
