"""The interface of evaluation protocols, running them, and the values of clients that they give.

`lit_fed.protocols` has the protocols.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from lit_fed.arguments import Checked
from lit_fed.engine.clients.executor import Question
from lit_fed.engine.lightning.metric_names import Direction
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Layout
from lit_fed.engine.wire.totals import Totals, exact_sum
from lit_fed.engine.wire.workers import raise_if_lost
from lit_fed.errors import ConfigError, EvaluationFailure, LitFedError, own_traceback, reason

if TYPE_CHECKING:
    from lit_fed.engine.evaluation.federation import Federation


class ClientRow(NamedTuple):
    """A value of a client: a line of ``clients.csv`` without its round.

    Args:
        client_id: The client.
        stage: ``train``, ``test``, ``global``, ``local``, ``personal`` or ``unseen``.
        metric: Name of the value.
        value: The value.
    """

    client_id: int
    stage: str
    metric: str
    value: float


def spread(
    prefix: str,
    rows: list[ClientRow],
    totals: Sequence[Totals] = (),
    asked: int | None = None,
    num_samples: Callable[[int], int] | None = None,
    direction: Callable[[str], Direction] | None = None,
) -> dict[str, float]:
    """Means, standard deviation, 10th percentile, minimum and worst value over clients of every metric.

    Args:
        prefix: Name of the protocol, such as ``clients``.
        rows: One row per client and metric.
        totals: Sums over clients without rows, each of weight 1.
        asked: Clients that were asked; None for the clients with rows.
        num_samples: Training samples of a client; None gives no weighted mean.
        direction: Better direction of a metric by its full name; None gives no worst value.

    Returns:
        Values named ``<prefix>/<metric>_mean``, ``_weighted`` (the mean weighted by training samples), ``_std``
        (population), ``_p10``, ``_min``, ``_worst`` (the largest where smaller is better) and ``_worst10`` (the 10th
        percentile from the worst); only the mean for metrics with totals. ``_missing``, where it is not 0, counts the
        clients that the mean leaves out: they failed, logged no such metric, or logged NaN, as of a metric that their
        data leave undefined. A metric that nobody could measure is NaN.
    """
    values: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row.client_id):
        values.setdefault(row.metric, []).append((row.client_id, row.value))
    asked = len({row.client_id for row in rows}) if asked is None else asked
    metrics = {}
    for metric in dict.fromkeys([*values, *(name for part in totals for name in part)]):
        name, withheld = f"{prefix}/{metric}", [part[metric] for part in totals if metric in part]
        measured = [one for one in values.get(metric, []) if not math.isnan(one[1])]
        count = len(measured) + sum(total.weight for total in withheld)
        if count < asked:
            metrics[f"{name}_missing"] = float(asked - count)
        column = [value for _, value in measured]
        parts = [*column, *(part for total in withheld for part in total.parts)]
        metrics[f"{name}_mean"] = exact_sum(parts) / count if count else math.nan
        if withheld:
            continue
        if num_samples is not None:
            weights = [num_samples(client_id) for client_id, _ in measured]
            total = exact_sum(weight * value for weight, value in zip(weights, column, strict=True))
            metrics[f"{name}_weighted"] = total / sum(weights) if sum(weights) else math.nan
        array = np.asarray(column or [math.nan], dtype=np.float64)
        metrics[f"{name}_std"] = float(array.std())
        metrics[f"{name}_p10"] = float(np.percentile(array, 10))
        metrics[f"{name}_min"] = float(array.min())
        if direction is not None:
            lower = direction(f"{name}_mean") == "min"
            metrics[f"{name}_worst"] = float(array.max() if lower else array.min())
            metrics[f"{name}_worst10"] = float(np.percentile(array, 90 if lower else 10))
    return metrics


EvalSubset = Literal["val", "test"]


@dataclass(slots=True)
class Evaluation:
    """Results of protocols.

    Args:
        metrics: Values by full name, such as ``global/acc``.
        rows: Values of single clients.
        absent: Reasons of protocols without results, by name.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[ClientRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


class Protocol(Checked, ABC):
    """A way to evaluate a federation."""

    name: str

    def check(self, federation: Federation) -> None:  # most protocols always apply
        """Refuse, before any training, a federation that the protocol does not apply to."""

    @abstractmethod
    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Evaluate after a round; called on every process, with the same result on all."""

    def promises(self, federation: Federation, logged: Sequence[str]) -> list[str] | None:
        """Full names of its metrics, for names that the model logs; None where they are not known before it runs."""
        return None

    def question(self, federation: Federation, subset: EvalSubset) -> Question:
        """The question to clients, for `lit_fed.engine.clients.executor.Executor.ask`."""

        def answer(client_id: int, broadcast: Broadcast) -> ClientUpdate | None:
            return self.answer(federation, client_id, broadcast, subset)

        return Question(self.name, subset, answer, self.layout(federation))

    def answer(
        self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset
    ) -> ClientUpdate | None:
        """A client's part, computed where its data are; None without an answer."""
        raise NotImplementedError(f"{type(self).__name__} asks nothing of clients")

    def layout(self, federation: Federation) -> Layout:
        """Layout of an answer's tensors; by default empty, for metrics alone."""
        return {}


def check_names(protocols: Sequence[Protocol]) -> None:
    """Refuse two protocols of one name, which would share columns."""
    names = [protocol.name for protocol in protocols]
    if twice := [name for position, name in enumerate(names) if name in names[:position]]:
        raise ConfigError(f"trainer.protocols has two named {twice[0]!r}, whose numbers would mix; leave one out")


def check_protocols(protocols: Sequence[Protocol], federation: Federation, subset: EvalSubset) -> None:
    """Refuse, before any training, protocols that do not apply, or lack validation data."""
    if subset == "val" and not federation.data.has_val:
        least = f"{federation.data.val_fraction:g}"
        raise ConfigError(
            f"there is no validation data; set data.init_args.val_fraction above {least}, or use the test data"
        )
    for protocol in protocols:
        protocol.check(federation)


def run_protocol(protocol: Protocol, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
    """Run a protocol; called on every process.

    Raises:
        EvaluationFailure: For any error that is not ours, such as one of the model's ``test_step``.
    """
    try:
        return protocol.run(federation, round_idx, subset)
    except Exception as error:
        told = isinstance(error, EvaluationFailure)  # another process's
        if isinstance(error, LitFedError) and not told:
            raise
        raise_if_lost(error)
        cause = str(error) if told else reason(error)
        line = f"protocol {protocol.name} failed in round {round_idx}, on the {subset} data: {cause}"
        raise EvaluationFailure(line, own_traceback(error)) from error


def run_protocols(
    protocols: Sequence[Protocol], federation: Federation, round_idx: int, subset: EvalSubset
) -> Evaluation:
    """Run every protocol; called on every process."""
    evaluation = Evaluation()
    for protocol in protocols:
        result = run_protocol(protocol, federation, round_idx, subset)
        evaluation.metrics |= result.metrics
        evaluation.rows += result.rows
        if not result.metrics:
            evaluation.absent |= result.absent or {protocol.name: f"the model logged nothing on the {subset} data"}
    evaluation.metrics |= federation.wrappers.evaluation_metrics(evaluation.rows)
    return evaluation
