"""Facts about a run for the set-up of a wrapper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lit_fed.engine.clients.forecast import layouts_of
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.lightning.optimization import has_own_scheduler_step, parse_optimizers
from lit_fed.engine.method.wrapper import Surroundings

_PLAIN = (str, int, float, bool, type(None))


def surroundings(federation: Federation, protocols: Sequence[Protocol], max_rounds: int) -> Surroundings:
    """Facts about an assembled federation for a wrapper."""
    session, kinds = federation.session, federation.kinds
    clients = {kind: next((one for one in federation.data.clients if kinds[one] == kind), 0) for kind in kinds.names}
    layouts = layouts_of(session, clients.values(), federation.broadcast(0))
    first = next(iter(federation.loops.values()))
    averaged = first.model.buffers if first.model.buffer_policy == "average" else ()
    return Surroundings(
        algorithm=federation.algorithm,
        server=federation.server,
        data=federation.data,
        participation=federation.participation,
        layout=layouts[kinds.names[0]],
        kinds=tuple(kinds.names),
        protocols=tuple(protocols),
        averaged=frozenset(averaged),
        settings=_settings(federation),
        max_rounds=max_rounds,
        seed=federation.seed,
        device=federation.fabric.device,
        writes=federation.fabric.is_global_zero,
        say=federation.fabric.print,
    )


def _settings(federation: Federation) -> str:
    """The settings on which updates depend, as one text: the method's, local work's and the optimizers'."""
    session = federation.session
    loops = session.loops.values()
    optimizers = [
        {key: value for key, value in group.items() if key != "params"}
        for loop in loops
        for optimizer in parse_optimizers(
            loop.model.task.configure_optimizers(), has_own_scheduler_step(loop.model.task)
        )[0]
        for group in optimizer.param_groups
    ]
    described = [
        _described(part)
        for part in (federation.algorithm, federation.participation, session.work, *(loop.gradients for loop in loops))
    ]
    return json.dumps([described, optimizers, session.seed], default=repr, sort_keys=True)


def _described(part: Any) -> list[Any]:
    slots = getattr(part, "__dataclass_fields__", None) or vars(part)
    values = {name: getattr(part, name) for name in slots if not name.startswith("_")}
    return [type(part).__name__, {name: value for name, value in values.items() if isinstance(value, _PLAIN)}]
