"""The processes of a run: how many, on which devices, who starts them, and how they talk.

Clients are spread over the processes (``clients``: every process trains whole clients), or every client is trained
data-parallel on all of them (``ddp``). The loop and the reducers talk to `Workers` in both cases.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed
from lightning import Fabric
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lit_fed.checks import check_choice, check_range
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError, LitFedError, ProcessLost, reason
from lit_fed.machine import available_cores, most_processes, most_threads

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
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        count = torch.tensor([len(pickled)]).view(torch.uint8)
        parts = self._exchange(torch.cat([count, pickled[: self._room]]), self._room)
        lengths = [int(part[:8].view(torch.int64)) for part in parts]
        if (longest := max(lengths)) > self._room:
            self._room = longest
            parts = self._exchange(torch.cat([count, pickled]), longest)
        pickles = [part[8 : 8 + length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
        return [pickle.loads(part) for part in pickles]  # noqa: S301  # from this run's own processes

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


STRATEGIES = ("auto", "clients", "ddp")
_SINGLE_RUNS = "for a run per seed start each by itself, see docs/devices.md"
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # as Lightning reads them


@dataclass(frozen=True, slots=True)
class Devices:
    """The trainer's settings of hardware and arithmetic, under its names."""

    accelerator: str = "auto"
    devices: list[int] | int | str = "auto"
    num_nodes: int = 1
    strategy: str | Strategy = "auto"
    precision: str | int | None = "32-true"
    num_threads: int | None = None
    deterministic: bool | Literal["warn"] = False

    def __post_init__(self) -> None:
        check_range("trainer.num_threads", self.num_threads, least=1, null="for torch's choice")
        if self.num_threads is not None and self.num_threads > most_threads():
            raise ConfigError(
                f"trainer.num_threads is {self.num_threads}; this machine can have at most {most_threads()}"
            )

    def settle_arithmetic(self) -> None:
        """Set this process's threads and determinism."""
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is refused without it
            torch.use_deterministic_algorithms(True, warn_only=self.deterministic == "warn")

    def fabric(self) -> Fabric:
        """Make the Fabric of a federation."""
        starter, strategy = _starter(), self.strategy
        devices = starter.here if self.devices == "auto" and starter is not None else self.devices
        _check_devices(devices, self.num_nodes, starter)
        if isinstance(strategy, str):
            check_choice("trainer.strategy", strategy, STRATEGIES)
        elif not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
            raise ConfigError(
                f"trainer.strategy {type(strategy).__name__} shards one model over devices; use 'clients' or 'ddp'"
            )
        options: dict[str, Any] = {
            "accelerator": self.accelerator,
            "devices": devices,
            "num_nodes": self.num_nodes,
            "precision": self.precision,
        }
        try:
            fabric = Fabric(strategy=strategy if isinstance(strategy, Strategy) else "auto", **options)
            if isinstance(strategy, str) and not isinstance(fabric.strategy, SingleDeviceStrategy):
                # A phase may train only some of the parameters; plain DDP would wait for the others.
                chosen = DDPStrategy(find_unused_parameters=True) if strategy == "ddp" else ClientParallelStrategy()
                fabric = Fabric(strategy=chosen, **options)
        except ImportError as error:
            raise ConfigError(
                f"trainer.accelerator {self.accelerator}, precision {self.precision}: {reason(error)}"
            ) from error
        except (ValueError, RuntimeError, TypeError) as error:
            text, key = " ".join(str(error).split()), f"trainer.accelerator is {self.accelerator!r}"
            if "No supported gpu backend" in text or "accelerator is not available" in text:
                no_device = "PyTorch finds no such device on this machine; set it to 'cpu' or 'auto'"
                raise ConfigError(f"{key}; {no_device}") from error
            if named := re.search("invalid accelerator name.*Available names are: (.*?)[.]?$", text):
                names = ", ".join(sorted(["gpu", *named[1].split(", ")]))
                raise ConfigError(f"{key}; it must be one of {names}") from error
            if "--ntasks-per-node" in text:
                tasks = os.environ.get("SLURM_NTASKS")
                raise ConfigError(
                    f"SLURM_NTASKS is {tasks}; start one run of {tasks} processes with --ntasks-per-node; "
                    f"{_SINGLE_RUNS}"
                ) from error
            raise ConfigError(f"trainer: {text}") from error
        wanted = getattr(fabric.strategy, "num_processes", 1) * self.num_nodes
        if starter is not None and wanted != starter.in_all:
            raise ConfigError(
                f"{starter.name} started {starter.in_all} processes, but trainer.devices {devices} on "
                f"trainer.num_nodes {self.num_nodes} makes {wanted}; set trainer.devices to {starter.here}, or to "
                f"auto; {_SINGLE_RUNS}"
            )
        number = getattr(rank_zero_only, "rank", 0)
        if wanted == 1 and number:
            rank_zero_only.rank = 0  # type: ignore[attr-defined]  # it stands alone, and prints the error
            name = next((key for key in _RANKS if os.environ.get(key) == str(number)), "RANK")
            raise ConfigError(
                f"{name} is {number}, as in one of several processes, but trainer.devices {devices} makes one; unset "
                f"{name}, or start a process for each device, see docs/devices.md"
            )
        return fabric


class _Starter(NamedTuple):
    """The program that started this process as one of several.

    Args:
        name: Its name.
        here: Processes on this machine.
        in_all: Processes on all machines.
    """

    name: str
    here: int
    in_all: int


def _starter() -> _Starter | None:
    """The program that started several processes; None for a single process or one of a run's own."""
    if TorchElasticEnvironment.detect():
        return _Starter("torchrun", int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]))
    if SLURMEnvironment.detect() and "SLURM_STEP_NUM_TASKS" in os.environ:  # by srun, not a job's own script
        tasks, nodes = (int(os.environ.get(f"SLURM_STEP_NUM_{what}", 1)) for what in ("TASKS", "NODES"))
        return _Starter("SLURM", tasks // nodes, tasks)
    return None


def _check_devices(devices: list[int] | str | int, num_nodes: int, starter: _Starter | None) -> None:
    """Refuse more processes than this machine can hold, and several machines without a starter."""
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
