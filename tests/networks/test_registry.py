"""Own and timm networks: shapes, parameter counts by arithmetic, and the split into features and classifier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.networks import (
    MLP,
    NETWORKS,
    TEXT_NETWORKS,
    WINDOW_NETWORKS,
    Logistic,
    SmallCNN,
    WindowCNN,
    build_network,
    classifier,
    features,
)


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# --- our own --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        # conv 1·16·9+16 = 160; conv 16·32·9+32 = 4,640; 8 -> 4 -> 2 pixels: head 32·2·2·10+10 = 1,290
        (SmallCNN(), 160 + 4640 + 1290),
        # conv 3·8·9+8 = 224; conv 8·16·9+16 = 1,168; 32 -> 16 -> 8: head 16·8·8·5+5 = 5,125
        (SmallCNN(num_classes=5, in_channels=3, width=8, input_shape=(3, 32, 32)), 224 + 1168 + 5125),
        # 28 -> 14 -> 7: head 32·7·7·10+10 = 15,690
        (SmallCNN(input_shape=(1, 28, 28)), 160 + 4640 + 15690),
        # 3·16·9+16 = 448; 4,640; 32·64·9+64 = 18,496; 64 -> 32 -> 16 -> 8: 64·8·8·64+64 = 262,208; head 64·200+200
        (SmallCNN(200, 3, 16, (3, 64, 64), num_features=64, blocks=3), 448 + 4640 + 18496 + 262208 + 13000),
        # conv 9·16·5+16 = 736; 16·32·5+32 = 2,592; 32·64·5+64 = 10,304; head 64·6+6 = 390
        (WindowCNN(6, 9, (9, 128)), 736 + 2592 + 10304 + 390),
        # conv 9·4·3+4 = 112; 4·8·3+8 = 104; 8·64+64 = 576; head 390
        (WindowCNN(6, 9, (9, 128), width=4, kernel_size=3, blocks=2, num_features=64), 112 + 104 + 576 + 390),
        # 64·64+64 = 4,160; head 64·10+10 = 650
        (MLP(10, 1, (1, 8, 8)), 4160 + 650),
        # 1,152 inputs (9 sensors × 128 steps): 1152·20+20 = 23,060; 20·30+30 = 630; head 30·6+6 = 186
        (MLP(6, 9, (9, 128), hidden=(20, 30)), 23060 + 630 + 186),
        (MLP(10, 1, (1, 8, 8), batch_norm=True), 4160 + 2 * 64 + 650),
        # 3·4·4 = 48 inputs: 48·2+2
        (Logistic(2, 3, (3, 4, 4)), 98),
    ],
)
def test_parameter_counts(network: nn.Module, expected: int) -> None:
    assert num_parameters(network) == expected


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(NETWORKS.keys() - {*TEXT_NETWORKS, *WINDOW_NETWORKS})),
    num_classes=st.integers(1, 12),
    channels=st.integers(1, 3),
    height=st.integers(4, 33),
    width=st.integers(4, 33),
    batch=st.integers(1, 3),
)
def test_own_networks_are_a_head_on_flat_features(
    name: str, num_classes: int, channels: int, height: int, width: int, batch: int
) -> None:
    network = build_network(name, num_classes, channels, (channels, height, width))
    x = torch.randn(batch, channels, height, width)
    flat = network.forward_features(x)
    assert flat.shape == (batch, network.num_features)
    assert network(x).shape == (batch, num_classes)
    assert isinstance(network.head, nn.Linear)
    assert classifier(network) is network.head
    assert torch.equal(features(network, x), flat)
    assert torch.equal(network(x), network.head(flat))


@pytest.mark.parametrize("steps", [8, 9, 128, 200])
def test_windows_are_a_head_on_flat_features(steps: int) -> None:
    network, x = build_network("window_cnn", 6, 9, (9, steps), num_features=7), torch.randn(3, 9, steps)
    flat = features(network, x)
    assert flat.shape == (3, 7)
    assert torch.equal(network(x), classifier(network)(flat))


def test_a_window_cnn_averages_over_time() -> None:
    # One block of kernel 1 with weights 1 and bias 0: the sum of both channels, 1+1, 2+0, −3+1, 4+0 → ReLU 2 2 0 4,
    # in pairs the larger 2 and 4, their mean 3.
    network = WindowCNN(1, 2, (2, 4), width=1, kernel_size=1, blocks=1)
    torch.nn.init.ones_(network.body[0].weight)
    torch.nn.init.zeros_(network.body[0].bias)
    assert network.forward_features(torch.tensor([[[1.0, 2, -3, 4], [1, 0, 1, 0]]])).tolist() == [[3.0]]


def test_logistic_is_the_affine_map() -> None:
    network = Logistic(2, 1, (1, 1, 2))
    with torch.no_grad():
        network.head.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        network.head.bias.copy_(torch.tensor([0.5, -0.5]))
    # 1·10 + 2·100 + .5 = 210.5; 3·10 + 4·100 − .5 = 429.5
    assert network(torch.tensor([[[[10.0, 100.0]]]])).tolist() == [[210.5, 429.5]]


def test_small_cnn_learns_the_digits() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(labels))
    train, test = order[:1437], order[1437:]
    network = build_network("small_cnn", 10, 1, (1, 8, 8))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    # What the network promises; chance is 10 %.
    assert (network(images[test]).argmax(1) == labels[test]).float().mean() > 0.95


# --- timm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Published: 11,689,512 with 1,000 classes and 3 channels. Two channels fewer in the 7×7 stem: −2·49·64;
        # 10 classes: −513·990.
        ("resnet18", 11_689_512 - 2 * 49 * 64 - 513 * 990),
        # Published: 5,717,416 at 224 px, 196 patches. 32 px have 4: −192·192; two channels fewer: −2·256·192;
        # 10 classes: −193·990.
        ("vit_tiny_patch16_224", 5_717_416 - 192 * 192 - 2 * 256 * 192 - 193 * 990),
    ],
)
def test_timm_networks_split_alike(name: str, expected: int) -> None:
    network = build_network(name, 10, 1, (1, 32, 32)).eval()
    assert num_parameters(network) == expected
    x = torch.randn(2, 1, 32, 32)
    flat = features(network, x)
    assert flat.shape == (2, network.num_features)
    head = classifier(network)
    assert isinstance(head, nn.Linear)
    assert torch.equal(head(flat), network(x))


def test_image_size_goes_only_to_timm_models_that_take_it() -> None:
    # hrnet words its refusal of img_size differently from the other convolutional models
    with torch.device("meta"):
        assert build_network("hrnet_w18_small", 10, 3, (3, 64, 64)) is not None
        assert build_network("test_vit", 10, 3, (3, 64, 64)).patch_embed.img_size == (64, 64)
        assert build_network("test_vit", 10, 3, (3, 64, 64), img_size=96).patch_embed.img_size == (96, 96)
        assert build_network("test_vit", 10, 3).patch_embed.img_size == (160, 160)  # its own


def test_timm_settings_are_passed_on() -> None:
    assert build_network("test_vit", 10, 3, (3, 64, 64), drop_rate=0.25).head_drop.p == 0.25


def test_weights_of_torchvisions_resnet_come_from_a_file_and_the_head_does_not(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    timm = pytest.importorskip("timm", "1.0.31")  # reads weights
    published = timm.create_model("resnet18.tv_in1k")  # the 11.7 million parameters of ImageNet's 1,000 classes
    assert num_parameters(published) == 11_689_512  # torchvision's documentation of resnet18
    save_file(published.state_dict(), tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    settings = {"pretrained": True, "pretrained_cfg_overlay": overlay}
    found: Any = build_network("resnet18.tv_in1k", 100, 3, (3, 224, 224), **settings)
    assert torch.equal(found.layer4[1].conv2.weight, published.layer4[1].conv2.weight)
    assert found.fc.weight.shape == (100, 512)


@pytest.mark.parametrize("settings", [{"pretrained": True}, {"checkpoint_path": "weights.pth"}])
def test_an_older_timm_builds_networks_and_reads_no_weights(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("timm.__version__", "1.0.30")
    with pytest.raises(ConfigError, match=r"'resnet18': pretrained weights need timm 1.0.31, not 1.0.30; upgrade it"):
        build_network("resnet18", 10, 3, (3, 32, 32), **settings)
    assert num_parameters(build_network("test_resnet", 10, 3, (3, 32, 32))) > 0


def test_importing_the_networks_does_not_import_timm() -> None:
    code = "import sys, lit_fed.networks; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- settings that cannot work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("smal_cnn", 10, 1), {}, r"'smal_cnn' is neither .* did you mean small_cnn"),
        (("resnet_18", 10, 1), {}, r"did you mean .*resnet18"),
        (("???", 10, 1), {}, r"choose small_cnn, mlp, logistic, .*, bert_tiny or a timm model"),
        (("small_cnn", 10, 3, (1, 8, 8)), {}, r"in_channels is 3; it must be 1, as in input_shape \(1, 8, 8\)"),
        (("small_cnn", 10, 3), {}, r"in_channels is 3; it must be 1, as in input_shape \(1, 8, 8\)"),
        (("small_cnn", 10, 1, (1, 3, 8)), {}, r"input_shape is \(1, 3, 8\); it must be .* at least 4×4"),
        (("small_cnn", 10, 1, (64,)), {}, r"input_shape is \(64,\)"),
        (("small_cnn", 10, 1, (1, 8, 8)), {"width": 0}, r"width is 0"),
        (("small_cnn", 10, 1, (1, 8, 8)), {"blocks": 0}, r"blocks is 0; it must be at least 1 and at most 8"),
        (("small_cnn", 10, 1, (1, 8, 8)), {"blocks": 4}, r"input_shape is \(1, 8, 8\); it must be .* at least 16×16"),
        (("window_cnn", 6, 1, (1, 8, 8)), {}, r"input_shape is \(1, 8, 8\); it must be \(channels, steps\)"),
        (("window_cnn", 6, 9, (9, 7)), {}, r"at least 8 steps for 3 blocks"),
        (("window_cnn", 6, 3, (9, 128)), {}, r"it must be \(channels, steps\) with in_channels = 3"),
        (("window_cnn", 6, 9, (9, 128)), {"kernel_size": 4}, r"kernel_size is 4; it must be odd"),
        (("window_cnn", 6, 9, (9, 128)), {"num_features": 0}, r"has 6 classes and 0 features"),
        (("small_cnn", 0, 1, (1, 8, 8)), {}, r"has 0 classes"),
        (("mlp", 10, 1), {}, r"'mlp': missing a required argument: 'input_shape'; its settings are num_classes"),
        (("mlp", 10, 1, (1, 8, 8)), {"width": 3}, r"unexpected keyword argument 'width'; its settings are"),
        (
            ("mlp", 10, 1, (1, 8, 8)),
            {"hidden": 17},
            r"'mlp': hidden is 17; it must be a list of whole numbers$",
        ),
        (("mlp", 10, 1, (1, 8, 8)), {"hidden": ["a"]}, r"hidden is \['a'\]; it must be a list of whole numbers$"),
        (("mlp", 10, 1, (1, 8, 8)), {"hidden": [-3]}, r"^MLP\.hidden is \(-3,\); it must hold widths of at least 1$"),
        (("small_cnn", 10, 1, (1, 8, 8)), {"width": 2.5}, r"width is 2.5; it must be a whole number$"),
        (("mlp", 10, 1, (1, 8, 8)), {"hidden": [64, 0]}, r"hidden is \(64, 0\)"),
        (("logistic", 10, 3, (1, 8, 8)), {}, r"in_channels is 3"),
        (("logistic", 10, 3, ()), {}, r"input_shape is \(\)"),
        (("test_resnet", 10, 3, (3, 8, 8)), {"wdth": 3}, r"'test_resnet': .*'wdth'; remove that setting"),
        (("resnet18.nonsense", 10, 3), {}, r"cannot be built: .*nonsense"),
        (("test_vit", 10, 3, (3, 8, 8)), {}, r"no patch in an image of \(8, 8\) pixels"),
    ],
)
def test_impossible_networks_are_refused_in_one_line(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_network(*arguments, **options)
    assert "\n" not in str(caught.value)


class _Maps(nn.Module):
    def forward_features(self, x: Tensor) -> Tensor:
        return x


def test_networks_without_the_split_are_refused() -> None:
    x = torch.zeros(2, 1, 4, 4)
    with pytest.raises(ConfigError, match="Linear has no forward_features"):
        features(nn.Linear(4, 4), x)
    with pytest.raises(ConfigError, match=r"_Maps yields features of shape \(2, 1, 4, 4\)"):
        features(_Maps(), x)
    with pytest.raises(ConfigError, match="_Maps has no single classifier"):
        classifier(_Maps())
    with torch.device("meta"):
        distilled = build_network("deit_tiny_distilled_patch16_224", 10, 3, (3, 32, 32))
    with pytest.raises(ConfigError, match="no single classifier"):
        classifier(distilled)


def test_an_mlp_normalises_by_the_batch_in_evaluation_too():
    network = MLP(2, 1, (1, 8, 8), hidden=(16, 8), batch_norm=True).eval()
    assert not list(network.buffers())
    x = torch.randn(50, 1, 8, 8)
    normalised = network.body[:-1](x)  # before the last ReLU
    assert torch.allclose(normalised.mean(dim=0), torch.zeros(8), atol=1e-5)
    assert torch.allclose(normalised.var(dim=0, correction=0), torch.ones(8), atol=1e-2)
