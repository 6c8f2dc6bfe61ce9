"""Executors by the names of ``trainer.executor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from lit_fed.engine.clients.executor import Executor, SequentialExecutor
from lit_fed.engine.clients.session import Session
from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor

ExecutorName = Literal["sequential", "vectorized", "auto"]

EXECUTORS: dict[str, Callable[[Session], Executor]] = {
    "sequential": SequentialExecutor,
    "vectorized": VectorizedExecutor,
    "auto": AutoExecutor,
}
