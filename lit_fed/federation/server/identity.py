"""A run's id and its clients' reports, which its checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.data.population.census import ClientReport, Scale


class Identity(Callback):
    """Stores a run's unique id and its clients' reports in the run's checkpoints.

    Whose key may claim a client is the key file's word, today's: a replaced key needs no new run.
    """

    tells_of_clients = True

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.reports: dict[int, ClientReport] = {}
        self._begun = False

    def check(self, client_id: int, report: ClientReport) -> str | None:
        """Return why somebody cannot be a client; None if there is no objection."""
        before = self.reports.get(client_id, report)
        if report.fingerprint != before.fingerprint:
            return f"client {client_id} has different data than before; restore its data, or start a new run"
        if (report.samples, report.histogram) != (before.samples, before.histogram):
            return f"client {client_id} reports different numbers of samples than before; start a new run"
        return None

    def accept(self, clients: Mapping[int, ClientReport]) -> None:
        """Record clients' reports. Before the run begins, nothing is recorded, so that nodes may swap clients."""
        if self._begun:
            self.reports |= clients

    def begin(self, clients: Mapping[int, ClientReport]) -> dict[int, ClientReport]:
        """Record the connected clients' reports, hold nodes to them from now on, and return all that are known."""
        self._begun = True
        self.accept(clients)
        return dict(sorted(self.reports.items()))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "known": {str(client_id): asdict(report) for client_id, report in self.reports.items()},
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was known before; nodes that connect from now on are held to it."""
        self.run_id = str(state["run_id"])
        self.reports = {int(name): _report(**report) for name, report in state["known"].items()} | self.reports


def _report(samples: int, histogram: Sequence[int] | None, fingerprint: str, scale: Scale | None) -> ClientReport:
    return ClientReport(int(samples), None if histogram is None else tuple(histogram), str(fingerprint), scale)
