"""Several networks in one place, of which one is in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.networks.registry import classifier, features


class NetworkChoice(nn.Module):
    """Runs the network that was chosen last; the others are as if they were not there.

    Args:
        networks: By name; the first one is in use until another is chosen.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # A module's name must not contain a dot, timm's names may.
        self.networks = nn.ModuleDict({name.replace(".", "_"): network for name, network in networks.items()})
        self._keys = {name: name.replace(".", "_") for name in networks}
        self.current = next(iter(self._keys))

    @property
    def chosen(self) -> nn.Module:
        """The network in use."""
        return self.networks[self._keys[self.current]]

    @property
    def prefix(self) -> str:
        """What the names of its parameters and buffers begin with."""
        return f"networks.{self._keys[self.current]}."

    def forward(self, x: Tensor) -> Tensor:
        """The chosen network's output for a batch (B, …)."""
        output: Tensor = self.chosen(x)
        return output

    def forward_features(self, x: Tensor) -> Tensor:
        """The chosen network's features (B, d)."""
        return features(self.chosen, x)

    def get_classifier(self) -> nn.Module:
        """The chosen network's last layer."""
        return classifier(self.chosen)


class Assignment:
    """Which client has which network.

    Args:
        networks: A list of names, which clients take in turn (client i the i-th, then from the start), or a mapping
            from names to the ids of their clients.

    Raises:
        ConfigError: If there is no network, or a client has two.
    """

    def __init__(self, networks: Sequence[str] | Mapping[str, Collection[int]]) -> None:
        self.names = list(dict.fromkeys(networks))
        if not self.names:
            raise ConfigError("model.networks is empty; name at least one network, or set it to null")
        self._turns = [] if isinstance(networks, Mapping) else list(networks)
        self._named: dict[int, str] = {}
        for name, client_ids in networks.items() if isinstance(networks, Mapping) else ():
            for client_id in client_ids:
                if client_id in self._named:
                    raise ConfigError(f"model.networks gives client {client_id} to {self._named[client_id]} and {name}")
                self._named[client_id] = name

    def check(self, num_clients: int) -> None:
        """Refuse a population in which some client has no network.

        Raises:
            ConfigError: If one has none, or a network is for a client that does not exist.
        """
        if self._turns:
            return
        missing = [client_id for client_id in range(num_clients) if client_id not in self._named]
        if missing:
            raise ConfigError(f"model.networks names no network for client {missing[0]}; name one for each client")
        beyond = [client_id for client_id in self._named if not 0 <= client_id < num_clients]
        if beyond:
            raise ConfigError(f"model.networks names client {beyond[0]}, but clients are 0 to {num_clients - 1}")

    def __getitem__(self, client_id: int) -> str:
        """The name of a client's network."""
        return self._turns[client_id % len(self._turns)] if self._turns else self._named[client_id]
