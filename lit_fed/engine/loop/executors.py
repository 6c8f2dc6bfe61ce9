"""Executors by the names of ``trainer.executor``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from lit_fed.checks import check_choice, check_range
from lit_fed.engine.clients.executor import Executor, SequentialExecutor
from lit_fed.engine.clients.session import Session
from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor
from lit_fed.errors import ConfigError

ExecutorName = Literal["sequential", "vectorized", "auto"]

EXECUTORS: dict[str, Callable[..., Executor]] = {
    "sequential": SequentialExecutor,
    "vectorized": VectorizedExecutor,
    "auto": AutoExecutor,
}


def executor_maker(name: str, group_size: int | None) -> Callable[[Session], Executor]:
    """Maker of a session's executor.

    Args:
        name: A key of `EXECUTORS`.
        group_size: Clients in a group; None leaves it to the executor.

    Raises:
        ConfigError: For an unknown name, a size below 1, or a size where no groups are trained.
    """
    check_choice("trainer.executor", name, list(EXECUTORS))
    if group_size is None:
        return EXECUTORS[name]
    check_range("trainer.group_size", group_size, least=1)
    if name == "sequential":
        raise ConfigError(
            f"trainer.group_size is {group_size!r}, but trainer.executor=sequential trains one client after the other; "
            "set trainer.executor to vectorized or auto, or leave trainer.group_size out"
        )
    return partial(EXECUTORS[name], group_size=group_size)
