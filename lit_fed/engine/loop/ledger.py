"""Results and costs of a round: metrics over clients, bytes, drift and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.engine.evaluation.protocols import ClientRow
from lit_fed.engine.method.kinds import ONLY
from lit_fed.engine.wire.payload import MOST_VALUES, Payload
from lit_fed.engine.wire.totals import Totals, exact_sum
from lit_fed.engine.wire.updates import Updates, together
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ClientFailure

_row = partial(tuple.__new__, ClientRow)  # `ClientRow._make` without a call in Python: a round has thousands

_FAR = 100.0  # times the median norm
_BLOCK_VALUES = 2**18  # in movements that are measured at once
_SAMPLED_VALUES = 2**20  # of a large model's movement


class Moves(NamedTuple):
    """A process's part of the drift.

    Args:
        clients: Its clients whose movements were measured.
        norms: Of these movements, float64.
        size: Measured values of a movement; 0 without clients.
        buffers: Norms of the movements of the clients' buffers, float64; empty without any.
    """

    clients: list[int]
    norms: NDArray[np.float64]
    size: int
    buffers: NDArray[np.float64]


class DriftMeter:
    r"""Mean norm and mean pairwise cosine of the clients' movements, in the memory of one model.

    The movement :math:`d_k` is update minus broadcast over their common tensors without buffers, of which the mean norm
    stands beside it; the mean cosine is
    :math:`(\|\sum_k u_k\|^2 - K) / (K(K-1))` with :math:`u_k = d_k / \|d_k\|`. Movements of small models are batched.

    Args:
        buffers: Names of buffers.

    Note:
        A model over 2²² values is sampled, every fifth, sixth, … value of each tensor, about 2²⁰ in all: a full copy
        would cost too much memory.
    """

    def __init__(self, buffers: Collection[str] = ()) -> None:
        self._buffers, self._buffer_norms = buffers, list[Tensor]()
        self._clients: list[int] = []
        self._norms: list[Tensor] = []
        self._units: Tensor | None = None
        self._sent: Payload | None = None
        self._origin: Tensor | None = None
        self._waiting: list[Tensor] = []  # rows of matrices
        self._count, self._most = 0, 0  # rows that wait, and that may
        self._alike: Mapping[str, torch.Size] | None = None
        self._every, self._share = 1, 1.0  # stride of the sampled values, and their share

    def add(self, updates: Updates, broadcast: Payload) -> None:
        """Add clients' movements from their broadcast, without synchronising the device."""
        vectors = updates.vectors
        if broadcast is not self._sent:  # clients of an asynchronous federation start from several
            self._measure()
            self._sent, self._origin, self._alike = broadcast, None, None
        if vectors is not None and vectors.layout is self._alike:
            self._waiting.append(vectors.values)
        elif not self._take_unlike(updates, broadcast):
            return
        self._clients += updates.client_ids
        self._count += len(updates)
        if self._buffers:
            payload = updates.example
            sent = {name: broadcast[name] for name in self._buffers if name in payload and name in broadcast}
            moves = [updates.stack(name) - one for name, one in sent.items() if one.is_floating_point()]
            if moves:
                moved = _thinned(1, moves)
                self._buffer_norms.append(torch.linalg.vector_norm(moved, dim=1))
        if self._count >= self._most:
            self._measure()

    def _take_unlike(self, updates: Updates, broadcast: Payload) -> bool:
        payload, vectors = updates.example, updates.vectors
        floating = (name for name, tensor in payload.items() if name in broadcast and tensor.is_floating_point())
        names = [name for name in floating if name not in self._buffers]
        if not names:
            return False
        if self._origin is None:
            total = sum(broadcast[name].numel() for name in names)
            self._every = -(-total // _SAMPLED_VALUES) if total > MOST_VALUES else 1
            self._origin = _thinned(self._every, [broadcast[name].unsqueeze(0) for name in names])[0]
            self._share = self._origin.numel() / max(total, 1)
            self._most = -(-_BLOCK_VALUES // max(self._origin.numel(), 1))
        # Tensors beyond the server's own, such as control variates, come last in a payload.
        whole = vectors is not None and self._every == 1 and names == list(vectors.layout)[: len(names)]
        self._alike = vectors.layout if vectors is not None and whole else None
        if vectors is not None and self._alike is not None:
            values = vectors.values
        else:
            values = _thinned(self._every, [updates.stack(name) for name in names])
        if self._waiting and self._waiting[0].shape[1:] != values.shape[1:]:
            self._measure()
        self._waiting.append(values)
        return True

    def _measure(self) -> None:
        if not self._waiting or self._origin is None:
            return
        moves = together(self._waiting)[:, : len(self._origin)] - self._origin
        self._waiting, self._count = [], 0
        norms = torch.linalg.vector_norm(moves, dim=1)
        moves.div_(norms.clamp_min(torch.finfo(moves.dtype).tiny).unsqueeze(1))
        units = moves.sum(0) if len(moves) > 1 else moves[0]
        self._units = units if self._units is None else self._units.add_(units)
        self._norms.append(norms)

    def moves(self) -> Moves:
        """The process's part of `result`."""
        self._measure()
        norms = (torch.cat(self._norms) if self._norms else torch.empty(0)).double() / self._share**0.5
        buffers = (torch.cat(self._buffer_norms) if self._buffer_norms else torch.empty(0)).double().cpu().numpy()
        return Moves(self._clients, norms.cpu().numpy(), 0 if self._units is None else self._units.numel(), buffers)

    def result(self, parts: Sequence[Moves], workers: Workers) -> dict[str, float]:
        """``drift/update_norm_mean``, of buffers ``drift/buffer_norm_mean``, and of two clients ``drift/cosine_mean``.

        Args:
            parts: Of every process.
            workers: The processes.
        """
        norms = np.concatenate([part.norms for part in parts])
        if not len(norms):
            return {}
        drift = {"drift/update_norm_mean": float(np.mean(norms))}
        if len(buffers := np.concatenate([part.buffers for part in parts])):
            drift["drift/buffer_norm_mean"] = float(np.mean(buffers))
        moved = int(np.count_nonzero(norms > 0))
        size = max(part.size for part in parts)
        units = workers.all_reduce(workers.zeros([size]) if self._units is None else self._units.double())
        if moved > 1:
            total = float(units.square().sum())
            drift["drift/cosine_mean"] = (total - moved) / (moved * (moved - 1))
        return drift


def _thinned(step: int, tensors: Iterable[Tensor]) -> Tensor:
    """Every ``step``-th value of each of n clients' tensors (n, …), as the rows of a matrix."""
    return torch.cat([tensor.unsqueeze(-1).flatten(1)[:, ::step] for tensor in tensors], 1)


@dataclass(slots=True)
class RoundLedger:
    """The reports of a process's clients; `merge` combines the processes.

    Args:
        drift: Movements of clients; None for different networks, between which angles are undefined.
        downloads: Bytes downloaded, by client.
        logged: Metrics of the local work, by client.
        uploads: Clients and the bytes that arrived from them; a client occurs twice if a late update arrives beside its
            new one.
        failures: Clients that could not finish.
        rates: The client with the lowest id and its first learning rate, by kind of network.
        totals: Summed metrics of clients that do not report individually.
        uncoded: By metric, the bytes that would have crossed without a codec, where there is one.
    """

    drift: DriftMeter | None = field(default_factory=DriftMeter)
    downloads: dict[int, int] = field(default_factory=dict)
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    uploads: list[tuple[int, int]] = field(default_factory=list)
    failures: list[ClientFailure] = field(default_factory=list)
    rates: dict[str, tuple[int, float]] = field(default_factory=dict)
    totals: list[Totals] = field(default_factory=list)
    uncoded: dict[str, int] = field(default_factory=dict)
    local_s: float = 0.0
    _moves: list[Moves] = field(default_factory=list)

    def sent(self, client_id: int, downlink_bytes: int) -> None:
        """Record a download of the broadcast."""
        self.downloads[client_id] = downlink_bytes

    def trained(self, updates: Updates, broadcast: Payload) -> None:
        """Record clients' finished local work."""
        columns = zip(updates.client_ids, updates.metrics, strict=True)
        if rates := [(client_id, metrics.pop("lr")) for client_id, metrics in columns if "lr" in metrics]:
            self._record_rate(updates.kind, min(rates))
        self.logged.update(zip(updates.client_ids, map(dict, updates.metrics), strict=True))
        if self.drift is not None:
            self.drift.add(updates, broadcast)

    def _record_rate(self, kind: str, rate: tuple[int, float]) -> None:
        self.rates[kind] = min(self.rates.get(kind, rate), rate)

    def arrived(self, updates: Updates) -> None:
        """Record updates' arrival."""
        self.uploads += zip(updates.client_ids, updates.uplink_bytes, strict=True)

    def failed(self, failure: ClientFailure) -> None:
        """Record a client's failure."""
        self.failures.append(failure)

    def merge(self, workers: Workers) -> None:
        """Combine the reports of all processes on each, in an order independent of their number."""
        failures = [(f.client_id, f.round_idx, f.cause, f.details) for f in self.failures]  # errors are not picklable
        moves = [] if self.drift is None else [self.drift.moves()]
        gathered = (self.downloads, self.logged, self.uploads, failures, self.local_s, self.rates, self.totals, moves)
        downloads, logged, uploads, every_failure, seconds, rates, totals, moved, uncoded = zip(
            *workers.gather((*gathered, self.uncoded)), strict=True
        )
        self.uncoded = {name: sum(part[name] for part in uncoded) for name in self.uncoded}
        self.downloads = dict(sorted(item for part in downloads for item in part.items()))
        self.logged = {client_id: part[client_id] for part in logged for client_id in part}
        self.uploads = sorted(upload for part in uploads for upload in part)
        self.failures = [ClientFailure(*failure) for failure in sorted(f for part in every_failure for f in part)]
        self.local_s = max(seconds)
        self.totals = [totals for part in totals for totals in part]
        self._moves = [move for part in moved for move in part]
        for kind, rate in (item for part in rates for item in part.items()):
            self._record_rate(kind, rate)

    @property
    def delivered(self) -> list[int]:
        """Clients whose updates arrived."""
        return [client_id for client_id, _ in self.uploads]

    @property
    def rows(self) -> list[ClientRow]:
        """Downloads, metrics and uploads by client; a late update may arrive on another process than the training."""
        rows = [_row((client_id, "train", "downlink_bytes", count)) for client_id, count in self.downloads.items()]
        rows += [
            _row((client_id, "train", metric, value))
            for client_id, metrics in self.logged.items()
            for metric, value in metrics.items()
        ]
        rows += [_row((client_id, "train", "uplink_bytes", count)) for client_id, count in self.uploads]
        return sorted(rows, key=itemgetter(0))  # stable: a client's rows keep this order

    def outlier(self) -> str | None:
        """A line about the update that moves furthest, if that is `_FAR` times the cohort's median norm; else None."""
        norms = dict(pair for part in self._moves for pair in zip(part.clients, part.norms.tolist(), strict=True))
        middle = median(norms.values()) if len(norms) > 2 else 0.0
        if not 0 < _FAR * middle < (most := max(norms.values(), default=0.0)):
            return None
        client_id = min(client for client, norm in norms.items() if norm == most)
        return (
            f"the update of client {client_id} has norm {most:.3g}, and the cohort's median is {middle:.3g}: it may "
            "decide the mean alone; trainer.aggregation bounds it"
        )

    def metrics(self, samples: Callable[[Sequence[int]], list[int]], workers: Workers) -> dict[str, float]:
        """Round metrics: sample-weighted means over clients, learning rates, bytes, drift, counts."""
        down, up = sum(self.downloads.values()), sum(num_bytes for _, num_bytes in self.uploads)
        metrics = {"train/lr" if kind == ONLY else f"train/lr_{kind}": rate for kind, (_, rate) in self.rates.items()}
        metrics |= self._training_means(samples)
        metrics |= {"comm/uplink_bytes": up, "comm/downlink_bytes": down, "comm/total_bytes": up + down} | self.uncoded
        if self.drift is not None:
            metrics |= self.drift.result(self._moves, workers)
        metrics["participation/count"] = len(self.uploads)
        return metrics

    def _training_means(self, samples: Callable[[Sequence[int]], list[int]]) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        counts: dict[str, int] = {}
        ids = sorted(self.logged)
        logged = list(zip((self.logged[client_id] for client_id in ids), samples(ids), strict=True))
        for name in dict.fromkeys(name for metrics, _ in logged for name in metrics):
            if "/" not in name:  # seconds; what the module logs has a slash
                continue
            told = [(metrics[name], count) for metrics, count in logged if not math.isnan(metrics.get(name, math.nan))]
            if told:
                sums[name], counts[name] = [value * count for value, count in told], sum(count for _, count in told)
        for name, total in (entry for totals in self.totals for entry in totals.items()):
            sums.setdefault(name, []).extend(total.parts)
            counts[name] = counts.get(name, 0) + total.weight
        return {name: exact_sum(parts) / max(counts[name], 1e-300) for name, parts in sums.items()}
