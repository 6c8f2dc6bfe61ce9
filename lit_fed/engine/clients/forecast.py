"""What a client's answer looks like, before it has trained."""

from __future__ import annotations

from typing import Any

from lit_fed.engine.method.algorithm import Algorithm, zeros_like
from lit_fed.engine.method.client import Client, Pass
from lit_fed.engine.wire.payload import Payload


def untrained_answer(client: Client, algorithm: Algorithm[Any]) -> Payload:
    """What a client sends that has not trained: the names, types and shapes of what it will send.

    Args:
        client: With what it received; the rest is filled in.
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
