"""Who sees what: clients' own views, nobody's, those that evaluations ask for, and the skew of clients' inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lit_fed.data.described import DescribedPopulation
from lit_fed.data.feature_skew import FeatureSkew
from lit_fed.data.views import View
from lit_fed.errors import ConfigError


class ViewedPopulation(DescribedPopulation):
    """A population whose clients may see their samples each in its own way; the base of `FederatedDataModule`.

    Args:
        skew: How clients' inputs differ; None shows all of them the same.
    """

    def __init__(self, skew: FeatureSkew | None = None) -> None:
        super().__init__()
        self.skew = skew

    @property
    @abstractmethod
    def num_clients(self) -> int:
        """Clients in the population."""

    def view(self, client_id: int) -> View | None:
        """What a client makes of its batches, such as a lower resolution; None shows them as they are.

        A view is applied to all batches of the client's own data, after normalising. See `ViewLoader` for random ones.

        Args:
            client_id: Which client.
        """
        del client_id
        return None

    def shared_view(self) -> View | None:
        """What is made of the batches of shared and pooled sets, nobody's own; None shows them as they are."""
        return None

    def views(self) -> Mapping[str, View]:
        """The views that an evaluation may ask for, by name; in the order in which to evaluate them."""
        return {}

    def seen(self, client_id: int | None, name: str | None = None) -> View | None:
        """The view of a name, of a client with its skew, or of nobody.

        Args:
            client_id: Which client; None for nobody.
            name: One of `views`; None for the client's own.

        Raises:
            ConfigError: There is no view of that name.
        """
        if name is not None:
            views = self.views()
            if name not in views:
                known = ", ".join(views) or "none"
                raise ConfigError(f"{type(self).__name__} has no view named {name!r}: it has {known}")
            return views[name]
        if client_id is None:
            return self.shared_view()
        own = self.view(client_id)
        skewed = None if self.skew is None else self.skew.view(client_id, self.num_clients)
        if own is None or skewed is None:
            return skewed if own is None else own
        return lambda batch: own(skewed(batch))

    def describe(self, client_id: int) -> dict[str, Any]:
        """See `DescribedPopulation.describe`; with the client's own values of the ``skew``, where there is one."""
        row = super().describe(client_id)
        return row if self.skew is None else row | {"skew": self.skew.describe(client_id, self.num_clients)}
