"""A client's objective without a federation."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule

from lit_fed.engine.lightning.compatibility import check_decay, check_task
from lit_fed.engine.lightning.objective import ATTRIBUTE, join
from lit_fed.engine.lightning.optimization import has_own_scheduler_step, parse_optimizers
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.model import Model


def objective_of(task: LightningModule, algorithm: Algorithm[Any]) -> LightningModule:
    """A client's objective as a LightningModule for a plain ``lightning.Trainer``: the task with the method's terms.

    ``Trainer().fit(objective_of(MyModule(), FedProx(mu=0.1)), datamodule)`` trains centrally, without the terms that
    need a broadcast, such as FedProx's.

    Args:
        task: Any LightningModule, trained in place.
        algorithm: The method.

    Raises:
        ConfigError: If the task lacks a need of the method.
    """
    algorithm.adapt(task)
    check_task(task, algorithm)
    if "no_decay" in algorithm.all_needs:
        optimizers, _, _ = parse_optimizers(task.configure_optimizers(), has_own_scheduler_step(task))
        check_decay(task, algorithm, (group for optimizer in optimizers for group in optimizer.param_groups))
    model = Model(task)
    model.divide(algorithm.split(model, 0))
    objective, state = join(task, algorithm, model)
    task.__dict__[ATTRIBUTE] = state
    state.task_run.listen()
    return objective
