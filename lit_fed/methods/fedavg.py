"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1.

The client's half is `lit_fed.client.ClientModule` as it stands; this is the server, and the base of every server that
keeps one global model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning import Fabric
from torch import Tensor

from lit_fed.algorithm import Algorithm
from lit_fed.client import ClientModule
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.payload import Payload
from lit_fed.reducers import Reducer, WeightedMean

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


class FedAvg(Algorithm[Payload]):
    r"""Averages the clients' models: :math:`w_{t+1} = \sum_{k \in S_t} \frac{n_k}{n} w^k_{t+1}`.

    Args:
        weighting: ``samples`` weighs a client by its number of training samples, ``uniform`` all alike.

    Raises:
        ConfigError: For another weighting.
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "samples") -> None:
        if weighting not in ("samples", "uniform"):
            raise ConfigError(f"algorithm.weighting is {weighting!r}; it must be 'samples' or 'uniform'")
        self.weighting = weighting
        self.state: dict[str, Tensor] = {}

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Take the module's parameters and buffers as the first global model."""
        self.module = module
        self.state = {name: tensor.clone() for name, tensor in module.tensors(module.state_names()).items()}

    def broadcast(self, round_idx: int) -> Payload:
        """The shared part of the global model."""
        return {name: self.state[name] for name in self.module.shared_names("down")}

    def reducer(self) -> Reducer[Payload]:
        """A weighted mean."""
        return WeightedMean(uniform=self.weighting == "uniform")

    def step(self, aggregate: Payload, round_idx: int, num_clients: int) -> dict[str, float]:
        """Replace the global model's shared tensors by their mean.

        Raises:
            ConfigError: If clients send what is no tensor of the model.
        """
        for name, mean in aggregate.items():
            if name not in self.state:
                raise ConfigError(
                    f"model {type(self.module).__name__} sends {name!r}, which algorithm {type(self).__name__} does not"
                    " know; use the server that belongs to this client"
                )
            self.state[name].copy_(mean)
        return {}

    def global_state(self) -> dict[str, Tensor]:
        """The global model."""
        return self.state

    def state_dict(self) -> dict[str, Any]:
        """The global model; subclasses add their optimizer's state."""
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved global model.

        Raises:
            CheckpointError: If it was saved from another model.
        """
        saved: dict[str, Tensor] = state["state"]
        for name in saved.keys() | self.state.keys():
            if name not in saved or name not in self.state or saved[name].shape != self.state[name].shape:
                raise CheckpointError(f"the checkpoint was saved from another model: it differs in {name!r}")
            self.state[name].copy_(saved[name])
