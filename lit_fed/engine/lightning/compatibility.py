"""Checks, before any training, that a task, a method and the data can work together."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lit_fed.engine.lightning.objective import Objective, head_of, task_name
from lit_fed.engine.lightning.optimization import has_own_scheduler_step, parse_optimizers
from lit_fed.engine.lightning.task_trainer import GradientOptions
from lit_fed.engine.method.algorithm import NEEDS, Algorithm
from lit_fed.engine.method.client import EffectiveSteps
from lit_fed.errors import ConfigError
from lit_fed.participation import Participation

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

NO_HOOKS = {
    "configure_callbacks": "name callbacks under trainer.callbacks",
    "configure_sharded_model": "a client's model is whole on its device; use configure_model",
    "on_save_checkpoint": "a federation's checkpoint holds parameters and buffers; register what must be kept as one",
    "on_load_checkpoint": "a federation's checkpoint holds parameters and buffers; register what must be kept as one",
    "on_validation_model_zero_grad": "a client is not validated while it trains",
}
"""Lightning's hooks that a federation does not call, and the replacements."""


def check_task(task: LightningModule, algorithm: Algorithm[Any]) -> None:
    """Refuse a task that lacks a need of the method, or has hooks that a federation does not call."""
    name = task_name(task)
    if type(task).training_step is LightningModule.training_step:
        raise ConfigError(f"model {name} has no training_step; a client needs one")
    if not any(parameter.requires_grad for parameter in task.parameters()):
        raise ConfigError(f"model {name} has no parameter that trains; a client needs one")
    if "dataloader_iter" in inspect.signature(task.training_step).parameters:
        raise ConfigError(f"model {name} has training_step(dataloader_iter); a client needs training_step(batch, …)")
    for parameter_name, parameter in task.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"model {name}: {parameter_name!r} has no shape yet; run its lazy layers once in setup")
    for hook, instead in NO_HOOKS.items():
        if overrides(task, hook):
            raise ConfigError(f"model {name} has the hook {hook}, which a federation does not call; {instead}")
    needs = algorithm.all_needs
    if "loss" in needs and not task.automatic_optimization:
        raise ConfigError(f"model {name} optimises by hand, and {whose(algorithm, 'loss')} needs {NEEDS['loss']}")
    if "unweighted" in needs and getattr(task, "class_weights", None) is not None:
        raise ConfigError(f"{whose(algorithm, 'unweighted')} needs {NEEDS['unweighted']}")
    if wanted := [need for need in ("head", "features", "logits", "outputs", "body") if need in needs]:
        head = head_of(task, algorithm.head)
        if head is None and wanted != ["body"]:
            raise _missing(task, algorithm, wanted[0])
        of_head = {id(parameter) for parameter in (head.parameters() if head is not None else ())}
        if "body" in needs and not any(one.requires_grad and id(one) not in of_head for one in task.parameters()):
            raise _missing(task, algorithm, "body")
    if "levels" in needs and not callable(getattr(task, "levels", None)):
        raise _missing(task, algorithm, "levels")
    if "forward" in needs and type(task).forward is LightningModule.forward:
        raise _missing(task, algorithm, "forward")


def check_participation(algorithm: Algorithm[Any], participation: Participation) -> None:
    """Refuse a participation that lacks a need of the method."""
    if "probability" in algorithm.all_needs and participation.probability_is == "unknown":
        raise ConfigError(
            f"{whose(algorithm, 'probability')} needs {NEEDS['probability']}; choose another than {participation.label}"
        )
    if "one_model" in algorithm.all_needs and not participation.one_model:
        raise ConfigError(
            f"{whose(algorithm, 'one_model')} needs {NEEDS['one_model']}; choose another trainer.participation than "
            f"{participation.label}"
        )


def check_data(task: LightningModule, algorithm: Algorithm[Any], data: FederatedDataModule) -> None:
    """Refuse data that lack a need of the method, or that a task refuses (``check_shape``)."""
    if (check := getattr(task, "check_shape", None)) is not None:
        for shape in data.input_shapes:
            check(shape)
    needs = algorithm.all_needs
    for need in ("targets", "classes"):
        if need in needs and data.num_classes is None:
            raise _missing(task, algorithm, need)
    if "public" in needs and not data.has_public:
        raise _missing(task, algorithm, "public")


def check_optimization(
    task: LightningModule, algorithm: Algorithm[Any], data_parallel: bool, gradients: GradientOptions
) -> type[Optimizer] | None:
    """Refuse optimizers that the local loop or the method cannot use.

    Returns:
        The class of the task's optimizer; None where it has several.
    """
    name, method = task_name(task), type(algorithm).__name__
    try:
        optimizers, _, by_step = parse_optimizers(task.configure_optimizers(), has_own_scheduler_step(task))
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.optimizer cannot be made: {error}") from error
    if task.automatic_optimization and len(optimizers) > 1:
        raise ConfigError(
            f"model {name} has {len(optimizers)} optimizers; set self.automatic_optimization = False and step them"
            " in training_step, or return one optimizer"
        )
    for optimizer in optimizers if task.automatic_optimization else ():
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(
                f"model {name} has the optimizer {type(optimizer).__name__}, which asks for the loss several times a"
                " step; choose another, or set self.automatic_optimization = False and step it in training_step"
            )
    for key, used in (
        ("gradient_clip_val", gradients.clip_val is not None),
        ("accumulate_grad_batches", gradients.accumulate > 1),
        ("schedule_steps", gradients.schedule_steps == "run"),
    ):
        if used and not task.automatic_optimization:
            raise ConfigError(f"model {name} optimises by hand, so trainer.{key} has no effect; do it in training_step")
    for entry in by_step if gradients.schedule_steps == "run" else ():
        if not hasattr(entry.scheduler, "load_state_dict"):
            raise ConfigError(
                f"model {name} has the scheduler {type(entry.scheduler).__name__} without state_dict and "
                "load_state_dict, by which trainer.schedule_steps=run goes on from round to round; add them"
            )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = {float(group["lr"]) for group in groups if "lr" in group}
    if "one_optimizer" in algorithm.all_needs and (len(optimizers) > 1 or len(rates) > 1):
        has = f"{len(optimizers)} optimizers" if len(optimizers) > 1 else f"{len(rates)} learning rates"
        raise ConfigError(f"model {name} has {has}, and algorithm {method} needs {NEEDS['one_optimizer']}")
    if "one_optimizer" in algorithm.all_needs and gradients.client_optimizer == "kept":
        raise ConfigError(
            f"trainer.client_optimizer is kept, and algorithm {method} measures the steps of a fresh optimizer; set it "
            "to fresh"
        )
    for optimizer in optimizers:
        if "linear_steps" in algorithm.all_needs and not EffectiveSteps.measures(type(optimizer)):
            has = f"the optimizer {type(optimizer).__name__}"
            raise ConfigError(f"model {name} has {has}, and algorithm {method} needs {NEEDS['linear_steps']}")
    check_decay(task, algorithm, groups)
    if data_parallel and "whole_batches" in algorithm.all_needs:
        raise ConfigError(f"algorithm {method} needs {NEEDS['whole_batches']}")
    if not task.automatic_optimization and data_parallel:
        raise ConfigError(f"model {name} optimises by hand, which strategy=ddp cannot synchronise; use 'clients'")
    return type(optimizers[0]) if len(optimizers) == 1 else None


def check_decay(task: LightningModule, algorithm: Algorithm[Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse weight decay under a method that adds a weight decay itself.

    Args:
        task: The task, for its name.
        algorithm: The method.
        groups: Parameter groups of the task's optimizers.
    """
    if "no_decay" not in algorithm.all_needs:
        return
    decay = max((float(group.get("weight_decay", 0.0)) for group in groups), default=0.0)
    if decay:
        raise ConfigError(
            f"model {task_name(task)} has an optimizer of weight_decay {decay:g}, and {whose(algorithm, 'no_decay')} "
            f"needs {NEEDS['no_decay']}"
        )


def probe(objective: Objective, algorithm: Algorithm[Any], batches: Iterable[Any]) -> None:
    """Check logits, features or labels on one batch, where the method needs them.

    The task's tensors and the generators are restored.
    """
    needs = algorithm.all_needs
    if not needs & {"logits", "outputs", "features", "targets"}:
        return
    batch = next(iter(batches), None)
    if batch is None:
        return
    name, method = task_name(objective), type(algorithm).__name__
    state, outputs = objective.state, None
    client = state.client
    with torch.no_grad(), torch.random.fork_rng(), client.muted(), client.model.lent(), client.model.evaluating():
        if state.task_run.head is not None and objective.automatic_optimization:
            outputs = client.run(batch)
            client.forget()
        if "targets" in needs:
            try:
                labels = client.targets(batch)
            except (KeyError, IndexError, TypeError):
                labels = None
            if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
                raise _missing(objective, algorithm, "targets")
    if outputs is not None and "logits" in needs:
        logits = outputs.logits
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"algorithm {method} needs logits (B, C) of at least two classes, and the head of model {name} gives "
                f"{shape}; name another submodule as algorithm.head"
            )


def overrides(task: LightningModule, hook: str) -> bool:
    """Whether a task overrides a hook."""
    return getattr(type(task), hook, None) is not getattr(LightningModule, hook, None)


def _missing(task: LightningModule, algorithm: Algorithm[Any], need: str) -> ConfigError:
    return ConfigError(
        f"{whose(algorithm, need)} needs {NEEDS[need]}; model {task_name(task)} with these data has none"
    )


def whose(algorithm: Algorithm[Any], need: str) -> str:
    """The method or its regularizer, whichever has the need."""
    if need not in algorithm.needs and algorithm.regularizer is not None:
        return f"regularizer {type(algorithm.regularizer).__name__}"
    return f"algorithm {type(algorithm).__name__}"
