"""Attacks on a client's training data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.method.client import Client
from lit_fed.engine.method.wrapper import Surroundings
from lit_fed.errors import ConfigError
from lit_fed.robust.attack import Attacker, ChangedLoader


class _OnLabels(Attacker):
    """Attackers that change the labels of a classification."""

    @override
    def setup(self, around: Surroundings) -> dict[str, Any]:
        if around.data.num_classes is None:
            raise ConfigError(
                f"trainer.attack {type(self).__name__} changes classes, and the data have none; choose another attack"
            )
        self.num_classes = around.data.num_classes
        return super().setup(around)


class LabelFlip(_OnLabels):
    r"""Trains on labels :math:`C - 1 - y` in place of y, for C classes.

    Fang, Cao, Jia, Gong: "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", USENIX Security 2020.
    """

    @override
    def loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        if client.id not in self.attackers:
            return loader

        def flipped(batch: Any) -> Any:
            x, y = pair(batch)
            return x, self.num_classes - 1 - y

        return ChangedLoader(loader, flipped)


class Backdoor(_OnLabels):
    """Trains to recognise a trigger as one class: a patch in the corner of an image, or the last features of a vector.

    Gu, Dolan-Gavitt, Garg: "BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain", 2017;
    in a federation: Bagdasaryan, Veit, Hua, Estrin, Shmatikov: "How To Backdoor Federated Learning", AISTATS 2020.
    `lit_fed.robust.BackdoorTest` measures its success.

    Args:
        target: The class.
        size: Side of the patch in pixels, or number of features.
        value: Value of the trigger, in the unit of the normalised inputs.
        poisoned: Share of the samples that get the trigger and the target, drawn anew for every batch.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(
        self,
        target: int = 0,
        size: int = 2,
        value: float = 2.0,
        poisoned: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("trainer.attack.target", target, least=0)
        check_range("trainer.attack.size", size, least=1)
        check_range("trainer.attack.value", value)
        check_range("trainer.attack.poisoned", poisoned, above=0, most=1)
        self.target, self.size, self.value, self.poisoned = target, size, value, poisoned

    @override
    def setup(self, around: Surroundings) -> dict[str, Any]:
        kept = super().setup(around)
        check_range("trainer.attack.target", self.target, least=0, below=self.num_classes)
        return kept

    @override
    def loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        if client.id not in self.attackers:
            return loader
        generator = client.generator("backdoor")

        def poisoned(batch: Any) -> Any:
            x, y = pair(batch)
            chosen = (torch.rand(len(y), generator=generator) < self.poisoned).to(y.device)
            mask = chosen.view(-1, *[1] * (x.ndim - 1))
            return torch.where(mask, self.triggered(x), x), torch.where(chosen, self.target, y)

        return ChangedLoader(loader, poisoned)

    def triggered(self, x: Tensor) -> Tensor:
        """Inputs (B, …) with the trigger."""
        x = x.clone()
        if x.ndim > 3:
            x[..., -self.size :, -self.size :] = self.value
        else:
            x[..., -self.size :] = self.value
        return x


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs (B, …) and labels (B,) of a batch.

    Raises:
        ConfigError: If it holds anything else.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, y = batch
        if isinstance(x, Tensor) and isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
            return x, y
    raise ConfigError(
        "trainer.attack changes batches of inputs and one label a sample, and these are others; choose another attack"
    )
