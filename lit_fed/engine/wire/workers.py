"""The processes of a run.

Clients are spread over the processes (``clients``: every process trains whole clients), or every client is trained
data-parallel on all of them (``ddp``). The loop and the reducers talk to `Workers` in both cases.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed
from lightning import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import LitFedError, ProcessLost

T = TypeVar("T")


class ClientParallelStrategy(DDPStrategy):
    """Processes that train different clients: DDP's process group without its gradient averaging.

    Args:
        start_method: ``popen`` runs the same script once per device, ``fork`` serves notebooks and tests.
        kwargs: Passed on to Lightning's ``DDPStrategy``.
    """

    def __init__(self, start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen", **kwargs: Any) -> None:
        super().__init__(start_method=start_method, **kwargs)
        self._backward_sync_control = None  # gradients are never synchronised

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]  # DDP promises its own wrapper
        return module


def launch(fabric: Fabric, function: Callable[[], T]) -> T:
    """Call a function on all processes, and start the processes that do not run yet.

    Note:
        Fabric patches PyTorch's `DataLoader` meanwhile, and reverts that only if nothing is raised: errors are carried
        around it.
    """
    if getattr(fabric.strategy, "_start_method", "popen") != "popen":
        forked: T = fabric.launch(lambda _fabric: function())  # in processes that end with it
        return forked
    errors: list[BaseException] = []

    def guarded(_fabric: Fabric) -> T | None:
        try:
            return function()
        except BaseException as error:  # raised again below, also Ctrl-C
            errors.append(error)
            return None

    result = fabric.launch(guarded)
    if errors:
        raise errors.pop()
    return cast(T, result)


def on_first_process(fabric: Fabric, function: Callable[[], T]) -> T:
    """Call a function on the first process; every process returns its result or raises its `LitFedError`."""
    result: T | None = None
    error: LitFedError | None = None
    if fabric.is_global_zero:
        try:
            result = function()
        except LitFedError as caught:
            error = caught
    result, error = fabric.broadcast((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error there is a result


def leave_processes() -> None:
    """End the process group, which waits for gloo's threads.

    Note:
        Left to the end of the interpreter, a gloo thread may drop the last reference to a tensor and ask for the
        interpreter's lock after it is gone: the process aborts with "terminate called without an active exception".
        Lightning ends nccl's group, not gloo's.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def raise_if_lost(error: BaseException) -> None:
    """Turn a collective's error, fifty lines long, into one line: another process of the run is gone.

    Raises:
        ProcessLost: If the error is a collective's.
    """
    if not torch.distributed.is_initialized() or not isinstance(error, RuntimeError):
        return
    if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
        raise ProcessLost(
            f"process {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} lost the others: one was "
            "stopped, killed, as for memory, or ended by a client's code; continue with --ckpt_path last"
        ) from error


class Workers:
    """The processes over which clients are spread, and their collectives.

    With ``ddp`` every process holds every client: a group of one.

    Args:
        fabric: Launched.
        everyone: Count every process even with ``ddp``, to merge the results of a batch's parts.
    """

    def __init__(self, fabric: Fabric, everyone: bool = False) -> None:
        self.fabric = fabric
        replicated = fabric.world_size > 1 and not isinstance(fabric.strategy, ClientParallelStrategy)
        self.data_parallel = replicated and not everyone
        self.world_size = 1 if self.data_parallel else fabric.world_size
        self.rank = 0 if self.data_parallel else fabric.global_rank
        self._room = 2**12  # bytes that cross in one exchange: as many as the longest object so far

    def share(self, client_ids: Sequence[int], num_samples: Callable[[int], int]) -> list[int]:
        """Clients of the current process: longest first, each to the least loaded process.

        Every process computes the same assignment without communication.
        """
        if self.world_size == 1:
            return list(client_ids)
        loads = [0] * self.world_size
        mine = []
        for negative, client_id in sorted((-num_samples(client_id), client_id) for client_id in client_ids):
            rank = loads.index(min(loads))
            loads[rank] += max(1, -negative)
            if rank == self.rank:
                mine.append(client_id)
        return mine

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in place; without the barrier of Fabric's own."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """A small object of every process, in rank order, on every process.

        Note:
            As ``torch.distributed.all_gather_object``, which first exchanges the lengths: twice the time.
        """
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        count = torch.tensor([len(own)]).view(torch.uint8)
        parts = self._exchange(torch.cat([count, own[: self._room]]), self._room)
        lengths = [int(part[:8].view(torch.int64)) for part in parts]
        if (longest := max(lengths)) > self._room:
            self._room = longest
            parts = self._exchange(torch.cat([count, own]), longest)
        told = [part[8 : 8 + length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
        return [pickle.loads(one) for one in told]  # noqa: S301  # from this run's own processes

    def _exchange(self, own: Tensor, room: int) -> list[Tensor]:
        """Every process's bytes: eight, and a room for the rest."""
        device = self.fabric.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
        sent = torch.zeros(8 + room, dtype=torch.uint8)
        sent[: len(own)] = own
        parts = [torch.empty(8 + room, dtype=torch.uint8, device=device) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, sent.to(device))
        return [part.cpu() for part in parts]

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """A float64 tensor of zeros on this process's device."""
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self.fabric.device)

    def agree(self, payload: Payload) -> None:
        """With ``ddp``, overwrite every process's tensors with the first one's."""
        if self.data_parallel:
            for tensor in payload.values():
                torch.distributed.broadcast(tensor, src=0)
