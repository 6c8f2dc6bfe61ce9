"""The settings of a run in groups, each checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning import Callback as LightningCallback
from lightning import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger

from lit_fed.checks import check_local, check_range
from lit_fed.engine.clients.executor import Executor
from lit_fed.engine.clients.guard import Guard
from lit_fed.engine.clients.session import Session
from lit_fed.engine.evaluation.protocols import EvalSubset, Protocol, check_names
from lit_fed.engine.lightning.task_trainer import GradientOptions, NetworkOptions
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import LocalWork
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.method.model import BufferPolicy
from lit_fed.engine.method.wrapper import Wrappers
from lit_fed.errors import ConfigError
from lit_fed.participation import Participation

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

OnFailure = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class RunParts:
    """The objects that a federation is made of.

    Args:
        tasks: By kind of network.
        kinds: The kind of each client.
        data: The population.
        algorithm: The method.
        participation: Draws the cohorts.
    """

    tasks: Mapping[str, LightningModule]
    kinds: Kinds
    data: FederatedDataModule
    algorithm: Algorithm[Any]
    participation: Participation


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Settings of the local work.

    Args:
        work: Length of a client's work in a round.
        gradients: Clipping and accumulation.
        networks: Compilation and memory format.
        buffers: Policy for buffers such as batch-norm statistics.
        watchers: Lightning callbacks on the local work.
        executor: Makes a session's executor.
        guard: Limits a client's time.
        wrappers: Wrappers around the method.
    """

    work: LocalWork
    gradients: GradientOptions
    networks: NetworkOptions
    buffers: BufferPolicy
    watchers: Sequence[LightningCallback]
    executor: Callable[[Session], Executor]
    guard: Guard
    wrappers: Wrappers


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The trainer's settings of rounds, evaluation and output, under its names.

    Args:
        logs: Folder of all runs.
        config: The resolved configuration as YAML, if the command line started the run; else empty.
        given_keys: Configuration keys that the user set, without ``init_args``, most recent first.
        is_trial: Whether nothing is kept of the run.
    """

    max_rounds: int
    seed: int
    evaluate_every: int
    evaluate_on: EvalSubset
    protocols: Sequence[Protocol]
    on_client_failure: OnFailure
    logs: Path
    logger: bool | Logger | list[Logger]
    enable_pictures: bool
    config: str = ""
    given_keys: tuple[str, ...] = ()
    is_trial: bool = False

    def __post_init__(self) -> None:
        check_local("trainer.default_root_dir", self.logs.parent)
        check_range("trainer.max_rounds", self.max_rounds, least=1)
        check_range("trainer.evaluate_every", self.evaluate_every, least=0)
        check_names(self.protocols)
        _check_loggers(self.logger, self.logs)


def _check_loggers(choice: bool | Logger | list[Logger], logs: Path) -> None:
    """Refuse a ``CSVLogger`` whose ``metrics.csv`` would overwrite a run's own: among the runs, or beside a logger."""
    given = [logger for logger in (choice if isinstance(choice, list) else [choice]) if isinstance(logger, Logger)]
    for logger in given:
        if isinstance(logger, CSVLogger):
            others = [other.log_dir for other in given if other is not logger and other.log_dir]
            if Path(logger.root_dir).resolve() == logs.resolve() or logger.log_dir in others:
                raise ConfigError(
                    f"trainer.logger CSVLogger would write its metrics.csv over a run's own in {logger.log_dir}; give "
                    "it another name, or leave it out: every run has metrics.csv without it"
                )
