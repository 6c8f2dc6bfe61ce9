"""What the clients of a group send and keep.

A method's ``finish`` that is pure in tensors runs once for all of them, under ``torch.vmap``. One that looks at a
client by itself (its number, its data, a value of Python) is asked for each client. What comes out is the same: a
tensor's values are worked out one by one either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.vectorized.objective import GroupObjective, NotVectorizable
from lit_fed.engine.wire.payload import MOST_VALUES, Flat, FlatPayload, Payload, are_finite


class Answer(NamedTuple):
    """What a client sends and keeps.

    Args:
        payload: What it sends.
        kept: What it keeps until it next takes part.
        weight: Its weight in a weighted mean; None for its number of samples.
        flat: The payload as one vector, where it can be one.
        finite: Whether all that it sends and keeps is, as far as a sum of each tensor tells.
    """

    payload: Payload
    kept: Tensors
    weight: float | None
    flat: Flat | None
    finite: bool


class GroupFinish:
    """Asks a method for the answers of groups of clients of one kind.

    Args:
        session: Knows the method.
        loop: Of the kind.
    """

    def __init__(self, session: Session, loop: LocalLoop) -> None:
        self.session = session
        self.loop = loop
        self.together = True
        """Whether ``finish`` is asked for all at once; until it turns out to look at clients one by one."""
        self._layout: Mapping[str, torch.Size] = {}

    def of_all(self, clients: Sequence[Client], tensors: Tensors) -> list[Answer] | None:
        """Every client's answer; None where each has to be asked for `of` itself.

        Args:
            clients: Trained, those with more steps first.
            tensors: Of their models, stacked.
        """
        found: list[Answer] = []
        for _, equals in itertools.groupby(range(len(clients)), lambda idx: clients[idx].steps.distance):
            places = list(equals)
            rows = slice(places[0], places[-1] + 1)
            try:
                if self.together:
                    found += self._answers(clients[rows], {name: tensor[rows] for name, tensor in tensors.items()})
            except (Exception, SystemExit):  # also where it fails for one of them: asked alone it says for whom
                self.together = False
        return found if self.together else None

    def of(self, client: Client) -> Answer:
        """One client's answer."""
        made = self.session.algorithm.finish(client)
        flat = Flat.of(made.payload, self._layout)
        if flat is not None:
            self._layout = flat.layout
        kept = self.session.kept(client, made.state)
        sent = made.payload.values() if flat is None else [flat.values]
        return Answer(made.payload, kept, made.weight, flat, are_finite([*sent, *kept.values()]))

    def _answers(self, clients: Sequence[Client], tensors: Tensors) -> list[Answer]:
        objective, count = GroupObjective(self.loop, clients), len(clients)
        made = objective.finish(clients, tensors)
        if isinstance(made.weight, Tensor):
            raise NotVectorizable("the method weighs clients by what they have trained")
        stacks = self.session.kept(objective.client, made.state)
        finite = finite_rows([*made.payload.values(), *stacks.values()], count)
        kept, flats = _rows(stacks, count), self._flats(made.payload, count)
        if flats is None:
            rows = _rows(made.payload, count)
            return [Answer(rows[idx], kept[idx], made.weight, None, finite[idx]) for idx in range(count)]
        return [Answer(FlatPayload(flat), kept[idx], made.weight, flat, finite[idx]) for idx, flat in enumerate(flats)]

    def _flats(self, payload: Payload, count: int) -> list[Flat] | None:
        """Every client's payload as one vector, by one copy of all; None where it cannot be one, see `Flat.of`."""
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
    """Of each client, whether its tensors are finite, as `are_finite` tells; one device sync."""
    parts = (torch.view_as_real(stack) if stack.is_complex() else stack for stack in stacks)
    floats = [stack for stack in parts if stack.is_floating_point() and stack.numel()]
    if not floats:
        return [True] * count
    sums = [stack.reshape(count, -1).sum(1, dtype=torch.promote_types(stack.dtype, torch.float32)) for stack in floats]
    found: list[bool] = torch.stack(sums).isfinite().all(0).tolist()
    return found


def _rows(stacks: Mapping[str, Any], count: int) -> list[Tensors]:
    """Stacked tensors by name, client by client."""
    if not stacks:
        return [{} for _ in range(count)]
    columns = [stack.unbind(0) for stack in stacks.values()]
    return [dict(zip(stacks, parts, strict=True)) for parts in zip(*columns, strict=True)]
