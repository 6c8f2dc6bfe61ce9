"""Lightning's own callbacks: those that watch or time the local work run, those that would steer it are refused."""

from __future__ import annotations

from collections.abc import Sequence

from lightning import Callback as LightningCallback

from lit_fed.engine.callback import Callback
from lit_fed.errors import ConfigError

_WATCHED = {
    *(f"on_{stage}_{edge}" for stage in ("train", "validation", "test", "predict") for edge in ("start", "end")),
    *(f"on_{stage}_epoch_{edge}" for stage in ("train", "validation", "test", "predict") for edge in ("start", "end")),
    *(f"on_{stage}_batch_{edge}" for stage in ("train", "validation", "test", "predict") for edge in ("start", "end")),
    *("on_fit_start", "on_fit_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    "on_before_zero_grad",
}
_STEERING = {
    "ModelCheckpoint": "lit_fed.callbacks.Checkpoint",
    "OnExceptionCheckpoint": "lit_fed.callbacks.Checkpoint",
    "EarlyStopping": "lit_fed.callbacks.EarlyStopping",
    "GradientAccumulationScheduler": "trainer.accumulate_grad_batches",
    "StochasticWeightAveraging": "a method of its own",
    "WeightAveraging": "a method of its own",
    "EMAWeightAveraging": "a method of its own",
    "BatchSizeFinder": "data.batch_size",
    "LearningRateFinder": "the optimizer's lr",
    "RichProgressBar": "lit_fed.callbacks.Progress",
    "TQDMProgressBar": "lit_fed.callbacks.Progress",
    "ModelPruning": "a codec",
    "BackboneFinetuning": "a method that freezes",
    "BaseFinetuning": "a method that freezes",
    "LambdaCallback": "a subclass of lightning.Callback",
}


def lightning_watchers(
    callbacks: Sequence[Callback | LightningCallback],
) -> tuple[list[Callback], list[LightningCallback]]:
    """Our listeners of the run, and Lightning's callbacks, which listen to every client's local work.

    Raises:
        ConfigError: For one of Lightning's that steers the training, or uses a hook that no client has.
    """
    own: list[Callback] = []
    watchers: list[LightningCallback] = []
    for callback in callbacks:
        if isinstance(callback, Callback):
            own.append(callback)
            continue
        name = type(callback).__name__
        for kind in type(callback).__mro__:
            if kind.__name__ in _STEERING and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
                raise ConfigError(
                    f"trainer.callbacks: Lightning's {name} steers one training and cannot steer a federation; use "
                    f"{_STEERING[kind.__name__]}"
                )
        hooks = [hook for hook in vars(LightningCallback) if hook.startswith("on_") or hook in ("setup", "teardown")]
        used = [hook for hook in hooks if getattr(type(callback), hook) is not getattr(LightningCallback, hook)]
        if unknown := [hook for hook in used if hook not in _WATCHED]:
            raise ConfigError(
                f"trainer.callbacks: Lightning's {name} uses {unknown[0]}, which no client's work has; leave it out"
            )
        watchers.append(callback)
    return own, watchers
