"""Evaluation protocols by name, so that nobody needs to ask "which accuracy?".

Every protocol says whose model is tested on whose data, and names its metrics after itself. Yours derives from
`Protocol`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lit_fed.engine.clients.executor import Question
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import EvalSubset, Evaluation, Protocol
from lit_fed.engine.evaluation.rows import ClientRow, spread
from lit_fed.engine.method.client import Client, FineTuning, Stage
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.errors import ConfigError
from lit_fed.face import live_here
from lit_fed.seeding import numpy_generator

__all__ = [
    "ClientGlobalTest",
    "ClientRow",
    "ClientTest",
    "EvalSubset",
    "Evaluation",
    "Federation",
    "GlobalTest",
    "LocalTest",
    "PersonalTest",
    "Protocol",
    "Question",
    "UnseenTest",
    "global_loops",
    "spread",
]

if TYPE_CHECKING:
    from lit_fed.engine.clients.local import LocalLoop


class GlobalTest(Protocol):
    """The global model on the shared test set: ``global/loss``, ``global/acc``.

    Where the data have views (`lit_fed.data.FederatedDataModule.views`), such as resolutions, also through each of
    them: ``global/acc_<view>``.

    Nothing for methods without one, nor where a part of every model is personal: what the server holds of that part
    was never trained.
    """

    name = "global"

    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Test the global model of every kind once; processes share the batches."""
        data, found = federation.data, Evaluation()
        for name, loop in global_loops(self.name, federation, round_idx, found):
            for view in (None, *data.views()):
                loader = data.test_loader(view=view) if subset == "test" else data.val_loader(view=view)
                values = loop.evaluate(loader, subset, spread=True)
                end = "" if view is None else f"_{view}"
                found.metrics |= {f"{name}/{metric}{end}": value for metric, value in values.items()}
        return found


def global_loops(
    protocol: str, federation: Federation, round_idx: int, found: Evaluation
) -> Iterator[tuple[str, LocalLoop]]:
    """What tests the global model of every kind, which is loaded, and the name that its metrics carry.

    Args:
        protocol: Its name; metrics carry it alone where there is one kind of network.
        federation: Whose models.
        round_idx: After which round.
        found: Is told where there is no global model, or a part of every model is personal.
    """
    models, method = federation.global_models(round_idx), type(federation.algorithm).__name__
    if not models:
        found.absent[protocol] = f"{method} has no global model"
    for kind, state in models.items():
        loop = federation.loops[kind]
        if loop.model.split.personal:
            found.absent[protocol] = f"under {method} a part of every model is its client's own"
            continue
        loop.model.load(state)
        yield protocol if len(federation.kinds.names) == 1 else f"{protocol}_{kind}", loop


class ClientTest(Protocol):
    """What each client would use, on that client's own test data, before any fine-tuning.

    Gives ``clients/<metric>_mean``, ``_std``, ``_p10`` and ``_min`` over clients. That is the global model for methods
    that have nothing else; a personal part, where a method has one, is the client's own.

    Args:
        max_clients: Test a fixed random choice of this many clients; None for all of them.
    """

    name = "clients"
    stage = "test"
    entered: Stage = "test"  # as what a client is entered
    fine_tuning: FineTuning | None = None

    def __init__(self, max_clients: int | None = None) -> None:
        if max_clients is not None and max_clients < 1:
            raise ConfigError(f"{type(self).__name__}.max_clients is {max_clients}; it must be at least 1")
        self.max_clients = max_clients

    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Test every client."""
        clients = _choose(self.clients(federation), self.max_clients, federation.seed)
        broadcast, workers = federation.broadcast(round_idx, "test"), federation.workers
        rows = []
        mine = workers.share(clients, federation.data.num_samples)
        for answer in federation.executor.ask(self.question(federation, subset), mine, broadcast):
            rows += [ClientRow(answer.client_id, self.stage, *metric) for metric in answer.metrics.items()]
        totals = [one for part in workers.gather(federation.executor.told_together()) for one in part]
        rows = sorted((row for part in workers.gather(rows) for row in part), key=lambda row: row.client_id)
        return Evaluation(spread(self.name, rows, totals), rows)

    def clients(self, federation: Federation) -> NDArray[np.int64]:
        """Whom to test: all that may be sampled."""
        return federation.participation.seen_clients

    def question(self, federation: Federation, subset: EvalSubset) -> Question:
        """See `Protocol.question`; with the data, and with what a client does before they are looked at."""
        question = super().question(federation, subset)
        own = (type(self).answer, type(self).test_client, type(self).enter)
        if own != (ClientTest.answer, ClientTest.test_client, ClientTest.enter):
            return question

        def loader(client_id: int | None) -> Iterable[object]:
            if client_id is not None:
                return self.loader(federation, client_id, subset)
            return federation.data.test_loader() if subset == "test" else federation.data.val_loader()

        of_all = self.max_clients is None
        return replace(question, loader=loader, stage=self.entered, fine_tuning=self.fine_tuning, of_all=of_all)

    def answer(self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset) -> ClientUpdate:
        """One client's metrics."""
        metrics = self.test_client(federation, client_id, broadcast, subset)
        return ClientUpdate(client_id, {}, metrics=metrics, kind=federation.kinds[client_id])

    def test_client(
        self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset
    ) -> dict[str, float]:
        """Metrics of one client."""
        client = self.enter(federation, client_id, broadcast)
        with federation.session.prepared(client):
            return federation.session.evaluate(client, self.loader(federation, client_id, subset), subset)

    def enter(self, federation: Federation, client_id: int, broadcast: Broadcast) -> Client:
        """Become the client, as it is to be tested."""
        return federation.session.enter(client_id, broadcast, self.entered, self.fine_tuning)

    def loader(self, federation: Federation, client_id: int, subset: EvalSubset) -> Iterable[object]:
        """What to test on: the client's own data."""
        return _client_loader(federation, client_id, subset)


class UnseenTest(ClientTest):
    """As `ClientTest`, on the clients that are never sampled (``participation.unseen_fraction``): ``unseen/…``."""

    name = "unseen"
    stage = "unseen"

    def check(self, federation: Federation) -> None:
        """Refuse a federation without unseen clients."""
        if not len(federation.participation.unseen_clients):
            raise ConfigError("protocol UnseenTest needs unseen clients; set participation.unseen_fraction above 0")

    def clients(self, federation: Federation) -> NDArray[np.int64]:
        """Whom to test: those that are never sampled."""
        return federation.participation.unseen_clients


class PersonalTest(ClientTest):
    """As `ClientTest`, after fine-tuning on the client's own training data: ``personal/…``, the "-FT" of tables.

    Args:
        epochs: Passes over the client's training data.
        lr: Learning rate of the fine-tuning; None keeps the round's own.
        max_clients: Test a fixed random choice of this many clients; None for all of them.
    """

    name = "personal"
    stage = entered = "personal"

    def __init__(self, epochs: int = 1, lr: float | None = None, max_clients: int | None = None) -> None:
        super().__init__(max_clients)
        if epochs < 1:
            raise ConfigError(f"PersonalTest.epochs is {epochs}; it must be at least 1")
        if lr is not None and lr <= 0:
            raise ConfigError(f"PersonalTest.lr is {lr}; it must be positive")
        self.fine_tuning = FineTuning(epochs, lr)


class ClientGlobalTest(ClientTest):
    """As `ClientTest`, on the shared test set, which has all classes: ``clients_global/…``.

    The accuracy that tables of federated distillation show. It costs the clients' number times the shared test set.
    """

    name = "clients_global"
    stage = "global"

    def loader(self, federation: Federation, client_id: int, subset: EvalSubset) -> Iterable[object]:
        """What to test on: the shared data."""
        return federation.data.test_loader() if subset == "test" else federation.data.val_loader()


class LocalTest(ClientTest):
    """As `ClientTest`, with each client's model as its own work left it, before the newest broadcast: ``local/…``.

    Says something of its own for methods that refine what a client keeps by what the server sends
    (`lit_fed.engine.method.algorithm.Algorithm.phases` of the stage ``test``); elsewhere it equals `ClientTest`.
    """

    name = "local"
    stage = "local"

    def test_client(
        self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset
    ) -> dict[str, float]:
        """Metrics of one client, without the work that a test otherwise begins with."""
        client = self.enter(federation, client_id, broadcast)
        return federation.session.evaluate(client, self.loader(federation, client_id, subset), subset)


def _client_loader(federation: Federation, client_id: int, subset: EvalSubset) -> Iterable[object]:
    data = federation.data
    return data.test_loader(client_id) if subset == "test" else data.val_loader(client_id)


def _choose(clients: NDArray[np.int64], max_clients: int | None, seed: int) -> list[int]:
    if max_clients is not None and max_clients < len(clients):
        # shuffle=False makes it of the order of the choice, not of the population
        picks = numpy_generator(seed, "evaluation").choice(len(clients), max_clients, replace=False, shuffle=False)
        clients = clients[np.sort(picks)]
    chosen: list[int] = clients.tolist()
    return chosen


live_here(globals())
