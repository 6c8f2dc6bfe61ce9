"""Lightning callbacks in a federation: they watch every client's work, or are refused by name."""

from __future__ import annotations

import threading
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
from lightning import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor, Timer

from lit_fed.callbacks import Recorder
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.methods import FedAvg, LocalOnly
from tests.support import assert_same, fit, trainer, weights

COUNT: Counter[str] = Counter()


class Counting(Callback):
    """A stranger's: counts its hooks in a module's variable, and one client's batches in itself."""

    def __init__(self) -> None:
        COUNT.clear()
        self.batches = 0
        self.rounds = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        COUNT["fit"] += 1
        self.rounds = trainer.max_epochs

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        COUNT["train"] += 1
        assert self.batches == 0  # nothing of another client or round

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        COUNT["epoch"] += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert pl_module.network.weight.grad is not None
        COUNT["step"] += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        COUNT["batch"] += 1
        COUNT["samples"] += len(batch[1])
        self.batches += 1
        # The mean of what the client has logged so far; its batches are alike.
        assert float(trainer.callback_metrics["train/loss"]) > float(outputs["loss"]) - 1e-6

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.batches == 2

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.callback_metrics == {}

    def on_test_batch_end(self, *args: Any) -> None:
        COUNT["test batch"] += 1

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        COUNT["end"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        COUNT["loaded"] += state["rounds"]


def test_a_strangers_callback_watches_every_clients_work(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=3, local_epochs=2, callbacks=[Counting(), Recorder()])
    # 3 rounds of 2 clients with 2 epochs of one batch each; a round tests the global model, and both clients.
    assert COUNT == {
        "fit": 1, "train": 6, "epoch": 12, "batch": 12, "step": 12, "test batch": 9, "end": 1,
        "samples": 3 * 2 * (1 + 3),
    }  # fmt: skip


def test_what_it_keeps_of_the_run_is_in_the_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=2, local_epochs=2, callbacks=[Counting()])
    fit(tmp_path, max_rounds=3, local_epochs=2, callbacks=[Counting()], ckpt_path="last")
    assert (COUNT["loaded"], COUNT["train"]) == (2, 2)


class Averaging(Callback):
    """An ordinary exponential moving average of the weights, swapped in when training ends."""

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.shadow: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, weight in pl_module.state_dict().items():
            before = self.shadow.get(name, weight)
            self.shadow[name] = self.decay * before + (1 - self.decay) * weight.clone()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.shadow)


@pytest.mark.parametrize("algorithm", [FedAvg, LocalOnly])
def test_an_average_of_one_clients_weights_holds_nothing_of_another(tmp_path: Path, algorithm: Any) -> None:
    """Client 0 steps from 0 to 1, client 1 from 0 to 2: an average begun with client 0 would hold half of both."""
    both = fit(tmp_path / "both", algorithm=algorithm(), max_rounds=1, callbacks=[Averaging()])
    alone = fit(tmp_path / "alone", algorithm=algorithm(), max_rounds=1)
    assert_same(weights(both), weights(alone))  # of one step, the average is the step


def test_a_callback_that_cannot_be_copied_is_refused() -> None:
    class Open(Callback):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"trainer\.callbacks: Open cannot be copied for each client \(.*lock"):
        trainer(Path(), callbacks=[Open()])


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
        (lightning_callbacks.RichModelSummary(), "use lit-fed cost"),
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
    with pytest.raises(ConfigError, match=r"trainer\.callbacks\[0\] is .*; it must be a Callback"):
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


class Swapping(Callback):
    """Averages the weights of training, and swaps them in for a test."""

    def __init__(self, module: bool) -> None:
        self.module = module

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self.swap(pl_module)

    def swap(self, pl_module: Any) -> None:
        if self.module:
            pl_module.network = deepcopy(pl_module.network)
        else:
            pl_module.network.weight.data.add_(0.5)  # of which its version tells nothing


class SwappingLate(Swapping):
    """Does so for a batch."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_test_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.swap(pl_module)


@pytest.mark.parametrize("kind", [Swapping, SwappingLate])
@pytest.mark.parametrize("module", [True, False])
def test_a_watcher_that_swaps_weights_for_a_test_is_refused(tmp_path: Path, module: bool, kind: type[Swapping]) -> None:
    """It has its own copy for each client and test, so that the swapped weights would be the initial ones."""
    with pytest.raises(ConfigError, match=rf"callbacks: {kind.__name__} changes the model's weights for a test"):
        fit(tmp_path, callbacks=[kind(module)])
