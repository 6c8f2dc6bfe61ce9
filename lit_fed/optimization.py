"""Optimizers and learning-rate schedules of a client's local work.

`configure_optimizers` is asked anew for every phase of every client, so momentum never leaks from one client to the
next. An ``epoch`` schedule counts rounds: every client of a round starts from the same learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_fed.client import ClientModule
from lit_fed.errors import ConfigError

_FORMS = "an optimizer, a list of optimizers, ([optimizers], [schedulers]) or {'optimizer': …, 'lr_scheduler': …}"


class OptimizerFactory:
    """Makes a client's optimizers, at the learning rate of the round.

    Args:
        module: The module whose ``configure_optimizers`` is asked.

    Note:
        The values a schedule gives a round come from one optimizer a phase that is stepped once a round; nothing of it
        is saved, a resumed run steps it up to its round.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._templates: dict[str, tuple[list[Optimizer], list[LRScheduler], int]] = {}

    def build(self, phase: str, round_idx: int) -> tuple[list[Optimizer], list[LRScheduler]]:
        """Fresh optimizers for one phase, and those schedulers that step with every batch."""
        optimizers, by_round, by_step = parse_optimizers(self.module.configure_optimizers())
        if by_round:
            for optimizer, template in zip(optimizers, self._template(phase, round_idx), strict=True):
                for group, scheduled in zip(optimizer.param_groups, template.param_groups, strict=True):
                    group.update({key: value for key, value in scheduled.items() if key != "params"})
        return optimizers, by_step

    def _template(self, phase: str, round_idx: int) -> list[Optimizer]:
        optimizers, schedulers, at = self._templates.get(phase, ([], [], round_idx + 1))
        if at > round_idx:
            optimizers, schedulers, _ = parse_optimizers(self.module.configure_optimizers())
            at = 0
        for optimizer in optimizers:
            # A scheduler warns unless its optimizer has stepped, by a flag that it adds to the optimizer; the template
            # never steps, it only carries hyper-parameters.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        for _ in range(at, round_idx):
            for scheduler in schedulers:
                scheduler.step()
        self._templates[phase] = (optimizers, schedulers, round_idx)
        return optimizers


def parse_optimizers(configured: Any) -> tuple[list[Optimizer], list[LRScheduler], list[LRScheduler]]:
    """Read what `configure_optimizers` returned, in any of Lightning's forms.

    Returns:
        The optimizers, the schedulers that step once a round, and those that step with every batch.

    Raises:
        ConfigError: For another form, or a scheduler that watches a metric.
    """
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], Sequence):
        optimizers, schedulers = list(configured[0]), list(configured[1])
    else:
        for entry in configured if isinstance(configured, tuple | list) else [configured]:
            if isinstance(entry, dict):
                optimizers.append(entry.get("optimizer"))  # type: ignore[arg-type]  # checked below
                schedulers += [entry["lr_scheduler"]] if entry.get("lr_scheduler") is not None else []
            else:
                optimizers.append(entry)
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ConfigError(f"model.configure_optimizers must return {_FORMS}; it returned {configured!r:.80}")
    by_round: list[LRScheduler] = []
    by_step: list[LRScheduler] = []
    for entry in schedulers:
        config = entry if isinstance(entry, dict) else {"scheduler": entry}
        scheduler = config.get("scheduler")
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"model: learning-rate scheduler {type(scheduler).__name__} is not a function of the round;"
                " use one of torch.optim.lr_scheduler that needs no metric"
            )
        (by_step if config.get("interval") == "step" else by_round).append(scheduler)
    return optimizers, by_round, by_step


def check_optimization(module: ClientModule, data_parallel: bool) -> None:
    """Refuse before any training what the local loop cannot do.

    Raises:
        ConfigError: If `configure_optimizers` fails (a negative learning rate, say), returns several optimizers while
            the module optimises automatically, or the module optimises manually under ``strategy=ddp``.
    """
    try:
        optimizers, _, _ = parse_optimizers(module.configure_optimizers())
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.optimizer cannot be made: {error}") from error
    name = type(module).__name__
    if module.automatic_optimization and len(optimizers) > 1:
        raise ConfigError(
            f"model {name} has {len(optimizers)} optimizers; set self.automatic_optimization = False and step them"
            " in training_step, or return one optimizer"
        )
    if not module.automatic_optimization and data_parallel:
        raise ConfigError(f"model {name} optimises manually, which strategy=ddp cannot synchronise; use 'clients'")
