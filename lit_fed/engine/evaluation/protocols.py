"""The interface of evaluation protocols, running them, and the values of clients that they give.

`lit_fed.protocols` has the protocols.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from lit_fed.arguments import Checked
from lit_fed.engine.clients.executor import Question
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Layout
from lit_fed.engine.wire.totals import Totals, exact_sum
from lit_fed.errors import ConfigError

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


def spread(prefix: str, rows: list[ClientRow], totals: Sequence[Totals] = ()) -> dict[str, float]:
    """Mean, standard deviation, 10th percentile and minimum over clients of every metric.

    Args:
        prefix: Name of the protocol, such as ``clients``.
        rows: One row per client and metric.
        totals: Sums over clients without rows, each of weight 1.

    Returns:
        Values named ``<prefix>/<metric>_mean``, ``_std`` (population), ``_p10`` and ``_min``; only the mean for metrics
        with totals. NaN, a value that a client could not measure, is left out and counted in ``_missing``; a metric
        that nobody could measure is NaN.
    """
    values: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.client_id):
        values.setdefault(row.metric, []).append(row.value)
    metrics = {}
    for metric in dict.fromkeys([*values, *(name for part in totals for name in part)]):
        column, withheld = values.get(metric, []), [part[metric] for part in totals if metric in part]
        if (measured := [value for value in column if not math.isnan(value)]) and len(measured) < len(column):
            metrics[f"{prefix}/{metric}_missing"] = float(len(column) - len(measured))
            column = measured
        count = len(column) + sum(total.weight for total in withheld)
        parts = [*column, *(part for total in withheld for part in total.parts)]
        metrics[f"{prefix}/{metric}_mean"] = exact_sum(parts) / max(count, 1)
        if withheld:
            continue
        array = np.asarray(column, dtype=np.float64)
        metrics[f"{prefix}/{metric}_std"] = float(array.std())
        metrics[f"{prefix}/{metric}_p10"] = float(np.percentile(array, 10))
        metrics[f"{prefix}/{metric}_min"] = float(array.min())
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


def run_protocols(
    protocols: Sequence[Protocol], federation: Federation, round_idx: int, subset: EvalSubset
) -> Evaluation:
    """Run every protocol; called on every process."""
    evaluation = Evaluation()
    for protocol in protocols:
        result = protocol.run(federation, round_idx, subset)
        evaluation.metrics |= result.metrics
        evaluation.rows += result.rows
        if not result.metrics:
            evaluation.absent |= result.absent or {protocol.name: f"the model logged nothing on the {subset} data"}
    evaluation.metrics |= federation.wrappers.measured(evaluation.rows)
    return evaluation
