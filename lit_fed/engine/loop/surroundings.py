"""Facts about a run for the set-up of a wrapper."""

from __future__ import annotations

from functools import partial

from lit_fed.engine.clients.forecast import layouts_of
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.loop.settings import RunSettings
from lit_fed.engine.method.wrapper import Aggregation, Surroundings
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import Layout
from lit_fed.engine.wire.workers import on_first_process


def surroundings(federation: Federation, settings: RunSettings) -> Surroundings:
    """Describe an assembled federation, whose session is at work."""
    kinds = federation.kinds
    client = next((one for one in federation.data.clients if kinds[one] == kinds.names[0]), 0)

    def layout(broadcast: Broadcast) -> Layout:
        return layouts_of(federation.session, [client], broadcast)[kinds.names[0]]

    first = next(iter(federation.loops.values()))
    averaged = first.model.buffers if first.model.buffer_policy == "average" else ()
    return Surroundings(
        algorithm=federation.algorithm,
        server=federation.server,
        data=federation.data,
        participation=federation.participation,
        broadcast=federation.broadcast(0),
        layout=layout,
        kinds=tuple(kinds.names),
        protocols=tuple(settings.protocols),
        averaged=frozenset(averaged),
        max_rounds=settings.max_rounds,
        on_client_failure=settings.on_client_failure,
        bears=next((one.bears for one in federation.wrappers.stack if isinstance(one, Aggregation)), None),
        seed=federation.seed,
        device=federation.fabric.device,
        first=partial(on_first_process, federation.fabric),
        say=federation.fabric.print,
    )
