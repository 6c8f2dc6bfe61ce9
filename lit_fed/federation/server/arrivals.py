"""An asynchronous federation on machines: the clock is real, and the order is that of arrival.

A round's plan is the work that arrives in it, as in a simulation; `lit_fed.participation.Asynchronous` with ``replay``
runs the recorded order again.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heapify
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.callbacks.recorder import RoundTable
from lit_fed.engine.clients.executor import layouts_of
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.loop.run import RoundRecord, Run
from lit_fed.engine.storage.files import cannot_write
from lit_fed.engine.wire.channel import Context, Direction
from lit_fed.engine.wire.payload import Arrival, Broadcast, ClientUpdate, Payload
from lit_fed.engine.wire.totals import Totals
from lit_fed.engine.wire.updates import Updates
from lit_fed.errors import CheckpointError, ClientFailure, ConfigError, NobodyLeft
from lit_fed.federation.ends import Alert
from lit_fed.federation.server.executor import Asked, CohortWork, GridExecutor
from lit_fed.participation import Asynchronous, Fate, Participant, Participation
from lit_fed.participation.asynchronous import COLUMNS, Flight, Step, cells_of, read_order
from lit_fed.tensors import map_tensors

ORDER = "order.csv"
"""The file of a run's order, in its folder."""


class FlightExecutor(GridExecutor):
    """Keeps clients at work across rounds: `start` sends their work, `land` waits for an outcome, `run` yields it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flights = self._requests()
        self._landing = self._outcomes(self._flights)
        self._landed: dict[int, ClientUpdate | ClientFailure] = {}

    def start(self, client_id: int, broadcast: Broadcast) -> None:
        """Send a client its work."""
        self.session.store.expect(client_id, broadcast.round_idx)
        self.session.divide(broadcast.round_idx)
        layouts = layouts_of(self.session, [client_id], broadcast)
        self._flights.queue.append(Asked(client_id, CohortWork("train", broadcast, layouts)))

    def land(self) -> tuple[int, bool]:
        """Wait for the next client whose work ends; return it, and whether its update arrived."""
        self.roster.late.clear()  # there are no rounds to sit out
        outcome = next(self._landing)
        if isinstance(outcome, ClientFailure):
            if not self.tolerant:
                raise outcome
            self.roster.say(Alert(f"{outcome}; its place is free"))
        self._landed[outcome.client_id] = outcome
        return outcome.client_id, isinstance(outcome, ClientUpdate)

    @override
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        """Yield the outcomes of a version's clients; with the first version of a step, that step's failures before."""
        failed = [client_id for client_id, one in self._landed.items() if isinstance(one, ClientFailure)]
        for client_id in [*failed, *client_ids]:
            outcome = self._landed.pop(client_id)
            yield outcome if isinstance(outcome, ClientFailure) else Updates.of([outcome])

    @override
    def summed_metrics(self, logged: Mapping[int, dict[str, float]] | None = None, round_idx: int = 0) -> list[Totals]:
        told, self._totals = super().summed_metrics(logged, round_idx), []
        return told

    def leave(self) -> None:
        """Give up all work under way."""
        self._flights.drop()
        self._flights.queue.clear()


class Arrivals(Asynchronous):
    """The arrivals of nodes in place of a simulation's.

    Args:
        simulated: The settings; its speeds are not used.
    """

    def __init__(self, simulated: Asynchronous) -> None:
        super().__init__(
            simulated.concurrency, simulated.buffer, max_staleness=simulated.max_staleness,
            unseen_fraction=simulated.unseen_fraction, every=simulated.every,
        )  # fmt: skip
        self.federation: Federation
        self.flights: FlightExecutor
        self.begun: list[Participant] = []  # at work when a checkpoint was written
        self.ended, self.version, self.offset = 0, 0, 0.0  # works and steps done, and seconds spent, by then
        self.order = Path(ORDER)
        self._past: list[list[Participant]] = []
        self._sent: dict[int, Broadcast] = {}
        self._live: Broadcast | None = None  # the last version's, of the server's own tensors
        self._since = time.monotonic()

    def learn(self, states: Mapping[str, Any], done: int, path: Path) -> None:
        """Take the clients at work from a checkpoint.

        Args:
            states: The states of its callbacks, by name.
            done: Its finished rounds.
            path: Its file.
        """
        saved = states.get(ArrivalOrder.__name__)
        if saved is None and done:
            raise CheckpointError(f"{path} comes from a run in rounds, or simulated; keep trainer.participation")
        try:
            for client_id, version, began in () if saved is None else saved["begun"]:
                self.begun.append(Participant(int(client_id), Fate.ON_TIME, int(version), float(began), math.inf))
            if saved is not None:
                self.ended, self.offset = int(saved["ended"]), float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} has clients at work that cannot be read: {error!r}") from error
        self.version = done

    def board(self, federation: Federation) -> None:
        """Begin, or go on: send the clients that were at work their work again."""
        assert isinstance(federation.executor, FlightExecutor)
        self.federation, self.flights, self._since = federation, federation.executor, time.monotonic()
        channel = federation.channel
        for one in self.begun:
            if (version := one.version or 0) not in self._sent:
                kept = federation.versions[version]
                contexts = {kind: channel.down(version, kind) for kind in kept.payloads}
                wire = {
                    kind: _again(channel.downlink, payload, contexts[kind]).wire
                    for kind, payload in kept.payloads.items()
                }
                self._sent[version] = sent = replace(kept, wire=wire)
                if kept.addressed is not None:
                    sent.addressed = {
                        i: _again(channel.downlink, held.payload, contexts[federation.kinds[i]])
                        for i, held in kept.addressed.items()
                    }
            self.flights.start(one.client_id, self._sent[version])

    @property
    @override
    def label(self) -> str:
        return Asynchronous.__name__

    @override
    def duration(self, client_id: int) -> float:
        return math.inf  # unknown

    @override
    def _rewind(self) -> None:
        self._steps = self._queue(self.begun, self.ended + len(self.begun), self.version)
        self._reached, self._step = self.version - 1, Step([], self.offset)
        self._flying = [(one.ended, number, 0, one) for number, one in enumerate(self.begun)]

    @override
    def _step_at(self, round_idx: int) -> Step:
        if round_idx < self._reached:  # for a picture
            if round_idx >= len(self._past):
                self._past = read_order(str(self.order), range(self.num_clients))
            return Step(plan := self._past[round_idx], max(one.ended for one in plan))
        is_new = round_idx > self._reached
        step = super()._step_at(round_idx)
        arrived = sum(one.fate is not Fate.LOST_BEFORE for one in step.plan)
        if is_new and arrived < (least := min(self.flights.patience.smallest_cohort, self.buffer)):
            raise NobodyLeft(
                f"round {round_idx} has answers from {arrived} of {len(step.plan)} clients, and the smallest cohort is "
                f"{least}; resume with --ckpt_path last when the nodes are connected"
            )
        return step

    @override
    def _begin(self, client_id: int, version: int, now: float) -> Participant:
        if version not in self._sent:
            broadcast = self.federation.broadcast(version)
            wire = {
                kind: {name: tensor.clone() for name, tensor in payload.items()}
                for kind, payload in broadcast.wire.items()
            }
            self._sent = {v: one for v, one in self._sent.items() if v in {f[3].version for f in self._flying}}
            self._sent[version] = replace(broadcast.detached(), wire=wire)
            self._live = broadcast
        if (addressed := self._sent[version].addressed) is not None:  # the version's step is still to come
            if self._live is None or self._live.round_idx != version:  # the first start after a resume
                self._live = self.federation.broadcast(version)
            addressed[client_id] = map_tensors(self._live.own(client_id), torch.clone)
        self.flights.start(client_id, self._sent[version])
        return Participant(client_id, Fate.ON_TIME, version, self._now(), math.inf)

    @override
    def _arrive(self, flying: list[Flight]) -> Iterator[tuple[int, Participant]]:
        client_id, arrived = self.flights.land()
        flight = next(flight for flight in flying if flight[3].client_id == client_id)
        flying.remove(flight)
        heapify(flying)
        yield flight[2], replace(flight[3], fate=Fate.ON_TIME if arrived else Fate.LOST_BEFORE, ended=self._now())

    def _now(self) -> float:
        return self.offset + time.monotonic() - self._since


def _again(downlink: Direction, payload: Payload, context: Context) -> Arrival:
    """A decoded payload, sent once more."""
    crossed = downlink.cross(payload, context)
    if any(not torch.equal(tensor, crossed.payload[name]) for name, tensor in payload.items()):
        raise CheckpointError(
            "trainer.downlink_codec changes what it has once decoded, so that clients at work cannot be sent the same "
            "again; start a new run"
        )
    return crossed


class ArrivalOrder(Callback):
    """Writes ``order.csv``, and keeps the clients at work in the run's checkpoints."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.ended = arrivals.ended

    @override
    def on_fit_start(self, run: Run) -> None:
        before = run.log_dir if run.resumed_from is None else run.resumed_from
        table = RoundTable(before / ORDER)
        there, _ = table.check(run.start_round, COLUMNS)
        if there < run.start_round:
            raise CheckpointError(f"{before / ORDER} lacks steps before round {run.start_round}; restore the file")
        table.cut(run.log_dir / ORDER, COLUMNS, run.start_round)
        self.arrivals.order = run.log_dir / ORDER
        self.arrivals.board(run.federation)

    @override
    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        path = run.log_dir / ORDER
        with cannot_write(path), open(path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(cells_of(record.round_idx, one) for one in record.plan)
        self.ended += len(record.plan)

    @override
    def on_fit_end(self, run: Run) -> None:
        """Give up what is under way."""
        self.arrivals.flights.leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        flying = [one for *_, one in sorted(self.arrivals._flying)]
        return {
            "begun": [[one.client_id, one.version, one.began] for one in flying],
            "ended": self.ended,
            "seconds": self.arrivals._now(),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # `Arrivals.learn` has read it, before the run was assembled


def arrivals_of(simulated: Participation) -> Arrivals | None:
    """The arrivals of nodes with a simulation's settings; None for rounds. Refuse what only a simulation has."""
    if simulated.one_model:
        return None
    if type(simulated) is not Asynchronous:
        raise ConfigError(
            f"trainer.participation is {type(simulated).__name__}, which simulates times of arrival, and nodes have "
            "their own; choose Asynchronous or rounds, or simulate with `lit-fed fit`"
        )
    if simulated.replay is not None:
        raise ConfigError("participation.replay repeats an order in a simulation, with `lit-fed fit`; leave it out")
    for name in ("dropout_before", "dropout_after", "absent", "absent_positions"):
        if getattr(simulated, name):
            raise ConfigError(f"participation.{name} simulates drop-outs, and nodes have their own; leave it out")
    return Arrivals(simulated)
