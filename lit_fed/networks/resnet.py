"""ResNet-18 for small images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lit_fed.checks import check_choice
from lit_fed.errors import ConfigError
from lit_fed.networks.basic import ClassificationNetwork
from lit_fed.networks.images import batch_norm, halved, image_size

_STAGES = (64, 128, 256, 512)  # table 1 of the paper: channels of each stage, two blocks each


class ResNet18Cifar(ClassificationNetwork):
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
        super().__init__(_STAGES[-1], num_classes, head_bias)
        channels = _STAGES[0]
        layers: list[nn.Module] = [_conv(in_channels, channels, 3), make_norm(channels), nn.ReLU()]
        for stage, channels_out in enumerate(_STAGES):
            stride, size = halved(size, smallest=2) if stage else ((1, 1), size)
            layers += [
                _Block(channels, channels_out, stride, make_norm),
                _Block(channels_out, channels_out, (1, 1), make_norm),
            ]
            channels = channels_out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, in_channels, H, W) to (B, 512)."""
        flat: Tensor = self.body(x)
        return flat


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, relu(F(x) + S(x)); S is a 1×1 convolution where the shape changes."""

    def __init__(
        self, channels: int, channels_out: int, stride: tuple[int, int], make_norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv(channels, channels_out, 3, stride),
            make_norm(channels_out),
            nn.ReLU(),
            _conv(channels_out, channels_out, 3),
            make_norm(channels_out),
        )
        self.shortcut = nn.Sequential()
        if channels != channels_out:
            self.shortcut.extend([_conv(channels, channels_out, 1, stride), make_norm(channels_out)])
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) to (B, channels_out, H / stride, W / stride)."""
        summed: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return summed


def _conv(channels: int, channels_out: int, kernel: int, stride: tuple[int, int] = (1, 1)) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(network: str, norm: str, batch_stats: bool) -> Callable[[int], nn.Module]:
    check_choice(f"{network}.norm", norm, ("batch", "group"))
    if norm == "group" and batch_stats:
        raise ConfigError(f"{network}.norm is 'group', which has no batch statistics; set batch_stats to false")
    return lambda channels: batch_norm(channels, batch_stats) if norm == "batch" else nn.GroupNorm(2, channels)
