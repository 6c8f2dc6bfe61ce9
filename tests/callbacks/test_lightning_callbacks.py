"""Lightning callbacks in a federation: they watch every client's work, or are refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
from lightning import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor, Timer

from lit_fed.callbacks import Recorder
from lit_fed.errors import ClientFailure, ConfigError
from tests.support import fit, trainer


class Counting(Callback):
    """A stranger's: counts, and keeps the count in checkpoints."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.samples = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.count["fit"] += 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.count["train"] += 1

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.count["epoch"] += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert pl_module.network.weight.grad is not None
        self.count["step"] += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count["batch"] += 1
        self.samples += len(batch[1])

    def on_test_batch_end(self, *args: Any) -> None:
        self.count["test batch"] += 1

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.count["end"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def test_a_strangers_callback_watches_every_clients_work(tmp_path: Path) -> None:
    counting = Counting()
    fit(tmp_path, max_rounds=3, local_epochs=2, callbacks=[counting, Recorder()])
    # 3 rounds of 2 clients with 2 epochs of one batch each; a round tests the global model, and both clients.
    assert counting.count == {
        "fit": 1, "train": 6, "epoch": 12, "batch": 12, "step": 12, "test batch": 9, "end": 1
    }  # fmt: skip
    assert counting.samples == 3 * 2 * (1 + 3)


def test_what_it_keeps_is_in_the_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=2, callbacks=[Counting()])
    resumed = Counting()
    fit(tmp_path, max_rounds=3, callbacks=[resumed], ckpt_path="last")
    assert (resumed.samples, resumed.count["train"]) == (3 * (1 + 3), 2)


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (Timer(), "use trainer.max_rounds, and time/round_s of metrics.csv"),
        (Timer(duration="00:00:01:00"), "use trainer.max_rounds, and time/round_s of metrics.csv"),
        (DeviceStatsMonitor(), "use a subclass of lightning.Callback that watches"),
        (LearningRateMonitor(), "use a subclass of lightning.Callback that watches"),
        (lightning_callbacks.ModelCheckpoint(), "use lit_fed.callbacks.Checkpoint"),
        (lightning_callbacks.EarlyStopping("loss"), "use lit_fed.callbacks.EarlyStopping"),
        (lightning_callbacks.TQDMProgressBar(), "use lit_fed.callbacks.Progress"),
        (lightning_callbacks.RichModelSummary(), "use the command explain"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else "",
)
def test_lightnings_own_are_refused_by_name(callback: Any, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.callbacks: {type(callback).__name__} needs a") as caught:
        trainer(Path(), callbacks=[callback])
    assert str(caught.value).endswith(instead)


def test_every_callback_that_lightning_brings_along_is_refused(tmp_path: Path) -> None:
    brought = [getattr(lightning_callbacks, name) for name in lightning_callbacks.__all__]
    for kind in brought:
        if kind is not Callback:
            with pytest.raises(ConfigError, match=rf"trainer\.callbacks: {kind.__name__} needs a Lightning trainer"):
                trainer(tmp_path, callbacks=[object.__new__(kind)])


def test_a_subclass_of_lightnings_own_is_refused_by_its_name() -> None:
    class Mine(Timer):
        pass

    with pytest.raises(ConfigError, match=r"trainer\.callbacks: Mine needs a Lightning trainer"):
        trainer(Path(), callbacks=[Mine()])


@pytest.mark.parametrize("hook", ["setup", "teardown", "on_exception", "on_save_checkpoint", "on_sanity_check_start"])
def test_a_hook_that_no_client_has_is_refused_by_name(hook: str) -> None:
    kind = type("Mine", (Callback,), {hook: lambda self, *args: None})
    with pytest.raises(ConfigError, match=rf"trainer\.callbacks: Mine uses the hook {hook}, which local work"):
        trainer(Path(), callbacks=[kind()])


@pytest.mark.parametrize("other", ["Recorder", Recorder, None])
def test_what_is_no_callback_is_refused(other: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.callbacks holds .*; it must be a callback of lit_fed or"):
        trainer(Path(), callbacks=[other])


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        (lambda trainer: trainer.fit_loop, r"a client of a federation has no self\.trainer\.fit_loop"),
        (
            lambda trainer: setattr(trainer, "should_stop", True),
            r"a client cannot stop the run by self\.trainer\.should_st",
        ),
    ],
)
def test_a_watcher_that_reaches_for_lightnings_loops_is_told_what_there_is(
    tmp_path: Path, reach: Any, message: str
) -> None:
    class Reaching(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            reach(trainer)

    with pytest.raises(ClientFailure, match=message):
        fit(tmp_path, callbacks=[Reaching()])
