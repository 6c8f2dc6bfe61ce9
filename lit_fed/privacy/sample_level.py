r"""Differential privacy at sample level: what a client sends hardly depends on any one of its samples.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: "Deep Learning with Differential Privacy", CCS 2016, Algorithm
1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.clients.executor import untrained_answer
from lit_fed.engine.clients.local import num_batches
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.client import Client, Pass, Phase
from lit_fed.engine.method.reducers import Reducer, WeightedMean
from lit_fed.engine.method.wrapper import WrappedRun
from lit_fed.engine.vectorized.alone import aside
from lit_fed.engine.wire.batches import batch_size_of, first_samples
from lit_fed.engine.wire.payload import CLAIMS, Broadcast, ClientUpdate
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import BudgetSpent, ConfigError
from lit_fed.participation import Fate
from lit_fed.privacy.accounting import IntArray, SampleAccount
from lit_fed.privacy.card import card, claims_card
from lit_fed.privacy.keyed import Keyed, PrivacyState
from lit_fed.privacy.keys import RunKey, conceal, reveal
from lit_fed.privacy.sample_gradients import ROUNDED, PoissonLoader, SampleGradients, refuse
from lit_fed.private_names import tree_flatten
from lit_fed.seeding import SECRET
from lit_fed.tensors import hash_of_groups

_BREACH = "a sample of the largest client"
_MOST = 4096  # samples of an expected batch: sums of up to 8,192 clipped gradients are exact
_COMPARED = 16
_PUBLIC = (
    "batch_size", "census", "client_names", "has_val", "input_shape", "num_clients", "num_classes", "num_samples",
)  # fmt: skip


@dataclass(kw_only=True)
class SampleState(PrivacyState):
    """The promise to samples.

    Args:
        account: Rounds, samples and steps of each client, which the key alone reads.
        counted: Number of rounds in the account.
        elsewhere: Whether the clients are on nodes, which have accounts of their own.
        claims: ε, δ and z that the nodes claim, (N, 3); -1 for none.
    """

    unlisted = PrivacyState.unlisted | {"account", "counted", "elsewhere", "claims"}
    mechanism: str = "SampleLevel"
    unit: str = "one sample of a client"
    relation: str = "the data of one sample replaced by none"
    batch_size: int
    steps: str
    left_out: int = 0
    account: Tensor
    counted: int = 0
    elsewhere: bool
    claims: Tensor


class SampleLevel(Keyed):
    r"""Clips the gradient of every sample, adds noise to the sum of a batch, and divides by the expected batch.

    .. math:: \tilde g = \frac{1}{B} \left[\sum_{i \in S} \min\left(1, \frac{C}{\lVert g_i \rVert}\right) g_i +
        \mathcal{N}(0, z^2 C^2 I)\right]

    Each sample of a client enters a batch S independently, with probability q = min(1, B / n), where B is
    ``data.batch_size``; the expected size qn divides the sum. An empty batch is a step of noise alone. Noise is added
    in the client's steps, so that its update, too, is private; who holds the run's key can remove it.

    Args:
        clip_norm: C, the largest norm of a sample's gradient, over all trained parameters together.
        noise_multiplier: z. Give this or ``epsilon``.
        epsilon: The budget of every client, for which z is worked out, by the cohorts of ``trainer.max_rounds`` rounds.
            A client that a round beyond them would take beyond the budget is left out.
        delta: δ, the chance of a breach that ε does not cover; below 1/n for clients of n samples.
        physical_batch: Most samples whose gradients are in memory at a time.
        key_file: The file that holds the key of noise and batches, as for `ClientLevel`.
        withhold: Whether data that are not private are kept out of files; by default where there is a key file.

    Raises:
        ConfigError: For values out of range, or both or neither of ``noise_multiplier`` and ``epsilon``.

    Note:
        A neighbour of a data set has one sample's data replaced by none; the number of a client's samples is public, as
        q follows from it. Batches have no largest size: nothing is dropped, and the account is of Poisson batches.
        Nothing is logged in training, as a mean of losses is not private.
    """

    keeps_finite = True
    own_settings = (*Keyed.own_settings, "noise_multiplier", "epsilon", "delta", "physical_batch")  # of each node
    state: SampleState

    def __init__(
        self,
        clip_norm: float,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        physical_batch: int = 64,
        key_file: str | None = None,
        withhold: bool | None = None,
    ) -> None:
        super().__init__(clip_norm, noise_multiplier, epsilon, delta, key_file, withhold)
        self.physical_batch = check_range("trainer.privacy.physical_batch", physical_batch, least=1)
        self._client: Client | None = None
        self._drawn = self._stepped = 0
        self._request = ""
        self._noise = math.nan

    # ------------------------------------------------------------------ before the first round

    def setup(self) -> None:
        """Refuse what reads samples beside their gradients."""
        super().setup()
        run, data = self.run, self.run.data
        if (mixed := data.mixed_by) is not None:
            raise ConfigError(
                f"trainer.privacy bounds what a sample does, and {mixed} draws from all samples at once; leave it out"
            )
        if data.batch_size > _MOST:
            raise ConfigError(f"data.batch_size is {data.batch_size}; SampleLevel sums up to {_MOST} samples exactly")
        parts = run.algorithm.reducer(run.server).parts()
        if parts is not None and not all(part.uniform for part in parts):
            raise ConfigError(
                f"trainer.privacy: {type(run.algorithm).__name__} weighs clients by their samples, which tells of "
                "each; set algorithm.weighting to uniform"
            )
        (loop,) = run.loops.values()
        refuse(loop)
        self._gradients = SampleGradients(loop, self.clip_norm, self.physical_batch, self._enter, self._noise_of)
        asked, census = [self._asked(loop, is_new) for is_new in (True, False)], data.census
        here = range(data.num_clients) if census.is_complete else census.clients
        self._on_nodes = not len(census.clients)  # at a federation's server
        with aside(loop):
            phases = [_phases(run, client) for client in asked]
            self._try(asked[0], list({phase.name: phase for part in phases for phase in part}.values()))
        loop.replays = self._gradients
        self._sizes = np.zeros(data.num_clients, np.int64)
        self._sizes[list(here)] = [census.num_samples(one) for one in here]
        made = [[_steps(phase, self._sizes, run) for phase in part] for part in phases]
        self._steps = np.maximum(*(sum(part, np.zeros_like(self._sizes)) for part in made))
        self.state = SampleState(
            **self._settings(), batch_size=data.batch_size, steps=f"{self._steps.min()} to {self._steps.max()}",
            account=torch.from_numpy(conceal(None, np.stack([0 * self._sizes, self._sizes, self._steps]))),
            elsewhere=self._on_nodes, claims=torch.full((data.num_clients, 3), -1.0, dtype=torch.float64),
        )  # fmt: skip

    def _asked(self, loop: Any, is_new: bool) -> Client:
        """A client whose data beside the gradient are refused by name; one that is known finds another model."""
        run = self.run
        data: Any = _Guarded(run.data, partial(_beside, type(run.algorithm).__name__))
        received = next(iter(run.broadcast.payloads.values()))
        if not is_new:
            received = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in received.items()}
        client_id = next(iter(run.data.census.clients), 0)
        return Client(
            client_id, 0, "train", run.seed, loop.model, data, run.work, is_new=is_new, received=received,
            task_run=loop.state.task_run,
        )  # fmt: skip

    def _try(self, client: Client, phases: list[Phase]) -> None:
        """Compare samples of the first client that has two, alone and in a batch."""
        (loop,), data = self.run.loops.values(), self.run.data
        for client_id in data.census.clients:
            if data.census.num_samples(client_id) > 1:
                loader = _drawing(data.train_loader(client_id, torch.Generator().manual_seed(0)))
                batch = first_samples(next(iter(loop.batches(loader))), _COMPARED)
                if batch_size_of(batch) > 1:
                    client.id = client_id
                    loop.objective.train()
                    for phase in phases:
                        client.phase = phase.name
                        loop.model.set_trainable(phase.trains)
                        made, schedules = loop.optimizers.build(phase.name, 0, client.rate_of(phase))
                        loop.trainer.optimizers, loop.trainer.schedulers = made, [one.scheduler for one in schedules]
                        self._gradients.settle(client, batch)
                    if self._gradients.one_by_one is not None:
                        self.run.fabric.print(
                            "trainer.privacy takes the samples of a batch in turn, which is slow: "
                            + self._gradients.one_by_one
                        )
                return

    @override
    def visible_data(self, data: Any) -> Any:
        def refusal(name: str) -> ConfigError:
            return ConfigError(
                f"trainer.privacy: the model or a callback reads {name} of self.trainer.datamodule, by which a sample "
                "could reach others; set what it needs from public data"
            )

        return _Guarded(data, refusal)

    def begin(self) -> None:
        """Find the noise, and go on with what is left of each client's budget."""
        super().begin()
        state, run = self.state, self.run
        if state.elsewhere != self._on_nodes:
            raise ConfigError(
                "trainer.privacy is SampleLevel, and the run began "
                f"{'in a simulation' if self._on_nodes else 'with clients on nodes'}; go on there"
            )
        self._rounds, sizes, steps = reveal(self._opened, state.account.numpy()).reshape(3, -1).copy()
        if not np.array_equal(sizes, self._sizes) or not np.array_equal(steps, self._steps):
            raise ConfigError(
                "trainer.privacy: clients have other samples, batches or steps a round than the run began with; keep "
                "data.batch_size and trainer.local_epochs, local_steps and limit_train_batches"
            )
        self._participation = run.participation
        self._participation.leave_out((), 0)
        self._note()
        if self._on_nodes:  # each node has its own account
            return
        if self.epsilon is not None and not state.allowed:
            state.allowed = run.max_rounds
            planned = self._worked(range(run.max_rounds))
            state.noise_multiplier = self._account_of(1.0).calibrated(planned, self.epsilon)
        self._account, self._noise = self._account_of(state.noise_multiplier), state.noise_multiplier
        self._rest()
        for round_idx in sorted(set(self._opened.releases.values())):  # a checkpoint may be older than the last one
            self._count(round_idx)
        self._warn_of_delta(self._sizes.max(), _BREACH)

    def settle(self) -> None:
        """Open a key for each client of this node, whose file also holds the client's account.

        Raises:
            ConfigError: Without a key file, as the server knows the seed; for a file of other settings; for protocols
                that tell of clients' data.
        """
        self._check_node()
        files = {one: Path(f"{self.key_file}.{one}") for one in self.run.data.census.clients}
        planned, budget = np.where(self._sizes > 0, self.run.max_rounds, 0), float(self.epsilon or 0.0)
        noise = self._node_noise(files.values(), lambda: self._account_of(1.0).calibrated(planned, budget))
        for one, file in files.items():
            self._node_keys[one] = self._node_key(
                file, noise, batch_size=self.run.data.batch_size, samples=int(self._sizes[one]),
                steps=int(self._steps[one]),
            )  # fmt: skip
        self._account, self._noise = self._account_of(noise), noise
        self._warn_of_delta(self._sizes.max(), _BREACH)

    def _account_of(self, noise_multiplier: float) -> SampleAccount:
        batch_size = self.run.data.batch_size
        return SampleAccount(self._sizes, self._steps, batch_size, noise_multiplier, self.delta)

    # ------------------------------------------------------------------ a client's work

    def loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        """Batches into which every sample is drawn by itself."""
        self._meet(client)
        key = self._key_of(client)
        if client.id in self._node_keys and client.round_idx not in key.releases.values():
            self._claim(client, Counter(key.releases.values()) + Counter([client.round_idx]))
        count = client.num_samples
        rate = min(1.0, client.population.batch_size / max(count, 1))

        def draw() -> NDArray[np.bool_]:
            self._drawn += 1  # by number in the round: no two batches of a client are the same draw
            return key.uniform(count, "batch", client.round_idx, client.id, self._drawn) < rate

        return PoissonLoader(_drawing(loader), draw)

    def _meet(self, client: Client) -> None:
        if self._client is not client:
            self._client, self._drawn, self._stepped = client, 0, 0
            self._request = self._request_of(client) if self._key_of(client).path is not None else ""

    def _request_of(self, client: Client) -> str:
        """Hash of what the server said to a client, and of what the client began with: of nothing that is private."""
        model = client.model
        frozen, known = model.tensors(model.split.frozen), torch.tensor(client.is_new)
        groups = {"received": client.received, "frozen": frozen, "own": client.own, "state": client.state}
        return hash_of_groups({**groups, "optimizers": client.optimizers, "is_new": {"": known}})

    def _enter(self, client: Client) -> tuple[float, float, int | None]:
        """The noise's standard deviation, the expected batch, and a seed from the key."""
        self._meet(client)
        if not self._noise >= 0:
            raise ConfigError("trainer.privacy: no noise is known before the run begins")
        key, seed = self._key_of(client), None
        if key.path is not None:
            self._gradients.say = self.run.fabric.print
            seed = key.seed("training", client.round_idx, client.id, self._stepped) % SECRET
        expected = float(min(client.population.batch_size, client.num_samples))
        return self._noise * self.clip_norm * ROUNDED, expected, seed

    def _noise_of(self, client: Client, total: Tensor) -> Tensor | None:
        """Noise of a client's next step; under a key, no two sums, and no two requests, have the same."""
        key = self._key_of(client)
        if self._stepped >= self._steps[client.id]:
            raise ConfigError(
                f"trainer.privacy: client {client.id} makes more steps than the {self._steps[client.id]} that are "
                "accounted for; give every client of a round the same phases"
            )
        self._stepped += 1
        if not self._noise:
            return None
        name = key.release(client.round_idx, (client.id, self._stepped), total.cpu().numpy(), self._request)
        return torch.from_numpy(key.noise(name, len(total)) * (self._noise * self.clip_norm * ROUNDED))

    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        """Let go of the client, which sends what follows from noisy gradients; a node records that, and claims.

        Beside the claim a node tells the learning rate, and nothing that was logged or measured in training.
        """
        self._client = None
        if (key := self._node_keys.get(client.id)) is not None:
            name = key.release(client.round_idx, (client.id,), _numbers(update.payload), self._request)
            again = key.releases | {name: client.round_idx}
            claim = self._claim(client, Counter(again.values()))
            if name not in key.releases:
                key.record(name, client.round_idx)
            update.metrics = {name: value for name, value in update.metrics.items() if name == "lr"} | claim
        return update

    def _key_of(self, client: Client) -> RunKey:
        return self._node_keys.get(client.id) or self._opened

    def _claim(self, client: Client, rounds: Counter[int]) -> dict[str, float]:
        """A node's promise to its client's samples after some releases, by round; refuse to exceed the budget."""
        taken = np.zeros_like(self._sizes)
        taken[client.id] = len(rounds)
        repeated = Counter(rounds.values())
        if self.epsilon is not None and self._account.exceeds(taken, repeated, self.epsilon).any():
            raise BudgetSpent(f"its samples have spent epsilon {self.epsilon}, by which its node leaves it out")
        spent, _ = self._account.epsilon(taken, repeated)
        if not math.isfinite(spent):
            return {}
        return {"epsilon": spent, "delta": self.delta, "noise_multiplier": self._noise}

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        """The method's; at a server, what nodes claim is noted as their updates arrive."""
        return _Listening(below, self.state.claims) if self._on_nodes else below

    # ------------------------------------------------------------------ a round

    def release(self, aggregate: Any, cohort: Cohort) -> tuple[Any, Cohort, dict[str, float]]:
        """Count a round for the clients that worked in it, before anybody sees its result."""
        if self._on_nodes:
            return aggregate, cohort, {"privacy/epsilon": max(0.0, float(self.state.claims[:, 0].max()))}
        key, round_idx = self._opened, cohort.round_idx
        name = key.release(round_idx, cohort.delivered, _numbers(aggregate) if key.path is not None else np.empty(0))
        self._count(round_idx)
        if self._record(name, round_idx):
            self._rest()
        spent, self.state.accountant = self._account.epsilon(self._rounds, self._repeats())
        self.state.epsilon = f"{spent:.6g}"
        return aggregate, cohort, {"privacy/epsilon": spent, "privacy/clip_norm": self.clip_norm}

    def _count(self, round_idx: int) -> None:
        """Count a round, unless it is counted, for the clients that work in it."""
        if round_idx >= self.state.counted:
            self._rounds = self._rounds + self._worked([round_idx])
            self._note()
            self.state.counted = round_idx + 1
            self._rest()

    def _note(self) -> None:
        """Note rounds, samples and steps of clients for checkpoints: who took part, which the key alone reads."""
        made = np.stack([self._rounds, self._sizes, self._steps])
        self.state.account = torch.from_numpy(conceal(self._opened, made))

    def _worked(self, rounds: Iterable[int]) -> IntArray:
        """In how many of some rounds each client works, (N,)."""
        found = np.zeros_like(self._sizes)
        for round_idx in rounds:
            plan = self._participation.plan(round_idx)
            found[[one.client_id for one in plan if one.fate is not Fate.LOST_BEFORE]] += 1
        return found

    @override
    def _exceeds(self, round_idx: int) -> bool:
        if self.epsilon is None or round_idx not in self._opened.releases.values():
            return False
        return bool(self._account.exceeds(self._rounds, self._repeats(round_idx), self.epsilon).any())

    def _rest(self) -> None:
        """Leave out the clients that another round would take beyond the budget."""
        state, rounds, repeated = self.state, self._rounds, self._repeats()
        over = np.zeros(len(rounds), bool)
        is_planned = state.counted < state.allowed and not repeated.keys() - {1}
        if self.epsilon is not None and not is_planned:
            over = self._account.exceeds(rounds + 1, repeated, self.epsilon)
        before, state.left_out = state.left_out, int(over.sum())
        self._participation.leave_out(np.flatnonzero(over).tolist(), state.counted)
        if (more := state.left_out - before) > 0:
            self.run.fabric.print(
                f"trainer.privacy: {more} clients have spent epsilon {self.epsilon}, and are left out from now on"
            )

    def exhausted(self, round_idx: int) -> str | None:
        """The budget, where it leaves out every client."""
        if self._on_nodes:
            return None
        if not set(self._participation.seen_clients.tolist()) <= self._participation.left_out(round_idx):
            return None
        return (
            f"trainer.privacy: every client has spent epsilon {self.epsilon} at delta {self.delta}; the run ends here"
        )

    def card(self) -> str:
        """The privacy card; a server's lists what each node claims."""
        state = self.state
        return claims_card(state, state.claims, self.withhold) if self._on_nodes else card(state, self.withhold)

    def closing_line(self) -> str:
        """The budget spent, and whom it protects."""
        if not self._on_nodes:
            return super().closing_line()
        claims = self.state.claims[:, 0]
        return (
            f"privacy     nodes claim epsilon up to {float(claims.max()):.6g} for {int((claims >= 0).sum())} of "
            f"{len(claims)} clients, each for one sample; the server cannot check it"
        )


class _Listening(Reducer[Any]):
    """A method's reducer, and what nodes claim with their updates: ε, δ and z by client, (N, 3)."""

    def __init__(self, below: Reducer[Any], claims: Tensor) -> None:
        self._below, self._claims = below, claims

    @override
    def add(self, update: ClientUpdate) -> None:
        if update.metrics.keys() >= set(CLAIMS):
            self._claims[update.client_id] = self._claims.new_tensor([update.metrics[name] for name in CLAIMS])
        self._below.add(update)

    @override
    def result(self, workers: Workers) -> Any:
        return self._below.result(workers)

    @override
    def parts(self) -> list[WeightedMean] | None:
        return self._below.parts()


class _Own(list[Any]):
    """Stands for the batches of a client's own data, where a method is asked for its start and its phases.

    Args:
        refusal: The error for whoever reads the batches.
    """

    num_samples = 0
    batch_size = 1

    def __init__(self, refusal: Callable[[str], ConfigError]) -> None:
        super().__init__()
        self._refusal = refusal

    def __iter__(self) -> NoReturn:
        """Refuse a method that reads the batches itself."""
        raise self._refusal("train_loader")


class _Guarded:
    """Data of which only what is public may be read: everything else is beside the gradient."""

    def __init__(self, data: Any, refusal: Callable[[str], ConfigError]) -> None:
        self._data, self._refusal = data, refusal

        self.public: list[Any] = []
        """The loaders of the public set that were asked for."""

    def train_loader(self, *_args: Any, **_kwargs: Any) -> _Own:
        return _Own(self._refusal)

    def public_loader(self, *args: Any, **kwargs: Any) -> Any:
        self.public.append(self._data.public_loader(*args, **kwargs))
        return self.public[-1]

    def __getattr__(self, name: str) -> Any:
        if name not in _PUBLIC:
            raise self._refusal(name)
        value = getattr(self._data, name)
        return _Guarded(value, self._refusal) if name == "census" else value


def _beside(method: str, name: str) -> ConfigError:
    return ConfigError(
        f"trainer.privacy cannot go around {method}: it reads {name} of a client's data beside the gradient of its "
        "samples"
    )


def _drawing(loader: Any) -> Any:
    """A loader, if it can load any samples."""
    if not hasattr(loader, "batches_of"):
        raise ConfigError(
            f"trainer.privacy: the data come from a {type(loader).__name__}, which cannot draw every sample by itself; "
            "take data without views"
        )
    return loader


def _phases(run: WrappedRun, client: Client) -> list[Phase]:
    """The phases of a client's work on its own data, of a method that reads them nowhere else."""
    method, data = type(run.algorithm).__name__, cast("_Guarded", client.data)
    untrained_answer(client, run.algorithm)
    found: list[Phase] = []
    for one in run.algorithm.phases(client):
        if any(one.loader is loader for loader in data.public):
            continue
        if isinstance(one, Pass) or not one.moves or not isinstance(one.loader, _Own):
            raise ConfigError(
                f"trainer.privacy cannot go around {method}: its {one.name!r} reads a client's data beside the steps "
                "of its training"
            )
        found.append(one)
    return found


def _steps(phase: Phase, sizes: IntArray, run: WrappedRun) -> IntArray:
    """Steps of a phase for clients of some sizes; a client without samples makes none."""
    made = dict.fromkeys(set(sizes.tolist()), 0)
    for size in made.keys() - {0}:
        batches = run.work.batches_of(-(-size // run.data.batch_size))
        steps = num_batches(Phase(phase.name, range(batches), phase.epochs, phase.steps))
        made[size] = int(phase.epochs or 0) * batches if steps is None else steps
    return np.array([made[size] for size in sizes.tolist()], np.int64)


def _numbers(aggregate: Any) -> NDArray[np.float64]:
    """All tensors of a reducer's result, one after the other."""
    tensors = [leaf for leaf in tree_flatten(aggregate)[0] if isinstance(leaf, Tensor)]
    parts = [tensor.detach().double().reshape(-1).cpu().numpy() for tensor in tensors]
    return np.concatenate([np.empty(0), *parts])
