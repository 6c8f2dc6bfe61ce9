"""The networks of the literature: published parameter counts, other implementations' outputs, and small images."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.networks import (
    NETWORKS,
    TEXT_NETWORKS,
    VGG11,
    WINDOW_NETWORKS,
    McMahanCNN,
    MobileNet,
    ResNet18Cifar,
    build_network,
)
from lit_fed.networks.basic import halved

CONVOLUTIONAL = ("mcmahan_cnn", "mobilenet", "resnet18_cifar", "vgg11")


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def copy_body(network: nn.Module, reference: nn.Module) -> None:
    """Give a network's body the weights of another implementation, which lists them in the same order, head last."""
    own = [tensor for name, tensor in network.state_dict().items() if not name.startswith("head.")]
    others = list(reference.state_dict().values())
    assert 0 <= len(others) - len(own) <= 2  # its own head
    for mine, other in zip(own, others, strict=False):
        mine.copy_(other)


# --- parameters -----------------------------------------------------------------------------------------------------

# Convolutions, 9·in·out + out:
#   9·3·64+64 = 1,792; 9·64·128+128 = 73,856; 9·128·256+256 = 295,168; 9·256·256+256 = 590,080;
#   9·256·512+512 = 1,180,160; 9·512·512+512 = 2,359,808, three times
VGG11_CONVOLUTIONS = 1792 + 73_856 + 295_168 + 590_080 + 1_180_160 + 3 * 2_359_808
# Hidden layers: 512·512+512 = 262,656, twice
VGG11_BODY = VGG11_CONVOLUTIONS + 2 * 262_656

# Stem: 9·3·32 and 2·32 of its norm. A block of i to o channels: 9·i + 2·i depthwise, i·o + 2·o pointwise.
#   32→64: 352 + 2,176; 64→128: 704 + 8,448; 128→128: 1,408 + 16,640; 128→256: 1,408 + 33,280;
#   256→256: 2,816 + 66,048; 256→512: 2,816 + 132,096; 512→512: 5,632 + 263,168, five times;
#   512→1024: 5,632 + 526,336; 1024→1024: 11,264 + 1,050,624
MOBILENET_BODY = (
    (864 + 64)
    + (352 + 2176)
    + (704 + 8448)
    + (1408 + 16_640)
    + (1408 + 33_280)
    + (2816 + 66_048)
    + (2816 + 132_096)
    + 5 * (5632 + 263_168)
    + (5632 + 526_336)
    + (11_264 + 1_050_624)
)

# Stem: 9·3·64 = 1,728 and 2·64 of its norm. Stages, convolutions + 1×1 shortcut + 2·channels of 4 or 5 norms:
#   64: 4 · 9·64·64 + 4·128; 128: 9·64·128 + 3 · 9·128·128 + 64·128 + 5·256;
#   256: 9·128·256 + 3 · 9·256·256 + 128·256 + 5·512; 512: 9·256·512 + 3 · 9·512·512 + 256·512 + 5·1,024
RESNET18_BODY = (
    (1728 + 128)
    + (4 * 36_864 + 4 * 128)
    + (73_728 + 3 * 147_456 + 8192 + 5 * 256)
    + (294_912 + 3 * 589_824 + 32_768 + 5 * 512)
    + (1_179_648 + 3 * 2_359_296 + 131_072 + 5 * 1024)
)

# 25·1·32+32 = 832; 25·32·64+64 = 51,264; 28 -> 14 -> 7: 64·7·7·512+512 = 1,606,144
MCMAHAN_BODY = 832 + 51_264 + 1_606_144


@pytest.mark.parametrize(
    ("name", "num_classes", "shape", "published", "arithmetic"),
    [
        ("vgg11", 10, (3, 32, 32), 9_750_922, VGG11_BODY + 512 * 10 + 10),
        ("mobilenet", 100, (3, 32, 32), 3_309_476, MOBILENET_BODY + 1024 * 100 + 100),
        ("resnet18_cifar", 10, (3, 32, 32), 11_173_962, RESNET18_BODY + 512 * 10 + 10),
        ("mcmahan_cnn", 10, (1, 28, 28), 1_663_370, MCMAHAN_BODY + 512 * 10 + 10),
    ],
)
def test_parameters_are_as_many_as_published(
    name: str, num_classes: int, shape: tuple[int, int, int], published: int, arithmetic: int
) -> None:
    assert published == arithmetic
    assert num_parameters(build_network(name, num_classes, shape[0], shape)) == published
    assert num_parameters(NETWORKS[name](num_classes)) == published  # the defaults are the published shape
    without = build_network(name, num_classes, shape[0], shape, head_bias=False)
    assert num_parameters(without) == published - num_classes
    assert without.head.bias is None


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {*TEXT_NETWORKS, *WINDOW_NETWORKS}))
def test_a_head_without_bias_is_a_product(name: str) -> None:
    network = build_network(name, 5, 1, (1, 8, 8), head_bias=False)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(network(x), F.linear(network.forward_features(x), network.head.weight))
    assert not [key for key in network.state_dict() if key == "head.bias"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # 5×5 convolution of 3 channels: 75·32+32 = 2,432; 32 -> 16 -> 8: 64·8·8·512+512 = 2,097,664; head 5,130
        ((3, 32, 32), 2432 + 51_264 + 2_097_664 + 5130),
        # 8 -> 4 -> 2: 64·2·2·512+512 = 131,584
        ((1, 8, 8), 832 + 51_264 + 131_584 + 5130),
        # 9×30: 9 -> 4 -> 2 and 30 -> 15 -> 7, so 64·2·7·512+512 = 459,264
        ((1, 9, 30), 832 + 51_264 + 459_264 + 5130),
    ],
)
def test_only_the_fully_connected_layer_of_mcmahans_cnn_grows_with_the_image(
    shape: tuple[int, int, int], expected: int
) -> None:
    assert num_parameters(build_network("mcmahan_cnn", 10, shape[0], shape)) == expected


# --- outputs of other implementations --------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "poolings"), [(32, 5), (28, 4)])
def test_vgg11_equals_torchvisions_convolutions(side: int, poolings: int) -> None:
    # 28 -> 14 -> 7 -> 3 -> 1: the fifth pooling has nothing left to halve; public codes leave it out as well.
    network = VGG11(input_shape=(3, side, side))
    convolutions = torchvision.models.vgg11().features
    if poolings == 4:
        convolutions = convolutions[:-1]
    reference = nn.Sequential(*convolutions, nn.Flatten())
    for _ in range(2):
        reference.extend([nn.Linear(512, 512), nn.ReLU()])
    copy_body(network, reference)
    x = torch.randn(2, 3, side, side)
    assert torch.equal(network.forward_features(x), reference(x))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_resnet18_equals_torchvisions_with_another_stem(norm: str, training: bool) -> None:
    layer = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 2)}[norm]
    reference = torchvision.models.resnet18(norm_layer=layer, num_classes=10)
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    for module in reference.modules():  # statistics that are not the 0 and 1 they start with
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    network = ResNet18Cifar(norm=norm)
    copy_body(network, reference)
    network.head.load_state_dict(reference.fc.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(network.train(training)(x), reference.train(training)(x))


def test_mobilenet_equals_timms_with_another_stem() -> None:
    reference = timm.create_model("mobilenetv1_100", num_classes=100, act_layer=nn.ReLU)
    reference.conv_stem.stride = (1, 1)
    network = MobileNet(100, batch_stats=False)
    copy_body(network, reference)
    network.head.load_state_dict(reference.classifier.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(network.train()(x), reference.train()(x))
    assert torch.equal(network.eval()(x), reference.eval()(x))  # with the running statistics of that one batch


def test_mcmahans_cnn_by_its_operations() -> None:
    network = McMahanCNN()
    conv1, bias1, conv2, bias2, full, bias3 = (p for n, p in network.named_parameters() if n.startswith("body."))
    x = torch.randn(2, 1, 28, 28)
    maps = F.max_pool2d(F.conv2d(x, conv1, bias1, padding="same"), 2).relu()
    maps = F.max_pool2d(F.conv2d(maps, conv2, bias2, padding="same"), 2).relu()
    expected = F.linear(maps.flatten(1), full, bias3).relu()
    # The order of max and relu does not matter, but that of the additions in another convolution kernel might.
    assert torch.allclose(network.forward_features(x), expected, atol=1e-6)


@pytest.mark.parametrize("make", [VGG11, ResNet18Cifar])
def test_convolutions_start_with_the_variance_of_he(make: type[nn.Module]) -> None:
    for conv in (module for module in make().modules() if isinstance(module, nn.Conv2d)):
        expected = (2 / (conv.kernel_size[0] ** 2 * conv.out_channels)) ** 0.5
        # The deviation of n normal numbers errs by 1/√(2n) of itself; 6 times that is 1 in 10⁹.
        error = 6 * (2 * conv.weight.numel()) ** -0.5
        assert float(conv.weight.detach().std()) == pytest.approx(expected, rel=error)
        assert conv.bias is None or not conv.bias.any()


# --- features and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 64, 48)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_features_have_their_length_and_no_negative_entry(name: str, shape: tuple[int, int, int]) -> None:
    network = build_network(name, 3, shape[0], shape)
    flat = network.forward_features(torch.randn(2, *shape))
    assert flat.shape == (2, 1024 if name == "mobilenet" else 512)
    assert flat.min() >= 0


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_gradients_reach_every_parameter(name: str, shape: tuple[int, int, int]) -> None:
    network = build_network(name, 4, shape[0], shape)
    F.cross_entropy(network(torch.randn(4, *shape)), torch.arange(4)).backward()
    assert [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


# --- small images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "smallest"), [("vgg11", 1), ("mobilenet", 2), ("resnet18_cifar", 2)])
def test_parameters_do_not_depend_on_the_image(name: str, smallest: int) -> None:
    for side in (smallest, 8, 33):
        network = build_network(name, 10, 3, (3, side, 32))
        assert num_parameters(network) == num_parameters(NETWORKS[name](10))
        assert network(torch.randn(1, 3, side, 32)).shape == (1, 10)  # trains, even on one image


@pytest.mark.parametrize(
    ("name", "side", "last"),
    [
        ("vgg11", 64, 2),  # 64 -> 32 -> 16 -> 8 -> 4 -> 2
        ("vgg11", 32, 1),
        ("vgg11", 8, 1),  # 8 -> 4 -> 2 -> 1, and no further
        ("mobilenet", 64, 4),  # 64 -> 32 -> 16 -> 8 -> 4
        ("mobilenet", 32, 2),
        ("mobilenet", 28, 2),  # 28 -> 14 -> 7 -> 4 -> 2
        ("mobilenet", 8, 2),  # 8 -> 4 -> 2, and no further
        ("resnet18_cifar", 32, 4),  # 32 -> 16 -> 8 -> 4
        ("resnet18_cifar", 8, 2),  # 8 -> 4 -> 2, and no further
    ],
)
def test_maps_are_halved_until_nothing_is_left_to_halve(name: str, side: int, last: int) -> None:
    network = build_network(name, 10, 1, (1, side, side))
    sizes: list[torch.Size] = []
    pool = next(module for module in network.modules() if isinstance(module, nn.AdaptiveAvgPool2d))
    pool.register_forward_pre_hook(lambda _module, args: sizes.append(args[0].shape[2:]))
    network(torch.randn(1, 1, side, side))
    assert sizes == [(last, last)]


def test_sides_are_halved_one_by_one() -> None:
    assert halved((5, 2), smallest=2) == ((2, 1), (3, 2))
    assert halved((3, 3), smallest=2) == ((2, 2), (2, 2))


# --- batch statistics ------------------------------------------------------------------------------------------------


def alone_and_in_company(network: nn.Module) -> tuple[Tensor, Tensor]:
    """The logits of two images in eval mode, in a batch of their own and in one with two others."""
    x = torch.randn(4, 3, 32, 32)
    network.eval()
    return network(x[:2]), network(x)[:2]


@pytest.mark.parametrize("name", ["mobilenet", "resnet18_cifar"])
def test_with_batch_statistics_a_prediction_depends_on_its_batch(name: str) -> None:
    network = build_network(name, 10, 3, (3, 32, 32), batch_stats=True)
    assert list(network.buffers()) == []
    alone, together = alone_and_in_company(network)
    assert (alone - together).abs().max() > 1e-2
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(network.eval()(x), network.train()(x))


@pytest.mark.parametrize(("name", "norms"), [("mobilenet", 1 + 2 * 13), ("resnet18_cifar", 1 + 16 + 3)])
def test_with_running_statistics_it_does_not(name: str, norms: int) -> None:
    network = build_network(name, 10, 3, (3, 32, 32), batch_stats=False)
    assert len(list(network.buffers())) == 3 * norms  # mean, variance and a count each
    alone, together = alone_and_in_company(network)
    assert torch.allclose(alone, together, atol=1e-5)  # kernels for other batch sizes may add in another order


def test_the_switch_is_on_for_mobilenet_and_off_for_resnet18() -> None:
    assert not list(MobileNet().buffers())
    assert len(list(ResNet18Cifar().buffers())) == 3 * 20
    assert not list(ResNet18Cifar(norm="group").buffers())
    assert MobileNet(batch_stats=False).state_dict().keys() > MobileNet().state_dict().keys()


# --- settings that cannot work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("vgg11", 10, 1), {}, r"VGG11\.in_channels is 1; it must be 3, as in input_shape \(3, 32, 32\)"),
        (("vgg11", 10, 3, (3, 0, 8)), {}, r"VGG11\.input_shape is \(3, 0, 8\); it must be .* at least 1×1"),
        (("vgg11", 10, 0, (0, 8, 8)), {}, r"VGG11\.in_channels is 0; it must be at least 1"),
        (("mobilenet", 10, 3, (3, 8, 1)), {}, r"MobileNet\.input_shape is \(3, 8, 1\); it must be .* at least 2×2"),
        (("mobilenet", 0, 3, (3, 8, 8)), {}, r"MobileNet has 0 classes"),
        (
            ("resnet18_cifar", 10, 3, (3, 1, 8)),
            {},
            r"ResNet18Cifar\.input_shape is \(3, 1, 8\); it must be .* at least 2×2",
        ),
        (("resnet18_cifar", 10, 3), {"norm": "layer"}, r"norm is 'layer'; it must be 'batch' or 'group'"),
        (
            ("resnet18_cifar", 10, 3),
            {"norm": "group", "batch_stats": True},
            r"'group', which has no batch statistics; set",
        ),
        (
            ("mcmahan_cnn", 10, 1, (1, 3, 28)),
            {},
            r"McMahanCNN\.input_shape is \(1, 3, 28\); it must be .* at least 4×4",
        ),
        (
            ("mcmahan_cnn", 10, 1, (64,)),
            {},
            r"McMahanCNN\.input_shape is \(64,\); it must be \(channels, height, width\)",
        ),
        (("mcmahan_cnn", 10, 1), {"width": 3}, r"unexpected keyword argument 'width'; its settings are num_classes"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_network(*arguments, **options)
    assert "\n" not in str(caught.value)
