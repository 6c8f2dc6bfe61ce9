"""The layout of a client's answer, without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from lit_fed.engine.clients.session import Session
from lit_fed.engine.method.algorithm import Algorithm, zeros_like
from lit_fed.engine.method.client import Client, Pass
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import Layout, Payload, layout_of


def untrained_answer(client: Client, algorithm: Algorithm[Any]) -> Payload:
    """Payload of a client that has not trained, with the names, dtypes and shapes of the trained one's.

    Args:
        client: With the tensors it received; the others are filled in.
        algorithm: The method.
    """
    client.own = client.model.copy(client.model.personal_names)
    client.state = algorithm.initial_state(client)
    client.begun = algorithm.start(client)
    for one in algorithm.phases(client):
        if isinstance(one, Pass):
            client.results[one.name] = dict(one.example)
            continue
        if one.begin is not None:
            client.left = client.model.copy()
        if not one.moves:
            client.results[one.name] = zeros_like(client.model.parameters)
    return algorithm.finish(client).payload


def layouts_of(session: Session, client_ids: Iterable[int], broadcast: Broadcast) -> dict[str, Layout]:
    """Layout of an update by kind of network, read from an untrained client's."""
    found: dict[str, Layout] = {}
    for client_id in client_ids:
        kind = session.kinds[client_id]
        if kind not in found:
            data = cast("Any", _Elsewhere(session.data))
            client = Client(
                client_id, broadcast.round_idx, "train", session.seed, session.loops[kind].model, data, session.work,
                received=broadcast.payloads[kind],
            )  # fmt: skip
            found[kind] = layout_of(untrained_answer(client, session.algorithm))
    return found


class _Elsewhere:
    """The data of remote clients: metadata, and loaders without batches."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_loader(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        return []

    val_loader = calibration_loader = train_loader
