"""VGG-11 for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lit_fed.networks.basic import ClassificationNetwork
from lit_fed.networks.images import image_size

_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # table 1 of the paper, column A; a pooling after each


class VGG11(ClassificationNetwork):
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
        for stage in _STAGES:
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

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, in_channels, H, W) to (B, 512)."""
        flat: Tensor = self.body(x)
        return flat
