"""The round loop, in the form of a paper's pseudo-code, for any method.

Methods act by the hooks of `lit_fed.engine.method.algorithm.Algorithm`; a
`lit_fed.engine.clients.executor.Executor` trains the cohort.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fed.engine.evaluation.protocols import ClientRow, Evaluation, run_protocols
from lit_fed.engine.loop.choice import choose
from lit_fed.engine.loop.ledger import DriftMeter, RoundLedger
from lit_fed.engine.loop.run import RoundRecord, Run
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.wire.channel import NOT_FINITE
from lit_fed.engine.wire.payload import Broadcast, Payload, are_finite, num_bytes
from lit_fed.engine.wire.updates import Updates
from lit_fed.errors import ClientFailure, NonFiniteServer, NothingToAverage
from lit_fed.machine import settled
from lit_fed.participation import CLOCK, Fate, Participant

_UP, _DOWN = "comm/uplink_uncoded_bytes", "comm/downlink_uncoded_bytes"  # before codecs, where there is one


@dataclass(slots=True)
class Round:
    """A round under way on this process.

    Args:
        round_idx: The round, counted from 0.
        plan: The selected clients, and the fate of their work.
        broadcast: The message to the clients.
        reducer: Aggregates arriving updates.
        ledger: Records results and costs.
        needs: The method's, `lit_fed.engine.method.algorithm.Algorithm.all_needs`.
        started: Start on the process's clock, in seconds.
    """

    round_idx: int
    plan: Sequence[Participant]
    broadcast: Broadcast
    reducer: Reducer[Any]
    ledger: RoundLedger
    needs: frozenset[str]
    started: float


def run_rounds(run: Run) -> None:
    """Run a run's remaining rounds."""
    run.call("on_fit_start")
    try:
        with settled():
            for round_idx in range(run.start_round, run.max_rounds):
                if run.should_stop:
                    break
                if (why := run.federation.wrappers.exhausted(round_idx)) is not None:
                    run.fabric.print(why)
                    break
                run_round(run, round_idx)
    except BaseException as error:
        run.call("on_exception", error)
        raise
    finally:
        if run.failures.count:
            run.alert(run.failures.summary())
    run.call("on_fit_end")


def run_round(run: Run, round_idx: int) -> None:
    """Run a round: broadcast, local work, aggregation, server's step, evaluation."""
    federation = run.federation
    current = _begin(run, round_idx)
    _add_late_updates(run, current)
    _train_cohort(run, current)
    ledger = current.ledger
    ledger.local_s = time.perf_counter() - current.started
    ledger.merge(run.workers)
    if not federation.wrappers.private and (far := ledger.outlier()) is not None:  # a private run bounds every norm
        run.alert(f"round {round_idx}: {far}")
    if ledger.failures and run.settings.on_client_failure == "raise":
        raise ledger.failures[0]
    working = [participant.client_id for participant in current.plan if participant.fate is not Fate.LOST_BEFORE]
    run.failures.take(ledger.failures, working, len(federation.participation.seen_clients), run.alert)

    reduced = time.perf_counter()
    aggregate = _reduced(run, current)
    federation.keep_version(current.broadcast)
    cohort = Cohort(round_idx, tuple(ledger.delivered), federation.data.num_clients)
    aggregate, cohort, metrics = federation.wrappers.release(aggregate, cohort)
    if aggregate is not None:
        metrics = federation.algorithm.step(federation.server, aggregate, cohort) | metrics
        _check_server(run, round_idx)
    federation.store.commit(run.workers, round_idx + 1)
    metrics = ledger.metrics(federation.data.census.samples, run.workers) | metrics
    metrics |= federation.participation.metrics(round_idx, run.metrics.get(CLOCK, 0.0))
    metrics |= {"time/local_s": ledger.local_s, "time/aggregate_s": time.perf_counter() - reduced}
    _end(run, current, metrics)


def _check_server(run: Run, round_idx: int) -> None:
    """Refuse a server that is not finite after its step, before anything of the round is kept."""
    if odd := run.federation.not_finite(round_idx):
        saved = "; the last checkpoint is from the previous round" if run.keeps_checkpoints else ""
        raise NonFiniteServer(
            f"{type(run.federation.algorithm).__name__}'s step in round {round_idx} left NaN or infinity in "
            f"{', '.join(odd[:3])}{', …' if odd[3:] else ''} of the server; try a smaller learning rate, or server_lr "
            f"if the method has it{saved}"
        )


def _reduced(run: Run, current: Round) -> Any:
    """The aggregate; None if no update arrived, or, with tolerated failures, if all have weight 0."""
    try:
        return current.reducer.result(run.workers)
    except NothingToAverage as error:
        if run.settings.on_client_failure == "raise":
            raise
        run.alert(f"round {current.round_idx} leaves the model unchanged: {error}")
        return None


def _begin(run: Run, round_idx: int) -> Round:
    federation = run.federation
    plan = federation.participation.plan(round_idx)
    started = time.perf_counter()
    run.call("on_round_start", round_idx, plan)
    broadcast = federation.broadcast(round_idx)
    run.call("on_broadcast", broadcast)
    measured = len(federation.kinds.names) == 1 and not federation.wrappers.sees_sums_only
    buffers = next(iter(federation.loops.values())).model.buffers
    ways = {_UP: federation.channel.uplink, _DOWN: federation.channel.downlink}
    uncoded = {name: 0 for name, way in ways.items() if way.codec is not None}
    ledger = RoundLedger(DriftMeter(buffers) if measured else None, uncoded=uncoded)
    algorithm = federation.algorithm
    reducer = federation.wrappers.reducer(algorithm.reducer(federation.server), broadcast)
    return Round(round_idx, plan, broadcast, reducer, ledger, algorithm.all_needs, started)


def _train_cohort(run: Run, current: Round) -> None:
    federation, ledger = run.federation, current.ledger
    plan = {participant.client_id: participant for participant in current.plan}
    versions = {client_id: current.round_idx if one.version is None else one.version for client_id, one in plan.items()}
    working = [client_id for client_id, one in plan.items() if one.fate is not Fate.LOST_BEFORE]
    broadcasts = {**federation.versions, current.round_idx: current.broadcast}
    mine = run.workers.share(working, federation.data.census.num_samples)
    # The same versions on every process, because an executor may exchange something with the others.
    for version in sorted({versions[client_id] for client_id in working}) or [current.round_idx]:
        stopped = ledger.failures and run.settings.on_client_failure == "raise"
        own = [client_id for client_id in mine if versions[client_id] == version and not stopped]
        _train_version(run, current, own, broadcasts[version], plan)
    dropouts = [client_id for client_id, one in plan.items() if one.fate is Fate.LOST_BEFORE]  # who downloads, too
    for client_id in [*mine, *dropouts[run.workers.rank :: run.workers.world_size]]:
        broadcast, kind = broadcasts[versions[client_id]], federation.kinds[client_id]
        ledger.sent(client_id, broadcast.bytes_down(client_id, kind))
        if _DOWN in ledger.uncoded:
            ledger.uncoded[_DOWN] += broadcast.bytes_down(client_id, kind, coded=False)
    ledger.totals += federation.executor.summed_metrics(ledger.logged, current.round_idx)


def _train_version(
    run: Run, current: Round, client_ids: Sequence[int], broadcast: Broadcast, plan: Mapping[int, Participant]
) -> None:
    """Train this process's clients that start from one broadcast."""
    federation, ledger = run.federation, current.ledger
    for outcome in federation.executor.run(client_ids, broadcast):
        if isinstance(outcome, ClientFailure):
            ledger.failed(outcome)
            if run.settings.on_client_failure == "raise":
                return  # the other processes learn of it when the ledgers merge
            continue
        for updates, sent in outcome.by_received(broadcast):
            _take_in(run, current, updates, sent, broadcast, plan)
            del updates
        del outcome  # no update stays in memory while the next client works


def _take_in(
    run: Run,
    current: Round,
    updates: Updates,
    sent: Payload,
    broadcast: Broadcast,
    plan: Mapping[int, Participant],
) -> None:
    """Record the work of clients that received the same, and aggregate the updates that arrive in time."""
    federation = run.federation
    updates.staleness = current.round_idx - broadcast.round_idx
    if plan[updates.client_ids[0]].version is not None:
        for metrics in updates.metrics:
            metrics["staleness"] = updates.staleness
    current.ledger.trained(updates, sent)
    run.call_each("on_client_end", updates)
    received = federation.channel.receive(updates, broadcast)
    fates = [plan[client_id].fate for client_id in received.client_ids]
    for fate in dict.fromkeys(fates):
        alike = received.only([idx for idx, one in enumerate(fates) if one is fate])
        arrived = alike.only([]) if fate is Fate.LOST_AFTER else _finite(run, current, alike)
        if federation.channel.uplink.codec is not None:
            _keep_decoders(run, alike, arrived)
        if fate is not Fate.LATE:
            _deliver(run, current, arrived, sent)
            continue
        for update in arrived:
            federation.store.put_update(update)


def _keep_decoders(run: Run, made: Updates, arrived: Updates) -> None:
    """Keep what the server's end of a codec knows of the clients whose updates arrive; undo the states of the others.

    Both ends go on together, or neither does.
    """
    store, there = run.federation.store, set(arrived.client_ids)
    for update in made:
        if update.decoder and update.client_id in there:
            store.put_decoder(update)
        elif update.decoder:
            store.undo([update.client_id])


def _add_late_updates(run: Run, current: Round) -> None:
    federation = run.federation
    late = federation.participation.late(current.round_idx)
    for client_id in run.workers.share(late, federation.data.census.num_samples):
        kind = federation.kinds[client_id]
        sent = current.broadcast.received(client_id, kind)
        update = federation.store.pop_update(client_id, run.fabric.device, kind, sent)
        if update is not None:
            _deliver(run, current, Updates.of([update]), sent)


def _finite(run: Run, current: Round, updates: Updates) -> Updates:
    """The updates that are finite after a codec or a wrapper, which alone can have changed that; note the failures."""
    codec = run.federation.channel.uplink.codec
    if codec is None and run.federation.wrappers.keep_finite:
        return updates
    sent = [update.payload.values() if update.flat is None else [update.flat.values] for update in updates]
    finite = [are_finite(tensors) for tensors in sent]
    cause = "is not finite, which trainer.attack makes of it" if codec is None else NOT_FINITE
    for client_id, is_one in zip(updates.client_ids, finite, strict=True):
        if not is_one:
            current.ledger.failed(ClientFailure(client_id, current.round_idx, f"its update {cause}"))
    return updates.only([idx for idx, is_one in enumerate(finite) if is_one])


def _deliver(run: Run, current: Round, updates: Updates, sent: Payload) -> None:
    """Reduce the updates that arrive from clients which received the same."""
    if not len(updates):
        return
    federation = run.federation
    run.call_each("on_arrival", updates)
    if "probability" in current.needs:  # an estimate takes seconds in a large population
        updates.probabilities = [federation.participation.probability(one) for one in updates.client_ids]
    current.reducer.extend(federation.algorithm.arrived(updates, sent, federation.server))
    current.ledger.arrived(updates)
    if _UP in current.ledger.uncoded:
        current.ledger.uncoded[_UP] += sum(num_bytes(update.payload) for update in updates)


def _end(run: Run, current: Round, metrics: dict[str, float]) -> None:
    federation, settings = run.federation, run.settings
    evaluation, done = Evaluation(), current.round_idx + 1
    if run.is_due(done):
        run.call("on_evaluation_start", current.round_idx)
        begun = time.perf_counter()
        evaluation = run_protocols(settings.protocols, federation, current.round_idx, settings.evaluate_on)
        on_validation = choose(run, current.round_idx, evaluation.metrics)
        run.tell_absent(evaluation)
        evaluation.metrics |= on_validation
        metrics["time/eval_s"] = time.perf_counter() - begun
    if settings.on_client_failure == "skip":
        metrics["participation/failed"] = len(current.ledger.failures)
    metrics["time/round_s"] = time.perf_counter() - current.started
    metrics = evaluation.metrics | run.workers.gather(metrics)[0]  # the first process's clock
    run.next_round = done
    reported = [ClientRow(one, "train", metric, value) for one, metric, value in federation.wrappers.client_rows()]
    rows = [] if federation.wrappers.sees_sums_only else current.ledger.rows + reported + evaluation.rows
    record = RoundRecord(current.round_idx, metrics, rows, current.plan)
    record = record.withheld(settings.evaluate_on) if run.withholds else record
    run.metrics = record.metrics
    run.call("on_round_end", record)
    if not run.keeps_checkpoints:
        federation.store.collect_garbage([], delete=run.fabric.is_global_zero)
