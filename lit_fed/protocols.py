"""Evaluation protocols: each tests a certain model on certain data, and prefixes its metrics with its name.

Subclass `Protocol` for your own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.clients.executor import Question
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import ClientRow, EvalSubset, Evaluation, Protocol, spread
from lit_fed.engine.lightning.metric_names import OVER_CLIENTS
from lit_fed.engine.method.client import Client, FineTuning, Stage
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
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

    Also through each view of the data (`lit_fed.data.FederatedDataModule.views`), such as a resolution:
    ``global/acc_<view>``. Methods without a global model do not have these metrics, and neither do methods with
    personal parts, which the server never trains.
    """

    name = "global"

    @override
    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        data, evaluation = federation.data, Evaluation()
        if subset == "val" and not data.has_shared_val:
            evaluation.absent[self.name] = "the server of a federation has no validation data"
            return evaluation
        for name, loop in global_loops(self.name, federation, round_idx, evaluation):
            for view in (None, *data.views()):  # processes share the batches
                loader = data.test_loader(view=view) if subset == "test" else data.val_loader(view=view)
                values = loop.evaluate(loader, subset, spread=True)
                end = "" if view is None else f"_{view}"
                evaluation.metrics |= {f"{name}/{metric}{end}": value for metric, value in values.items()}
        return evaluation

    @override
    def promises(self, federation: Federation, logged: Sequence[str]) -> list[str]:
        prefixes = [prefix for prefix, _ in global_loops(self.name, federation, 0, Evaluation())]
        ends = ["", *(f"_{view}" for view in federation.data.views())]
        return [f"{prefix}/{metric}{end}" for prefix in prefixes for metric in logged for end in ends]


def global_loops(
    protocol: str, federation: Federation, round_idx: int, evaluation: Evaluation
) -> Iterator[tuple[str, LocalLoop]]:
    """The loop of each kind, with the global model loaded, and the prefix of its metrics.

    Args:
        protocol: Its name, which is the prefix for a single kind.
        federation: Has the models.
        round_idx: The last round.
        evaluation: Receives the reason for a missing global model, or one with personal parts.
    """
    models, method = federation.global_models(round_idx), type(federation.algorithm).__name__
    if not models:
        evaluation.absent[protocol] = f"{method} has no global model"
    for kind, state in models.items():
        loop = federation.loops[kind]
        if federation.is_partly_personal(round_idx, kind):
            evaluation.absent[protocol] = f"under {method} a part of every model is personal"
            continue
        loop.model.load(state)
        yield protocol if len(federation.kinds.names) == 1 else f"{protocol}_{kind}", loop


class ClientTest(Protocol):
    """Each client's model on the client's own test data, before fine-tuning.

    Gives the statistics of `spread` over clients: ``clients/<metric>_mean``, ``_weighted``, ``_std``, ``_p10``,
    ``_min``, ``_worst`` and ``_worst10``. A client's model is the global one with the client's personal parts, if the
    method has any.

    Args:
        max_clients: Test a fixed random choice of this many clients; None for all.
    """

    name = "clients"
    stage = "test"
    entered: Stage = "test"  # stage of the session
    fine_tuning: FineTuning | None = None

    def __init__(self, max_clients: int | None = None) -> None:
        check_range(f"{type(self).__name__}.max_clients", max_clients, least=1, null="for all")
        self.max_clients = max_clients

    @override
    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        clients = _choose(self.clients(federation), self.max_clients, federation.seed)
        broadcast, num_samples = federation.broadcast(round_idx, "test"), federation.data.census.num_samples
        own = list[ClientRow]()
        for answer in federation.ask(self.question(federation, subset), clients, broadcast):
            own += [ClientRow(answer.client_id, self.stage, *metric) for metric in answer.metrics.items()]
        directions = [loop.directions for loop in federation.loops.values()]
        parts = federation.workers.gather((own, federation.executor.summed_metrics(), directions))
        for found in (found for part in parts for found in part[2]):
            federation.names.observe(found)
        rows = sorted((row for part in parts for row in part[0]), key=lambda row: row.client_id)
        totals = [one for part in parts for one in part[1]]
        return Evaluation(spread(self.name, rows, totals, len(clients), num_samples, federation.names.direction), rows)

    @override
    def promises(self, federation: Federation, logged: Sequence[str]) -> list[str]:
        return [f"{self.name}/{metric}{statistic}" for metric in logged for statistic in OVER_CLIENTS]

    def clients(self, federation: Federation) -> NDArray[np.int64]:
        """The clients to test: all that may be sampled."""
        return federation.participation.seen_clients

    @override
    def question(self, federation: Federation, subset: EvalSubset) -> Question:
        """The question with its data and fine-tuning, which groups of clients can answer together."""
        question = super().question(federation, subset)
        methods = (type(self).answer, type(self).test_client, type(self).enter)
        if methods != (ClientTest.answer, ClientTest.test_client, ClientTest.enter):
            return question

        def loader(client_id: int | None) -> Iterable[object]:
            if client_id is not None:
                return self.loader(federation, client_id, subset)
            return federation.data.test_loader() if subset == "test" else federation.data.val_loader()

        of_all = self.max_clients is None
        return replace(question, loader=loader, stage=self.entered, fine_tuning=self.fine_tuning, of_all=of_all)

    @override
    def answer(self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset) -> ClientUpdate:
        metrics = self.test_client(federation, client_id, broadcast, subset)
        return ClientUpdate(client_id, {}, metrics=metrics, kind=federation.kinds[client_id])

    def test_client(
        self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset
    ) -> dict[str, float]:
        """Metrics of a client."""
        client = self.enter(federation, client_id, broadcast)
        with federation.session.prepared(client):
            return federation.session.evaluate(client, self.loader(federation, client_id, subset), subset)

    def enter(self, federation: Federation, client_id: int, broadcast: Broadcast) -> Client:
        """Enter the client for the test."""
        return federation.session.enter(client_id, broadcast, self.entered, self.fine_tuning)

    def loader(self, federation: Federation, client_id: int, subset: EvalSubset) -> Iterable[object]:
        """The data to test on: the client's own."""
        return _client_loader(federation, client_id, subset)


DEFAULT_PROTOCOLS: tuple[type[Protocol], ...] = (GlobalTest, ClientTest)
"""Those of a trainer that is given none."""


class UnseenTest(ClientTest):
    """As `ClientTest`, for clients that are never sampled (``participation.unseen_fraction``): ``unseen/…``."""

    name = "unseen"
    stage = "unseen"

    @override
    def check(self, federation: Federation) -> None:
        if not len(federation.participation.unseen_clients):
            raise ConfigError("protocol UnseenTest needs unseen clients; set participation.unseen_fraction above 0")

    @override
    def clients(self, federation: Federation) -> NDArray[np.int64]:
        return federation.participation.unseen_clients


class PersonalTest(ClientTest):
    """As `ClientTest`, after fine-tuning on the client's own training data: ``personal/…``, the "-FT" of tables.

    Args:
        epochs: Passes over the client's training data.
        lr: Learning rate of the fine-tuning; None keeps the round's.
        max_clients: Test a fixed random choice of this many clients; None for all.
    """

    name = "personal"
    stage = entered = "personal"

    def __init__(self, epochs: int = 1, lr: float | None = None, max_clients: int | None = None) -> None:
        super().__init__(max_clients)
        check_range("PersonalTest.epochs", epochs, least=1)
        check_range("PersonalTest.lr", lr, above=0, null="for the round's")
        self.fine_tuning = FineTuning(epochs, lr)


class ClientGlobalTest(ClientTest):
    """As `ClientTest`, on the shared test set, which has all classes: ``clients_global/…``.

    Tables of federated distillation show this accuracy. It costs a pass over the shared test set per client.
    """

    name = "clients_global"
    stage = "global"

    @override
    def loader(self, federation: Federation, client_id: int, subset: EvalSubset) -> Iterable[object]:
        return federation.data.test_loader() if subset == "test" else federation.data.val_loader()


class LocalTest(ClientTest):
    """As `ClientTest`, with each client's model after its local work, before the newest broadcast: ``local/…``.

    Differs from `ClientTest` for methods that refine a client's model by the broadcast
    (`lit_fed.algorithm.Algorithm.phases` of the stage ``test``).
    """

    name = "local"
    stage = "local"

    @override
    def test_client(
        self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset
    ) -> dict[str, float]:
        """Metrics of a client, without the phases before a test."""
        client = self.enter(federation, client_id, broadcast)
        return federation.session.evaluate(client, self.loader(federation, client_id, subset), subset)


def _client_loader(federation: Federation, client_id: int, subset: EvalSubset) -> Iterable[object]:
    data = federation.data
    return data.test_loader(client_id) if subset == "test" else data.val_loader(client_id)


def _choose(clients: NDArray[np.int64], max_clients: int | None, seed: int) -> list[int]:
    if max_clients is not None and max_clients < len(clients):
        # shuffle=False costs the size of the choice, not of the population
        picks = numpy_generator(seed, "evaluation").choice(len(clients), max_clients, replace=False, shuffle=False)
        clients = clients[np.sort(picks)]
    chosen: list[int] = clients.tolist()
    return chosen


live_here(globals())
