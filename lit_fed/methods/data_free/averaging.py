"""The mean of networks of several kinds: tensors of equal name and shape, and always the classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError


class Decoder:
    """The classifier of a kind of network: features (B, d) to logits (B, C).

    Args:
        kind: The kind of network.
        model: The kind's network.
        name: The submodule (``algorithm.head``); None for the task's own.
        method: The method's name, for errors.
    """

    def __init__(self, kind: str, model: fed.Model, name: str | None, method: str) -> None:
        head = fed.head_of(model.task, name)
        assert head is not None, "declared in `needs`, so it is there"
        self.kind, self.module = kind, head
        inside = {id(tensor): key for key, tensor in head.state_dict(keep_vars=True).items()}
        held = {**model.parameters, **{key: getattr(*place) for key, place in model.buffers.items()}}
        self.names = {key: inside[id(tensor)] for key, tensor in held.items() if id(tensor) in inside}
        """The classifier's names of its tensors, by the model's names."""
        layer = next((module for module in head.modules() if isinstance(module, nn.Linear)), None)
        if layer is None:
            raise ConfigError(
                f"algorithm {method} splits each network into an encoder and a classifier, and the head "
                f"{type(head).__name__} of model {fed.task_name(model.task)} has no linear layer that tells the "
                "features' length; name another submodule as algorithm.head"
            )
        self.num_features = layer.in_features

    def tensors(self, held: fed.Payload) -> dict[str, Tensor]:
        """The classifier's tensors out of a network's, by the network's names."""
        return {name: held[name] for name in self.names if name in held}

    def logits(self, held: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """The logits (B, C) of features (B, d), with the classifier's tensors out of a network's."""
        renamed = {self.names[name]: tensor for name, tensor in held.items() if name in self.names}
        logits: Tensor = functional_call(self.module, renamed, (features,))
        return logits


class Slot(NamedTuple):
    """A set of tensors to average: tensors of one name and shape, over all kinds of network.

    Args:
        name: The tensor's name; for a classifier, its name within the classifier.
        in_head: Whether the tensor belongs to a classifier.
        shape: The tensor's shape.
        dtype: The tensor's dtype.
    """

    name: str
    in_head: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


def slots(models: Mapping[str, fed.Model], decoders: Mapping[str, Decoder]) -> dict[str, dict[str, Slot]]:
    """The slot of every tensor of every kind, by its name."""
    slots_by_kind: dict[str, dict[str, Slot]] = {}
    for kind, model in models.items():
        inside = decoders[kind].names
        slots_by_kind[kind] = {
            name: Slot(inside.get(name, name), name in inside, tuple(tensor.shape), tensor.dtype)
            for name, tensor in model.tensors().items()
        }
    return slots_by_kind


class SlotMean(fed.Reducer[dict[str, dict[str, Tensor]]]):
    r"""The weighted mean :math:`\sum_k w_k x_k / \sum_k w_k` in every slot, over the clients that hold one.

    Sums run in float64 with unnormalised weights, as in `lit_fed.algorithm.WeightedMean`, with the same bits if all
    clients have the same network. The result is by kind and by name, without the slots that no client sent.

    Args:
        by_kind: `slots` of every kind.
        uniform: Weigh every client 1 instead of by ``update.weight``.

    Note:
        Published averages of networks of different width differ; here tensors of different width are not averaged:
        networks share the tensors of equal shape, and always the classifier.
    """

    def __init__(self, by_kind: Mapping[str, Mapping[str, Slot]], uniform: bool = False) -> None:
        self.by_kind = by_kind
        self.uniform = uniform
        self._sums: dict[Slot, Tensor] = {}
        self._totals: dict[Slot, float] = {}

    def add(self, update: fed.ClientUpdate) -> None:
        """Add ``weight * tensor`` for every tensor of the network; ignore the payload's other tensors."""
        self.add_weighed(update, 1.0 if self.uniform else float(update.weight))

    def add_weighed(self, update: fed.ClientUpdate, weight: float) -> None:
        """Add the update with the given weight."""
        for name, slot in self.by_kind[update.kind].items():
            if name in update.payload:
                tensor = update.payload[name].detach()
                if slot not in self._sums:
                    self._sums[slot] = torch.zeros_like(tensor, dtype=torch.float64)
                    self._totals[slot] = 0.0
                self._sums[slot].add_(tensor, alpha=weight)
                self._totals[slot] += weight

    def result(self, workers: fed.Workers) -> dict[str, dict[str, Tensor]] | None:
        """The means over all processes; None where no update arrived."""
        if workers.world_size > 1:
            self._merge(workers)
        return self.means() or None

    def means(self) -> dict[str, dict[str, Tensor]]:
        """Means of the current process, by kind."""
        means = {slot: self._mean(slot) for slot, total in self._totals.items() if total > 0}
        by_kind = {
            kind: {name: means[slot] for name, slot in names.items() if slot in means}
            for kind, names in self.by_kind.items()
        }
        return {kind: tensors for kind, tensors in by_kind.items() if tensors}

    def _mean(self, slot: Slot) -> Tensor:
        mean = self._sums[slot] / self._totals[slot]
        return mean.to(slot.dtype) if slot.dtype.is_floating_point else mean.round().to(slot.dtype)

    def _merge(self, workers: fed.Workers) -> None:
        every = sorted({slot for names in self.by_kind.values() for slot in names.values()}, key=str)
        sums = [self._sums[slot] if slot in self._sums else workers.zeros(slot.shape) for slot in every]
        totals = torch.tensor([self._totals.get(slot, 0.0) for slot in every], dtype=torch.float64)
        totals = totals.to(sums[0].device)
        merged = workers.all_reduce(torch.cat([*(total.flatten() for total in sums), totals]))
        *parts, last = torch.split(merged, [*(total.numel() for total in sums), len(every)])
        self._sums = {slot: part.view(slot.shape) for slot, part in zip(every, parts, strict=True)}
        self._totals = dict(zip(every, last.tolist(), strict=True))
