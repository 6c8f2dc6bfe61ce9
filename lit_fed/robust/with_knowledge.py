"""Attacks by clients that know the honest updates of the round, in front of the server's reducer."""

from __future__ import annotations

from abc import abstractmethod
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.method.reducers import Reducer, WeightedMean
from lit_fed.engine.method.wrapper import Surroundings
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.robust.attack import Attacker
from lit_fed.robust.on_update import check_sends
from lit_fed.robust.stack import Stack, inner_products, warn_of_memory


class Informed(Attacker):
    """Attackers that all send one update, made of the honest ones that arrived in the round.

    Vectors are as in `lit_fed.robust.stack.Stack`; averaged buffers, integer tensors and the clients' weights are sent
    as they are. Needs the memory of the cohort's updates.
    """

    knows_others = True

    @override
    def setup(self, around: Surroundings) -> dict[str, Any]:
        check_sends(self, around)
        if len(around.kinds) > 1:
            raise ConfigError(
                f"trainer.attack {type(self).__name__} needs one kind of network; trainer.kinds has several"
            )
        self._buffers = around.averaged
        return super().setup(around)

    @override
    def begin(self, around: Surroundings, kept: dict[str, Any]) -> None:
        warn_of_memory(f"trainer.attack {type(self).__name__}", around)

    @override
    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        return _Forging(below, self, Stack(next(iter(broadcast.payloads.values())), self._buffers))

    @abstractmethod
    def forge(self, honest: Stack, attackers: int, workers: Workers) -> Tensor:
        """The difference to the broadcast that all attackers send, (d,).

        Args:
            honest: The honest updates of all processes, gathered; at least one.
            attackers: Number of attackers' updates in the round.
            workers: The processes.
        """


class _Forging(Reducer[Any]):
    """Hands honest updates on, and holds the attackers' back until all are known."""

    def __init__(self, below: Reducer[Any], attack: Informed, honest: Stack) -> None:
        self.below, self._attack, self._honest = below, attack, honest
        self._held: list[ClientUpdate] = []

    @override
    def parts(self) -> list[WeightedMean] | None:
        return self.below.parts()

    @override
    def add(self, update: ClientUpdate) -> None:
        if update.client_id in self._attack.attackers:
            self._held.append(update.detached())
        else:
            self._honest.add(update)
            self.below.add(update)

    @override
    def result(self, workers: Workers) -> Any:
        forged: dict[str, Tensor] = {}
        count = sum(workers.gather(len(self._held)))
        if self._honest.gather(workers) and count:
            forged = self._honest.tensors(self._attack.forge(self._honest, count, workers))
        for update in self._held:
            self.below.add(update.with_payload({**update.payload, **forged}) if forged else update)
        return self.below.result(workers)


class ALIE(Informed):
    r"""A little is enough: sends :math:`\mu - z \sigma` of every coordinate of the honest updates.

    Baruch, Baruch, Goldberg: "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019.

    Args:
        z: Number of standard deviations; null for the paper's largest that hides among a majority,
            :math:`\Phi^{-1}((n - f - s) / (n - f))` with :math:`s = \lfloor n / 2 + 1 \rfloor - f`.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.

    Note:
        σ has n − 1 in its denominator, and is 0 for a single honest update. Where the formula's argument is not within
        0 and 1, z is 0.
    """

    def __init__(self, z: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("trainer.attack.z", z, above=0, null="for the paper's")
        self.z = z

    @override
    def forge(self, honest: Stack, attackers: int, workers: Workers) -> Tensor:
        count = len(honest.clients)
        z = hidden_deviations(count + attackers, attackers) if self.z is None else self.z
        correction = min(1, count - 1)
        return torch.cat([rows.mean(0) - z * rows.std(0, correction=correction) for rows in honest.blocks(workers)])


def hidden_deviations(count: int, attackers: int) -> float:
    """ALIE's z for some updates, of which some are the attackers'."""
    honest = count - attackers
    share = (honest - (count // 2 + 1 - attackers)) / honest
    return NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0


class InnerProduct(Informed):
    r"""Sends :math:`-\varepsilon \mu` for the mean μ of the honest updates: inner-product manipulation.

    Xie, Koyejo, Gupta: "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019.

    Args:
        factor: ε.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, factor: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("trainer.attack.factor", factor, above=0)
        self.factor = factor

    @override
    def forge(self, honest: Stack, attackers: int, workers: Workers) -> Tensor:
        return torch.cat([-self.factor * rows.mean(0) for rows in honest.blocks(workers)])


class Mimic(Informed):
    """Sends a copy of one honest update: the farthest from the mean along the direction in which they differ most.

    Karimireddy, He, Jaggi: "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022.

    Note:
        The paper estimates the direction over its first rounds; here it is that of the round. Of equally far updates
        the first client's is copied.
    """

    @override
    def forge(self, honest: Stack, attackers: int, workers: Workers) -> Tensor:
        gram, _, _ = inner_products(lambda: (rows - rows.mean(0) for rows in honest.blocks(workers)))
        along = torch.linalg.eigh(gram).eigenvectors[:, -1].abs()
        chosen = int((along >= along.max() - 1e-9).nonzero()[0])
        return torch.cat([rows[chosen] for rows in honest.blocks(workers)])
