"""FedALA.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import proximal
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.server import positive

LOCAL, WEIGHT, LEARNT = "local.", "weight.", "learnt"  # in a client's state: Θ_i, W, and whether W was learnt before
ALA, LOSSES = "ala", "losses"  # the phase, and its losses by batch, in a client's results
_STEADY, _MOST = 10, 100  # losses whose deviation is taken; passes at most


class FedALA(FedAvg):
    r"""A client merges the global model into its own, element by element, before it trains or is tested.

    Lower layers are the global model's. In the top ones
    :math:`\hat\Theta = \Theta_i + (\Theta - \Theta_i) \odot W`, with Θ the global model, Θ_i the client's after its
    last training and W, from 1, learnt before every training and kept: :math:`W \leftarrow \mathrm{clip}_{[0, 1]}(W -
    \eta \nabla_{\hat\Theta} \ell \odot (\Theta - \Theta_i))` on each batch of one pass over a share of the client's
    batches; the first time, passes go on until the last ten losses hardly differ.

    Args:
        layers: p, the number of top layers, modules with parameters of their own; 0 is FedAvg.
        eta: η.
        share: The share of batches.
        threshold: Standard deviation of ten passes' last losses, below which the first learning ends.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative p, or another setting out of range.

    Note:
        While a client's top layers equal the global ones, as in the first round, there is nothing to learn. The share
        is drawn anew each round, where the authors' code takes one slice of the data. Buffers are the global model's,
        whatever the passes of learning see. The first learning ends after 100 passes at the latest, where the paper's
        may not end. Tests learn W, too, and do not keep it.
    """

    needs = frozenset({"loss", "whole_batches", "one_client"})

    def __init__(
        self, layers: int = 1, eta: float = 1.0, share: float = 0.8, threshold: float = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.layers = check_range("algorithm.layers", layers, least=0)
        self.share = check_range("algorithm.share", share, above=0, most=1)
        self.eta = positive("eta", eta)
        self.threshold = positive("threshold", threshold)

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """The first model's top layers, and W = 1."""
        local = {name: client.model.initial[name] for name in self._top(client.model)}
        weights = {name: torch.ones_like(tensor) for name, tensor in local.items()}
        learnt = {LEARNT: torch.zeros((), device=client.device)} if local else {}
        return {**fed.add_prefix(LOCAL, local), **fed.add_prefix(WEIGHT, weights), **learnt}

    def start(self, client: fed.Client) -> fed.Tensors:
        """The merged model, with the W of the client's last training."""
        return {**super().start(client), **_merged(client, fed.split_prefix(WEIGHT, client.state)[0])}

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """W, then the round's work; W alone before a test."""
        local = fed.split_prefix(LOCAL, client.state)[0]
        alike = all(torch.equal(tensor, client.received[name]) for name, tensor in local.items())
        learn = [] if alike else [fed.Phase(ALA, _Learning(self, client), epochs=1, trains=tuple(local), moves=False)]
        return [*learn, *super().phases(client)]

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss; while W is learnt, also move W, and the model with it."""
        if client.phase != ALA:
            return super().objective(client, batch)
        weights = client.results.get(WEIGHT) or fed.split_prefix(WEIGHT, client.state)[0]
        local = fed.split_prefix(LOCAL, client.state)[0]
        merged = {name: tensor.requires_grad_() for name, tensor in _merged(client, weights).items()}
        with client.muted():
            loss = client.run(batch, {**client.model.copy(client.model.buffers), **merged}).loss
        if loss is None:
            return super().objective(client, batch)
        found = torch.autograd.grad(loss, list(merged.values()), allow_unused=True, materialize_grads=True)
        for (name, own), gradient in () if LEARNT in client.results else zip(local.items(), found, strict=True):
            weights[name] = (weights[name] - self.eta * gradient * (client.received[name] - own)).clamp(0, 1)
        client.results[WEIGHT] = weights
        losses = client.results.setdefault(LOSSES, {})
        losses[str(len(losses))] = loss.detach()
        client.model.load(_merged(client, weights))
        still = proximal((client.parameters[name] for name in local), client.model.copy(local).values())  # 0
        return {"task": loss.detach() + still}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model; keep its top layers and W."""
        local = client.model.tensors(self._top(client.model))
        weights = client.results.get(WEIGHT) or fed.split_prefix(WEIGHT, client.state)[0]
        learnt = {name: torch.ones_like(client.state[name]) for name in (LEARNT,) if WEIGHT in client.results}
        state = {**client.state, **fed.add_prefix(LOCAL, local), **fed.add_prefix(WEIGHT, weights), **learnt}
        return replace(super().finish(client), state=state)

    def _top(self, model: fed.Model) -> tuple[str, ...]:
        """Names of the parameters in the last modules that have some."""
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in model.split.shared))
        top = set(modules[max(0, len(modules) - self.layers) :])
        return tuple(name for name in model.split.shared if name.rpartition(".")[0] in top)


class _Learning:
    """Batches for W: one pass, or the first time passes until their last losses hardly differ.

    The loop takes a batch ahead, so the first one after the end still comes, and must not count.

    Args:
        method: Gives the settings.
        client: Its results hold the losses so far, and take a mark at the end.
    """

    def __init__(self, method: FedALA, client: fed.Client) -> None:
        self._method, self._client = method, client  # without a length: a group cannot tell how many batches

    def __iter__(self) -> Iterator[Any]:
        batches = list(self._client.train_loader())
        batches = batches[: max(1, int(self._method.share * len(batches)))]
        for done in range(_MOST if not self._client.state[LEARNT] else 1):  # passes
            for idx, batch in enumerate(batches):
                yield batch
                if not idx and done and self._is_steady(len(batches)):
                    self._client.results[LEARNT] = {}
                    return

    def _is_steady(self, each: int) -> bool:
        losses = list(self._client.results.get(LOSSES, {}).values())[each - 1 :: each]
        last = torch.tensor([float(loss) for loss in losses[-_STEADY:]], dtype=torch.float64)
        return len(losses) > _STEADY and float(last.std(correction=0)) < self._method.threshold


def _merged(client: fed.Client, weights: fed.Tensors) -> fed.Tensors:
    """The top layers Θ_i + (Θ − Θ_i) ⊙ W."""
    local = fed.split_prefix(LOCAL, client.state)[0]
    return {name: own + (client.received[name] - own) * weights[name] for name, own in local.items()}
