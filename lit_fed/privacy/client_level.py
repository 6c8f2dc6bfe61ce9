r"""Differential privacy at client level: a released model hardly depends on any one client's data.

McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.client import Client
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.method.wrapper import View, Wrapper
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Payload, layout_of
from lit_fed.errors import BudgetSpent, ConfigError
from lit_fed.participation import FullParticipation, Participation, PoissonParticipation, UniformParticipation
from lit_fed.privacy.accounting import Mechanism, Releases, Sampling, calibrate, check_budget
from lit_fed.privacy.bounded_sum import GRID_BITS, BoundedSum, Frame, Released, clip, grid_of
from lit_fed.privacy.card import card
from lit_fed.privacy.keyed import Keyed, PrivacyState

_DEVIATION_BITS = 20
"""Bits of a node's deviation on the grid of its noise."""


@dataclass(kw_only=True)
class ClientState(PrivacyState):
    """The promise to clients."""

    mechanism: str = "ClientLevel"
    unit: str = "one client with all its data"
    participation: str
    clients: int
    expected_cohort: float
    honest_nodes: int


class ClientLevel(Keyed):
    r"""Clips every client's update, adds noise to their sum, and divides by the expected cohort.

    .. math:: x \leftarrow x + \frac{1}{qN} \left[\sum_{k \in S} \min\left(1, \frac{C}{\lVert \Delta_k \rVert}\right)
        \Delta_k + \mathcal{N}(0, z^2 C^2 I)\right]

    :math:`\Delta_k` is everything that a client sends minus the broadcast, one vector: SCAFFOLD's model and control
    variate are clipped together. An empty cohort releases noise. Goes around every method whose reducer is a mean in
    which clients weigh the same.

    Args:
        clip_norm: C, the largest norm of an update.
        noise_multiplier: z. Give this or ``epsilon``.
        epsilon: The budget for ``trainer.max_rounds`` rounds, for which z is worked out; the run stops before a round
            that would exceed it.
        delta: δ, the chance of a breach that ε does not cover; below 1/N.
        key_file: The file that holds the run's key, made where there is none, readable by its owner alone. Without it
            noise and cohorts follow from the seed, which protects nobody: a simulation.
        withhold: Whether data that are not private are kept out of files and loggers: metrics of clients and means over
            them, counts, and who took part. By default where there is a key file.
        honest_nodes: h, the number of honest nodes whose vectors are in every sum of ``trainer.secure_sum``. Each node
            adds noise of standard deviation z C / √h, and the server adds none. With null the server adds the noise.

    Raises:
        ConfigError: For values out of range, or both or neither of ``noise_multiplier`` and ``epsilon``.

    Note:
        Clients are weighed alike and the sum is divided by q · N, not by the number that came, because both would
        depend on who took part. Sums are taken in float64 on a grid, see `lit_fed.privacy.bounded_sum`.

        With ``honest_nodes`` the noise is on a grid of its own, on which a node's deviation s is a whole number above
        2^19. Updates are cut towards zero, so that one moves a sum by at most C; s is rounded up by 1 to 2, which is
        more than what norms in float64 are off.
    """

    grid: float = 0.0
    """The grid of the nodes' noise."""
    deviation: int = 0
    """s: a node's noise in multiples of the grid; 0 where the server adds the noise."""
    node: int = 0
    """The first client of this node; 0 in a simulation."""
    state: ClientState

    keeps_finite = True
    sees: View = "sum"
    _on_node = False
    _frame: Frame | None = None
    _all: Frame | None = None  # of all values, before a codec chooses some

    @override
    def __init__(
        self,
        clip_norm: float,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        key_file: str | None = None,
        withhold: bool | None = None,
        honest_nodes: int | None = None,
    ) -> None:
        super().__init__(clip_norm, noise_multiplier, epsilon, delta, key_file, withhold)
        check_range("trainer.privacy.honest_nodes", honest_nodes, least=1, null="for noise from the server")
        self.honest_nodes = honest_nodes

    # ------------------------------------------------------------------ before the first round

    @override
    def negotiate(self, others: Sequence[Wrapper]) -> None:
        if (self.honest_nodes or 0) > max((other.least_nodes for other in others), default=0):
            raise ConfigError(
                f"trainer.privacy.honest_nodes is {self.honest_nodes}, and a sum is sure to have only "
                "trainer.secure_sum.threshold nodes; set that to at least as many"
            )

    @override
    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"honest_nodes": self.honest_nodes or 0}

    def setup(self) -> None:
        """Refuse a method without a bounded sum."""
        super().setup()
        self._frame, run, participation = None, self.run, self.run.participation
        self.state = ClientState(
            **self._settings(), participation=type(participation).__name__,
            clients=participation.num_seen, expected_cohort=expected_cohort(participation),
        )  # fmt: skip
        method = type(run.algorithm).__name__
        parts = run.algorithm.reducer(run.server).parts()
        if parts is None:
            raise ConfigError(
                f"trainer.privacy cannot go around {method}: what its server makes of updates is not a mean of what "
                "clients send, so no bound on one client's part is known"
            )
        if not all(part.uniform for part in parts):
            raise ConfigError(
                f"trainer.privacy weighs clients alike, and {method} weighs them by their samples; set "
                "algorithm.weighting to uniform"
            )
        if odd := sorted(name for name, (dtype, _) in run.layout(run.broadcast).items() if not dtype.is_floating_point):
            raise ConfigError(f"trainer.privacy cannot add noise to {odd[0]!r}, which holds whole numbers")
        if (mixed := run.data.mixed_by) is not None:
            raise ConfigError(
                f"trainer.privacy bounds a client's own update, and {mixed} draws from all clients' samples at once, "
                "so that one client changes which samples the others train on; leave it out"
            )

    def prepare(self, resumed: bool) -> None:
        """Open the key; a `ConfigError` also if no noise keeps the budget, or a client's failure ends the run."""
        if self.epsilon is not None and not resumed:  # a run that goes on has its noise
            check_budget(*self._population, self.run.max_rounds, self.epsilon, self.delta)
        if self.key_file is not None and self.run.on_client_failure == "raise":
            raise ConfigError(
                "trainer.on_client_failure is raise, so that a client which fails tells by the run's end that it took "
                "part, which trainer.privacy hides; set it to skip"
            )
        super().prepare(resumed)

    def begin(self) -> None:
        """Find the noise, and go on with the budget that is left, and with all settings: rounds are accounted alike."""
        super().begin()
        state, run, kind = self.state, self.run, type(self.run.participation).__name__
        sampling, num_clients, self._cohort = self._population
        cohort = (kind, self._cohort, num_clients)
        if cohort != (begun := (state.participation, state.expected_cohort, state.clients)):
            raise ConfigError(
                "trainer.participation is {} with {:g} of {} clients a round, and the private run began with {} and "
                "{:g} of {}; keep it".format(*cohort, *begun)
            )
        if self.epsilon is not None and not state.allowed:
            state.allowed = run.max_rounds
            state.noise_multiplier = calibrate(*self._population, run.max_rounds, self.epsilon, self.delta)
        self._mechanism = Mechanism(*self._population, state.noise_multiplier)
        self._share(state.noise_multiplier)
        state.relation = self._mechanism.relation
        self._warn_of_delta(num_clients, "one client's data")
        if sampling in ("fixed_size", "none"):
            counted = "a larger epsilon" if sampling == "fixed_size" else "no amplification by sampling"
            run.fabric.print(
                f"warning: trainer.privacy counts {counted} for {kind}; PoissonParticipation gives the smallest"
            )

    @property
    def _population(self) -> tuple[Sampling, int, float]:
        """How cohorts are accounted, N, and q N; a server that adds no noise is among those who must learn nothing."""
        participation = self.run.participation
        sampling = "known" if self.honest_nodes else sampling_of(participation)
        return sampling, participation.num_seen, expected_cohort(participation)

    def _share(self, noise_multiplier: float) -> None:
        """Choose a node's part of the noise, and its grid."""
        if self.honest_nodes is None:
            return
        std = noise_multiplier * self.clip_norm / math.sqrt(self.honest_nodes)
        if std < self.clip_norm * 2.0**-_DEVIATION_BITS:
            raise ConfigError(
                f"trainer.privacy.noise_multiplier is {noise_multiplier}, too little to be shared by nodes; set "
                "honest_nodes to null, or give more"
            )
        self.grid = grid_of(std * 2.0**_DEVIATION_BITS)
        self.deviation = math.ceil(std / self.grid) + 1

    @override
    def settle(self) -> None:
        if self.honest_nodes is None:
            return
        self._check_node()
        assert self.key_file is not None
        file, budget = Path(self.key_file), float(self.epsilon or 0.0)
        noise = self._node_noise([file], lambda: calibrate("known", 1, 1, self.run.max_rounds, budget, self.delta))
        self._key, self._on_node = self._node_key(file, noise, honest_nodes=self.honest_nodes), True
        self.node, self._mechanism = min(self.run.data.census.clients), Mechanism("known", 1, 1, noise)
        self._share(noise)

    def secret(self, node: int, round_idx: int, request: bytes, content: bytes) -> bytes:
        """The key of a node's noise in a round: of the request and the sum, to be used on it alone.

        Args:
            node: The node.
            round_idx: The round.
            request: Digest of what the server asks for. It alone decides whether there is noise: a node that has given
                noise to the round gives none again, and repeats the noisy sum that it kept.
            content: The sum, so that no other one ever gets the same noise; without influence in a simulation.

        Raises:
            BudgetSpent: On a node whose noise the round has had, or whose account is spent.
        """
        key, epsilon, rounds = self._opened, self.epsilon, len(self._opened.releases) + 1
        if self._on_node and round_idx in key.releases.values():
            raise BudgetSpent(
                f"round {round_idx} got this node's noise before, for another request or run, or the noisy sum is "
                "lost; a second sum would tell of single nodes"
            )
        if self._on_node and epsilon is not None and self._mechanism.epsilon({1: rounds}, self.delta)[0] > epsilon:
            raise BudgetSpent(f"{rounds - 1} sums have spent epsilon {epsilon} at delta {self.delta} of this node")
        return key.secret(key.release(round_idx, (node,), np.frombuffer(request + content, np.uint8)))

    def charge(self, round_idx: int, request: bytes) -> None:
        """Write down, before it leaves, that a node gives a noisy sum of a round; once for a request."""
        name = self._opened.release(round_idx, (self.node,), np.frombuffer(request, np.uint8))
        if name not in self._opened.releases:
            self._opened.record(name, round_idx)

    # ------------------------------------------------------------------ a round

    def on_clients(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> list[ClientUpdate]:
        """Clip updates, before they leave their clients."""
        received = clients[0].received
        if self._all is None or self._all.received is not received:
            of_round = self._frame if self._frame is not None and self._frame.received is received else None
            self._all = of_round.whole if of_round is not None else Frame(layout_of(updates[0].payload), received)
        return clip(updates, self._all, self.clip_norm)

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        """A sum of bounded updates in place of the method's mean."""
        sent, layout = next(iter(broadcast.payloads.values())), self.run.layout(broadcast)
        self._frame, self._all = Frame(layout, sent, self.run.common_places(broadcast, layout)), None
        std = self._mechanism.noise_multiplier * self.clip_norm
        coarse = self.grid * 2.0**GRID_BITS if self.deviation else std
        return BoundedSum(self._frame, self.clip_norm, self.run.fabric.device, coarse)

    def release(self, aggregate: Released, cohort: Cohort) -> tuple[Payload, Cohort, dict[str, float]]:
        """Noise on the sum, over the expected cohort; written down before anybody sees it."""
        assert self._frame is not None
        key, total, round_idx = self._opened, aggregate.total, cohort.round_idx
        name = key.release(round_idx, cohort.delivered, total.cpu().numpy())
        self._record(name, round_idx)
        std = self.state.noise_multiplier * self.clip_norm
        if std and not self.deviation:
            total = aggregate.noised(torch.from_numpy(key.noise(name, len(total))).to(total.device) * std)
        metrics = {"privacy/epsilon": self._spent(), "privacy/clip_norm": self.clip_norm}
        metrics["privacy/noise_std"] = std / self._cohort
        if not self.withhold and not self.deviation and aggregate.count:
            metrics["privacy/clipped"] = aggregate.clipped / aggregate.count
        mean, _ = self._frame.payload(aggregate.origin + total / self._cohort)
        return dict(mean), replace(cohort, expected=self._cohort), metrics

    def _spent(self) -> float:
        """Note and return the ε spent, by the accountant that the budget was checked with."""
        spent, self.state.accountant = self._mechanism.epsilon(self._repeats(), self.delta)
        self.state.epsilon = f"{spent:.6g}"
        return spent

    @override
    def _repeats(self, more: int | None = None) -> Releases:
        return super()._repeats(more) if self._opened.path else {1: self.state.releases + (more is not None)}

    @override
    def _exceeds(self, round_idx: int) -> bool:
        if self.epsilon is None:
            return False
        releases = self._repeats(round_idx)
        if releases.keys() == {1}:
            return bool(releases[1] > self.state.allowed)
        return bool(self._mechanism.epsilon(releases, self.delta)[0] > self.epsilon)

    @override
    def card(self) -> str:
        return card(self.state, self.withhold, self.state.honest_nodes)

    def exhausted(self, round_idx: int) -> str | None:
        """The budget, where a new release of the round would exceed it; one that was made before costs nothing."""
        if round_idx in self._opened.releases.values() or not self._exceeds(round_idx):
            return None
        return (
            f"trainer.privacy: {self.state.releases} releases have spent epsilon {self.epsilon} at delta {self.delta}; "
            "the run ends here"
        )


def sampling_of(participation: Participation) -> Sampling:
    """How a participation's cohorts are accounted; a subclass may draw differently, so that nothing is known of it."""
    if type(participation) in (PoissonParticipation, FullParticipation):
        return "poisson"
    return "fixed_size" if type(participation) is UniformParticipation else "none"


def expected_cohort(participation: Participation) -> float:
    """How many clients a round selects in the mean: q · N."""
    if isinstance(participation, PoissonParticipation):
        return participation.fraction * participation.num_seen
    return float(participation.nominal_cohort_size)
