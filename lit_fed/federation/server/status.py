"""The state of a running federation, for the server's operator."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.data.partitions.cut import named
from lit_fed.engine.loop.run import RoundRecord, Run
from lit_fed.federation.server.executor import GridExecutor
from lit_fed.federation.transport.serving import RpcGrid
from lit_fed.federation.transport.status_port import LABELS, StatusSource

_MOST_POINTS = 500  # of the curve


class Status(Callback, StatusSource):
    """The facts that the pages show: numbers of the server's own, and nothing that a node says.

    Under ``trainer.privacy.withhold``, and before the run knows whether it withholds, the facts tell neither who takes
    part nor how many clients, nor how long a round took.
    """

    page = Path(__file__).with_name("status.html").read_text(encoding="utf-8")

    def __init__(self, grid: RpcGrid) -> None:
        StatusSource.__init__(self, "round_seconds")
        self.grid = grid
        self._run: Run | None = None
        self._curve: list[tuple[int, float]] = []
        self._epsilon: float | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        self._run = run

    @override
    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Take what the record of a round tells; the record of a private run lacks what may not be told."""
        metrics = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
        if "time/round_s" in metrics:
            self.seconds.labels(*self._names(run)).observe(metrics["time/round_s"])
        if run.names.monitor in metrics:
            self._curve.append((record.round_idx, metrics[run.names.monitor]))
        self._epsilon = metrics.get("privacy/epsilon", self._epsilon)

    @override
    def is_ready(self) -> bool:
        """Whether nodes are gathered, and those that are connected have clients enough for a round."""
        if self._run is None:
            return False
        executor, here = self._executor(self._run), {node for node, *_ in self.grid.answered()}
        clients = sum(len(home.clients) for node, home in list(executor.roster.homes.items()) if node in here)
        return clients >= max(1, executor.patience.smallest_cohort)

    @override
    def facts(self) -> dict[str, Any]:
        run, answered = self._run, self.grid.answered()
        facts: dict[str, Any] = {"now": time.time(), "rounds": 0, "max_rounds": None, "nodes": len(answered)}
        if run is None:
            return facts
        curve = self._curve[:: len(self._curve) // _MOST_POINTS + 1]
        facts |= dict(zip(LABELS, self._names(run), strict=True))
        facts |= {
            "rounds": run.next_round,
            "max_rounds": run.max_rounds,
            "epsilon": self._epsilon,
            "metric": run.names.monitor,
            "curve": curve,
        }
        if run.withholds:
            return facts
        sites = list(self._sites(run, answered))
        return facts | {"bytes": self.grid.num_bytes, "failures": run.failures.count, "sites": sites}

    def _sites(self, run: Run, answered: list[tuple[int, str, float]]) -> Iterator[dict[str, Any]]:
        """Yield the nodes that are connected, and those with a key that are not."""
        roster, keys = self._executor(run).roster, {} if self.grid.keys is None else dict(self.grid.keys.data)
        for node, key, at in answered:
            grant, home = keys.pop(key, None), roster.homes.get(node)
            name = f"node {node}" if grant is None else f"{grant.name}, {named(grant.clients)}"
            state = "late" if home is not None and home.boot in roster.late else "connected"
            yield {"name": name, "state": state, "answered": round(at, 3) or None}
        for grant in keys.values():
            yield {"name": f"{grant.name}, {named(grant.clients)}", "state": "absent", "answered": None}

    def _names(self, run: Run) -> tuple[str, str]:
        return run.log_dir.name, type(run.federation.algorithm).__name__

    def _executor(self, run: Run) -> GridExecutor:
        assert isinstance(run.federation.executor, GridExecutor)
        return run.federation.executor
