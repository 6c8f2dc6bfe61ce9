"""Methods that tasks on the data of key points share: lower resolutions of a batch, and features from a map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.poses.pictures import features_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = Mapping[str, Any]


class OnMaps:
    """Mixed into a task whose network outputs maps, or makes maps on the way to its outputs."""

    network: nn.Module

    def levels(self, batch: Batch) -> list[Batch]:
        """The batch at lower resolutions, in descending order; empty at the lowest."""
        return list(batch.get("levels", ()))

    def test_figures(self, batches: Mapping[str, Batch]) -> dict[str, Figure]:
        """Pictures of a test batch in several views, such as resolutions, by the view's name.

        Returns:
            ``features``: the feature map's means over all places, by t-SNE, if the network has a ``forward_features``
            with such a map.
        """
        means = {name: self._features(batch["image"]) for name, batch in batches.items()}
        known = {name: features.float().cpu().numpy() for name, features in means.items() if features is not None}
        return {} if (drawn := features_figure(known)) is None else {"features": drawn}

    def test_features(self, batch: Batch) -> Tensor:
        """Features of each picture (B, d): the feature map's means over all places.

        Raises:
            ConfigError: The network has no ``forward_features`` with a feature map.
        """
        if (features := self._features(batch["image"])) is None:
            raise ConfigError(f"network {type(self.network).__name__} needs a forward_features that returns a map")
        return features

    def _features(self, images: Tensor) -> Tensor | None:
        make: Any = getattr(self.network, "forward_features", None)
        feature_map: Tensor | None = None if make is None else make(images)
        return None if feature_map is None or feature_map.ndim != 4 else feature_map.mean(dim=(2, 3))
