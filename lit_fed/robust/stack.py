"""The updates of a round as rows of a matrix, spread over the processes and read in blocks of coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor

from lit_fed.engine.method.wrapper import WrappedRun
from lit_fed.engine.wire.payload import ClientUpdate, Flat, Layout, Payload, joined, layout_of
from lit_fed.engine.wire.workers import Workers
from lit_fed.machine import free_memory

_BLOCK_VALUES = 2**22
_LARGEST_PRODUCT = 1e300
_MEDIAN_EXPONENT, _LARGEST_EXPONENT = 450, 480  # 2**64 squares of 2**480 stay finite
Shapes = Mapping[str, torch.Size]
Blocks = Callable[[], Iterable[Tensor]]
"""Reads all rows, (n, b), some coordinates after the other."""


class Stack:
    """Single updates, in the memory of the cohort times the model.

    A row holds the floating-point tensors that are not buffers, one after the other, in the updates' dtype; tensors
    beside the model, such as SCAFFOLD's changes, are a part of the row. Buffers and integer tensors are
    `extras`.

    Every process keeps its clients' rows. A block holds some coordinates of all rows, sorted by client, in float64 and
    minus the broadcast; processes exchange blocks, so that none has all updates, and all compute the same bits, which
    do not depend on the number of processes.

    Args:
        received: The broadcast; tensors that it lacks count as 0.
        buffers: Names of the buffers that are averaged.
    """

    def __init__(self, received: Payload, buffers: Collection[str]) -> None:
        self._received, self._buffers = received, buffers
        self.layout: Layout = {}
        self._rows: list[Tensor] = []
        self._extras: list[Tensor] = []
        self._keys: list[tuple[int, float]] = []
        self._places: list[int] = []
        self.clients: list[int] = []

    def add(self, update: ClientUpdate) -> None:
        """Copy an update.

        Raises:
            ValueError: If it has other tensors than the updates before it.
        """
        layout = layout_of(update.payload)
        if not self.layout:
            self.layout = layout
        elif layout != self.layout:
            odd = sorted({name for name, _ in layout.items() ^ self.layout.items()})
            raise ValueError(f"client {update.client_id} sends other tensors than the clients before it: {odd}")
        names, flat = self.names, update.flat
        whole = flat is not None and list(flat.layout) == list(names) and len(names) == len(layout)
        row = flat.values if flat is not None and whole else _joined(update.payload, names)
        self._rows.append(row)
        self._extras.append(_joined(update.payload, self.extras).double())
        # A late update arrives beside a client's new one: their order may not depend on the process.
        self._keys.append((update.client_id, float(row.sum(dtype=torch.float64))))

    @property
    def names(self) -> Shapes:
        """Tensors of a row."""
        return {n: shape for n, (dtype, shape) in self.layout.items() if _in_row(n, dtype, self._buffers)}

    @property
    def extras(self) -> Shapes:
        """Buffers and integer tensors."""
        return {n: shape for n, (dtype, shape) in self.layout.items() if not _in_row(n, dtype, self._buffers)}

    def gather(self, workers: Workers) -> int:
        """Agree with the other processes on the order of all rows; gives their number.

        Raises:
            ValueError: If clients of different processes send different tensors.
        """
        gathered = workers.gather((self._keys, self.layout))
        layouts = [layout for _, layout in gathered if layout]
        if any(layout != layouts[0] for layout in layouts):
            raise ValueError("clients of different processes send different tensors")
        order = sorted((*key, rank, place) for rank, (keys, _) in enumerate(gathered) for place, key in enumerate(keys))
        row_of = {place: row for row, (_, _, rank, place) in enumerate(order) if rank == workers.rank}
        self._places = [row_of[place] for place in range(len(self._rows))]
        self.clients = [client_id for client_id, *_ in order]
        self.layout = layouts[0] if layouts else {}
        return len(order)

    def blocks(self, workers: Workers) -> Iterator[Tensor]:
        """All rows minus the broadcast, (n, b) in float64, some coordinates after the other; after `gather`."""
        origin = self.vector(self._received, workers.fabric.device)
        width = max(1, _BLOCK_VALUES // max(len(self.clients), 1))
        for start in range(0, max(len(origin), 1), width):  # without coordinates one empty block
            part = origin[start : start + width]
            yield self._block([row[start : start + width] for row in self._rows], len(part), workers) - part

    def extra_values(self, workers: Workers) -> Tensor:
        """The buffers and integer tensors of all clients, (n, e) in float64; after `gather`."""
        return self._block(self._extras, sum(map(torch.Size.numel, self.extras.values())), workers)

    def _block(self, parts: list[Tensor], width: int, workers: Workers) -> Tensor:
        block = torch.zeros(len(self.clients), width, dtype=torch.float64, device=workers.fabric.device)
        if parts:
            block[self._places] = torch.stack(parts).to(block)
        return workers.all_reduce(block)  # a value and zeros: exact

    def vector(self, payload: Payload, device: torch.device) -> Tensor:
        """The tensors of a row from a payload, (d,) in float64; 0 for missing tensors."""
        return joined(payload, self.names, device)

    def tensors(self, moved: Tensor) -> dict[str, Tensor]:
        """The row's tensors in the updates' types, from a vector (d,) to which the broadcast is added.

        Values beyond a type's range become its largest ones: nobody can send infinity.
        """
        values = self.vector(self._received, moved.device) + moved
        tensors_moved = {}
        for name, tensor in Flat(self.names, values).split(values).items():
            dtype = self.layout[name][0]
            limit = torch.finfo(dtype).max
            tensors_moved[name] = tensor.clamp(-limit, limit).to(dtype)
        return tensors_moved

    def extra_tensors(self, values: Tensor) -> dict[str, Tensor]:
        """The buffers and integer tensors in the updates' types, from a vector (e,); integers are rounded."""
        return {
            name: tensor.to(dtype) if (dtype := self.layout[name][0]).is_floating_point else tensor.round().to(dtype)
            for name, tensor in Flat(self.extras, values).split(values).items()
        }


def inner_products(blocks: Blocks) -> tuple[Tensor, Blocks, float]:
    """The inner products of all rows, (n, n), the rows to combine, and the unit of these rows, a power of two.

    The unit is 1 and the rows are unchanged, unless squares overflow, as the square of 1e155 does. In this case the
    rows are multiplied by the unit in which the median of the rows' largest numbers is at most 2^450, whatever an
    attacker sends, and numbers beyond 2^480 become 2^480.
    """
    gram = _gram(blocks)
    if bool((gram.abs() <= _LARGEST_PRODUCT).all()):
        return gram, blocks, 1.0
    largest = reduce(torch.maximum, (rows.abs().amax(1) for rows in blocks() if rows.shape[1])).median()
    unit = math.ldexp(1.0, min(0, _MEDIAN_EXPONENT - math.frexp(min(float(largest), torch.finfo(gram.dtype).max))[1]))
    limit = math.ldexp(1.0, _LARGEST_EXPONENT)

    def scaled() -> Iterator[Tensor]:
        return ((rows * unit).clamp(-limit, limit) for rows in blocks())

    return _gram(scaled), scaled, unit


def _gram(blocks: Blocks) -> Tensor:
    return reduce(torch.add, (rows @ rows.T for rows in blocks()))


def warn_of_memory(key: str, run: WrappedRun) -> None:
    """Print a warning if the single updates of a cohort do not fit into the free memory of their device.

    Args:
        key: The setting that needs single updates.
        run: The run.
    """
    size = sum(shape.numel() * dtype.itemsize for dtype, shape in run.layout(run.broadcast).values())
    cohort = run.participation.nominal_cohort_size
    device = run.fabric.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if free is not None and size * cohort > free:
        run.fabric.print(
            f"warning: {key} keeps {cohort} updates of {size / 1e6:.3g} MB a round, {size * cohort / 1e9:.3g} GB over "
            f"all processes, and {free / 1e9:.3g} GB are free here; select fewer clients or add machines"
        )


def _in_row(name: str, dtype: torch.dtype, buffers: Collection[str]) -> bool:
    return dtype.is_floating_point and name not in buffers


def _joined(payload: Payload, names: Shapes) -> Tensor:
    """Tensors one after the other, in new memory."""
    return torch.cat([payload[name].detach().reshape(-1) for name in names]) if names else torch.empty(0)
