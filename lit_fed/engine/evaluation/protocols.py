"""The interface of evaluation protocols, how they are checked and run; those that there are: `lit_fed.protocols`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lit_fed.engine.clients.executor import Question
from lit_fed.engine.evaluation.rows import ClientRow
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate, Layout
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.engine.evaluation.federation import Federation

EvalSubset = Literal["val", "test"]


@dataclass(slots=True)
class Evaluation:
    """What protocols found.

    Args:
        metrics: Values by full name, such as ``global/acc``.
        rows: Values of single clients.
        absent: By the name of a protocol that has nothing to report, why.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[ClientRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


class Protocol(ABC):
    """A way to evaluate a federation."""

    name: str

    def check(self, federation: Federation) -> None:  # noqa: B027  # most protocols always apply
        """Refuse, before any training, a federation the protocol cannot be applied to."""

    @abstractmethod
    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Evaluate after a round; called on every process, the same result on all."""

    def question(self, federation: Federation, subset: EvalSubset) -> Question:
        """What it asks of clients, for `lit_fed.engine.clients.executor.Executor.ask`."""

        def answer(client_id: int, broadcast: Broadcast) -> ClientUpdate | None:
            return self.answer(federation, client_id, broadcast, subset)

        return Question(self.name, subset, answer, self.layout(federation))

    def answer(
        self, federation: Federation, client_id: int, broadcast: Broadcast, subset: EvalSubset
    ) -> ClientUpdate | None:
        """A client's part, done wherever its data are; None where it has nothing to say."""
        raise NotImplementedError(f"{type(self).__name__} asks nothing of clients")

    def layout(self, federation: Federation) -> Layout:
        """The tensors that an answer holds; by default none, only metrics."""
        del federation
        return {}


def check_names(protocols: Sequence[Protocol]) -> None:
    """Refuse protocols that would write into the same columns.

    Raises:
        ConfigError: If two have one name.
    """
    names = [protocol.name for protocol in protocols]
    if twice := [name for position, name in enumerate(names) if name in names[:position]]:
        raise ConfigError(f"trainer.protocols has two of the name {twice[0]!r}, whose numbers would mix; leave one out")


def check_protocols(protocols: Sequence[Protocol], federation: Federation, subset: EvalSubset) -> None:
    """Refuse, before any training, protocols that cannot be applied.

    Raises:
        ConfigError: If one cannot, or there is no validation data to run them on.
    """
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
    """Run every protocol in turn; called on every process."""
    evaluation = Evaluation()
    for protocol in protocols:
        found = protocol.run(federation, round_idx, subset)
        evaluation.metrics |= found.metrics
        evaluation.rows += found.rows
        if not found.metrics:
            evaluation.absent |= found.absent or {protocol.name: f"the model logged nothing on the {subset} data"}
    return evaluation
