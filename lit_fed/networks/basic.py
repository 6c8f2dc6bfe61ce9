"""Networks in a few lines: small ones for quick runs, and published convolutional networks for small images.

All split in the same way, which methods that distil features or treat the head separately rely on:
``forward(x) == head(forward_features(x))``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

from lit_fed.checks import check_choice, check_range
from lit_fed.errors import ConfigError


def image_size(network: str, in_channels: int, input_shape: Sequence[int], smallest: int) -> tuple[int, int]:
    """Height and width of a network's images.

    Args:
        network: Name for the error message.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the images.
        smallest: Least height and width, in pixels.
    """
    shape = tuple(input_shape)
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"{network}.input_shape is {shape}; it must be (channels, height, width), at least {smallest}×{smallest}"
        )
    check_range(f"{network}.in_channels", in_channels, least=1)
    if shape[0] != in_channels:
        raise ConfigError(f"{network}.in_channels is {in_channels}; it must be {shape[0]}, as in input_shape {shape}")
    return shape[1], shape[2]


def halved(size: tuple[int, int], smallest: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The stride that halves a map, and the size (height, width) of the map after it, rounded up.

    Args:
        size: Height and width of the map.
        smallest: A side of at most this length keeps it, with stride 1.
    """
    stride = (2 if size[0] > smallest else 1, 2 if size[1] > smallest else 1)
    return stride, (-(-size[0] // stride[0]), -(-size[1] // stride[1]))


def batch_norm(channels: int, batch_stats: bool) -> nn.BatchNorm2d:
    """Batch normalisation (Ioffe and Szegedy 2015) of maps (B, channels, H, W).

    Args:
        channels: Channels of the maps.
        batch_stats: Normalise by the statistics of the current batch, also in eval mode, without buffers: there are no
            running statistics that differ between clients or need aggregation.
    """
    return nn.BatchNorm2d(channels, track_running_stats=not batch_stats)


_MOST_BLOCKS = 8  # whose image is at least 256 pixels wide


class ClassificationNetwork(nn.Module, ABC):
    """A body that yields flat features and a linear head.

    Args:
        num_features: Length d of the feature vector.
        num_classes: Length of the output, at least 1.
        head_bias: Whether the head adds a bias to its logits.

    Raises:
        ConfigError: For no features or no classes.
    """

    def __init__(self, num_features: int, num_classes: int, head_bias: bool = True) -> None:
        super().__init__()
        if num_classes < 1 or num_features < 1:
            raise ConfigError(
                f"network {type(self).__name__} has {num_classes} classes and {num_features} features; it must have at "
                "least 1 of each, and an input_shape without zeros"
            )
        self.num_features = num_features
        self.head = nn.Linear(num_features, num_classes, bias=head_bias)

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, *input_shape) to (B, d)."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch: (B, *input_shape) to (B, num_classes)."""
        logits: Tensor = self.head(self.forward_features(x))
        return logits


class _Layers(ClassificationNetwork):
    """A network whose body is a chain of layers."""

    body: nn.Sequential

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, *input_shape) to (B, d)."""
        flat: Tensor = self.body(x)
        return flat


class SmallCNN(_Layers):
    """Blocks of a 3×3 convolution, ReLU and 2×2 max pooling, then a linear head; for images of 8×8 to 64×64.

    The convolutions have ``width``, ``2 * width``, ``4 * width``, … channels. The features are the last flattened map,
    with two blocks ``d = 2 * width * (H // 4) * (W // 4)``, or with `num_features` the output of a linear layer with
    ReLU on it, so that networks of different width have features of one length.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.
        width: Channels of the first convolution.
        input_shape: Channels, height and width of the images; height and width at least ``2 ** blocks`` pixels.
        head_bias: Whether the head has a bias.
        num_features: d; None for the flattened map.
        blocks: Convolutions; each halves height and width, so that a third suits images of 64×64.

    Raises:
        ConfigError: If the image is too small or its channels are not `in_channels`.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        width: int = 16,
        input_shape: Sequence[int] = (1, 8, 8),
        head_bias: bool = True,
        num_features: int | None = None,
        blocks: int = 2,
    ) -> None:
        check_range("SmallCNN.width", width, least=1)
        check_range("SmallCNN.blocks", blocks, least=1, most=_MOST_BLOCKS)
        pixels = image_size(type(self).__name__, in_channels, input_shape, smallest=2**blocks)
        channels = [in_channels, *(width * 2**block for block in range(blocks))]
        flat = channels[-1] * (pixels[0] // 2**blocks) * (pixels[1] // 2**blocks)
        super().__init__(flat if num_features is None else num_features, num_classes, head_bias)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), *projection(flat, num_features)]
        self.body = nn.Sequential(*layers)


class WindowCNN(_Layers):
    """Blocks of a convolution along time, ReLU and max pooling by 2, then a linear head; for windows of sensors.

    The convolutions have ``width``, ``2 * width``, … channels. The features are the last map's means over time, so
    ``d = 2 ** (blocks - 1) * width``, or with `num_features` the output of a linear layer with ReLU on them, so that
    networks of different width have features of one length.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the windows, one per sensor axis.
        input_shape: Channels and time steps of a window; at least ``2 ** blocks`` steps.
        width: Channels of the first convolution.
        kernel_size: Steps that a convolution sees, an odd number.
        blocks: Convolutions.
        head_bias: Whether the head has a bias.
        num_features: d; None for the means.

    Raises:
        ConfigError: If the input is not a window, too short, or its channels are not `in_channels`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        input_shape: Sequence[int],
        width: int = 16,
        kernel_size: int = 5,
        blocks: int = 3,
        head_bias: bool = True,
        num_features: int | None = None,
    ) -> None:
        shape = tuple(input_shape)
        check_range("WindowCNN.width", width, least=1)
        check_range("WindowCNN.blocks", blocks, least=1, most=_MOST_BLOCKS)
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ConfigError(f"WindowCNN.kernel_size is {kernel_size}; it must be odd, such as 5")
        if len(shape) != 2 or shape[0] != in_channels or shape[0] < 1 or shape[1] < 2**blocks:
            raise ConfigError(
                f"WindowCNN.input_shape is {shape}; it must be (channels, steps) with in_channels = {in_channels} and "
                f"at least {2**blocks} steps for {blocks} blocks"
            )
        channels = [in_channels, *(width * 2**block for block in range(blocks))]
        super().__init__(channels[-1] if num_features is None else num_features, num_classes, head_bias)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv1d(before, after, kernel_size, padding=kernel_size // 2), nn.ReLU(), nn.MaxPool1d(2)]
        layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten(), *projection(channels[-1], num_features)]
        self.body = nn.Sequential(*layers)


class MLP(_Layers):
    """Fully connected hidden layers with ReLU on the flattened input, then a linear head.

    Args:
        num_classes: Length of the output.
        in_channels: First entry of an input shape (channels, height, width).
        input_shape: Shape of one example, of any number of dimensions.
        hidden: Widths of the hidden layers; the last one is the feature length d.
        head_bias: Whether the head has a bias.
        batch_norm: Normalise each layer before its ReLU by the statistics of the current batch, also in eval mode, as
            `MobileNet` does with its ``batch_stats``; there are no buffers, and a batch needs at least two examples.

    Raises:
        ConfigError: If a layer has no units or the input's channels are not `in_channels`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        input_shape: Sequence[int],
        hidden: Sequence[int] = (64,),
        head_bias: bool = True,
        batch_norm: bool = False,
    ) -> None:
        widths = [_flat_size(type(self).__name__, in_channels, input_shape), *hidden]
        if min(widths) < 1:
            raise ConfigError(f"{type(self).__name__}.hidden is {tuple(hidden)}; it must hold widths of at least 1")
        super().__init__(widths[-1], num_classes, head_bias)
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise(widths):
            norm = [nn.BatchNorm1d(width_out, track_running_stats=False)] if batch_norm else []
            layers += [nn.Linear(width_in, width_out), *norm, nn.ReLU()]
        self.body = nn.Sequential(*layers)


class Logistic(ClassificationNetwork):
    """Multinomial logistic regression: the features are the flattened input.

    Args:
        num_classes: Length of the output.
        in_channels: First entry of an input shape (channels, height, width).
        input_shape: Shape of one example, of any number of dimensions.
        head_bias: Whether the head has a bias.

    Raises:
        ConfigError: If the input's channels are not `in_channels`.
    """

    def __init__(self, num_classes: int, in_channels: int, input_shape: Sequence[int], head_bias: bool = True) -> None:
        super().__init__(_flat_size(type(self).__name__, in_channels, input_shape), num_classes, head_bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, *input_shape) to (B, d)."""
        return x.flatten(1)


def projection(size: int, num_features: int | None) -> list[nn.Module]:
    """The layers from a flat map to features of a given length; empty for None."""
    return [] if num_features is None else [nn.Linear(size, num_features), nn.ReLU()]


def _flat_size(network: str, in_channels: int, input_shape: Sequence[int]) -> int:
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        raise ConfigError(f"{network}.input_shape is {shape}; it must be the shape of one example")
    if len(shape) == 3 and shape[0] != in_channels:  # only an image's first dimension is its channels
        raise ConfigError(f"{network}.in_channels is {in_channels}; it must be {shape[0]}, as in input_shape {shape}")
    return math.prod(shape)


class McMahanCNN(_Layers):
    """The CNN of McMahan et al., "Communication-efficient learning of deep networks …" (AISTATS 2017), for MNIST.

    Two 5×5 convolutions that keep the map's size, of 32 and 64 channels, each with ReLU and 2×2 max pooling, then a
    fully connected layer of 512 units with ReLU, which yields the features: (B, 1, 28, 28) to (B, 64, 7, 7) to
    (B, 512), all at least 0. 1,663,370 parameters with 28×28 pixels, 1 channel and 10 classes, as the paper says.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the images; height and width at least 4 pixels.
        head_bias: Whether the classifier has a bias.

    Raises:
        ConfigError: If the image is too small or its channels are not `in_channels`.

    Note:
        The paper names layers in words. Convolutions that keep the map's size, and ReLU before the pooling, are our
        reading; the stated number of parameters confirms the first, and the order of the second does not matter.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        input_shape: Sequence[int] = (1, 28, 28),
        head_bias: bool = True,
    ) -> None:
        height, width = image_size(type(self).__name__, in_channels, input_shape, smallest=4)
        super().__init__(512, num_classes, head_bias)
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), 512),
            nn.ReLU(),
        )


# Table 1 of the paper, column A; a pooling after each.
_VGG_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11(_Layers):
    """VGG-11 of Simonyan and Zisserman, "Very deep convolutional networks …" (ICLR 2015), configuration A, for CIFAR.

    Eight 3×3 convolutions with bias and ReLU, of 64, 128, 256, 256, 512, 512, 512 and 512 channels, with 2×2 max
    pooling after the first, second, fourth, sixth and eighth: (B, 3, 32, 32) to (B, 512, 1, 1). Two fully connected
    layers 512 → 512 → 512, ReLU after both, yield the features, d = 512, all at least 0. No normalisation, no dropout.
    9,750,922 parameters with 3 channels and 10 classes.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the images; any size.
        head_bias: Whether the classifier has a bias.

    Raises:
        ConfigError: If `input_shape` is not that of an image, or its channels are not `in_channels`.

    Note:
        The paper's network is for 224×224 pixels, with 4,096 hidden units and dropout. This form, and the weights it
        starts with (convolutions by He et al. 2015, normal with variance 2 / (9 · channels out), no bias; torch's
        default elsewhere), follow the public code of FedNTD. Two readings let it take any size with the same
        parameters, and leave 32×32 as it is: a pooling leaves out a side that is already 1 pixel long (below 32
        pixels), and a last map larger than 1×1 is averaged (from 64 pixels on). timm's `vgg11` is another network; its
        full name `vgg11.tv_in1k` still reaches it.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        input_shape: Sequence[int] = (3, 32, 32),
        head_bias: bool = True,
    ) -> None:
        height, width = image_size(type(self).__name__, in_channels, input_shape, smallest=1)
        super().__init__(512, num_classes, head_bias)
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in _VGG_STAGES:
            for channels_out in stage:
                conv = nn.Conv2d(channels, channels_out, kernel_size=3, padding=1)
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]  # a convolution may have none; these have one
                layers += [conv, nn.ReLU()]
                channels = channels_out
            window = (min(height, 2), min(width, 2))
            layers.append(nn.MaxPool2d(window))
            height, width = height // window[0], width // window[1]
        hidden = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *hidden)


# Table 1 of the paper: channels out of each block, and whether it halves the map.
_BLOCKS = (
    *((64, False), (128, True), (128, False), (256, True), (256, False), (512, True)),
    *((512, False),) * 5,
    *((1024, True), (1024, False)),
)


class MobileNet(_Layers):
    """MobileNet of Howard et al., "MobileNets: efficient convolutional neural networks …" (2017), for CIFAR.

    A 3×3 convolution to 32 channels, then 13 blocks of a depthwise 3×3 and a pointwise 1×1 convolution, each
    convolution without bias and followed by batch norm and ReLU. Four blocks halve the map: (B, 3, 32, 32) to
    (B, 1024, 2, 2), whose average is the features, d = 1024, all at least 0. 3,309,476 parameters with 3 channels and
    100 classes.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the images; height and width at least 2 pixels.
        head_bias: Whether the classifier has a bias.
        batch_stats: Normalise by the statistics of the current batch, also in eval mode, without buffers; a prediction
            then depends on its batch. If false, running statistics are buffers, as usual in torch, and follow
            `trainer.buffers`.

    Raises:
        ConfigError: If the image is too small or its channels are not `in_channels`.

    Note:
        The paper's network is for 224×224 pixels; for CIFAR the first convolution has stride 1 instead of 2, as in the
        public code of FedDr+, which also has the statistics of the batch (its paper does not say so). On images of up
        to 16 pixels a block does not halve a side that is only 2 pixels long: a channel then has at least 4 values
        even for a single image, and batch norm needs more than one. A last map larger than 2×2 is averaged as well.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        input_shape: Sequence[int] = (3, 32, 32),
        head_bias: bool = True,
        batch_stats: bool = True,
    ) -> None:
        size = image_size(type(self).__name__, in_channels, input_shape, smallest=2)
        super().__init__(_BLOCKS[-1][0], num_classes, head_bias)
        channels = 32
        layers = _mobile_conv(in_channels, channels, 3, batch_stats)
        for channels_out, halves in _BLOCKS:
            stride, size = halved(size, smallest=2) if halves else ((1, 1), size)
            layers += _mobile_conv(channels, channels, 3, batch_stats, stride, groups=channels)  # depthwise
            layers += _mobile_conv(channels, channels_out, 1, batch_stats)  # pointwise
            channels = channels_out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _mobile_conv(
    channels: int, channels_out: int, kernel: int, batch_stats: bool, stride: tuple[int, int] = (1, 1), groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, batch_norm(channels_out, batch_stats), nn.ReLU()]


_RESNET_STAGES = (64, 128, 256, 512)  # table 1 of the paper: channels of each stage, two blocks each


class ResNet18Cifar(_Layers):
    """ResNet-18 of He et al., "Deep residual learning for image recognition" (CVPR 2016), with a stem for CIFAR.

    A 3×3 convolution of stride 1 to 64 channels in place of the 7×7 convolution of stride 2 and the max pooling, then
    four stages of two basic blocks, of 64, 128, 256 and 512 channels, where each stage except the first halves the map:
    (B, 3, 32, 32) to (B, 512, 4, 4), whose average is the features, d = 512, all at least 0. 11,173,962 parameters with
    3 channels and 10 classes.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the images; height and width at least 2 pixels.
        head_bias: Whether the classifier has a bias.
        norm: ``batch``, or ``group`` for group norm with 2 groups, which does not depend on the batch and has no
            buffers (Reddi et al., "Adaptive federated optimization", ICLR 2021).
        batch_stats: With ``norm="batch"``: normalise by the statistics of the current batch, also in eval mode, without
            buffers; a prediction then depends on its batch. If false, running statistics are buffers, as usual in
            torch, and follow `trainer.buffers`.

    Raises:
        ConfigError: If the image is too small, its channels are not `in_channels`, or `norm` is unknown.

    Note:
        The paper's own networks for CIFAR are narrower (16, 32, 64 channels); this is the form that the federated
        literature calls ResNet-18 on CIFAR. Weights start as in the paper: convolutions by He et al. 2015. On images
        of up to 8 pixels a stage does not halve a side that is only 2 pixels long: a channel then has at least 4
        values even for a single image, and batch norm needs more than one.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        input_shape: Sequence[int] = (3, 32, 32),
        head_bias: bool = True,
        norm: str = "batch",
        batch_stats: bool = False,
    ) -> None:
        size = image_size(type(self).__name__, in_channels, input_shape, smallest=2)
        make_norm = _norm(type(self).__name__, norm, batch_stats)
        super().__init__(_RESNET_STAGES[-1], num_classes, head_bias)
        channels = _RESNET_STAGES[0]
        layers: list[nn.Module] = [_resnet_conv(in_channels, channels, 3), make_norm(channels), nn.ReLU()]
        for stage, channels_out in enumerate(_RESNET_STAGES):
            stride, size = halved(size, smallest=2) if stage else ((1, 1), size)
            layers += [
                _Block(channels, channels_out, stride, make_norm),
                _Block(channels_out, channels_out, (1, 1), make_norm),
            ]
            channels = channels_out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, relu(F(x) + S(x)); S is a 1×1 convolution where the shape changes."""

    def __init__(
        self, channels: int, channels_out: int, stride: tuple[int, int], make_norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _resnet_conv(channels, channels_out, 3, stride),
            make_norm(channels_out),
            nn.ReLU(),
            _resnet_conv(channels_out, channels_out, 3),
            make_norm(channels_out),
        )
        self.shortcut = nn.Sequential()
        if channels != channels_out:
            self.shortcut.extend([_resnet_conv(channels, channels_out, 1, stride), make_norm(channels_out)])
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) to (B, channels_out, H / stride, W / stride)."""
        summed: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return summed


def _resnet_conv(channels: int, channels_out: int, kernel: int, stride: tuple[int, int] = (1, 1)) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(network: str, norm: str, batch_stats: bool) -> Callable[[int], nn.Module]:
    check_choice(f"{network}.norm", norm, ("batch", "group"))
    if norm == "group" and batch_stats:
        raise ConfigError(f"{network}.norm is 'group', which has no batch statistics; set batch_stats to false")
    return lambda channels: batch_norm(channels, batch_stats) if norm == "batch" else nn.GroupNorm(2, channels)
