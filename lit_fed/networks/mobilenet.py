"""MobileNet for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lit_fed.networks.basic import ClassificationNetwork
from lit_fed.networks.images import batch_norm, halved, image_size

# Table 1 of the paper: channels out of each block, and whether it halves the map.
_BLOCKS = (
    *((64, False), (128, True), (128, False), (256, True), (256, False), (512, True)),
    *((512, False),) * 5,
    *((1024, True), (1024, False)),
)


class MobileNet(ClassificationNetwork):
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
        layers = _conv(in_channels, channels, 3, batch_stats)
        for channels_out, halves in _BLOCKS:
            stride, size = halved(size, smallest=2) if halves else ((1, 1), size)
            layers += _conv(channels, channels, 3, batch_stats, stride, groups=channels)  # depthwise
            layers += _conv(channels, channels_out, 1, batch_stats)  # pointwise
            channels = channels_out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, in_channels, H, W) to (B, 1024)."""
        flat: Tensor = self.body(x)
        return flat


def _conv(
    channels: int, channels_out: int, kernel: int, batch_stats: bool, stride: tuple[int, int] = (1, 1), groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, batch_norm(channels_out, batch_stats), nn.ReLU()]
