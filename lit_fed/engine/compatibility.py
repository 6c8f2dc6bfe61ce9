"""Whether a task, a method and the data can work together; checked before any training, refused in one line."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from torch import Tensor

from lit_fed.engine.algorithm import NEEDS, Algorithm
from lit_fed.engine.model import Model
from lit_fed.engine.objective import at_work, head_of, join, task_name
from lit_fed.engine.optimization import parse_optimizers
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

_NO_HOOKS = {
    "configure_callbacks": "name callbacks under trainer.callbacks",
    "configure_sharded_model": "a client's model is whole on its device",
    "train_dataloader": "clients' data come from data",
    "val_dataloader": "clients' data come from data",
    "test_dataloader": "clients' data come from data",
    "predict_dataloader": "clients' data come from data",
    "on_save_checkpoint": "a federation's checkpoint holds parameters and buffers; register what must be kept as one",
    "on_load_checkpoint": "a federation's checkpoint holds parameters and buffers; register what must be kept as one",
    "on_validation_model_zero_grad": "a client is not validated while it trains",
}
"""Lightning's hooks that a federation does not call, and what to do instead."""


def check_task(task: LightningModule, algorithm: Algorithm[Any]) -> None:
    """Refuse a task that lacks what a method needs, or hooks that a federation does not call.

    Raises:
        ConfigError: In one line that names what is missing.
    """
    name, method = task_name(task), type(algorithm).__name__
    if type(task).training_step is LightningModule.training_step:
        raise ConfigError(f"model {name} has no training_step; a client needs one")
    if not any(parameter.requires_grad for parameter in task.parameters()):
        raise ConfigError(f"model {name} has no parameter that trains; a client needs one")
    for hook, instead in _NO_HOOKS.items():
        if overrides(task, hook):
            raise ConfigError(f"model {name} has the hook {hook}, which a federation does not call; {instead}")
    needs = algorithm.all_needs
    if "loss" in needs and not task.automatic_optimization:
        raise ConfigError(f"model {name} optimises by hand, and algorithm {method} needs {NEEDS['loss']}")
    if needs & {"logits", "outputs", "features", "head"} and head_of(task, algorithm.head) is None:
        raise _missing(
            task, algorithm, next(need for need in ("head", "features", "logits", "outputs") if need in needs)
        )
    if "forward" in needs and type(task).forward is LightningModule.forward:
        raise _missing(task, algorithm, "forward")


def check_data(task: LightningModule, algorithm: Algorithm[Any], data: FederatedDataModule) -> None:
    """Refuse data that lack what a method needs.

    Raises:
        ConfigError: In one line that names what is missing.
    """
    needs = algorithm.all_needs
    if "targets" in needs and data.num_classes is None:
        raise _missing(task, algorithm, "targets")
    if "public" in needs and not data.has_public:
        raise _missing(task, algorithm, "public")


def check_optimization(task: LightningModule, algorithm: Algorithm[Any], data_parallel: bool) -> None:
    """Refuse optimizers that the local loop or the method cannot do with.

    Raises:
        ConfigError: If `configure_optimizers` fails (a negative learning rate, say), returns none, or several while
            the module optimises automatically, or the module optimises by hand under ``strategy=ddp``.
    """
    name, method = task_name(task), type(algorithm).__name__
    try:
        optimizers, _, _ = parse_optimizers(task.configure_optimizers())
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.optimizer cannot be made: {error}") from error
    if task.automatic_optimization and len(optimizers) > 1:
        raise ConfigError(
            f"model {name} has {len(optimizers)} optimizers; set self.automatic_optimization = False and step them"
            " in training_step, or return one optimizer"
        )
    if "one_optimizer" in algorithm.all_needs and len(optimizers) > 1:
        raise ConfigError(
            f"model {name} has {len(optimizers)} optimizers, and algorithm {method} needs {NEEDS['one_optimizer']}"
        )
    if data_parallel and "whole_batches" in algorithm.all_needs:
        raise ConfigError(f"algorithm {method} needs {NEEDS['whole_batches']}")
    if not task.automatic_optimization and data_parallel:
        raise ConfigError(f"model {name} optimises by hand, which strategy=ddp cannot synchronise; use 'clients'")


def probe(task: LightningModule, algorithm: Algorithm[Any], batches: Iterable[Any]) -> None:
    """Run a copy of the task on one batch to see that logits, features and labels are there, where a method needs them.

    Raises:
        ConfigError: If the head does not run just once, or what it gives is not what the method needs.
    """
    needs = algorithm.all_needs
    if not needs & {"logits", "outputs", "features", "targets"}:
        return
    batch = next(iter(batches), None)
    if batch is None:
        return
    name, method = task_name(task), type(algorithm).__name__
    twin = copy.deepcopy(task)
    objective, state = join(twin, algorithm, Model(twin))
    client = state.client
    with at_work(objective, state), torch.no_grad(), torch.random.fork_rng(), client.muted():
        outputs = client.run(batch) if state.head is not None else None
        if "targets" in needs:
            try:
                labels = client.targets(batch)
            except (KeyError, IndexError, TypeError):
                labels = None
            if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
                raise _missing(task, algorithm, "targets")
    if outputs is not None and "logits" in needs:
        logits = outputs.logits
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"algorithm {method} needs logits (B, C) of at least two classes, and the head of model {name} gives "
                f"{shape}; name another submodule as algorithm.head"
            )


def overrides(task: LightningModule, hook: str) -> bool:
    """Whether a task has a hook of its own."""
    return getattr(type(task), hook, None) is not getattr(LightningModule, hook, None)


def _missing(task: LightningModule, algorithm: Algorithm[Any], need: str) -> ConfigError:
    who = f"algorithm {type(algorithm).__name__}"
    if need not in algorithm.needs and algorithm.regularizer is not None:
        who = f"regularizer {type(algorithm.regularizer).__name__}"
    return ConfigError(f"{who} needs {NEEDS[need]}; model {task_name(task)} with these data has none")
