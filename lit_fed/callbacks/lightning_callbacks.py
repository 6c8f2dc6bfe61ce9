"""Lightning callbacks: watchers of local work run, callbacks that need Lightning's trainer are refused."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from lightning import Callback as LightningCallback

from lit_fed.engine.loop.run import Callback
from lit_fed.errors import ConfigError, reason

_STRETCHES = [
    f"{what}{part}" for what in ("train", "validation", "test", "predict") for part in ("", "_epoch", "_batch")
]
_WATCHED = {
    *(f"on_{what}_{edge}" for what in _STRETCHES for edge in ("start", "end")),
    *("on_fit_start", "on_fit_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    "on_before_zero_grad",
}
_INSTEAD = {
    "BackboneFinetuning": "a method that freezes",
    "BaseFinetuning": "a method that freezes",
    "BasePredictionWriter": "predict with output",
    "BatchSizeFinder": "data.batch_size",
    "Checkpoint": "lit_fed.callbacks.Checkpoint",
    "EarlyStopping": "lit_fed.callbacks.EarlyStopping",
    "GradientAccumulationScheduler": "trainer.accumulate_grad_batches",
    "LambdaCallback": "a subclass of lightning.Callback",
    "LearningRateFinder": "the optimizer's lr",
    "ModelPruning": "a codec",
    "ModelSummary": "lit-fed cost",
    "OnExceptionCheckpoint": "lit_fed.callbacks.Checkpoint",
    "ProgressBar": "lit_fed.callbacks.Progress",
    "StochasticWeightAveraging": "a method that averages",
    "Timer": "trainer.max_rounds, and time/round_s of metrics.csv",
    "WeightAveraging": "a method that averages",
}
"""Replacements of Lightning's own callbacks."""


def lightning_watchers(
    callbacks: Sequence[Callback | LightningCallback],
) -> tuple[list[Callback], list[LightningCallback]]:
    """Split callbacks into listeners of the run and Lightning callbacks, which watch each client's local work.

    Lightning's own are refused: each steers one training or reads its loops and loggers. Each client's work has its
    own copies of the others.

    Raises:
        ConfigError: For one of Lightning's own, a hook that local work lacks, or a callback that cannot be copied.
    """
    own_callbacks: list[Callback] = []
    watchers: list[LightningCallback] = []
    for callback in callbacks:
        if isinstance(callback, Callback):
            own_callbacks.append(callback)
        else:
            _check(callback)
            watchers.append(callback)
    return own_callbacks, watchers


def _check(callback: LightningCallback) -> None:
    name, lineage = type(callback).__name__, type(callback).__mro__
    theirs = [kind.__name__ for kind in lineage if kind.__module__.startswith("lightning.pytorch.callbacks.")]
    if theirs != [LightningCallback.__name__]:
        watching = "a subclass of lightning.Callback that watches"
        instead = next((_INSTEAD[kind] for kind in theirs if kind in _INSTEAD), watching)
        raise ConfigError(
            f"trainer.callbacks: {name} needs a Lightning trainer, which a federation does not have; use {instead}"
        )
    hooks = [hook for hook in vars(LightningCallback) if hook.startswith("on_") or hook in ("setup", "teardown")]
    used = [hook for hook in hooks if getattr(type(callback), hook) is not getattr(LightningCallback, hook)]
    if unknown := [hook for hook in used if hook not in _WATCHED]:
        raise ConfigError(
            f"trainer.callbacks: {name} uses the hook {unknown[0]}, which local work does not have; remove the hook"
        )
    try:
        deepcopy(callback)
    except Exception as error:  # whatever an attribute of a user's class raises
        raise ConfigError(
            f"trainer.callbacks: {name} cannot be copied for each client ({reason(error)}); keep files, locks and "
            "connections out of its attributes, and open each in on_train_start"
        ) from error
