"""Robust rules in place of a method's mean: `trainer.aggregation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.checks import check_range
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.method.wrapper import Aggregation, WrapperState
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Flat, Payload
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.robust import rules
from lit_fed.robust.rules import Definition
from lit_fed.robust.stack import Blocks, Stack, inner_products, warn_of_memory
from lit_fed.seeding import torch_generator

_KEY = "trainer.aggregation"


class PreAggregation(Checked, ABC):
    """Mixes the vectors of a round before a rule takes them."""

    least: int = 1
    """Number of vectors that it needs."""

    def outputs(self, count: int) -> int:
        """Number of mixed vectors."""
        return count

    @abstractmethod
    def matrix(self, gram: Tensor, generator: torch.Generator) -> Tensor:
        """The matrix, (m, n) in float64, that mixes n vectors with these inner products into m."""


class NNM(PreAggregation):
    """Nearest-neighbour mixing: each vector becomes the mean of the n − f nearest to it, itself included.

    See `lit_fed.robust.rules.nearest_neighbours` for the paper.

    Args:
        attackers: f, the number of attackers in a cohort that it bears.
    """

    def __init__(self, attackers: int) -> None:
        check_range(f"{_KEY}.before.attackers", attackers, least=0)
        self.attackers, self.least = attackers, 2 * attackers + 1

    @override
    def matrix(self, gram: Tensor, generator: torch.Generator) -> Tensor:
        return rules.nearest_neighbours(gram, self.attackers)


class Bucketing(PreAggregation):
    """Averages buckets of s vectors at random, drawn from the run's seed and the round.

    See `lit_fed.robust.rules.buckets` for the paper. A rule with ``attackers`` sees only ⌈n / s⌉ vectors.

    Args:
        size: s.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = check_range(f"{_KEY}.before.size", size, least=1)

    @override
    def outputs(self, count: int) -> int:
        return -(-count // self.size)

    @override
    def matrix(self, gram: Tensor, generator: torch.Generator) -> Tensor:
        return rules.buckets(len(gram), self.size, generator).to(gram.device)


@dataclass(frozen=True)
class Combined:
    """Result of a rule.

    Args:
        payload: The aggregate, in the method's layout; None where the cohort was too small.
        moved: Its difference to the broadcast, by name.
        weights: Clients and their updates' weights; None for a rule that looks at single coordinates.
    """

    payload: Payload | None = None
    moved: Payload = field(default_factory=dict)
    weights: Sequence[tuple[int, float]] | None = None


@dataclass(kw_only=True)
class RuleState(WrapperState):
    """The rule, and the movement of its previous aggregate, by name."""

    rule: str
    centre: Payload = field(default_factory=dict)


class RobustRule(Aggregation, ABC):
    """A rule in place of the mean of the clients' payloads.

    A vector is a client's payload minus the broadcast. All floating-point tensors of a payload are one vector, so that
    SCAFFOLD's model and control variate are kept or left out together. The vectors exclude averaged buffers and integer
    tensors: every rule takes their coordinate-wise median, rounded for integers. Updates weigh the same, whatever the
    clients' numbers of samples.

    A round with fewer updates than the rule needs leaves the server as it is, and is counted in
    ``aggregation/skipped``. Memory grows with the cohort: see `lit_fed.robust.stack.Stack`.

    Args:
        before: Mixes the vectors first, such as `NNM`; null for none.
    """

    least: int = 1
    """Number of vectors that the rule needs."""

    uses_products: bool = True
    """Whether the rule is a combination with weights from the vectors' inner products."""

    remembers: bool = False
    """Whether the previous aggregate is one more vector, the last."""

    state: RuleState

    def __init__(self, before: PreAggregation | None = None) -> None:
        self.before = before
        self._weights: Sequence[tuple[int, float]] = []

    @property
    @override
    def tolerated_attackers(self) -> int | None:
        numbers = (getattr(part, "attackers", None) for part in (self, self.before))  # a rule's own number comes first
        return next((number for number in numbers if number is not None), None)

    def weights(self, gram: Tensor, unit: float) -> Tensor:
        """Weights of the vectors, (n,), from their inner products; lengths in settings are multiplied by the unit."""
        raise NotImplementedError(f"{type(self).__name__} is not a weighted combination")

    def combine(self, vectors: Tensor) -> Tensor:
        """The aggregate of some coordinates, (n, b) to (b,)."""
        raise NotImplementedError(f"{type(self).__name__} does not work on single coordinates")

    # ------------------------------------------------------------------ before the first round

    @override
    def setup(self) -> None:
        self.state, run = RuleState(rule=type(self).__name__), self.run
        method = type(run.algorithm).__name__
        run.check_kinds(_KEY)
        if run.algorithm.reducer(run.server).parts() is None:
            raise ConfigError(
                f"{_KEY} cannot replace the mean of {method}: its server does not average what clients send; choose "
                "another method"
            )
        run.check_sends(_KEY, "combine")
        if odd := sorted(name for name, (dtype, _) in run.layout(run.broadcast).items() if dtype.is_complex):
            raise ConfigError(f"{_KEY} cannot order the complex numbers of {odd[0]!r}; choose another method")
        count = run.participation.nominal_cohort_size
        if self.lacks(count):
            least = next(size for size in range(count + 1, 10**9) if not self.lacks(size))
            named = type(self).__name__ + ("" if self.before is None else f" after {type(self.before).__name__}")
            raise ConfigError(
                f"{_KEY}: {named} needs cohorts of at least {least} clients, and a round has {count}; lower "
                "attackers or select more clients"
            )

    def lacks(self, count: int) -> bool:
        """Whether a round with this number of updates is too small."""
        if self.before is None:
            return count < self.least
        return count < self.before.least or self.before.outputs(count) < self.least

    @override
    def begin(self) -> None:
        warn_of_memory(_KEY, self.run)
        parts = self.run.algorithm.reducer(self.run.server).parts() or []
        if not all(part.uniform for part in parts):
            self.run.fabric.print(
                f"{_KEY}: {type(self).__name__} ignores the clients' numbers of samples; all weigh the same"
            )

    # ------------------------------------------------------------------ a round

    @override
    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        return RuleReducer(self, broadcast, self.run.seed, self.run.averaged, self.state.centre)

    @override
    def release(self, aggregate: Combined | None, cohort: Cohort) -> tuple[Payload | None, Cohort, dict[str, float]]:
        payload = None if aggregate is None else aggregate.payload
        metrics = {"aggregation/skipped": float(payload is None)}
        self._weights = [] if aggregate is None else aggregate.weights or []
        if self._weights:
            kept_count = sum(weight != 0 for _, weight in self._weights)
            metrics |= {"aggregation/kept": kept_count, "aggregation/left_out": len(self._weights) - kept_count}
        if aggregate is not None and payload is not None and self.remembers:
            self.state.centre = dict(aggregate.moved)
        return payload, cohort, metrics

    @override
    def client_rows(self) -> list[tuple[int, str, float]]:
        return [(client_id, "aggregation/weight", weight) for client_id, weight in self._weights]

    def aggregate(
        self, vectors: Tensor, centre: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """The aggregate of a stack of vectors, (n, d) in float64, as (d,)."""
        rows = vectors if centre is None else torch.cat([vectors, centre[None]])
        return self.combined(lambda: [rows], generator or torch.Generator())[0]

    def combined(self, blocks: Blocks, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """The aggregate, (d,), of rows that are read in blocks, and the rows' weights if the rule is a combination."""
        mix, weights, unit = None, None, 1.0
        if self.uses_products or self.before is not None:
            gram, blocks, unit = inner_products(blocks)
            mix, weights = self._plan(gram, unit, generator)
        if weights is not None:
            parts = [weights @ rows for rows in blocks()]
        else:
            parts = [self.combine(rows if mix is None else mix @ rows) for rows in blocks()]
        return torch.cat(parts) / unit, weights

    def _plan(self, gram: Tensor, unit: float, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        """The pre-aggregation's matrix and the weights of the unmixed vectors, each None if it does not exist."""
        mix = None
        if self.before is not None:
            count = len(gram) - self.remembers
            mix = self.before.matrix(gram[:count, :count], generator)
            if self.remembers:  # the centre is not mixed
                mix = torch.block_diag(mix, torch.ones_like(mix[:1, :1]))
        if not self.uses_products:
            return mix, None
        return mix, self.weights(gram, unit) if mix is None else self.weights(mix @ gram @ mix.T, unit) @ mix


class RuleReducer(Reducer[Combined]):
    """Keeps a round's updates and combines them by a rule.

    Args:
        rule: The rule.
        broadcast: The round's message.
        seed: The run's.
        buffers: Names of the buffers that are averaged.
        centre: Movement of the previous aggregate, by name.
    """

    def __init__(
        self, rule: RobustRule, broadcast: Broadcast, seed: int, buffers: frozenset[str], centre: Mapping[str, Tensor]
    ) -> None:
        self.rule, self.centre = rule, centre
        self._stack = Stack(next(iter(broadcast.payloads.values())), buffers)
        self._generator = torch_generator(seed, "aggregation", broadcast.round_idx)

    @override
    def add(self, update: ClientUpdate) -> None:
        self._stack.add(update)

    @override
    def result(self, workers: Workers) -> Combined | None:
        stack, rule = self._stack, self.rule
        count = stack.gather(workers)
        if not count:
            return None
        if rule.lacks(count):
            return Combined()
        moved, weights = rule.combined(lambda: self._blocks(workers), self._generator)
        payload = stack.tensors(moved) | stack.extra_tensors(rules.median(stack.extra_values(workers)))
        payload = {name: payload[name] for name in stack.layout}
        if weights is None:
            return Combined(payload)
        shares = list(zip(stack.clients, weights[:count].tolist(), strict=True))
        return Combined(payload, Flat(stack.names, moved).split(moved), shares)

    def _blocks(self, workers: Workers) -> Iterator[Tensor]:
        if not self.rule.remembers:
            yield from self._stack.blocks(workers)
            return
        centre, start = self._stack.vector(self.centre, workers.fabric.device), 0
        for rows in self._stack.blocks(workers):
            end = start + rows.shape[1]
            yield torch.cat([rows, centre[None, start:end]])
            start = end


class Median(RobustRule):
    """The coordinate-wise median; see `lit_fed.robust.rules.median`."""

    uses_products = False

    @override
    def combine(self, vectors: Tensor) -> Tensor:
        return rules.median(vectors)


class TrimmedMean(RobustRule):
    """The mean of each coordinate without its f smallest and largest values; see `lit_fed.robust.rules.trimmed_mean`.

    Args:
        attackers: f, the number of attackers in a cohort that it bears, below half of the cohort.
        before: See `RobustRule`.
    """

    uses_products = False

    def __init__(self, attackers: int, before: PreAggregation | None = None) -> None:
        super().__init__(before)
        check_range(f"{_KEY}.attackers", attackers, least=0)
        self.attackers, self.least = attackers, 2 * attackers + 1

    @override
    def combine(self, vectors: Tensor) -> Tensor:
        return rules.trimmed_mean(vectors, self.attackers)


class MultiKrum(RobustRule):
    """The mean of the vectors with the nearest neighbours; see `lit_fed.robust.rules.krum_scores`.

    Args:
        attackers: f. The definition of ``blanchard`` needs cohorts of at least 2f + 3, that of ``byzfl`` of 2f + 1.
        definition: Number of neighbours that a score counts: n − f − 2 (``blanchard``) or n − f − 1 (``byzfl``).
        keep: Number of vectors to average; null for n − f.
        before: See `RobustRule`.
    """

    def __init__(
        self,
        attackers: int,
        definition: Definition = "blanchard",
        keep: int | None = None,
        before: PreAggregation | None = None,
    ) -> None:
        super().__init__(before)
        self.attackers = check_range(f"{_KEY}.attackers", attackers, least=0)
        self.definition: Definition = definition
        self.keep = check_range(f"{_KEY}.keep", keep, least=1, null="for all but the attackers")
        self.least = max(2 * attackers + (3 if definition == "blanchard" else 1), keep or 1)

    @override
    def weights(self, gram: Tensor, unit: float) -> Tensor:
        keep = len(gram) - self.attackers if self.keep is None else self.keep
        return rules.multi_krum(gram, self.attackers, keep, self.definition)


class Krum(MultiKrum):
    """The vector with the nearest neighbours; see `lit_fed.robust.rules.krum_scores`.

    Args:
        attackers: See `MultiKrum`.
        definition: See `MultiKrum`.
        before: See `RobustRule`.
    """

    def __init__(
        self, attackers: int, definition: Definition = "blanchard", before: PreAggregation | None = None
    ) -> None:
        super().__init__(attackers, definition, 1, before)


class GeometricMedian(RobustRule):
    """The vector with the smallest sum of distances, smoothed; see `lit_fed.robust.rules.geometric_median`.

    Args:
        smoothing: ν: distances below it count as ν.
        iterations: The most steps of Weiszfeld's algorithm.
        before: See `RobustRule`.
    """

    def __init__(self, smoothing: float = 1e-6, iterations: int = 1000, before: PreAggregation | None = None) -> None:
        super().__init__(before)
        self.smoothing = check_range(f"{_KEY}.smoothing", smoothing, above=0)
        self.iterations = check_range(f"{_KEY}.iterations", iterations, least=1)

    @override
    def weights(self, gram: Tensor, unit: float) -> Tensor:
        return rules.geometric_median(gram, self.smoothing * unit, self.iterations)


class CentredClipping(RobustRule):
    """Moves from the previous round's aggregate by clipped differences; see `lit_fed.robust.rules.centred_clipping`.

    Args:
        radius: τ, in the unit of an update's norm (``drift/update_norm_mean``); a large one gives the mean.
        iterations: L.
        before: See `RobustRule`.

    Note:
        The centre is the previous aggregate's movement, as vectors are movements; in the first round it is 0. The
        paper's clients send momenta, as under `lit_fed.methods.ClientMomentum`.
    """

    remembers = True

    def __init__(self, radius: float, iterations: int = 1, before: PreAggregation | None = None) -> None:
        super().__init__(before)
        self.radius = check_range(f"{_KEY}.radius", radius, above=0)
        self.iterations = check_range(f"{_KEY}.iterations", iterations, least=1)

    @override
    def weights(self, gram: Tensor, unit: float) -> Tensor:
        return rules.centred_clipping(gram, self.radius * unit, self.iterations)


class NormBounding(RobustRule):
    """The mean of updates that are shortened to a norm; see `lit_fed.robust.rules.norm_bounding`.

    Args:
        norm: C, in the unit of an update's norm (``drift/update_norm_mean``).
        before: See `RobustRule`.
    """

    def __init__(self, norm: float, before: PreAggregation | None = None) -> None:
        super().__init__(before)
        self.norm = check_range(f"{_KEY}.norm", norm, above=0)

    @override
    def weights(self, gram: Tensor, unit: float) -> Tensor:
        return rules.norm_bounding(gram, self.norm * unit)
