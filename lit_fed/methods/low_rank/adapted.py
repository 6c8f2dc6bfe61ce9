r"""The base of methods over low-rank adapters :math:`W_0 + sB_iA_i`, and of servers that combine products.

The mean of products is not the product of means: :math:`\sum_i p_iB_iA_i \ne \bar B\bar A`. Methods differ in how they
avoid the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from lightning import LightningModule
from torch import Tensor, nn
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.networks.adapters import AdapterNames, adapters_of, merge_adapters

LEFT, RIGHT = "left.", "right."  # prefixes of factors, beside the base's name


class OnAdapters(FedAvg):
    """FedAvg of a task with low-rank adapters; parameters beside them that train, such as the head, are averaged.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.
    """

    @override
    def adapt(self, task: LightningModule) -> None:
        if not adapters_of(task):
            raise ConfigError(
                f"algorithm {type(self).__name__} needs adapters in model {fed.task_name(task)}; set "
                "model.adapter.rank, such as to 4, name the factors of an adapter of your own lora_A and lora_B, or "
                "choose FedAvg"
            )


class Products(OnAdapters):
    r"""A server that combines single clients' products :math:`B_iA_i`, over kinds that differ in their adapters' rank.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Note:
        Kinds of network may differ in the rank alone. All start from the first kind's base and head.
    """

    @property
    @override
    def all_needs(self) -> frozenset[str]:
        return super().all_needs | {"one_model"}

    @override
    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        self.models, self.population = models, population
        self.adapters = {kind: adapters_of(model.task) for kind, model in models.items()}
        factors = set[str]().union(*map(_names, self.adapters.values()))
        first, *others = models
        held = {kind: model.copy() for kind, model in models.items()}
        shapes = {kind: {n: t.shape for n, t in held[kind].items() if n not in factors} for kind in models}
        for kind in others:
            if [one.base for one in self.adapters[kind]] != [one.base for one in self.adapters[first]] or (
                shapes[kind] != shapes[first]
            ):
                raise ConfigError(
                    f"trainer.kinds.{kind} differs from {first} in more than the rank of its adapters, which algorithm "
                    f"{type(self).__name__} combines; set adapter.rank and adapter.alpha alone"
                )
            held[kind] |= {name: tensor.clone() for name, tensor in held[first].items() if name not in factors}
        return {"models": held}

    @override
    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        return {name: server["models"][kind][name] for name in self.models[kind].shared_names("down")}

    def averaged(self, update: fed.ClientUpdate) -> fed.ClientUpdate:
        """The tensors of an update that are averaged by name; without A and B, unless a method adds them."""
        factors = _names(self.adapters[update.kind])
        return update.with_payload({name: tensor for name, tensor in update.payload.items() if name not in factors})

    def combined(self, updates: list[fed.ClientUpdate], shares: list[float]) -> fed.Tensors:
        r"""Tensors for `step` from single clients' adapters.

        By base, :math:`[p_1s_1B_1, …, p_Ks_KB_K]` and :math:`[A_1; …; A_K]`, whose product sums what clients add.

        Args:
            updates: Each client's A and B by name, ascending by client.
            shares: Each client's weight p, which sum to 1.
        """
        columns: dict[str, list[Tensor]] = {}
        rows: dict[str, list[Tensor]] = {}
        for update, share in zip(updates, shares, strict=True):
            for one in self.adapters[update.kind]:
                columns.setdefault(one.base, []).append(share * one.scale * update.payload[one.lora_b])
                rows.setdefault(one.base, []).append(update.payload[one.lora_a])
        left, right = {base: torch.cat(b, 1) for base, b in columns.items()}, {b: torch.cat(a) for b, a in rows.items()}
        return {**fed.add_prefix(LEFT, left), **fed.add_prefix(RIGHT, right)}

    @override
    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        return _WithFactors(self)

    @override
    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Replace the averaged tensors in every kind; a kind of a smaller rank takes their first rows and columns."""
        for model in server["models"].values():
            for name in aggregate.keys() & model.keys():
                mean, held = aggregate[name], model[name]
                place = tuple(slice(min(sizes)) for sizes in zip(mean.shape, held.shape, strict=True))
                held[place].copy_(mean[place])
        return {}


class Merging(Products):
    r"""A server that adds products to the base: :math:`W_t = W_0 + \sum_j L_jR_j`.

    The base :math:`W_0` stays with the clients; the factors L and R since the first round travel, and from the round in
    which they are no smaller than :math:`W_t` this matrix in their place. Both are counted as downlink.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.
    """

    also = 0
    """Products that a round merges beside one of each client."""

    @override
    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        self._merged: tuple[fed.Payload, fed.Tensors] = ({}, {})
        return {**super().setup(models, population), "left": {}, "right": {}, "sum": {}}

    def merge(self, server: fed.Server, base: str, left: Tensor, right: Tensor) -> None:
        """Add the product of (m, k) and (k, n) to a base."""
        if base in server["sum"]:
            server["sum"][base].add_(left @ right)
            return
        if base in server["left"]:
            left = torch.cat([server["left"].pop(base), left], 1)
            right = torch.cat([server["right"].pop(base), right])
        if left.numel() + right.numel() < len(left) * right.shape[1]:
            server["left"][base], server["right"][base] = left, right
        else:
            server["sum"][base] = left @ right

    @override
    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The shared tensors, and of each base the factors of the merged products or the sum."""
        held = server["models"][kind]
        merged = {base: held[base] + total for base, total in server["sum"].items()}
        factors = {**fed.add_prefix(LEFT, server["left"]), **fed.add_prefix(RIGHT, server["right"])}
        return {**super().broadcast(server, round_idx, kind, stage), **merged, **factors}

    @override
    def tested(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """The broadcast, with the products merged into the bases."""
        held = server["models"][kind]
        products = {base: held[base] + left @ server["right"][base] for base, left in server["left"].items()}
        return {**super().tested(server, round_idx, kind), **products}

    @override
    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """The broadcast with the factors of earlier rounds, of cohorts of the nominal size and the largest rank."""
        held, sent = server["models"][kind], dict(self.broadcast(server, round_idx, kind))
        rank = max(len(server["models"][k][one.lora_a]) for k, found in self.adapters.items() for one in found)
        width = round_idx * rank * (self.population.participation.nominal_cohort_size + self.also)
        for one in self.adapters[kind]:
            (m, n), zero = held[one.base].shape, held[one.base].new_zeros(())  # expanded, it needs no memory
            if 0 < width * (m + n) < m * n:
                sent |= {LEFT + one.base: zero.expand(m, width), RIGHT + one.base: zero.expand(width, n)}
            elif width:
                sent[one.base] = zero.expand(m, n)
        return sent

    @override
    def release(self, task: LightningModule) -> nn.Module:
        """The network with adapters and products in its weights, because its base is not the one of the beginning."""
        return merge_adapters(super().release(task))

    @override
    def start(self, client: fed.Client) -> fed.Tensors:
        """The received tensors, with the products merged into the base."""
        if self._merged[0] is not client.received:  # once for all clients of a broadcast
            (left, _), (right, _) = fed.split_prefix(LEFT, client.received), fed.split_prefix(RIGHT, client.received)
            merged = {base: client.model.tensor(base) + factor @ right[base] for base, factor in left.items()}
            self._merged = client.received, merged
        return super().start(client) | self._merged[1]


class _WithFactors(fed.Reducer[fed.Payload]):
    """A weighted mean of tensors by name, and what a method makes of single clients' adapters."""

    def __init__(self, method: Products) -> None:
        self.method, self.updates = method, fed.Gather()
        self.mean = fed.WeightedMean(uniform=method.weighting == "uniform")

    @override
    def add(self, update: fed.ClientUpdate) -> None:
        factors = sorted(_names(self.method.adapters[update.kind]))
        self.updates.add(update.with_payload({name: update.payload[name] for name in factors}))
        self.mean.add(self.method.averaged(update))

    @override
    def result(self, workers: fed.Workers) -> fed.Payload | None:
        updates, mean = self.updates.result(workers), self.mean.result(workers)
        if updates is None:
            return None
        weights = [1.0 if self.mean.uniform else float(update.weight) for update in updates]
        return {**(mean or {}), **self.method.combined(updates, [weight / sum(weights) for weight in weights])}


def _names(adapters: Iterable[AdapterNames]) -> set[str]:
    """Names of A and B."""
    return {name for one in adapters for name in (one.lora_a, one.lora_b)}
