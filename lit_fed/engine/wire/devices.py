"""Devices and processes of a run: how many, who starts them, and the Fabric on them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from lightning import Fabric
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lit_fed.checks import check_choice, check_range
from lit_fed.engine.wire.workers import ClientParallelStrategy
from lit_fed.errors import ConfigError, reason
from lit_fed.machine import available_cores, most_processes, most_threads

STRATEGIES = ("auto", "clients", "ddp")
_SINGLE_RUNS = "for a run per seed start each by itself, see docs/devices.md"
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # as Lightning reads them


@dataclass(frozen=True, slots=True)
class Devices:
    """The trainer's settings of hardware and arithmetic, under its names.

    Raises:
        ConfigError: For a number of threads out of range.
    """

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
        check_choice("trainer.deterministic", self.deterministic, (False, True, "warn"))

    def settle_arithmetic(self) -> None:
        """Set this process's threads and determinism."""
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is refused without it
            torch.use_deterministic_algorithms(True, warn_only=self.deterministic == "warn")

    def fabric(self) -> Fabric:
        """Make the Fabric of a federation.

        Raises:
            ConfigError: For an unknown strategy, settings that Fabric refuses, or a number of processes that differs
                from those started or exceeds this machine.
        """
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
