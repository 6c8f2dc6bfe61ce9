"""FedFomo.

Zhang, Sapra, Fidler, Yeung, Alvarez: "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
read beside the authors' code, ``NVlabs/FedFomo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.ifca import sums_of_losses
from lit_fed.methods.last_models import LastModels
from lit_fed.seeding import torch_generator

MODELS, SENDERS = "models.", "senders"  # addressed: others' models (m, …), and whose they are (m,)
WEIGHTS = "weights"  # in a payload: the weight of every client's model (n,), 0 where it was not sent


class FedFomo(LastModels):
    r"""Each client moves its own model towards the models of others that are better on its held-out samples.

    The server addresses up to M models to a client i of a round. The client weighs them, and the model θ_i that it
    trained last, against the model θ′_i with which it began to train that one,

    .. math:: w_{ij} = \frac{F_i(\theta'_i) - F_i(\theta_j)}{\|\theta_j - \theta'_i\|}, \qquad
        \theta_i \leftarrow \theta'_i + \sum_j \frac{\max(w_{ij}, 0)}{\sum_k \max(w_{ik}, 0)} (\theta_j - \theta'_i),

    with F_i the mean loss over its calibration samples, and trains the result. The server sends a client the models of
    the largest affinities :math:`P_{ij} \leftarrow P_{ij} + w_{ij}`, and in place of each with probability
    :math:`\epsilon - t \cdot` `epsilon_decay` of round t a random one. Clients are tested with the model that they
    trained last. A client that gets no model, as in the first round, trains its own: M = 0 is
    `lit_fed.methods.LocalOnly`.

    M times FedAvg's bytes down, and 4 bytes a client of the population more up. The server keeps the last model of
    every client, a client the model with which it began. Buffers stay with the clients.

    Args:
        models: M, models of others that a client gets.
        epsilon: ε.
        epsilon_decay: By how much ε falls from round to round.
        calibration_fraction: Share of every client's samples that is held out to weigh models.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.

    Raises:
        ConfigError: For a setting out of its range, or a `calibration_fraction` of 0 that is needed.

    Note:
        The models sent are the last ones of all clients that ever took part, in the authors' code of the last round's.
        If no model is better than θ′_i, the client begins with θ′_i again, as in the authors' code and by the equation;
        PFLlib goes on with θ_i. PFLlib counts θ_i among the M, explores no random models, and adds the normalised
        weights to P, here and in the authors' code :math:`w_{ij}`, which may be negative.
    """

    needs = frozenset({"loss"})

    def __init__(
        self,
        models: int = 4,
        epsilon: float = 0.3,
        epsilon_decay: float = 0.05,
        calibration_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(calibration_fraction=calibration_fraction, **kwargs)
        self.models = check_range("algorithm.models", models, least=0)
        self.epsilon = check_range("algorithm.epsilon", epsilon, least=0, most=1)
        self.epsilon_decay = check_range("algorithm.epsilon_decay", epsilon_decay, least=0)
        if models and not calibration_fraction:
            raise ConfigError(
                "algorithm FedFomo weighs models on calibration samples; set algorithm.calibration_fraction above 0"
            )

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """The initial model for every client, and affinities of 0."""
        server = super().setup(models, population)
        self.seed, self.count = population.seed, population.num_clients
        affinity = torch.zeros(self.count, self.count, dtype=torch.float64, device=server["seen"].device)
        return {**server, "affinity": affinity}

    # ------------------------------------------------------------------ client

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """The initial model."""
        return {name: client.own[name] for name in client.model.split.personal}

    def start(self, client: fed.Client) -> fed.Tensors:
        """The model that the received ones and the client's own make; without a received one the client's own."""
        own, before = super().start(client), client.state
        weights = torch.zeros(self.count, device=client.device)
        client.results[WEIGHTS] = {WEIGHTS: weights}
        stacks, rest = fed.split_prefix(MODELS, client.addressed)
        if not stacks:
            return own
        others = [{name: stack[k] for name, stack in stacks.items()} for k in range(len(rest[SENDERS]))]
        held_out = client.population.calibration_loader(client.id)
        sums, num_samples = sums_of_losses(client, held_out, [{**own, **one} for one in (before, own, *others)])
        if not num_samples:
            return own
        moves = {name: torch.cat([own[name].unsqueeze(0), stacks[name]]) - tensor for name, tensor in before.items()}
        norms = [torch.linalg.vector_norm(move.flatten(1), dim=1, dtype=torch.float64) for move in moves.values()]
        gains = torch.tensor([sums[0] - one for one in sums[1:]], dtype=torch.float64, device=client.device)
        w = gains / num_samples / torch.stack(norms).norm(dim=0)
        w = w.nan_to_num(0.0, 0.0, 0.0)  # a model that has not moved, or whose loss is not finite
        weights[rest[SENDERS]] = w[1:].to(weights.dtype)
        shares = w.clamp(min=0)
        shares /= shares.sum().clamp(min=torch.finfo(w.dtype).tiny)
        return {**own, **{n: before[n] + torch.tensordot(shares.to(m.dtype), m, 1) for n, m in moves.items()}}

    def finish(self, client: fed.Client) -> fed.Update:
        """The client's own model and the weights; keep the model with which it began."""
        sent = {**super().finish(client).payload, **client.results[WEIGHTS]}
        return fed.Update(sent, {name: client.begun[name] for name in client.model.split.personal})

    # ------------------------------------------------------------------ server

    def address(
        self, server: fed.Server, client_id: int, round_idx: int, kind: str, stage: fed.Stage = "train"
    ) -> fed.Payload:
        """Others' models in training; nothing for tests, or while no other client has taken part."""
        if stage != "train" or not (chosen := self._chosen(server, client_id, round_idx)):
            return {}
        senders = torch.tensor(chosen, device=server["seen"].device)
        return {**fed.add_prefix(MODELS, {n: stack[senders] for n, stack in server["last"].items()}), SENDERS: senders}

    def _chosen(self, server: fed.Server, client_id: int, round_idx: int) -> list[int]:
        """Clients whose models a client gets: by affinity, of equal ones any, or with probability ε at random."""
        random = torch_generator(self.seed, "FedFomo", round_idx, client_id)
        others = [one for one in torch.randperm(self.count, generator=random).tolist() if one != client_id]
        others = [one for one in others if server["seen"][one]]
        affinity = server["affinity"][client_id].tolist()
        best = sorted(others, key=lambda one: -affinity[one])
        explores = torch.rand(self.models, generator=random) < self.epsilon - self.epsilon_decay * round_idx
        chosen = list[int]()
        for explore in explores.tolist()[: len(others)]:
            chosen.append(next(one for one in (others if explore else best) if one not in chosen))
        return chosen

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """M models from the second round on."""
        senders = torch.arange(min(self.models, self.count - 1) if round_idx else 0)
        models = fed.add_prefix(MODELS, {name: stack[: len(senders)] for name, stack in server["last"].items()})
        return {**models, SENDERS: senders} if len(senders) else {}

    def step(self, server: fed.Server, aggregate: Any, cohort: fed.Cohort) -> dict[str, float]:
        """Keep the clients' models, and add their weights to the affinities."""
        for update in aggregate:
            server["affinity"][update.client_id] += update.payload[WEIGHTS]
        return super().step(server, aggregate, cohort)
