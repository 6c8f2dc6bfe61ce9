"""Torchvision's fully convolutional network, for dense tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.segmentation import fcn_resnet50

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError


class FCN(nn.Module):
    """Torchvision's ``fcn_resnet50``: a dilated ResNet-50, two convolutions, and maps as large as the image.

    Long, Shelhamer, Darrell: "Fully Convolutional Networks for Semantic Segmentation", CVPR 2015.

    Takes images of any size. Parameters have torchvision's names: ``model.weights`` reads torchvision's file of
    ``fcn_resnet50`` where there are 21 classes, and with ``model.weights_of: backbone`` this file or the file of
    ``resnet50`` for any classes.

    Args:
        num_classes: Maps in the output.
        in_channels: Channels of the images, 3.
        input_shape: Not used; a network of any size takes any images.
    """

    stride = 1

    def __init__(self, num_classes: int = 21, in_channels: int = 3, input_shape: Sequence[int] = (3, 256, 192)) -> None:
        super().__init__()
        check_range("FCN.num_classes", num_classes, least=1)
        if in_channels != 3:
            raise ConfigError(f"FCN.in_channels is {in_channels}; it must be 3, as in torchvision")
        network = fcn_resnet50(weights=None, weights_backbone=None, num_classes=num_classes)
        self.backbone: nn.Module = network.backbone
        self.classifier: nn.Module = network.classifier

    @property
    def head(self) -> nn.Module:
        """The convolutions from features (B, 2048, H/8, W/8) to maps (B, num_classes, H/8, W/8)."""
        return self.classifier

    def forward_features(self, x: Tensor) -> Tensor:
        """The last block of the backbone: (B, 3, H, W) to (B, 2048, H/8, W/8), sides rounded up."""
        features: Tensor = self.backbone(x)["out"]
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Maps of a batch, enlarged bilinearly: (B, 3, H, W) to (B, num_classes, H, W)."""
        maps = self.head(self.forward_features(x))
        return F.interpolate(maps, size=x.shape[-2:], mode="bilinear", align_corners=False)


def checkpoint_filter_fn(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """A file's tensors without the classifiers that `FCN` does not have; `load_weights` finds it by timm's name."""
    return {name: one for name, one in tensors.items() if not name.startswith(("aux_classifier.", "backbone.fc."))}
