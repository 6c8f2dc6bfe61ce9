"""The callback that says what each client gave: its share in what the server's steps gain on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.callbacks import Callback, Dashboard, Recorder, RoundRecord, Run, in_place_of
from lit_fed.callbacks.boards import show_picture
from lit_fed.checks import check_range
from lit_fed.data.population.pictures import MOST_CLIENTS, label_axis, new_figure, render
from lit_fed.engine.evaluation.protocols import run_protocol
from lit_fed.engine.method.wrapper import Wrapper
from lit_fed.engine.vectorized.alone import aside
from lit_fed.errors import ConfigError, NothingToAverage
from lit_fed.participation import Fate, Participant
from lit_fed.patterns import unknown_name
from lit_fed.protocols import ClientRow, GlobalTest
from lit_fed.record.shares import gtg, leave_one_out, shapley
from lit_fed.seeding import numpy_generator

Rule = Literal["leave_one_out", "shapley", "gtg"]
_KEY = "trainer.callbacks: Contribution"
MOST_EXACT = 10
"""The most clients of a round under the rule ``shapley``, of whom there are 1024 coalitions."""


class Contribution(Callback):
    """Writes each client's share in what a round's step gains to ``clients.csv``, and draws ``contribution.png``.

    The players are the clients whose updates arrived. The value of a coalition is the metric, on the shared validation
    set, of the model that the method's own reducer and step make of its updates alone, on a copy of the server; the
    value of nobody is that of the model before the round. A share above 0 helped: a metric of which less is better
    counts with the opposite sign. A round's shares sum to the round's gain under the rules ``shapley`` and, but for
    what it leaves out, ``gtg``. Where a coalition's metric is NaN, so are shares and sums.

    Adds the rows ``contribution`` and ``contribution_sum``, over the rounds so far, and the metrics
    ``contribution/gain`` and ``contribution/evaluations``, the number of coalitions that were evaluated. The run itself
    stays as it is without the callback. Needs memory for the updates of a round and two copies of the server's state.

    Args:
        rule: ``leave_one_out`` evaluates n + 2 coalitions of n clients, ``shapley`` all 2ⁿ, of up to ten clients;
            ``gtg`` samples. See `lit_fed.record.shares`.
        metric: Name of the metric, such as ``global/acc``; ``auto`` takes the metric that chooses the best round.
        samples: The most permutations of ``gtg`` in a round.
        between: ``gtg`` gives nobody a share of a round that moves the metric by less.
        within: ``gtg`` ends a permutation whose coalition comes closer to the value of all.

    Raises:
        ConfigError: For settings of ``gtg`` under another rule; before training, under privacy, secure sums, robust
            rules and attacks that replace the mean, without a global model or a shared validation set, for an unknown
            metric, and for more than ten clients a round under ``shapley``; after a round, for a method whose step is
            not a function of the server's state, the aggregate and the cohort.
    """

    def __init__(
        self, rule: Rule = "gtg", metric: str = "auto", samples: int = 100, between: float = 1e-2, within: float = 1e-3
    ) -> None:
        check_range("Contribution.samples", samples, least=1)
        check_range("Contribution.between", between, least=0)
        check_range("Contribution.within", within, least=0)
        self.rule, self.metric, self.gtg = rule, metric, (samples, between, within)
        if rule != "gtg" and self.gtg != (100, 1e-2, 1e-3):
            raise ConfigError(f"Contribution.samples, between and within are of gtg, not of {rule}; leave them out")
        self.shares: dict[int, list[float]] = {}  # by client, of its rounds

    def on_fit_start(self, run: Run) -> None:
        """Refuse runs without values of coalitions, and find the metric."""
        federation, before = run.federation, run.callbacks[: list(run.callbacks).index(self)]
        federation.wrappers.check_view(_KEY.removeprefix("trainer."), self, "updates")
        for one in federation.wrappers.stack:
            if type(one).reducer is not Wrapper.reducer:
                raise ConfigError(f"{_KEY} sums as the method does, and trainer.{one.name} otherwise; leave one out")
        if any(isinstance(one, Recorder | Dashboard) for one in before):
            raise ConfigError(f"{_KEY} stands after a callback that writes what it adds to a round; put it first")
        if not federation.data.has_val:
            raise ConfigError(f"{_KEY} needs validation data, of which there are none; set data.init_args.val_fraction")
        evaluation = GlobalTest().run(federation, run.start_round, "val")
        if not (found := evaluation.metrics):
            why = next(iter(evaluation.absent.values()), "the model logs nothing on the validation data")
            raise ConfigError(f"{_KEY} has nothing by which to value a coalition: {why}; leave it out")
        run.learn_names({})
        self._name = run.names.best_of(found) or "" if self.metric == "auto" else self.metric.removeprefix("val/")
        if self._name not in found:
            raise unknown_name("Contribution.metric", self.metric, "metric of the global model is called so", found)
        self._sign = 1.0 if run.names.direction(self._name) == "max" else -1.0
        self.shares = self.shares if run.start_round else {}

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Refuse a round of too many clients for ``shapley``."""
        arriving = {one.client_id for one in plan if one.fate is Fate.ON_TIME}
        count = len(arriving.union(run.federation.participation.late(round_idx)))
        if self.rule == "shapley" and count > MOST_EXACT:
            raise ConfigError(f"Contribution.rule shapley takes {MOST_EXACT} clients a round, not {count}; set gtg")

    def on_broadcast(self, run: Run, broadcast: fed.Broadcast) -> None:
        """Copy the server."""
        self._before = fed.map_tensors(run.federation.server, torch.clone)
        self._broadcast, self._arrived = broadcast, fed.Gather()

    def on_arrival(self, run: Run, update: fed.ClientUpdate) -> None:
        """Copy an update, as the method's reducer takes it."""
        federation, round_idx = run.federation, self._broadcast.round_idx
        if "probability" in federation.algorithm.all_needs:
            update = replace(update, probability=federation.participation.probability(update.client_id))
        begun = {**federation.versions, round_idx: self._broadcast}[round_idx - update.staleness]
        self._arrived.add(federation.algorithm.arrive(update, begun.payloads[update.kind], federation.server))

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Value the coalitions, and add the clients' shares to the record."""
        if not (updates := self._arrived.result(run.workers)):
            return
        players = sorted({one.client_id for one in updates})
        value = cache(partial(self._value, run, record.round_idx, updates))
        generator = numpy_generator(run.federation.seed, "contribution", record.round_idx)
        rule = {"leave_one_out": leave_one_out, "shapley": shapley}.get(self.rule)
        with ExitStack() as stack:
            for loop in run.federation.loops.values():
                stack.enter_context(aside(loop))
            shares = gtg(players, value, generator, *self.gtg) if rule is None else rule(players, value)
            gain = value(frozenset(players)) - value(frozenset())
        record.metrics["contribution/gain"] = gain
        record.metrics["contribution/evaluations"] = float(value.cache_info().misses)
        for client_id, share in shares.items():
            self.shares.setdefault(client_id, []).append(share)
            record.rows.append(ClientRow(client_id, "train", "contribution", share))
            record.rows.append(ClientRow(client_id, "train", "contribution_sum", sum(self.shares[client_id])))

    def _value(self, run: Run, round_idx: int, updates: Sequence[fed.ClientUpdate], members: frozenset[int]) -> float:
        """The metric of the model that a coalition's updates make, the larger the better."""
        sent, algorithm = [one for one in updates if one.client_id in members], run.federation.algorithm
        federation = replace(run.federation, server=fed.map_tensors(self._before, torch.clone))
        alone = fed.Workers(run.fabric)
        alone.world_size = 1  # every process holds every update
        reducer = algorithm.reducer(federation.server)
        for update in sent:
            reducer.add(update)
        aggregate = None
        with suppress(NothingToAverage):  # their weights are 0
            aggregate = reducer.result(alone) if sent else None
        if aggregate is not None:
            cohort = fed.Cohort(round_idx, tuple(one.client_id for one in sent), federation.data.num_clients)
            algorithm.step(federation.server, aggregate, cohort)
        made, there = (one.global_models(round_idx) for one in (federation, run.federation))
        pairs = ((one, there[kind][name]) for kind, model in made.items() for name, one in model.items())
        if len(sent) == len(updates) and not all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in pairs):
            what = f"the step of {type(algorithm).__name__} on a copy of the server"
            raise ConfigError(f"{_KEY} repeats {what}, which makes another model in round {round_idx}; leave it out")
        return self._sign * run_protocol(GlobalTest(), federation, round_idx, "val").metrics[self._name]

    def on_fit_end(self, run: Run) -> None:
        r"""Draw each client's sum, with its 95 % interval over the rounds in which its updates arrived.

        The interval of a sum of n shares of standard deviation s is :math:`\pm 1.96 \sqrt{n} s`; one share has none.

        Raises:
            CheckpointError: If the picture cannot be written.
        """
        if not self.shares or not run.settings.enable_pictures or not run.fabric.is_global_zero:
            return
        shown = sorted(self.shares)[:MOST_CLIENTS]
        shares = [self.shares[one] for one in shown]
        errors = [1.96 * float(np.var(own) * len(own) / max(len(own) - 1, 1) * len(own)) ** 0.5 for own in shares]
        figure, axes = new_figure()
        axes.axhline(0, color="#999999", linewidth=0.8)
        axes.errorbar(range(len(shown)), list(map(sum, shares)), errors, fmt="o", color="#2a7fba", capsize=2)
        label_axis(axes.xaxis, np.array(shown), "client", run.federation.data.client_names)
        axes.set_ylabel(f"gain in {self._name}")
        axes.set_title(f"What {len(shown)} of {len(self.shares):,} clients gave, 95 % over rounds")
        with in_place_of(run.log_dir / "contribution.png") as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": None})
        show_picture(run, "pictures/contribution", render(figure), run.next_round - 1)

    def state_dict(self) -> dict[str, Any]:
        """The shares of each client."""
        return {"shares": self.shares}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shares = state["shares"]
