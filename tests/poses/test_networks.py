"""Networks for poses: sizes by arithmetic, grids of any shape, embeddings by hand, weights of others."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torchvision.models.segmentation import fcn_resnet50

from lit_fed.errors import ConfigError
from lit_fed.networks import build_network, classifier, load_weights
from lit_fed.poses import POSE_NETWORKS
from lit_fed.poses.networks import DeconvolutionHead, GlobalPositions, LocalAttention, PoseViT
from lit_fed.poses.networks.vit import LocalBlock, sin_cos_map
from tests.support import flip_tensor_bit


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def tiny(**kwargs: Any) -> Any:
    return build_network("pose_vit_tiny", 14, 3, (3, 64, 48), **kwargs)


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_vit_small_has_as_many_parameters_as_published() -> None:
    network: Any = build_network("pose_vit_small", 16, 3, (3, 256, 192))
    d = 384
    # two norms 4d, qkv d·3d + 3d, projection d² + d, hidden layer d·4d + 4d, back 4d·d + d
    block = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    # 3·16·16 pixels a patch and a bias, 12 blocks, the last norm, the class token
    plain = (3 * 16 * 16 * d + d) + 12 * block + 2 * d + d
    gpe, lpe = 9 * d + d, 12 * (9 * 32 + 32)  # 9 weights and a bias a channel; heads of 384/12 = 32 channels
    assert (gpe, lpe) == (3_840, 3_840)
    # deconvolutions 384·256·4·4 and 256·256·4·4, each with a norm of 2·256; 1×1 convolution 256·16 + 16
    head = 384 * 256 * 16 + 512 + 256 * 256 * 16 + 512 + 256 * 16 + 16
    table = (16 * 12 + 1) * d  # which the authors' code carries along unread
    assert plain + gpe + lpe + table == 21_671_808
    assert head == 2_626_576
    assert count(network.gpe) == gpe
    assert sum(count(block.attn.lpe) for block in network.blocks) == lpe
    assert count(network.head) == head
    assert count(network) - head == 21_671_808 - table


def test_the_other_networks_have_as_many_parameters_as_they_say() -> None:
    # patch 48·64 + 64; a block 4·64 + (64·192 + 192) + (64² + 64) + (64·128 + 128) + (128·64 + 64), four heads of 16
    # channels 160; norm 128; GPE 640; head 64·14·16 + 14·16
    block = 4 * 64 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 160
    assert count(tiny()) == 48 * 64 + 64 + 3 * block + 128 + 640 + 64 * 224 + 224 == 119_360
    # The paper's table 2: 34.0 M for ResNet-50
    assert round(count(build_network("pose_resnet", 16, 3, (3, 256, 192))) / 1e6, 1) == 34.0
    # 3·32·9 + 32, norm 64; 32·64·9 + 64, norm 128; four blocks of two 64·64·9 + 64 and norms of 128; head 64·224 + 224
    cnn = 3 * 32 * 9 + 32 + 64 + 32 * 64 * 9 + 64 + 128 + 8 * (64 * 64 * 9 + 64 + 128) + 64 * 224 + 224
    assert count(build_network("pose_cnn", 14, 3, (3, 64, 48))) == cnn == 330_592


@pytest.mark.parametrize("name", POSE_NETWORKS)
def test_without_memory_there_are_as_many(name: str) -> None:
    known = count(build_network(name, 14, 3, (3, 64, 64)))
    with torch.device("meta"):  # as `cost` counts
        assert count(build_network(name, 14, 3, (3, 64, 64))) == known


def test_blocks_are_left_out_ever_more_often() -> None:
    network: Any = build_network("pose_vit_small", 16, 3, (3, 256, 192), embed_dim=16, num_heads=2, depth=3)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in network.blocks]
    assert rates == pytest.approx([0.0, 0.05, 0.1])


@pytest.mark.parametrize(
    ("name", "settings", "sizes", "stride"),
    [
        ("pose_vit_small", {"depth": 1}, [(128, 96), (192, 144), (256, 192), (512, 384)], 4),
        ("pose_vit_small", {"depth": 1, "positions": "absolute"}, [(128, 96), (256, 192), (512, 384)], 4),
        ("pose_vit_tiny", {}, [(32, 24), (48, 36), (64, 48), (80, 60), (4, 4), (16, 48)], 1),
        ("pose_vit_tiny", {"positions": "absolute", "class_token": True}, [(32, 24), (80, 60)], 1),
        ("pose_cnn", {"upsample": 1}, [(32, 24), (48, 36), (80, 60)], 4),
        ("pose_resnet", {"backbone": "resnet10t"}, [(128, 96), (256, 192)], 4),
    ],
)
def test_one_set_of_weights_takes_every_resolution(
    name: str, settings: dict[str, Any], sizes: list[tuple[int, int]], stride: int
) -> None:
    network: Any = build_network(name, 5, 3, (3, 256, 192), **settings).eval()
    assert network.stride == stride
    assert classifier(network) is network.head
    with torch.no_grad():
        for height, width in sizes:
            x = torch.randn(2, 3, height, width)
            heatmaps = network(x)
            assert heatmaps.shape == (2, 5, height // stride, width // stride)
            assert torch.equal(heatmaps, network.head(network.forward_features(x)))


# --- torchvision's FCN ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> nn.Module:
    """Torchvision's own network with its auxiliary classifier, as in the file of its weights for 21 classes."""
    torch.manual_seed(1)
    return fcn_resnet50(weights=None, weights_backbone=None, aux_loss=True).eval()


def test_fcn_is_torchvisions_with_the_weights_of_its_file(tmp_path: Path, published: Any) -> None:
    torch.save(published.state_dict(), tmp_path / "fcn.pth")
    network: Any = build_network("fcn_resnet50", 21, 3, (3, 64, 48)).eval()
    load_weights(network, tmp_path / "fcn.pth", classifier(network))
    assert classifier(network) is network.head
    blocks = nn.Sequential(*published.backbone.children())  # from the first convolution to the last block
    # Torchvision documents 35,322,218 parameters, with the auxiliary classifier's 1024·256·9 + 512 + 256·21 + 21.
    assert count(network) == 35_322_218 - 2_365_205
    # Strides 2 · 2 · 2, then dilation: eighths of the image, rounded up.
    with torch.no_grad():
        for size, cells in (((32, 24), (4, 3)), ((36, 20), (5, 3))):
            x = torch.randn(2, 3, *size)
            features = network.forward_features(x)
            assert features.shape == (2, 2048, *cells)
            assert torch.equal(features, blocks(x))
            assert network(x).shape == (2, 21, *size)
            assert torch.equal(network(x), published(x)["out"])


def test_fcn_starts_from_the_files_of_torchvisions_backbones(tmp_path: Path, published: Any) -> None:
    torch.save(published.state_dict(), tmp_path / "fcn.pth")
    classes = torchvision.models.resnet50(weights=None)
    save_file(classes.state_dict(), tmp_path / "resnet50.safetensors")
    for file, backbone in (("fcn.pth", published.backbone), ("resnet50.safetensors", classes)):
        network: Any = build_network("fcn_resnet50", 8, 3)
        load_weights(network, tmp_path / file, classifier(network), "backbone")
        held = backbone.state_dict()
        assert all(torch.equal(one, held[name]) for name, one in network.backbone.state_dict().items())
        with pytest.raises(ConfigError, match=r"does not fit FCN.* set model\.weights_of to backbone"):
            load_weights(network, tmp_path / file, classifier(network))


def test_fcn_refuses_other_settings() -> None:
    with pytest.raises(ConfigError, match=r"FCN\.in_channels is 1; it must be 3"):
        build_network("fcn_resnet50", 8, 1)
    with pytest.raises(ConfigError, match=r"FCN\.num_classes is 0; it must be at least 1"):
        build_network("fcn_resnet50", 0, 3)
    with pytest.raises(ConfigError, match="aux_loss"):
        build_network("fcn_resnet50", 8, 3, aux_loss=True)


# --- embeddings -----------------------------------------------------------------------------------------------------


def test_the_map_of_places_by_hand() -> None:
    # 8 channels, 4 about rows: entries 0 and 1 have period 1, entries 2 and 3 have 10,000^(2/4) = 100. Of two rows the
    # first stands at π, the second at 2π; of one column all stand at 2π.
    found = sin_cos_map(8, (2, 1), torch.device("cpu"))
    assert found.shape == (8, 2, 1)
    y, x = torch.tensor([math.pi, 2 * math.pi]), 2 * math.pi
    rows = [y.sin(), y.cos(), (y / 100).sin(), (y / 100).cos()]
    columns = [math.sin(x), math.cos(x), math.sin(x / 100), math.cos(x / 100)]
    expected = torch.stack(rows + [torch.full((2,), value) for value in columns])
    torch.testing.assert_close(found[:, :, 0], expected, rtol=0, atol=1e-6)  # float32


def test_the_global_embedding_is_added_through_a_depthwise_convolution() -> None:
    embedding = GlobalPositions(8)
    nn.init.ones_(embedding.conv.weight)
    nn.init.constant_(embedding.conv.bias, 0.5)  # type: ignore[arg-type]  # it has one
    grid = torch.randn(3, 8, 2, 1)
    # Kernel of ones with a border of zeros over a 2×1 grid: everywhere the sum over both rows, channel by channel.
    total = sin_cos_map(8, (2, 1), torch.device("cpu")).sum(dim=1, keepdim=True)
    torch.testing.assert_close(embedding(grid), grid + total + 0.5)


def test_the_global_embedding_of_a_known_grid_is_interpolated_to_others() -> None:
    embedding = GlobalPositions(8, (1, 1))
    nn.init.constant_(embedding.conv.weight, 2.0)
    nn.init.constant_(embedding.conv.bias, 0.5)  # type: ignore[arg-type]  # it has one
    # Of one place there is one value, wherever: twice the map's, whose neighbours are the border of zeros.
    everywhere = 2 * sin_cos_map(8, (1, 1), torch.device("cpu")) + 0.5
    grid = torch.randn(3, 8, 4, 2)
    torch.testing.assert_close(embedding(grid), grid + everywhere)
    plain, known = GlobalPositions(8), GlobalPositions(8, (4, 2))
    known.load_state_dict(plain.state_dict())
    torch.testing.assert_close(known(grid), plain(grid), rtol=0, atol=0)


def test_global_positions_are_convolutional_ones_without_the_local_embedding() -> None:
    both, alone = tiny().eval(), tiny(positions="global").eval()
    missing = alone.load_state_dict(both.state_dict(), strict=False)
    assert not missing.missing_keys
    assert missing.unexpected_keys
    assert all(".lpe." in name for name in missing.unexpected_keys)
    x = torch.randn(2, 3, 24, 16)
    torch.testing.assert_close(alone(x), both(x), rtol=0, atol=1e-5)  # the local embedding starts at zero
    assert tiny(positions="absolute").gpe is None


def test_the_local_embedding_at_its_start_changes_nothing() -> None:
    torch.manual_seed(0)
    ours, timms = LocalBlock(16, 4, qkv_bias=True), Block(16, 4, qkv_bias=True)
    missing = timms.load_state_dict(ours.state_dict(), strict=False)
    assert all(".lpe." in name for name in missing.unexpected_keys)
    assert not missing.missing_keys
    x = torch.randn(2, 1 + 3 * 2, 16)
    torch.testing.assert_close(ours(x, (3, 2)), timms(x), rtol=0, atol=1e-6)  # attention in another order of sums


def test_the_local_embedding_by_hand() -> None:
    # One head of one channel; query, key and value are the token itself, the projection does nothing.
    attention = LocalAttention(1, 1)
    with torch.no_grad():
        attention.qkv.weight.copy_(torch.tensor([[0.0], [0.0], [1.0]]))  # all attend to all alike
        attention.qkv.bias.zero_()
        attention.proj.weight.fill_(1.0)
        attention.proj.bias.zero_()
        attention.lpe.weight.copy_(torch.tensor([[[[0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]]]))
        attention.lpe.bias.fill_(0.25)
    # A token without a place, then two rows of two: attention gives the mean (8 + 1 + 2 + 3 + 4) / 5 = 3.6 everywhere;
    # to those with a place comes twice the right neighbour, or nothing at the border, and the bias.
    tokens = torch.tensor([8.0, 1.0, 2.0, 3.0, 4.0])[None, :, None]
    found = attention(tokens, (2, 2)).flatten()
    torch.testing.assert_close(found, torch.tensor([3.6, 3.6 + 4.25, 3.6 + 0.25, 3.6 + 8.25, 3.6 + 0.25]))


def test_rows_and_columns_are_not_mixed_up() -> None:
    network = tiny(depth=1).eval()
    nn.init.normal_(network.blocks[0].attn.lpe.weight)
    nn.init.normal_(network.head[0].weight)
    with torch.no_grad():
        x = torch.randn(1, 3, 16, 8)
        moved = x.clone()
        moved[:, :, :4, :4] += 1.0  # the first patch
        change = (network.forward_features(moved) - network.forward_features(x)).abs().amax(dim=1)[0]
    assert change.shape == (4, 2)
    assert change.argmax() == 0


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((3, 2, 48), "an image of 2×48 pixels is smaller than a patch of 4"),
        ((3, 62, 48), "an image of 62×48 pixels cannot be cut into patches of 4; choose resolutions that are"),
        ((1, 64, 48), r"takes images \(B, 3, H, W\) and got \(2, 1, 64, 48\)"),
    ],
)
@pytest.mark.parametrize("name", ["pose_vit_tiny", "pose_cnn"])
def test_images_that_do_not_fit_are_refused(name: str, size: tuple[int, int, int], words: str) -> None:
    network = build_network(name, 14, 3, (3, 64, 48))
    with pytest.raises(ConfigError, match=words):
        network(torch.zeros(2, *size))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"padding": 2}, "padding is 2; it must be at least 0 and below half of patch_size, 4; more adds"),
        ({"embed_dim": 66}, "embed_dim is 66; it must be a multiple of 4 and of num_heads, 4"),
        ({"upsample": 3}, "upsample is 3; it must divide patch_size, 4"),
        ({"positions": "learnt"}, "positions is 'learnt'; it must be 'convolutional', 'global' or 'absolute'"),
        (
            {"positions": "absolute", "position_grid": [8, 6]},
            "position_grid is .8, 6.; it must be the rows and columns .* positions is 'absolute'",
        ),
        ({"position_grid": [8]}, "position_grid is .8.; it must be the rows and columns of a grid"),
        ({"head": "linear"}, "head is 'linear'; it must be 'deconvolution' or 'shuffle'"),
        (
            {"patch_size": 6, "head": "deconvolution", "upsample": 3, "input_shape": (3, 60, 48)},
            "it must be a power of two",
        ),
        ({"head": "deconvolution", "norm": "layer"}, "norm is 'layer'; it must be 'batch' or 'group'"),
        ({"weights": "no.pth"}, "weights is 'no.pth'; the file does not exist"),
        ({"input_shape": (3, 62, 48)}, "an image of 62×48 pixels cannot be cut into patches of 4"),
        ({"breadth": 3}, "unexpected keyword argument 'breadth'; its settings are num_classes"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    shape = settings.pop("input_shape", (3, 64, 48))
    with pytest.raises(ConfigError, match=words):
        build_network("pose_vit_tiny", 14, 3, shape, **settings)


def test_a_head_of_group_norm_holds_no_buffers() -> None:
    assert list(DeconvolutionHead(8, 2, norm="batch").buffers())
    assert not list(DeconvolutionHead(8, 2, norm="group").buffers())


def test_a_backbone_must_be_one_of_timms() -> None:
    with pytest.raises(ConfigError, match="backbone is 'resnet51'; it must be a model of timm"):
        build_network("pose_resnet", 16, 3, (3, 256, 192), backbone="resnet51")


def test_an_older_timm_gives_a_backbone_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.__version__", "1.0.30")
    with pytest.raises(ConfigError, match=r"'resnet10t': pretrained weights need timm 1.0.31, not 1.0.30; upgrade it"):
        build_network("pose_resnet", 16, 3, (3, 256, 192), backbone="resnet10t", pretrained=True)


# --- weights of others ----------------------------------------------------------------------------------------------


def vitpose_file(network: PoseViT, path: Path, **changes: Any) -> Path:
    """A file of ViTPose's names with the weights of a network, whose table of positions has a class token's."""
    names = {"patch_embed.": "backbone.patch_embed.proj.", "norm.": "backbone.last_norm."}
    tensors: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if "lpe" in name or name.startswith("gpe"):
            continue
        for ours, theirs in names.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        if name.startswith("head.6."):
            name = name.replace("head.6.", "keypoint_head.final_layer.")
        elif name.startswith("head."):
            name = name.replace("head.", "keypoint_head.deconv_layers.")
        elif not name.startswith("backbone."):
            name = f"backbone.{name}"
        tensors[name] = tensor.clone()
    tensors |= changes
    torch.save({"meta": {"epoch": 210}, "state_dict": {n: t for n, t in tensors.items() if t is not None}}, path)
    return path


def small(**kwargs: Any) -> Any:
    settings = {"embed_dim": 16, "depth": 2, "num_heads": 2, "class_token": False} | kwargs
    return build_network("pose_vit_small", 3, 3, (3, 64, 48), **settings)


def test_vitposes_weights_are_taken_under_their_names(tmp_path: Path) -> None:
    source = small(positions="absolute")
    table = torch.randn(1, 1 + 4 * 3, 16)
    path = vitpose_file(source, tmp_path / "vitpose.pth", **{"backbone.pos_embed": table})
    loaded = small(positions="absolute", weights=path)
    # ViTPose adds the class token's place to all.
    assert torch.equal(loaded.pos_embed, table[:, 1:] + table[:, :1])
    same = source.state_dict() | {"pos_embed": loaded.pos_embed}
    assert all(torch.equal(tensor, same[name]) for name, tensor in loaded.state_dict().items())
    resformers = small(weights=path)  # which has no table, and embeddings that start afresh
    assert torch.equal(resformers.blocks[1].attn.qkv.weight, source.blocks[1].attn.qkv.weight)
    assert torch.equal(resformers.head[3].weight, source.head[3].weight)


def test_maes_weights_start_a_backbone(tmp_path: Path) -> None:
    source = small(positions="absolute", class_token=True)
    held = {name: tensor.clone() for name, tensor in source.state_dict().items() if not name.startswith("head.")}
    held["patch_embed.proj.weight"], held["patch_embed.proj.bias"] = (
        held.pop("patch_embed.weight"),
        held.pop("patch_embed.bias"),
    )
    held["pos_embed"] = torch.randn(1, 1 + 14 * 14, 16)
    held |= {"mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.zeros(8, 16)}
    path = tmp_path / "mae.pth"
    torch.save({"model": held}, path)
    with pytest.raises(ConfigError, match=r"mae.pth lacks the weight 'head.0.weight' .*; set weights_of to backbone"):
        small(weights=path)
    loaded = small(positions="absolute", class_token=True, weights=path, weights_of="backbone")
    assert loaded.pos_embed.shape == (1, 1 + 4 * 3, 16)  # 14×14 places, resampled to 4×3
    assert torch.equal(loaded.pos_embed[:, 0], held["pos_embed"][:, 0])
    assert torch.equal(loaded.cls_token, source.cls_token)
    assert torch.equal(loaded.patch_embed.weight, source.patch_embed.weight)


OF_TRANSFORMERS = (  # of `transformers`' VitPoseForPoseEstimation with the classic decoder
    (r"^patch_embed\.", "backbone.embeddings.patch_embeddings.projection."),
    (r"^pos_embed$", "backbone.embeddings.position_embeddings"),
    (r"^blocks\.(\d+)\.norm1\.", r"backbone.encoder.layer.\1.layernorm_before."),
    (r"^blocks\.(\d+)\.norm2\.", r"backbone.encoder.layer.\1.layernorm_after."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"backbone.encoder.layer.\1.attention.output.dense."),
    (r"^blocks\.(\d+)\.mlp\.", r"backbone.encoder.layer.\1.mlp."),
    (r"^norm\.", "backbone.layernorm."),
    (r"^head\.0\.", "head.deconv1."), (r"^head\.1\.", "head.batchnorm1."),
    (r"^head\.3\.", "head.deconv2."), (r"^head\.4\.", "head.batchnorm2."), (r"^head\.6\.", "head.conv."),
)  # fmt: skip
OF_MMPOSE_1 = (
    (r"^patch_embed\.", "backbone.patch_embed.projection."), (r"^pos_embed$", "backbone.pos_embed"),
    (r"^blocks\.(\d+)\.norm([12])\.", r"backbone.layers.\1.ln\2."),
    (r"^blocks\.(\d+)\.attn\.", r"backbone.layers.\1.attn."),
    (r"^blocks\.(\d+)\.mlp\.fc1\.", r"backbone.layers.\1.ffn.layers.0.0."),
    (r"^blocks\.(\d+)\.mlp\.fc2\.", r"backbone.layers.\1.ffn.layers.1."),
    (r"^norm\.", "backbone.ln1."), (r"^head\.6\.", "head.final_layer."), (r"^head\.", "head.deconv_layers."),
)  # fmt: skip
OF_RAF = (
    (r"^patch_embed\.", "backbone.patch_embed.proj."), (r"^gpe\.conv\.", "backbone.global_pos_embed.embed_layer."),
    (r"^blocks\.(\d+)\.attn\.lpe\.", r"backbone.blocks.\1.attn.get_v."), (r"^blocks\.", "backbone.blocks."),
    (r"^norm\.", "backbone.last_norm."), (r"^head\.6\.", "keypoint_head.final_layer."),
    (r"^head\.", "keypoint_head.deconv_layers."),
)  # fmt: skip


def theirs(network: PoseViT, names: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """The weights of a network under the names of others, queries, keys and values apart where they are."""
    found = {}
    for ours, tensor in network.state_dict().items():
        if "encoder.layer" in names[2][1] and ".attn.qkv." in ours:
            number, end = ours.split(".")[1], ours.rpartition(".")[2]
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"backbone.encoder.layer.{number}.attention.attention.{part}.{end}"] = piece.clone()
            continue
        name = next(re.sub(pattern, other, ours) for pattern, other in names if re.search(pattern, ours))
        found[name] = tensor.clone()
    return found


@pytest.mark.parametrize(
    ("names", "positions", "file"),
    [
        pytest.param(OF_TRANSFORMERS, "absolute", "model.safetensors", id="transformers"),
        pytest.param(OF_MMPOSE_1, "absolute", "mmpose.pth", id="mmpose 1"),
        pytest.param(OF_RAF, "convolutional", "raf.pth", id="RAF"),
    ],
)
def test_weights_of_others_are_taken_under_their_names(tmp_path: Path, names: Any, positions: str, file: str) -> None:
    source = small(positions=positions)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    tensors, path = theirs(source, names), tmp_path / file
    if "pos_embed" in source.state_dict():
        key = next(name for name in tensors if "pos" in name)
        tensors[key] = torch.cat((torch.zeros(1, 1, 16), tensors[key]), dim=1)  # the class token's place
    if file.endswith(".safetensors"):
        save_file(tensors, path)
    else:
        torch.save({"state_dict": tensors}, path)
    loaded = small(positions=positions, weights=path)
    expected = source.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert not small(positions=positions).norm.weight.equal(expected["norm.weight"])


def test_a_missing_weight_is_named_with_its_nearest(tmp_path: Path) -> None:
    tensors = theirs(small(), OF_RAF)
    tensors["backbone.blocks.1.mlp.fc9.weight"] = tensors.pop("backbone.blocks.1.mlp.fc1.weight")
    torch.save({"state_dict": tensors}, tmp_path / "raf.pth")
    with pytest.raises(
        ConfigError, match=r"lacks the weight 'blocks.1.mlp.fc1.weight' .*; its nearest is 'blocks.1.mlp.fc9.weight'"
    ):
        small(weights=tmp_path / "raf.pth")


def test_our_own_checkpoints_are_taken(tmp_path: Path) -> None:
    source = small()
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {f"network.{name}": tensor for name, tensor in source.state_dict().items()}}, path)
    loaded = small(weights=path)
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_flipped_bit_in_a_file_of_weights_is_refused(tmp_path: Path) -> None:
    source, path = small(), tmp_path / "weights.pth"
    vitpose_file(source, path)
    small(weights=path)
    flip_tensor_bit(path, max(source.state_dict().values(), key=torch.numel))
    with pytest.raises(ConfigError, match=r"weights\.pth holds more than weights, or is damaged: .* from its checksum"):
        small(weights=path)


def test_files_that_do_not_fit_are_refused_by_the_weight(tmp_path: Path) -> None:
    source, path = small(), tmp_path / "weights.pth"
    vitpose_file(source, path, **{"backbone.blocks.1.attn.qkv.weight": None})
    with pytest.raises(
        ConfigError, match=r"weights.pth lacks the weight 'blocks.1.attn.qkv.weight' of network PoseViT$"
    ):
        small(weights=path)
    vitpose_file(source, path, **{"keypoint_head.final_layer.bias": torch.zeros(17)})
    with pytest.raises(
        ConfigError, match=r"the weight 'head.6.bias' has shape \(17,\), and here it has \(3,\); set weights_of to"
    ):
        small(weights=path)
    vitpose_file(source, path, **{"backbone.blocks.2.norm1.weight": torch.zeros(16)})
    with pytest.raises(
        ConfigError,
        match=r"has the weight 'blocks.2.norm1.weight', which network PoseViT lacks; choose the settings it",
    ):
        small(weights=path)
    vitpose_file(source, path, **{"backbone.pos_embed": torch.zeros(1, 19, 16)})
    with pytest.raises(ConfigError, match=r"'pos_embed' has 19 places; they must form a square or the grid \(4, 3\)"):
        small(positions="absolute", weights=path)
    path.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"weights.pth holds more than weights, or is damaged"):
        small(weights=path)
    with pytest.raises(ConfigError, match="weights_of is 'head'; it must be 'all' or 'backbone'"):
        small(weights=path, weights_of="head")


def test_every_layer_is_in_a_group_of_its_learning_rate() -> None:
    from timm.optim import param_groups_layer_decay

    network = small()
    groups = param_groups_layer_decay(network, 0.1, network.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(scale) == len(list(network.parameters()))
    # The stem, two blocks, then the norm and the head: .5³, .5², .5, 1; places and vectors are not shrunk.
    assert scale[id(network.patch_embed.weight)] == (0.125, 0.1)
    assert scale[id(network.gpe.conv.weight)] == (0.125, 0.0)
    assert scale[id(network.blocks[0].mlp.fc1.weight)] == (0.25, 0.1)
    assert scale[id(network.blocks[1].attn.lpe.weight)] == (0.5, 0.0)
    assert scale[id(network.norm.weight)] == (1.0, 0.0)
    assert scale[id(network.head[0].weight)] == (1.0, 0.1)
