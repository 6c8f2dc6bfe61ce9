"""FedCross.

Hu, Zhou, Yue, Ling, Huang, Li, Liu, Lian, Chen: "FedCross: Towards Accurate Federated Learning via Multi-Model
Cross-Aggregation", ICDE 2024, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.seeding import torch_generator

PLACE = "place"  # addressed, and sent back: which middleware model


class FedCross(fed.Algorithm[list[fed.ClientUpdate]]):
    r"""Each client of a round trains another one of K models, which the server draws to each other.

    The server deals its K middleware models to the round's clients at random, and makes of the trained ones

    .. math:: w_i \leftarrow \alpha v_i + (1 - \alpha) v_{co(i)}.

    The global model, which is tested, is their mean. K is the cohort's nominal size. Bytes are FedAvg's and 16 a client
    more.

    Args:
        alpha: α, of a model's own; at least 0.5.
        partner: co(i): ``lowest_similarity``, the model with the least cosine to model i, or ``in_order``, model
            :math:`i + 1 + t \bmod (K - 1)` (modulo K) in round t.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.

    Note:
        The paper's accelerations, several partners and a growing α, are left out. A middleware model of which no update
        arrives stays as it is; one that several clients trained, in a cohort above its nominal size, is their mean.
        PFLlib sums cosines over pairs of tensors; here one cosine is over all parameters.
    """

    needs = frozenset({"one_model"})

    def __init__(
        self,
        alpha: float = 0.99,
        partner: Literal["lowest_similarity", "in_order"] = "lowest_similarity",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, least=0.5, most=1)
        self.partner = partner

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """K equal middleware models, and the global model."""
        self.model, self.seed, self.participation = fed.sole(models, self), population.seed, population.participation
        self.count = self.participation.nominal_cohort_size
        self._dealt: tuple[int, dict[int, int]] = -1, {}
        first = self.model.copy()
        return {"model": first, "middleware": {name: torch.stack([one] * self.count) for name, one in first.items()}}

    # ------------------------------------------------------------------ client

    def finish(self, client: fed.Client) -> fed.Update:
        """The trained model, and its place."""
        return fed.Update({**super().finish(client).payload, PLACE: client.received[PLACE]})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The global model, for tests."""
        return {} if stage == "train" else {name: server["model"][name] for name in self.model.shared_names("down")}

    def address(
        self, server: fed.Server, client_id: int, round_idx: int, kind: str, stage: fed.Stage = "train"
    ) -> fed.Payload:
        """The client's middleware model and its place."""
        if stage != "train":
            return {}
        if self._dealt[0] != round_idx:  # a function of the round, kept for the next client
            cohort = sorted(one.client_id for one in self.participation.plan(round_idx))
            order = torch.randperm(len(cohort), generator=torch_generator(self.seed, "FedCross", round_idx)).tolist()
            self._dealt = round_idx, {client: place % self.count for client, place in zip(cohort, order, strict=True)}
        place = self._dealt[1].get(client_id, 0)
        sent = {name: server["middleware"][name][place] for name in self.model.shared_names("down")}
        return {**sent, PLACE: torch.tensor(place, device=next(iter(sent.values())).device)}

    def reducer(self, server: fed.Server) -> fed.Reducer[list[fed.ClientUpdate]]:
        """Every update."""
        return fed.Gather()

    def step(self, server: fed.Server, aggregate: list[fed.ClientUpdate], cohort: fed.Cohort) -> dict[str, float]:
        """Cross-aggregate the middleware models, and average them."""
        trained = dict[int, list[fed.Payload]]()
        for update in aggregate:
            trained.setdefault(int(update.payload[PLACE]) % self.count, []).append(update.payload)
        for place, payloads in trained.items():
            for name in payloads[0].keys() - {PLACE}:
                _take(server["middleware"][name][place], torch.stack([one[name].double() for one in payloads]).mean(0))
        partners = self._partners(server["middleware"], cohort.round_idx)
        for name, stack in server["middleware"].items():
            v = stack.double()
            _take(stack, self.alpha * v + (1 - self.alpha) * v[partners])
            _take(server["model"][name], stack.double().mean(0))
        return {}

    def _partners(self, middleware: fed.Tensors, round_idx: int) -> torch.Tensor:
        """Each model's collaborator (K,); with one model itself."""
        places = torch.arange(self.count)
        if self.partner == "in_order" or self.count == 1:
            return (places + 1 + round_idx % max(self.count - 1, 1)) % self.count
        flat = torch.cat([middleware[name].double().flatten(1) for name in self.model.parameters], dim=1)
        unit = torch.nn.functional.normalize(flat)
        return (unit @ unit.T).fill_diagonal_(torch.inf).argmin(1)


def _take(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value into a tensor, rounded where it holds integers."""
    tensor.copy_(value if tensor.is_floating_point() else value.round())
