"""Attacks: the choice of the attackers; on training data, on a client's own update, or knowing the honest ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.population.naming import Keys, called, clients_of
from lit_fed.engine.evaluation.protocols import ClientRow, spread
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.client import Client
from lit_fed.engine.method.reducers import Reducer, WeightedMean
from lit_fed.engine.method.wrapper import Attack, Tested, View, Wrapper, WrapperState
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.robust.stack import Stack, inner_products, warn_of_memory
from lit_fed.seeding import numpy_generator

_KEYS = Keys("trainer.attack.clients", "trainer.attack.positions")
_CHOICES = "trainer.attack.fraction or trainer.attack.clients"
_LISTED = 20


@dataclass(kw_only=True)
class AttackState(WrapperState):
    """The attack, and names of the first attackers."""

    attack: str
    attackers: str


class Attacker(Attack):
    """Clients that attack in every round in which they take part: chosen once, by fraction, name or position.

    Logs ``attack/attackers``, the number of attackers among a round's updates, and marks the attackers in
    ``clients.csv`` by ``attack/attacker``; beside a rule also ``attack/beyond``, the excess over the number that the
    rule bears. Where `lit_fed.protocols.ClientTest` runs, logs its statistics over the other clients as ``honest/…``;
    clients whose nodes withhold their results are not in them.

    Args:
        fraction: Share of the population that attacks, rounded and chosen by the run's seed.
        clients: Names of the attackers, or their numbers if clients have no names.
        positions: Positions of the attackers, from 0.
    """

    def __init__(
        self,
        fraction: float | None = None,
        clients: Sequence[str | int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        check_range("trainer.attack.fraction", fraction, above=0, below=1, null=f"with {_KEYS.name}")
        if (fraction is None) == (clients is None and positions is None):
            choices = "no choice" if fraction is None else "two choices"
            raise ConfigError(f"trainer.attack has {choices} of attackers; give either {_CHOICES}")
        self.fraction, self.clients, self.positions = fraction, clients, positions
        self.attackers: frozenset[int] = frozenset()
        self._delivered: list[int] = []

    @override
    def negotiate(self, others: Sequence[Wrapper]) -> None:
        self._tolerated = next((one.tolerated_attackers for one in others if one.tolerated_attackers is not None), None)

    @override
    def setup(self) -> None:
        data = self.run.data
        chosen = clients_of(data, _KEYS, self.clients, self.positions)
        if chosen is None:
            count = round((self.fraction or 0) * data.num_clients)
            chosen = numpy_generator(self.run.seed, "attackers").permutation(data.num_clients)[:count].tolist()
        if not chosen:
            raise ConfigError(f"trainer.attack chooses none of {data.num_clients} clients; give {_CHOICES}")
        self.attackers = frozenset(chosen)
        self._warned_beyond = False
        names = [called(data, client_id) for client_id in sorted(self.attackers)]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        self.state = AttackState(attack=type(self).__name__, attackers=", ".join(names[:_LISTED]) + more)

    @override
    def release(self, aggregate: Any, cohort: Cohort) -> tuple[Any, Cohort, dict[str, float]]:
        self._delivered = [client_id for client_id in cohort.delivered if client_id in self.attackers]
        metrics = {"attack/attackers": float(count := len(self._delivered))}
        if (tolerated := self._tolerated) is not None:
            metrics["attack/beyond"] = float(max(0, count - tolerated))
            if count > tolerated and not self._warned_beyond:
                self._warned_beyond = True
                self.run.fabric.print(
                    f"round {cohort.round_idx}: {count} of {len(cohort.delivered)} updates are attackers', and the "
                    f"rule bears {tolerated}; attack/beyond counts such rounds; select more clients, or raise "
                    "its attackers"
                )
        return aggregate, cohort, metrics

    @override
    def evaluation_metrics(self, tests: Sequence[Tested]) -> dict[str, float]:
        honest = [ClientRow(*test) for test in tests if test[0] not in self.attackers and test[1] == "test"]
        return spread("honest", honest)

    @override
    def client_rows(self) -> list[tuple[int, str, float]]:
        return [(client_id, "attack/attacker", 1.0) for client_id in self._delivered]


class ChangedLoader:
    """A loader whose batches are changed.

    Args:
        loader: The loader.
        change: Gives a batch for a batch.
    """

    def __init__(self, loader: Any, change: Callable[[Any], Any]) -> None:
        self._loader, self._change = loader, change

    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _OnLabels(Attacker):
    """Attackers that change the labels of a classification."""

    @override
    def setup(self) -> None:
        if self.run.data.num_classes is None:
            raise ConfigError(
                f"trainer.attack {type(self).__name__} changes classes, and the data have none; choose another attack"
            )
        self.num_classes = self.run.data.num_classes
        super().setup()

    @override
    def loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        if client.id not in self.attackers:
            return loader
        generator = client.generator("backdoor")
        return ChangedLoader(loader, lambda batch: self.change(*pair(batch), generator))

    @abstractmethod
    def change(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs (B, …) and labels (B,) in place of a batch's."""


class LabelFlip(_OnLabels):
    r"""Trains on labels :math:`C - 1 - y` in place of y, for C classes.

    Fang, Cao, Jia, Gong: "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning", USENIX Security 2020.
    """

    @override
    def change(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return x, self.num_classes - 1 - y


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
        self.target = check_range("trainer.attack.target", target, least=0)
        self.size = check_range("trainer.attack.size", size, least=1)
        self.value = check_range("trainer.attack.value", value)
        self.poisoned = check_range("trainer.attack.poisoned", poisoned, above=0, most=1)

    @override
    def setup(self) -> None:
        super().setup()
        check_range("trainer.attack.target", self.target, least=0, below=self.num_classes)

    @override
    def change(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = (torch.rand(len(y), generator=generator) < self.poisoned).to(y.device)
        mask = chosen.view(-1, *[1] * (x.ndim - 1))
        return torch.where(mask, self.triggered(x), x), torch.where(chosen, self.target, y)

    def triggered(self, x: Tensor) -> Tensor:
        """Inputs (B, …) with the trigger."""
        x = x.clone()
        if x.ndim > 3:
            x[..., -self.size :, -self.size :] = self.value
        else:
            x[..., -self.size :] = self.value
        return x


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs (B, …) and labels (B,) of a batch."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, y = batch
        if isinstance(x, Tensor) and isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
            return x, y
    raise ConfigError(
        "trainer.attack changes batches of inputs and one label a sample, and these are others; choose another attack"
    )


class _OnUpdate(Attacker):
    """Attackers that change the difference between their payload and the broadcast.

    Averaged buffers and integer tensors are sent as they are.
    """

    @override
    def setup(self) -> None:
        check_sends(self)
        super().setup()

    @override
    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        if update.client_id not in self.attackers:
            return update
        generator, payload = client.generator("attack"), dict(update.payload)
        for name, tensor in update.payload.items():
            if tensor.is_floating_point() and name not in self.run.averaged:
                sent = tensor.detach().double()
                origin = client.received[name].double() if name in client.received else torch.zeros_like(sent)
                payload[name] = (origin + self.change(sent - origin, generator)).to(tensor.dtype)
        return update.with_payload(payload)

    @abstractmethod
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        """The difference that is sent in place of a tensor's own, in float64."""


class Scaling(_OnUpdate):
    """Sends the difference times a factor.

    Bagdasaryan, Veit, Hua, Estrin, Shmatikov: "How To Backdoor Federated Learning", AISTATS 2020 (model replacement).

    Args:
        factor: The factor.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, factor: float = 10.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = check_range("trainer.attack.factor", factor)

    @override
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        return moved * self.factor


class SignFlip(_OnUpdate):
    """Sends the opposite of the difference.

    Li, Xu, Chen, Giannakis, Ling: "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
    Heterogeneous Datasets", AAAI 2019.

    Args:
        factor: Length of the sent difference, relative to the honest one.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = check_range("trainer.attack.factor", factor, above=0)

    @override
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        return -self.factor * moved


class GaussianNoise(_OnUpdate):
    """Sends noise in place of the difference, drawn from the run's seed, the round and the client.

    Args:
        std: Standard deviation of every coordinate.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, std: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.std = check_range("trainer.attack.std", std, above=0)

    @override
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(moved.shape, generator=generator, dtype=torch.float64)
        return noise.to(moved.device) * self.std


def check_sends(attack: Attacker) -> None:
    """Refuse an attack on updates where clients send nothing."""
    if not attack.run.layout(attack.run.broadcast):
        raise ConfigError(
            f"trainer.attack {type(attack).__name__} changes updates, and clients of "
            f"{type(attack.run.algorithm).__name__} send nothing; choose another attack"
        )


class Informed(Attacker):
    """Attackers that all send one update, made of the honest ones that arrived in the round.

    Vectors are as in `lit_fed.robust.stack.Stack`; averaged buffers, integer tensors and the clients' weights are sent
    as they are. Needs the memory of the cohort's updates.
    """

    sees: View = "honest updates"

    @override
    def setup(self) -> None:
        check_sends(self)
        self.run.check_kinds(f"trainer.attack {type(self).__name__}")
        super().setup()

    @override
    def begin(self) -> None:
        warn_of_memory(f"trainer.attack {type(self).__name__}", self.run)

    @override
    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        return _Forging(below, self, Stack(next(iter(broadcast.payloads.values())), self.run.averaged))

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
        self.z = check_range("trainer.attack.z", z, above=0, null="for the paper's")

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
        self.factor = check_range("trainer.attack.factor", factor, above=0)

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
