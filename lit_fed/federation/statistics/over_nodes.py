"""Statistics over nodes: a node that answers them and nothing else, and the server's questions.

A node takes the same pass over its clients' samples as a simulation, withholds or adds noise before anything leaves,
and answers one histogram: another question could be subtracted from the first.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fed.checks import check_range
from lit_fed.data import FederatedDataModule
from lit_fed.data.partitions.cut import clients_here
from lit_fed.data.population.naming import called
from lit_fed.engine.wire.totals import exact_parts
from lit_fed.errors import ConfigError, LitFedError, WireError
from lit_fed.federation.ends import Alert, Wait
from lit_fed.federation.keys.node_keys import Grant
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.settings import agreed, mismatch
from lit_fed.federation.messages.wire import MOST_BYTES, Message, decode, encode, shown
from lit_fed.federation.server.answers import answer_of
from lit_fed.federation.server.identity import Identity
from lit_fed.federation.server.roster import Roster
from lit_fed.federation.statistics.federation import MOST_BINS
from lit_fed.federation.statistics.noise import Noise
from lit_fed.federation.statistics.site import Inquiry, SiteStatistics, Variable, columns_of, empty, survey
from lit_fed.federation.statistics.withheld import withheld
from lit_fed.federation.transport.grid import Grid

ONLY = "--statistics"
"""The setting by which nodes for statistics and nodes for training refuse each other's servers."""
_MOST_PARTS = 64  # of an exact sum
_LARGEST_SUM, _LARGEST_UNIT = 1e100, 1e20  # of squares of float32, and their quotients' squares are finite
_MOST_TABLE = 2**18  # numbers of an answer's histograms: 2 MiB


def settings_of(config: str) -> dict[str, str]:
    """The settings that both ends share, and that statistics alone are asked for."""
    alike = {key: value for key, value in agreed(config).items() if key.startswith(("data.", "trainer.privacy"))}
    return alike | {ONLY: '"asked for"'}


class StatisticsNode:
    """The clients of one node, for statistics alone.

    Args:
        data: The population, of which the node sets up its clients.
        clients: Positions of the node's clients.
        config: The resolved configuration.
        least: Smallest number of samples that a count may tell of; a server may ask for more, and not for less.
        noise: The noise of ``trainer.privacy``; None for exact statistics.
        together: Report all clients as one site.
        limit: Maximum size of a message, bytes.
        say: Prints a line.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        clients: Iterable[int],
        config: str,
        least: int,
        noise: Noise | None = None,
        together: bool = False,
        limit: int = MOST_BYTES,
        say: Callable[[str], object] = print,
    ) -> None:
        check_range(ONLY, least, least=1)
        data.keeps_missing = True  # before anything is read
        self.clients = clients_here(clients, data.num_clients)
        self.data, self.least, self.noise, self.together, self.limit = data, least, noise, together, limit
        self.say: Callable[[str], object] = lambda line: say(type(line)(shown(line, 1000)))
        self.boot, self.settings = secrets.token_hex(8), settings_of(config)
        data.prepare_data()
        data.setup("fit", clients=self.clients)
        self._asked: dict[bool, bytes] = {}  # the question with and without ranges
        self._answers: dict[tuple[int, bool], Message] = {}

    @contextmanager
    def at_work(self) -> Iterator[StatisticsNode]:
        """Do nothing: statistics need no device."""
        yield self

    done = False  # a server may ask again

    def idle(self, connected: bool = True) -> None:
        """Do nothing: a server asks within seconds."""

    def handle(self, blob: bytes | bytearray) -> bytearray:
        """Handle a message, and return the answer; every error becomes an answer, too."""
        try:
            message = decode(blob, self.limit)
            if message.word == "hello":
                return encode(self._greet(message))
            if message.word != "statistics":
                raise WireError(
                    f"the node answers {ONLY} alone, not {message.word!r}; start it without {ONLY} to train"
                )
            return encode(self._answer(message))
        except (Exception, SystemExit) as error:
            cause = (error.remote_text() if isinstance(error, LitFedError) else "") or type(error).__name__
            self.say(Alert(f"no statistics: {error}"))
            return encode(Message.pack(schema.Failure(shown(cause))))

    def _greet(self, message: Message) -> Message:
        if (cause := mismatch(self.settings, message.read(schema.Hello), f", and nodes with {ONLY}")) is not None:
            raise WireError(cause)
        nothing = schema.DataReport(0, None, "0" * 64, None)  # counts leave with the statistics only
        clients = dict.fromkeys(map(str, self.clients), nothing)
        return Message.pack(schema.Greeted(self.boot, clients, False, 0, self.limit, {}))

    def _answer(self, message: Message) -> Message:
        question = read_question(message, len(columns_of(self.data)), self.least)
        to = message.read(schema.AskStatistics)
        client = to.client
        if to.boot != self.boot or (client not in self.clients and (client != -1 or not self.together)):
            raise WireError(f"client {client} is not on this node, or the node reports sums only")
        key = question.has_ranges
        if self.noise is not None and not key:
            raise WireError("the ranges of noisy statistics must be given; give --ranges for all columns")
        asked = repr((question.bins, question.least, question.ranges.tolist())).encode()
        if self._asked.setdefault(key, asked) != asked:
            raise WireError("the node has answered another question, from which this could be subtracted; restart it")
        if (client, key) not in self._answers:
            self._answers[client, key] = pack(self._site(client, question))
            who = "all its clients" if client == -1 else f"client {called(self.data, client)}"
            self.say(f"told the server statistics of {who}" + ("" if key else ": sums and extremes"))
        return self._answers[client, key]

    def _site(self, client: int, question: Inquiry) -> SiteStatistics:
        clients = self.clients if client == -1 else [client]
        if self.together and client != -1:
            raise WireError("the node reports sums only")
        if self.noise is not None:
            return self.noise.survey(self.data, clients, question, Noise.of_system())
        return withheld(survey(self.data, clients, question), question.least)


# ---------------------------------------------------------------------- messages


def ask_message(client: int, boot: str, question: Inquiry) -> Message:
    """The question for a client, or for all clients of a node (−1)."""
    asked = schema.AskStatistics(client, boot, question.bins, question.least)
    return Message.pack(asked, {"ranges": {"ranges": torch.from_numpy(question.ranges)}})


def read_question(message: Message, columns: int, least: int) -> Inquiry:
    """Validate a server's question; refuse one with a smaller threshold than the node's own."""
    asked, ranges = (
        message.read(schema.AskStatistics),
        _floats(message.tensors.get("ranges", {}), "ranges", (columns, 2)),
    )
    if asked.bins > MOST_BINS or np.isinf(ranges).any():
        raise WireError("the question for statistics is malformed; run the same lit_fed on both ends")
    if (ranges[:, 0] > ranges[:, 1]).any():
        raise WireError("a range of the question for statistics is empty; run the same lit_fed on both ends")
    if asked.least < least:
        raise WireError(f"the node tells of no count below {least} samples; ask with --least {least}")
    return Inquiry(asked.bins, asked.least, ranges)


_ARRAYS = ("classes", "count", "missing", "low", "high", "cells", "unit", "known")


def pack(site: SiteStatistics) -> Message:
    """A site's statistics as a message."""
    tensors: dict[str, Tensor] = {name: torch.from_numpy(np.array(getattr(site, name))) for name in _ARRAYS}
    units = [Fraction(unit) for unit in site.unit.tolist()]
    tensors["total"] = _padded([exact_parts(total * unit) for total, unit in zip(site.total, units, strict=True)])
    tensors["squares"] = _padded(
        [exact_parts(sum_ * unit * unit) for sum_, unit in zip(site.squares, units, strict=True)]
    )
    tensors["samples"] = torch.tensor([site.samples], dtype=torch.float64)
    return Message.pack(schema.SiteAnswer(site.clients), {"site": tensors})


def unpack(
    message: Message, columns: int, classes: int | None, question: Inquiry, clients: int, exact: bool = True
) -> SiteStatistics:
    """Validate a node's statistics; raise `WireError` if they are malformed, or of another number of clients."""
    if answer_of(message, schema.SiteAnswer).clients != clients:
        raise WireError("the statistics are of other clients; run the same lit_fed on both ends")
    told, site = message.tensors.get("site", {}), empty(columns, classes, question)
    for name in _ARRAYS:
        setattr(site, name, _floats(told, name, getattr(site, name).shape).copy())
    site.samples, site.clients = float(_floats(told, "samples", (1,))[0]), clients
    counts = np.concatenate([[site.samples], site.classes, site.count, site.missing, site.cells.reshape(-1)])
    told_counts = counts[~np.isnan(counts)]
    odd = exact and ((told_counts < 0) | (told_counts != np.floor(told_counts))).any()
    if odd or (np.abs(told_counts) >= 2**53).any():
        raise WireError("a count of the statistics is not a number below 2^53; run the same lit_fed on both ends")
    if not ((site.unit >= 1 / _LARGEST_UNIT) & (site.unit <= _LARGEST_UNIT)).all():
        raise WireError("a unit of the statistics is out of its range; run the same lit_fed on both ends")
    units = [Fraction(unit) for unit in site.unit.tolist()]
    site.total = [total / unit for total, unit in zip(_sums(told, "total", columns), units, strict=True)]
    site.squares = [sum_ / unit / unit for sum_, unit in zip(_sums(told, "squares", columns), units, strict=True)]
    return site


def _floats(told: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Any:
    tensor = told.get(name)
    if tensor is None or tensor.dtype != torch.float64 or tuple(tensor.shape) != shape:
        raise WireError(f"{name!r} of the statistics is malformed; use the same data settings on both ends")
    return tensor.numpy()


def _padded(rows: Collection[tuple[float, ...]]) -> Tensor:
    table = np.zeros((len(rows), max(map(len, rows), default=0)))
    for place, parts in enumerate(rows):
        table[place, : len(parts)] = parts
    return torch.from_numpy(table)


def _sums(told: Mapping[str, Tensor], name: str, columns: int) -> list[Fraction]:
    tensor = told.get(name)
    parts = tensor.shape[1] if tensor is not None and tensor.dim() == 2 else 0
    table = _floats(told, name, (columns, min(parts, _MOST_PARTS)))
    if not (np.abs(table) <= _LARGEST_SUM).all():  # which NaN is not
        raise WireError(f"{name!r} of the statistics is not finite; run the same lit_fed on both ends")
    return [sum(map(Fraction, row), Fraction()) for row in table.tolist()]


# ---------------------------------------------------------------------- the server


def ask_nodes(
    roster: Roster, data: FederatedDataModule, question: Inquiry, seconds: float, together: bool, exact: bool = True
) -> dict[str, SiteStatistics]:
    """Ask every client's node, one client of each node at a time; raise `ConfigError` without an answer."""
    columns: list[Variable] = columns_of(data)
    if question.has_ranges and len(columns) * (question.bins + 2) > _MOST_TABLE:
        raise ConfigError(f"--bins {question.bins} of {len(columns)} columns are too many for a message; give fewer")
    sites = dict[str, SiteStatistics]()
    begun, wait = time.monotonic(), Wait(roster.say, seconds)
    queues = {node: [-1] if together else sorted(home.clients) for node, home in roster.homes.items()}
    while queues:
        now = {node: clients.pop(0) for node, clients in queues.items()}
        messages = {node: ask_message(client, roster.homes[node].boot, question) for node, client in now.items()}

        def read(node: int, message: Message, now: Mapping[int, int] = now) -> SiteStatistics:
            count = len(roster.homes[node].clients) if now[node] == -1 else 1
            return unpack(message, len(columns), data.num_classes, question, count, exact)

        names = {node: f"node {node}" if client == -1 else called(data, client) for node, client in now.items()}

        def idle(nodes: Iterator[int], names: Mapping[int, str] = names) -> None:
            awaited = [names[node] for node in nodes]
            of = "" if together else "client " if len(awaited) == 1 else "clients "
            wait.go_on(f"statistics of {of}{', '.join(awaited[:8])}{', …' if len(awaited) > 8 else ''}")

        answers = roster.ask(messages, max(seconds - (time.monotonic() - begun), 1.0), read, idle=idle)
        for node, who in names.items():
            if node not in answers:
                raise ConfigError(f"no statistics of {who} within {seconds:g} s; see its node's log, and ask again")
            sites[who] = answers[node]
        queues = {node: clients for node, clients in queues.items() if clients}
    order = {called(data, one): one for one in range(data.num_clients)}
    return dict(sorted(sites.items(), key=lambda item: order.get(item[0], -1)))


def new_roster(
    grid: Grid,
    data: FederatedDataModule,
    config: str,
    say: Callable[[str], object] = print,
    limit: int = MOST_BYTES,
    node_clients: Mapping[str, Grant] | None = None,
) -> Roster:
    """The nodes of a federation that is asked for statistics; see `lit_fed.federation.server.federate.federate`."""
    settings = settings_of(config)
    return Roster(grid, Identity(secrets.token_hex(8)), settings, data.num_clients, say, limit, None, node_clients)
