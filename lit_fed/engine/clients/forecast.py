"""The layout of a client's answer, without training."""

from __future__ import annotations

from typing import Any

from lit_fed.engine.method.algorithm import Algorithm, zeros_like
from lit_fed.engine.method.client import Client, Pass
from lit_fed.engine.wire.payload import Payload


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
