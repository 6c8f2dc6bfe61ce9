"""A server's audit log: the run, and each round's requests and end, of what the run may tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import RoundRecord, Run
from lit_fed.federation.audit import Audit, hash_of
from lit_fed.federation.server.identity import Identity
from lit_fed.participation import Participant


class AuditedRun(Callback):
    """Writes when a run begins or is resumed, whom a round asks, and what a round has spent.

    A run that withholds who takes part says so to nobody, its log included.

    Args:
        audit: The server's log.
        identity: The run's id.
        settings: The settings that must match on both ends.
    """

    def __init__(self, audit: Audit, identity: Identity, settings: Mapping[str, str]) -> None:
        self.audit, self.identity, self.settings = audit, identity, settings

    @override
    def on_fit_start(self, run: Run) -> None:
        event, settings = "resumed" if run.start_round else "began", hash_of(self.settings)
        run_id, folder = self.identity.run_id, run.log_dir.name
        self.audit.write(event, run=run_id, folder=folder, round=run.start_round, of=run.max_rounds, settings=settings)

    @override
    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        protocols = [one.name for one in run.settings.protocols if run.is_due(round_idx + 1)]
        who = None if run.withholds else sorted(participant.client_id for participant in plan)
        self.audit.write("asked", lasting=False, round=round_idx, asked=["train", *protocols], clients=who)

    @override
    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        spent = record.metrics.get("privacy/epsilon")
        epsilon = None if spent is None else f"{spent:.6g}"
        self.audit.write("round", lasting=False, round=record.round_idx, epsilon=epsilon)
