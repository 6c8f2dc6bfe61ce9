"""The answers of a group's clients.

A method's ``finish`` that is pure in tensors runs once for all of them, under ``torch.vmap``. One that uses a client's
number, its data or another value of Python is asked for each client. The results are the same bits: ``finish`` computes
every value of a tensor by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Answer, Session
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.vectorized.objective import GroupObjective, NotVectorizable
from lit_fed.engine.wire.payload import MOST_VALUES, Flat, FlatPayload, Payload


class GroupFinish:
    """Asks a method for the answers of groups of clients of one kind.

    Args:
        session: Knows the method.
        loop: The kind's.
    """

    def __init__(self, session: Session, loop: LocalLoop) -> None:
        self.session = session
        self.loop = loop
        self.together = True
        """Whether ``finish`` is called for all clients at once; false after a failure."""
        self._layout: Mapping[str, torch.Size] = {}

    def of_all(self, clients: Sequence[Client], tensors: Tensors) -> list[Answer] | None:
        """Every client's answer; None where each has to be asked by `Session.answer`.

        Args:
            clients: Trained, in descending order of steps.
            tensors: Their models, stacked.
        """
        found: list[Answer] = []
        for _, equals in itertools.groupby([client.steps.distance for client in clients]):
            rows = slice(len(found), len(found) + sum(1 for _ in equals))
            try:
                if self.together:
                    found += self._answers(clients[rows], {name: tensor[rows] for name, tensor in tensors.items()})
            except (Exception, SystemExit):  # asked alone, a failing client is named
                self.together = False
        return found if self.together else None

    def _answers(self, clients: Sequence[Client], tensors: Tensors) -> list[Answer]:
        objective, count = GroupObjective(self.loop, clients), len(clients)
        made = objective.finish(clients, tensors)
        if isinstance(made.weight, Tensor):
            raise NotVectorizable("algorithm.finish gives a weight that is a tensor")
        stacks = self.session.kept(objective.client, made.state)
        finite = finite_rows([*made.payload.values(), *stacks.values()], count)
        kept, flats = _rows(stacks, count), self._flats(made.payload, count)
        if flats is None:
            rows = _rows(made.payload, count)
            return [Answer(rows[idx], kept[idx], made.weight, None, finite[idx]) for idx in range(count)]
        return [Answer(FlatPayload(flat), kept[idx], made.weight, flat, finite[idx]) for idx, flat in enumerate(flats)]

    def _flats(self, payload: Payload, count: int) -> list[Flat] | None:
        """Every client's payload as one vector, by one copy for all; None where it cannot be one, see `Flat.of`."""
        shapes = {name: stack.shape[1:] for name, stack in payload.items()}
        kinds = {stack.dtype for stack in payload.values()}
        if len(kinds) != 1 or not kinds.pop().is_floating_point:
            return None
        if sum(map(torch.Size.numel, shapes.values())) > MOST_VALUES:
            return None
        layout = self._layout = self._layout if shapes == self._layout else shapes
        vectors = torch.cat([payload[name].reshape(count, -1) for name in layout], 1).unbind(0)
        return [Flat(layout, values) for values in vectors]


def finite_rows(stacks: Iterable[Tensor], count: int) -> list[bool]:
    """Whether each client's tensors are finite, as by `are_finite`; one device synchronization."""
    parts = (torch.view_as_real(stack) if stack.is_complex() else stack for stack in stacks)
    floats = [stack for stack in parts if stack.is_floating_point() and stack.numel()]
    if not floats:
        return [True] * count
    sums = [stack.reshape(count, -1).sum(1, dtype=torch.promote_types(stack.dtype, torch.float32)) for stack in floats]
    found: list[bool] = torch.stack(sums).isfinite().all(0).tolist()
    return found


def _rows(stacks: Mapping[str, Any], count: int) -> list[Tensors]:
    """Stacked tensors by name, unbound by client."""
    if not stacks:
        return [{} for _ in range(count)]
    columns = [stack.unbind(0) for stack in stacks.values()]
    return [dict(zip(stacks, parts, strict=True)) for parts in zip(*columns, strict=True)]
