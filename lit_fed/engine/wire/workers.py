"""How a federation spreads over processes.

Either the clients are spread over the processes (``clients``, every process trains whole clients) or every client is
trained data-parallel on all of them (``ddp``). Both stand behind `Workers`, which the loop and the reducers talk to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed
from lightning import Fabric
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor
from torch.nn import Module

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError, LitFedError, ProcessLost, reason
from lit_fed.machine import available_cores, most_processes

T = TypeVar("T")

STRATEGIES = ("auto", "clients", "ddp")


class ClientParallelStrategy(DDPStrategy):
    """Processes that train different clients: the process group of DDP without its gradient averaging.

    Args:
        start_method: ``popen`` runs the same script once per device, ``fork`` serves notebooks and tests.
        kwargs: Passed on to Lightning's ``DDPStrategy``.
    """

    def __init__(self, start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen", **kwargs: Any) -> None:
        super().__init__(start_method=start_method, **kwargs)
        # Gradients are never synchronised, so there is no synchronisation to block either.
        self._backward_sync_control = None

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]  # DDP promises its own wrapper
        """Leave the module as it is: every process works on its own client."""
        return module


def build_fabric(
    accelerator: str,
    devices: list[int] | str | int,
    num_nodes: int,
    strategy: str | Strategy,
    precision: str | int | None,
) -> Fabric:
    """Make the Fabric that a federation runs on.

    Raises:
        ConfigError: For a strategy that is neither ``auto``, ``clients``, ``ddp`` nor a DDP strategy object, for
            settings that Fabric refuses, or for other processes than there are or can be.
    """
    starter = _starter()
    if devices == "auto" and starter is not None:
        devices = starter.here
    _check_devices(devices, num_nodes, starter)
    options: dict[str, Any] = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes}
    options["precision"] = precision
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        raise ConfigError(f"trainer.strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}")
    if isinstance(strategy, Strategy) and not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise ConfigError(
            f"trainer.strategy {type(strategy).__name__} shards one model over devices; use 'clients' or 'ddp'"
        )
    try:
        fabric = Fabric(strategy=strategy if isinstance(strategy, Strategy) else "auto", **options)
        if isinstance(strategy, str) and not isinstance(fabric.strategy, SingleDeviceStrategy):
            # A phase may train only some of the parameters, which plain DDP would wait for.
            chosen = DDPStrategy(find_unused_parameters=True) if strategy == "ddp" else ClientParallelStrategy()
            fabric = Fabric(strategy=chosen, **options)
    except ImportError as error:
        raise ConfigError(f"trainer.accelerator {accelerator}, precision {precision}: {reason(error)}") from error
    except (ValueError, RuntimeError, TypeError) as error:
        text = " ".join(str(error).split())
        if "No supported gpu backend" in text or "accelerator is not available" in text:
            what = "PyTorch finds no such device on this machine; set it to 'cpu' or 'auto'"
            raise ConfigError(f"trainer.accelerator is {accelerator!r}; {what}") from error
        if named := re.search("invalid accelerator name.*Available names are: (.*?)[.]?$", text):
            names = ", ".join(sorted(["gpu", *named[1].split(", ")]))
            raise ConfigError(f"trainer.accelerator is {accelerator!r}; it must be one of {names}") from error
        raise ConfigError(f"trainer: {text}") from error
    wanted = getattr(fabric.strategy, "num_processes", 1) * num_nodes
    if starter is not None and wanted != starter.in_all:
        raise ConfigError(
            f"{starter.name} started {starter.in_all} processes, but trainer.devices {devices} on trainer.num_nodes "
            f"{num_nodes} makes {wanted}; set trainer.devices to {starter.here}, or to auto"
        )
    return fabric


class _Starter(NamedTuple):
    """Who started this process, and others.

    Args:
        name: Of the program.
        here: How many of them on this machine.
        in_all: How many on all machines.
    """

    name: str
    here: int
    in_all: int


def _starter() -> _Starter | None:
    """Who started this process as one of several; None where nobody did, or a run of ours."""
    if TorchElasticEnvironment.detect():
        return _Starter("torchrun", int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]))
    if SLURMEnvironment.detect() and "SLURM_STEP_NUM_TASKS" in os.environ:  # by srun, not a job's own script
        tasks, nodes = (int(os.environ.get(f"SLURM_STEP_NUM_{what}", 1)) for what in ("TASKS", "NODES"))
        return _Starter("SLURM", tasks // nodes, tasks)
    return None


def _check_devices(devices: list[int] | str | int, num_nodes: int, starter: _Starter | None) -> None:
    """Refuse processes that this machine cannot hold, and machines that nobody starts.

    Raises:
        ConfigError: In one line with what there is.
    """
    text = str(devices).strip()
    most = max(most_processes(), torch.cuda.device_count())
    if text.isdecimal() and int(text) > most:
        raise ConfigError(
            f"trainer.devices is {text}, but this machine has {available_cores()} cores and "
            f"{torch.cuda.device_count()} GPUs; use at most {most}"
        )
    if num_nodes > 1 and starter is None and not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys():
        raise ConfigError(
            f"trainer.num_nodes is {num_nodes}, but this process was not started as one of several machines'; start it "
            "by torchrun or SLURM"
        )


def launch(fabric: Fabric, function: Callable[[], T]) -> T:
    """Call a function on all processes, which are started for it where they are not there yet.

    Note:
        Fabric changes PyTorch's `DataLoader` for that time, and changes it back only where nothing is raised: an error
        is carried around it.
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
    """What a function returns on the first process, on every process; so is the error a user can act on."""
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
        Left to the end of the interpreter, one of those threads may still drop the last reference to a tensor. It asks
        for the interpreter's lock, which is gone, and the process aborts after all its work is done: "terminate called
        without an active exception". Lightning ends nccl's group itself; gloo's it leaves.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def raise_if_lost(error: BaseException) -> None:
    """Say in a line what an error of a collective says in fifty: another process of the run is gone.

    Raises:
        ProcessLost: If it is such an error.
    """
    if not torch.distributed.is_initialized() or not isinstance(error, RuntimeError):
        return
    if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
        raise ProcessLost(
            f"process {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} lost the others: one was "
            "stopped, killed, as for memory, or ended by a client's code; go on with --ckpt_path last"
        ) from error


class Workers:
    """The processes over which clients are spread, and how their results meet.

    With ``ddp`` every process holds every client, so this is a group of one.

    Args:
        fabric: The launched Fabric.
        everyone: Count every process even with ``ddp``, to merge what the parts of one batch gave.
    """

    def __init__(self, fabric: Fabric, everyone: bool = False) -> None:
        self.fabric = fabric
        replicated = fabric.world_size > 1 and not isinstance(fabric.strategy, ClientParallelStrategy)
        self.data_parallel = replicated and not everyone
        self.world_size = 1 if self.data_parallel else fabric.world_size
        self.rank = 0 if self.data_parallel else fabric.global_rank

    def share(self, client_ids: Sequence[int], num_samples: Callable[[int], int]) -> list[int]:
        """The clients this process runs: longest first, each to the least loaded process.

        Every process computes the same assignment, so nothing is communicated.
        """
        if self.world_size == 1:
            return list(client_ids)
        loads = [0] * self.world_size
        mine = []
        for client_id in sorted(client_ids, key=lambda client: (-num_samples(client), client)):
            rank = loads.index(min(loads))
            loads[rank] += max(1, num_samples(client_id))
            if rank == self.rank:
                mine.append(client_id)
        return mine

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.world_size == 1:
            return tensor
        return self.fabric.all_reduce(tensor, reduce_op="sum")  # type: ignore[return-value]  # a tensor in, a tensor out

    def gather(self, value: T) -> list[T]:
        """A small object of every process, in rank order, on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """A float64 tensor of zeros on this process's device."""
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self.fabric.device)

    def agree(self, payload: Payload) -> None:
        """With ``ddp``, give every process the first one's tensors, in place."""
        if self.data_parallel:
            for tensor in payload.values():
                torch.distributed.broadcast(tensor, src=0)
