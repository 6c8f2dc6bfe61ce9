"""`trainer.secure_sum`: a round of whose updates the server sees the sum alone."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar
from typing import Protocol as Interface

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.client import Client
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.method.wrapper import View, Wrapper
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.participation import Participation
from lit_fed.participation.samplers import SampledParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.privacy.bounded_sum import BoundedSum, Frame, Released, grid_of, is_at_bound, moved_on_grid

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from lit_fed.federation.secure.masks import Words
    from lit_fed.trainer import FederatedTrainer

_MOST_WEIGHT = 2**22
"""Largest sum of weights: times 2^40, the largest coordinate on the grid, it stays below 2^63."""
_COUNTS = 3
"""Coordinates between a model's and its metrics': the sum of weights, clipped updates, and updates."""
_LARGEST = float(torch.finfo(torch.float32).max)
"""Largest mean of a metric that tables and plots hold."""
_DIGIT, _DIGITS = 32, 66
"""Bits and number of a metric's digits: float64 reaches from 2^-1074 to 2^1024, and 66 · 32 = 2112 ≥ 1074 + 1024."""
_UNIT = 1074


Logged = dict[int, tuple[Mapping[str, float], int]]
"""Metrics of clients, and the weight of each in their means."""


def digits(total: Fraction) -> list[int]:
    """An exact sum of float64 values as signed digits, which add up over nodes without carries."""
    rest, found = int(total * 2**_UNIT), []
    sign, rest = (-1, -rest) if rest < 0 else (1, rest)
    for _ in range(_DIGITS - 1):
        found.append(sign * (rest & (2**_DIGIT - 1)))
        rest >>= _DIGIT
    return [*found, sign * rest]


def from_digits(found: Iterable[int]) -> float:
    """The number of `digits`, rounded once; infinite beyond float64's range."""
    total = Fraction(sum(digit << (_DIGIT * place) for place, digit in enumerate(found)), 2**_UNIT)
    try:
        return float(total)
    except OverflowError:
        return math.copysign(math.inf, total)


@dataclass(frozen=True)
class Summed:
    """The sum of a round.

    Args:
        total: The sum of clipped updates, (d,) in whole multiples of the grid.
        weight: Sum of the weights.
        clipped: How many updates were at the bound.
        count: How many there were.
        metrics: Weighted sums of the clients' metrics, rounded once, and their weights.
        clients: Whose updates are in it, where nodes were lost; None for all that arrived.
        costs: Further metrics of the round.
    """

    total: Tensor
    weight: int
    clipped: int
    count: int
    metrics: Mapping[str, tuple[float, int]]
    clients: frozenset[int] | None = None
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float]:
        """Means of the metrics; NaN beyond what tables and plots hold."""
        means = {name: total / max(weight, 1e-300) for name, (total, weight) in self.metrics.items()}
        return {name: mean if abs(mean) <= _LARGEST else math.nan for name, mean in means.items()}


class NodeSums(Reducer[Summed]):
    r"""Sums clipped, weighted differences on a grid, for each node, and then over the nodes.

    .. math:: x + \frac{g}{\sum_k n_k} \sum_k n_k \left\lfloor \min(1, C / \lVert \Delta_k \rVert)\,
        \Delta_k / g \right\rfloor

    The brackets cut towards zero, and g is the grid of `lit_fed.privacy.bounded_sum`. A node's vector holds the sum of
    its clients' integers, of their weights, and the exact sums of their metrics.

    Args:
        frame: Of the round.
        settings: C and the number of nodes.
        uniform: Weight 1 for every client.
        device: Where to sum.
        logged: Metrics and weight of this process's clients, by client, once they have trained.
        masked: Sums the nodes' vectors, (nodes, words) in int64, as the server learns it.
        grid: g, where noise makes it coarser than C does.
    """

    def __init__(
        self,
        frame: Frame,
        settings: SecureSum,
        uniform: bool,
        device: torch.device,
        logged: Logged,
        masked: Callable[[Tensor], Tensor],
        grid: float | None = None,
    ) -> None:
        self.frame, self.settings, self.uniform, self._logged, self._masked = frame, settings, uniform, logged, masked
        self.origin = frame.origin(device)
        self.grid = grid or grid_of(settings.clip)
        self._nodes = settings.nodes or 1
        self._words = torch.zeros(self._nodes, len(self.origin) + _COUNTS, dtype=torch.int64, device=device)

    def add(self, update: ClientUpdate) -> None:
        """Add an update to its node's vector; raise `ValueError` for a weight that is not a whole number."""
        weight = 1.0 if self.uniform else float(update.weight)
        if weight < 0 or not weight.is_integer():
            raise ValueError(f"client {update.client_id} has weight {weight}; a secure sum needs a whole number")
        moved, norms = moved_on_grid([self.frame.vector(update)], self.origin, self.settings.clip, self.grid)
        own, size = self._words[update.client_id % self._nodes], len(self.origin)
        own[:size].add_(moved[0].to(torch.int64), alpha=int(weight))
        counts = torch.tensor([int(weight), int(is_at_bound(norms, self.settings.clip).sum()), 1])
        own[size:] += counts.to(own.device)

    def result(self, workers: Workers) -> Summed:
        """The sum over all processes and nodes."""
        names = sorted({name for part in workers.gather(self.names()) for name in part})
        found = self.read(self._masked(workers.all_reduce(self.words(names))), names)
        return found if found.count else replace(found, clients=frozenset())

    def names(self) -> set[str]:
        """Names of the metrics of this process's clients."""
        return {name for metrics, _ in self._logged.values() for name in metrics}

    def words(self, names: Sequence[str]) -> Tensor:
        """Each node's vector, (nodes, words), with sums of these metrics."""
        return torch.cat([self._words, self._of_metrics(names).to(self._words.device)], 1)

    def read(self, total: Tensor, names: Sequence[str]) -> Summed:
        """Unpack a sum of vectors; raise `ConfigError` if no nodes' vectors can have this sum."""
        size = len(self.origin)
        weight, clipped, count = total[size : size + _COUNTS].tolist()
        if not 0 <= weight <= _MOST_WEIGHT:
            raise ConfigError(f"the weights of the secure sum add up to {weight}; a node sent a wrong vector")
        rows = total[size + _COUNTS :].view(len(names), _DIGITS + 2).tolist()
        return Summed(total[:size], weight, clipped, count, dict(zip(names, map(_metric, rows), strict=True)))

    def mean(self, found: Summed) -> Tensor | None:
        """The weighted mean of clipped updates, (d,) in float64; None where nothing arrived."""
        return self.origin + found.total.double() * self.grid / found.weight if found.weight else None

    def _of_metrics(self, names: Sequence[str]) -> Tensor:
        """Digits, weight and number of values that are not finite, of each metric, on each node."""
        rows: list[list[int]] = []
        for node in range(self._nodes):
            own = [logged for client_id, logged in self._logged.items() if client_id % self._nodes == node]
            row: list[int] = []
            for name in names:
                found = [(metrics[name] * count, count) for metrics, count in own if name in metrics]
                total = sum((Fraction(value) for value, _ in found if math.isfinite(value)), Fraction())
                odd = sum(not math.isfinite(value) for value, _ in found)
                row += [*digits(total), sum(count for _, count in found), odd]
            rows.append(row)
        return torch.tensor(rows, dtype=torch.int64).view(self._nodes, -1)


def length_of(size: int, names: Sequence[str]) -> int:
    """Words of a node's vector: of a model's values, of counts, and of metrics by name."""
    return size + _COUNTS + (_DIGITS + 2) * len(names)


def _metric(row: list[int]) -> tuple[float, int]:
    """A metric's sum and weight; NaN where a client's value was not finite."""
    *found, weight, odd = row
    return math.nan if odd else from_digits(found), weight


class SummedSecurely(Wrapper):
    """Replaces a method's mean by a secure sum; the loop learns no client's metrics, movement or update.

    Args:
        settings: Of the sum.

    Note:
        In a simulation one process holds all clients: the protocol runs, and protects nobody.
    """

    name = "secure_sum"
    keeps_finite = True
    sees: View = "sum"
    hides: ClassVar[Mapping[View, str]] = dict.fromkeys(
        ("updates", "honest updates", "payloads"), "needs single updates, which trainer.secure_sum hides in a sum"
    )
    noise: ClientLevel | None = None
    """Privacy for which nodes add noise to their vectors of updates. These then have neither metrics nor the number of
    clipped updates, which no noise would hide.
    """
    over_nodes: SumOverNodes | None = None
    """Runs the protocol where clients are on nodes; None in a simulation."""

    def __init__(self, settings: SecureSum) -> None:
        settings.validate()
        self.settings, self.least_nodes = settings, settings.threshold
        self.logged: Logged = {}
        self._keys: dict[str, EllipticCurvePrivateKey] = {}
        self._sums: NodeSums
        self._private = False

    @override
    def negotiate(self, others: Sequence[Wrapper]) -> None:
        for private in (other for other in others if isinstance(other, ClientLevel)):
            if private.clip_norm != self.settings.clip:
                raise ConfigError(
                    f"trainer.secure_sum.clip is {self.settings.clip:g} and trainer.privacy.clip_norm is "
                    f"{private.clip_norm:g}; set them alike"
                )
            self.noise = private if private.honest_nodes else None

    def setup(self) -> None:
        """Refuse a method or a setting that reads single updates."""
        run, key, method = self.run, "trainer.secure_sum", type(self.run.algorithm).__name__
        run.check_kinds(key)
        parts = run.algorithm.reducer(run.server).parts()
        if not parts:
            raise ConfigError(f"{key} cannot go around {method}: its server reads single updates, or nothing is sent")
        if len({part.uniform for part in parts}) > 1:
            raise ConfigError(f"{key} has one weight a client, and {method} weighs its parts differently")
        run.check_sends(key, "sum")
        if odd := sorted(name for name, (dtype, _) in run.layout(run.broadcast).items() if not dtype.is_floating_point):
            raise ConfigError(f"{key} cannot sum {odd[0]!r}, which holds whole numbers; set trainer.buffers to local")
        if not run.participation.one_model:
            raise ConfigError(
                f"{key} sums a round's own updates, and under {run.participation.label} the server weighs "
                "each by its staleness; choose another trainer.participation"
            )
        stragglers = run.participation.stragglers
        if stragglers is not None and stragglers.late == "next_round":
            raise ConfigError(f"{key} sums a round's own updates; set participation.stragglers.late to lost")
        if sends := [type(one).__name__ for one in run.protocols if type(one).layout is not Protocol.layout]:
            raise ConfigError(f"trainer.protocols has {sends[0]}, for which clients send tensors past {key}")
        self.uniform, self.samples = parts[0].uniform, run.data.census.num_samples

    def begin(self) -> None:
        """Refuse weights that are too large, and make the nodes, with keys of their own."""
        run = self.run
        if self.noise is not None and self.over_nodes is None and self.settings.nodes is None:
            raise ConfigError(
                f"trainer.privacy.honest_nodes is {self.noise.honest_nodes}, and each node adds noise of its own; set "
                "trainer.secure_sum.nodes"
            )
        sent, one = next(iter(run.broadcast.payloads.values())), ClientUpdate(0, {})
        if self.over_nodes is not None and run.algorithm.arrive(one, sent, run.server) is not one:
            raise ConfigError(
                "trainer.secure_sum sums updates on their nodes, and the server of "
                f"{type(run.algorithm).__name__} changes each as it arrives; simulate it, or choose another method"
            )
        seen = run.participation.seen_clients
        heaviest = len(seen) if self.uniform else sum(map(self.samples, seen))
        if heaviest > _MOST_WEIGHT:
            raise ConfigError(
                f"trainer.secure_sum sums weights up to {_MOST_WEIGHT:,}, and the clients have {heaviest:,} samples; "
                "set algorithm.weighting to uniform"
            )
        from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key

        self._run_name, nodes = secrets.token_hex(8), range(self.settings.nodes or 0)
        self._keys = {f"node {node:03}": generate_private_key(SECP384R1()) for node in nodes}
        if self.noise is None:
            self._check_cohorts(run.participation)

    def _check_cohorts(self, participation: Participation) -> None:
        """Refuse a participation of which no round has clients on enough nodes, where the nodes are known."""
        seen = [client_id for client_id in map(int, participation.seen_clients) if self.contributes(client_id)]
        if self.over_nodes is not None:
            nodes, smallest = self.over_nodes.reach(seen)
        elif self.settings.nodes is not None:
            nodes, smallest = len({client_id % self.settings.nodes for client_id in seen}), self.settings.threshold
        else:
            return
        sampled = isinstance(participation, SampledParticipation)
        if (most := min(nodes, participation.nominal_cohort_size) if sampled else nodes) < smallest:
            raise ConfigError(
                f"trainer.secure_sum sums over at least {smallest} nodes with clients, and a round has clients on at "
                f"most {most}; let more clients take part, or lower --smallest_sum of the nodes of a federation"
            )

    def contributes(self, client_id: int) -> bool:
        """Whether a client's update is more than zeros, by its number of samples."""
        return self.samples(client_id) > 0

    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        """Keep the task's metrics on the node."""
        told = {name: value for name, value in update.metrics.items() if "/" not in name and self.noise is None}
        own = {name: value for name, value in update.metrics.items() if "/" in name}
        self.logged[update.client_id] = ({} if self.noise else own, self.samples(update.client_id))
        update.metrics = told
        return update

    def sums(self, broadcast: Broadcast | None, logged: Logged, grid: float | None = None) -> NodeSums:
        """A sum of updates from a broadcast, none of them added yet, and of metrics; None sums metrics alone."""
        frame = Frame({}, {})
        if broadcast is not None:
            sent, layout = next(iter(broadcast.payloads.values())), self.run.layout(broadcast)
            frame = Frame(layout, sent, self.run.common_places(broadcast, layout))
        return NodeSums(frame, self.settings, self.uniform, self.run.fabric.device, logged, self._masked, grid)

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        """The nodes' sums in place of the method's mean, or of the bounded sum of `trainer.privacy`."""
        self.logged, self._round = {}, broadcast.round_idx
        self._private = isinstance(below, BoundedSum)
        self._sums = self.sums(broadcast, self.logged, below.grid if isinstance(below, BoundedSum) else None)
        if self.over_nodes is None:
            return self._sums
        return RemoteSums(self._sums, broadcast, self.over_nodes, self.noise is not None)

    def noised(self, words: Tensor, round_idx: int, request: bytes = b"") -> Tensor:
        """Vectors of updates by node, (nodes, words), with the noise of each node, where nodes add noise.

        Args:
            words: The vectors.
            round_idx: The round.
            request: See `ClientLevel.secret`.
        """
        if self.noise is None:
            return words
        from lit_fed.federation.secure.noise import discrete_gaussian

        size, made = words.shape[1] - _COUNTS, words.clone()
        made[:, size + 1] = 0  # the number of clipped updates
        content = made.cpu().numpy().tobytes()
        for place, row in enumerate(made):
            secret = self.noise.secret(self.noise.node + place, round_idx, request, content)
            row[:size] += torch.from_numpy(discrete_gaussian(secret, self.noise.deviation, size)).to(row.device)
        return made

    def _masked(self, words: Tensor) -> Tensor:
        words, threshold = self.noised(words, self._round), self.settings.threshold
        if not self._keys:
            return words.sum(0)
        from lit_fed.federation.secure.coordinator import secure_sum
        from lit_fed.federation.secure.messages import TooSmall
        from lit_fed.federation.secure.party import Party

        smallest, weights = 0 if self.noise else threshold, words[:, len(self._sums.origin)].tolist()
        identities = {name: key.public_key() for name, key in self._keys.items()}
        parties = {
            name: Party(name, key, identities, smallest, clients=int(weight > 0))
            for (name, key), weight in zip(self._keys.items(), weights, strict=True)
        }
        vectors: dict[str, Words] = dict(zip(parties, words.cpu().numpy().view(np.uint64), strict=True))
        try:
            total, _ = secure_sum(
                parties, vectors, identities, threshold, self._round, self._run_name, dishonest=self.settings.dishonest
            )
        except TooSmall as error:
            self.run.fabric.print(f"round {self._round} is skipped: {error}")
            return torch.zeros_like(words[0])
        return torch.from_numpy(total.view(np.int64)).to(words.device)

    def release(self, aggregate: Summed, cohort: Cohort) -> tuple[Any, Cohort, dict[str, float]]:
        """The mean in the method's names and types, and the means of the clients' metrics."""
        metrics = aggregate.means | dict(aggregate.costs)
        if aggregate.clients is not None:
            cohort = replace(cohort, delivered=tuple(one for one in cohort.delivered if one in aggregate.clients))
            metrics["participation/count"] = len(cohort.delivered)
        sums = self._sums
        if self._private:
            total = aggregate.total.double() * sums.grid
            return Released(total, sums.origin, aggregate.clipped, aggregate.count, sums.grid), cohort, metrics
        if (mean := sums.mean(aggregate)) is None:
            return None, cohort, metrics
        return dict(sums.frame.payload(mean)[0]), cohort, metrics


class SumOverNodes(Interface):
    """Runs the protocol over nodes."""

    def train(self, broadcast: Broadcast, clients: Sequence[int], sums: NodeSums) -> Summed:
        """The sum of a round's updates of some clients, which their nodes keep."""

    def reach(self, clients: Sequence[int]) -> tuple[int, int]:
        """The number of nodes that have some clients, and the least number with clients that a sum must have."""


class RemoteSums(Reducer[Summed]):
    """Sums updates that are on nodes.

    Args:
        sums: Reads the sum.
        broadcast: What the clients trained on.
        over_nodes: Runs the protocol.
        always: Also for no updates, to which nodes add noise.
    """

    def __init__(self, sums: NodeSums, broadcast: Broadcast, over_nodes: SumOverNodes, always: bool) -> None:
        self._sums, self._broadcast, self._over_nodes, self._always = sums, broadcast, over_nodes, always
        self._clients: list[int] = []

    def add(self, update: ClientUpdate) -> None:
        """Note whose update its node has."""
        self._clients.append(update.client_id)

    def result(self, workers: Workers) -> Summed:
        """The sum over the nodes."""
        if not self._clients and not self._always:
            return self._sums.read(self._sums.words([])[0], [])
        return self._over_nodes.train(self._broadcast, sorted(self._clients), self._sums)


def secure_sum_of(trainer: FederatedTrainer) -> SummedSecurely | None:
    """Return the setting of secure sums; None without it."""
    found = next((one for one in trainer.local.wrappers.stack if isinstance(one, SummedSecurely)), None)
    if found is not None and found.settings.nodes is not None:
        raise ConfigError(
            f"trainer.secure_sum.nodes is {found.settings.nodes}, the number of nodes in memory; leave it out where "
            "clients are on nodes"
        )
    return found
