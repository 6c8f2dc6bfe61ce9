"""Listeners of a run. Derive your own from `Callback`; its hooks receive the `Run`."""

from lightning import Callback as LightningCallback

from lit_fed.callbacks.checkpoint import Checkpoint
from lit_fed.callbacks.dashboard import Dashboard
from lit_fed.callbacks.early_stopping import EarlyStopping
from lit_fed.callbacks.lightning_callbacks import lightning_watchers
from lit_fed.callbacks.pictures import Cards, LeftOut
from lit_fed.callbacks.progress import Progress
from lit_fed.callbacks.recorder import Recorder
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.engine.storage.files import in_place_of
from lit_fed.face import live_here

__all__ = [
    "Callback",
    "Cards",
    "Checkpoint",
    "Dashboard",
    "EarlyStopping",
    "LeftOut",
    "LightningCallback",
    "Progress",
    "Recorder",
    "RoundRecord",
    "Run",
    "default_callbacks",
    "in_place_of",
    "lightning_watchers",
]


def default_callbacks(given: list[Callback], progress: bool, checkpoints: bool) -> list[Callback]:
    """Add the default listeners that were not given, and put the checkpoint last."""
    defaults: list[Callback] = [Recorder(), Cards(), LeftOut(), Dashboard()]
    defaults += [Progress()] if progress else []
    defaults += [Checkpoint()] if checkpoints else []
    missing = [default for default in defaults if not any(isinstance(have, type(default)) for have in given)]
    return sorted([*given, *missing], key=lambda callback: isinstance(callback, Checkpoint))


live_here(globals())
