"""The convolutional network of the paper that introduced federated averaging."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lit_fed.networks.basic import ClassificationNetwork
from lit_fed.networks.images import image_size


class McMahanCNN(ClassificationNetwork):
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

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, in_channels, H, W) to (B, 512)."""
        flat: Tensor = self.body(x)
        return flat
