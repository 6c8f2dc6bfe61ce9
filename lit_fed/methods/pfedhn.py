"""pFedHN.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1.
Compared with the authors' code, ``AvivSham/pFedHN``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.server import decay, positive
from lit_fed.seeding import derive_seed

DELTA = "delta."  # before a parameter's name in the payload: its movement


class PFedHN(fed.Algorithm[list[fed.ClientUpdate]]):
    r"""The server's hypernetwork h makes each client's model of its embedding: :math:`\theta_i = h(v_i; \phi)`.

    A client trains :math:`\theta_i`, which the server addresses to it, and sends the movement
    :math:`\Delta\theta_i`. The server steps φ and v by SGD with momentum along :math:`-(\partial\theta_i /
    \partial\phi)^\top \Delta\theta_i`, a mean over the round's clients, clipped to `clip`. Clients are tested with the
    model that they would train; one that never took part has the model of its first embedding. Buffers are averaged,
    or stay, by ``trainer.buffers``.

    The server holds `width` + 1 times a model, twice with the momentum. Bytes are FedAvg's.

    Args:
        server_lr: Learning rate of φ and v.
        momentum: Of the server's SGD.
        weight_decay: Of the server's SGD.
        embedding: Length of v; null for ⌊1 + n/4⌋ of n clients.
        width: Units of a hidden layer of h.
        hidden: Further hidden layers, with ReLU before each; 0 makes h linear.
        clip: Largest norm of the server's gradient.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.

    Raises:
        ConfigError: For a setting out of its range; before training, for clients with different networks.

    Note:
        The paper has one client a round. The authors' code has a linear layer for each parameter, here one makes all,
        which has the same values. As there, weight decay and momentum move the embeddings of absent clients, too.
    """

    needs = frozenset()

    def __init__(
        self,
        server_lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
        embedding: int | None = None,
        width: int = 100,
        hidden: int = 3,
        clip: float = 50.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.server_lr, self.momentum = positive("server_lr", server_lr), decay("momentum", momentum)
        self.weight_decay = check_range("algorithm.weight_decay", weight_decay, least=0)
        self.embedding = check_range("algorithm.embedding", embedding, least=1, null="for 1 + a quarter of the clients")
        self.width = check_range("algorithm.width", width, least=1)
        self.hidden = check_range("algorithm.hidden", hidden, least=0)
        self.clip = positive("clip", clip)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """A seeded hypernetwork, and the initial buffers."""
        self.model, count = fed.sole(models, self), population.num_clients
        self.shapes = {name: self.model.parameters[name].shape for name in self.model.split.shared}
        like = next(iter(self.model.parameters.values()))
        with torch.random.fork_rng([like.device] if like.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(population.seed, "pFedHN"))
            length = self.embedding or 1 + count // 4
            size = sum(map(torch.Size.numel, self.shapes.values()))
            self.hyper = Hypernetwork(count, length, self.width, self.hidden, size)
        held = {name: p.detach().to(like.device, copy=True) for name, p in self.hyper.named_parameters()}
        self.hyper.to("meta")  # its form; the values are the server's
        buffers = self.model.copy([n for n in self.model.shared_names("down") if n not in self.shapes])
        return {"hyper": held, "momentum": fed.zeros_like(held), "buffers": buffers}

    def made(self, hyper: fed.Tensors, client_id: int) -> fed.Tensors:
        """A client's parameters, differentiable in the hypernetwork's."""
        flat: Tensor = functional_call(self.hyper, hyper, (client_id,))
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    # ------------------------------------------------------------------ client

    def finish(self, client: fed.Client) -> fed.Update:
        """The movement of the parameters, and the shared buffers."""
        moved = {name: client.model.tensor(name) - client.received[name] for name in self.shapes}
        buffers = [name for name in client.model.shared_names("up") if name not in self.shapes]
        return fed.Update({**fed.add_prefix(DELTA, moved), **client.model.tensors(buffers)})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The shared buffers."""
        buffers: fed.Tensors = server["buffers"]
        return buffers

    @torch.no_grad()
    def address(
        self, server: fed.Server, client_id: int, round_idx: int, kind: str, stage: fed.Stage = "train"
    ) -> fed.Payload:
        """The client's parameters, in their own dtypes."""
        made = self.made(server["hyper"], client_id)
        return {name: tensor.to(self.model.parameters[name].dtype) for name, tensor in made.items()}

    def reducer(self, server: fed.Server) -> fed.Reducer[list[fed.ClientUpdate]]:
        """Every update."""
        return fed.Gather()

    def step(self, server: fed.Server, aggregate: list[fed.ClientUpdate], cohort: fed.Cohort) -> dict[str, float]:
        """A step of SGD along the mean gradient; the mean of the buffers."""
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in server["hyper"].items()}
        for update in aggregate:
            for name, theta in (made := self.made(leaves, update.client_id)).items():
                made[name] = (theta * -update.payload[DELTA + name].to(theta.dtype)).sum()
            (torch.stack(list(made.values())).sum() / len(aggregate)).backward()
        norm = float(nn.utils.clip_grad_norm_(leaves.values(), self.clip))
        for name, leaf in leaves.items():
            held, momentum = server["hyper"][name], server["momentum"][name]
            gradient = torch.zeros_like(held) if leaf.grad is None else leaf.grad
            momentum.mul_(self.momentum).add_(gradient).add_(held, alpha=self.weight_decay)
            held.sub_(momentum, alpha=self.server_lr)
        for name, held in server["buffers"].items():
            mean = torch.stack([update.payload[name].double() for update in aggregate]).mean(0)
            held.copy_(mean if held.is_floating_point() else mean.round())
        return {"server/gradient_norm": norm}


class Hypernetwork(nn.Module):
    """An embedding for each client, hidden layers, and a linear layer that makes all parameters.

    Args:
        count: Number of clients.
        length: Of an embedding.
        width: Units of a hidden layer.
        hidden: Hidden layers with ReLU, after a linear one.
        size: Number of parameters to make.
    """

    def __init__(self, count: int, length: int, width: int, hidden: int, size: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(count, length)
        deeper = chain.from_iterable((nn.ReLU(), nn.Linear(width, width)) for _ in range(hidden))
        self.layers = nn.Sequential(nn.Linear(length, width), *deeper, nn.Linear(width, size))

    def forward(self, client_id: int) -> Tensor:
        """The parameters of a client as one vector."""
        made: Tensor = self.layers(self.embeddings.weight[client_id])
        return made
