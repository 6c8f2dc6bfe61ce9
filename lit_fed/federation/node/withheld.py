"""Metrics that leave a node only as sums over its clients, no two of which tell of a single client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from lit_fed.engine.storage.files import write_atomically
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.engine.wire.request import Request
from lit_fed.engine.wire.totals import Totals, totals_of
from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.messages.schema import Ask, ClientWork
from lit_fed.federation.messages.wire import TOLD
from lit_fed.tensors import check_bytes, hash_of_groups

Report = Literal["clients", "aggregate"]
"""Forms in which a node reports its clients' metrics: per client, or as sums."""

NAME = "sums.pt"
"""The file of a node's folder that lists reported sums: groups of clients, by what is summed."""


def check_least(least: int, clients: int, what: str) -> None:
    """Refuse sums over more clients than a node has."""
    if least > clients:
        raise ConfigError(
            f"--report aggregate sends sums of at least {least} clients, and this node has {clients}; lower "
            f"--report_least, with 1 a sum may be a single client's {what}"
        )


class Withheld:
    """Collects the metrics of all clients of one request, until all of them are done.

    A sum of fewer than ``least`` clients' values stays here, and so does a sum that overlaps an earlier one over other
    clients, because their difference is a sum of fewer clients: in training one after the same broadcast, in an
    evaluation one of the same metric, whatever the model, because a server can send almost equal models.

    Args:
        samples: Training samples by client.
        least: Minimum number of clients of a sum.
        folder: Holds the record of sums, so that a restart forgets none.
        say: Prints a line.

    Raises:
        ConfigError: If the record cannot be read.
    """

    def __init__(self, samples: Mapping[int, int], least: int, folder: Path, say: Callable[[str], object]) -> None:
        self.samples, self.least, self._path, self._say = samples, least, folder / NAME, say
        self._asked: Request | None = None
        self._models: dict[str, str] = {}
        self._done: dict[int, dict[str, float]] = {}
        self._failed: set[int] = set()
        self._reported: dict[tuple[str, ...], list[list[int]]] = {}
        self._is_said = False
        try:
            if self._path.exists():
                self._reported = torch.load(self._path, weights_only=True)
                check_bytes(self._path)
            self._saved = sum(map(len, self._reported.values()))
        except Exception as error:  # damaged bytes raise many exceptions
            why = " ".join(str(error).split())[:120]
            raise ConfigError(f"{self._path} cannot be read ({why}); restore it, or name a new --state_dir") from error

    def take(
        self, message: ClientWork, outcome: ClientUpdate | Exception | None, broadcast: Broadcast | None
    ) -> Totals:
        """Withhold a client's metrics.

        Args:
            message: The request, with all clients of this node that get the same.
            outcome: The client's outcome; the metrics of an update are removed.
            broadcast: The tensors of the request; None if they are malformed.

        Returns:
            With the last client, the sums over all by name: the parts of an exact sum, and its weight. Else empty, and
            without sums that stay here.

        Raises:
            WireError: If the clients are not this node's.
        """
        client_id, asked = message.client, message.request(message.together)
        is_trained = not isinstance(message, Ask)
        if client_id not in asked.clients or set(asked.clients) - self.samples.keys():
            raise WireError(f"client {client_id} is not among the clients whose sums are requested")
        sent = broadcast or Broadcast(0, {})
        models = {
            kind: hash_of_groups({"payload": payload, "frozen": sent.frozen.get(kind, {})})
            for kind, payload in sent.payloads.items()
        }
        if asked != self._asked or any(self._models.get(kind, model) != model for kind, model in models.items()):
            self._asked, self._models, self._done, self._failed = asked, {}, {}, set()
        self._models |= models
        self._done[client_id] = {}
        self._failed.discard(client_id)
        if isinstance(outcome, Exception):
            self._failed.add(client_id)
        elif outcome is not None:
            self._done[client_id] = {name: value for name, value in outcome.metrics.items() if name not in TOLD}
            outcome.metrics = {name: value for name, value in outcome.metrics.items() if name in TOLD}
        if self._done.keys() < set(asked.clients) or (self._failed and not is_trained):
            return {}
        counted = {  # as in `lit_fed.engine.loop.ledger`, and what could be measured
            one: {n: value for n, value in metrics.items() if ("/" in n or not is_trained) and math.isfinite(value)}
            for one, metrics in self._done.items()
        }
        totals = totals_of((metrics, self.samples[one] if is_trained else 1) for one, metrics in counted.items())
        models_of = sorted(self._models.values()) if is_trained else ()
        key = (asked.work, asked.protocol, asked.subset, *models_of)
        of = {name: sorted(one for one, metrics in counted.items() if name in metrics) for name in totals}
        sums = {
            name: total
            for name, total in totals.items()
            if len(of[name]) >= self.least and self._may_report((*key, name), of[name])
        }
        if (noted := sum(map(len, self._reported.values()))) != self._saved:
            write_atomically(self._reported, self._path)
            self._saved = noted
        return sums

    def _may_report(self, key: tuple[str, ...], clients: list[int]) -> bool:
        """Note whose sum it is; refuse one that overlaps an earlier one over other clients."""
        known = self._reported.setdefault(key, [])
        if clients in known:
            return True
        if is_new := all(set(clients).isdisjoint(other) for other in known):
            known.append(clients)
        elif not self._is_said:
            self._is_said = True
            odd = f"the sum of {key[-1]} over other clients than before stays here"
            self._say(Alert(f"{odd}: the difference would be of fewer clients; {self._path} lists the reported sums"))
        return is_new
