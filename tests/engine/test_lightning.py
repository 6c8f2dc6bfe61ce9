"""Lightning's own list of what a module may do: a federation calls it, or works with it, or refuses it in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedProx
from tests.support import LeastSquares, Points, fit, trainer, weights

STAGES = ("train", "validation", "test", "predict")
CALLED = {
    *(f"on_{stage}_{moment}" for stage in STAGES for moment in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{moment}" for stage in STAGES for moment in ("start", "end")),
    *("on_fit_start", "on_fit_end", "prepare_data", "configure_model", "setup", "teardown", "configure_optimizers"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("training_step", "validation_step", "test_step", "predict_step", "forward"),
    *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step"),
}
REFUSED = {
    *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")),
    *(f"on_{stage}_model_eval" for stage in ("validation", "test", "predict")),
    *("on_validation_model_train", "on_test_model_train", "on_validation_model_zero_grad"),
    *("configure_callbacks", "configure_sharded_model", "on_save_checkpoint", "on_load_checkpoint"),
}
AT_WORK = {
    *("automatic_optimization", "all_gather", "clip_gradients", "current_epoch", "fabric", "freeze", "global_rank"),
    *("global_step", "local_rank", "log", "log_dict", "logger", "loggers", "lr_schedulers", "manual_backward"),
    *("optimizers", "print", "toggle_optimizer", "toggled_optimizer", "trainer", "unfreeze", "untoggle_optimizer"),
}
"""What a module may use of itself while a client works; `ByHand` uses all of it."""
APART = {
    *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE", "strict_loading"),
    *("device_mesh", "example_input_array", "load_from_checkpoint", "to_onnx", "to_tensorrt", "to_torchscript"),
    "on_gpu",
}
"""Constants, and what is about a module on its own, before or after a federation."""


def test_the_list_is_whole() -> None:
    names = {name for kind in (LightningModule, ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)}
    public = {name for name in names if not name.startswith("_")}
    assert public == CALLED | REFUSED | AT_WORK | APART
    assert len(public) == len(CALLED) + len(REFUSED) + len(AT_WORK) + len(APART)


def recording(calls: set[str]) -> LightningModule:
    """A module with every hook of its own, each of which does what Lightning's does."""

    class Whole(LeastSquares):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    def hook(name: str) -> Any:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            return getattr(super(kind, self), name)(*args, **kwargs)

        return called

    kind: Any = type("Recording", (Whole,), {name: hook(name) for name in CALLED})
    made: LightningModule = kind()
    return made


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.0)])
def test_every_hook_is_called_and_may_do_what_lightnings_does(tmp_path: Path, algorithm: Any) -> None:
    calls: set[str] = set()
    parts = (recording(calls), Points(val_fraction=0.34), algorithm)
    made = trainer(tmp_path, max_rounds=1, accumulate_grad_batches=1, local_epochs=2, gradient_clip_val=1e6)
    made.fit(*parts)
    made.validate(*parts)
    made.test(*parts)
    made.predict(*parts, output=str(tmp_path / "p.csv"))
    assert calls == CALLED
    plain = fit(tmp_path / "plain", LeastSquares(), Points(val_fraction=0.34), max_rounds=1, local_epochs=2)
    assert weights(made)["network.weight"].tolist() == weights(plain)["network.weight"].tolist()


@pytest.mark.parametrize("hook", sorted(REFUSED))
def test_what_a_federation_does_not_call_is_refused_in_one_line(tmp_path: Path, hook: str) -> None:
    kind: Any = type("Odd", (LeastSquares,), {hook: lambda self, *args: None})
    with pytest.raises(
        ConfigError, match=f"model Odd has the hook {hook}, which a federation does not call; "
    ) as refusal:
        fit(tmp_path, kind())
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "lightning_logs").exists()


class ByHand(LeastSquares):
    """Optimises by hand and uses everything that a module may use of itself while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.extra = torch.nn.Linear(1, 1)
        self.seen: set[tuple[Any, ...]] = set()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.network, self.extra)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        own, other = self.optimizers()  # type: ignore[misc]  # two of them
        self.extra.requires_grad_(False)
        self.extra.requires_grad_(True)
        with self.toggled_optimizer(other):
            assert not self.network.weight.requires_grad
        self.toggle_optimizer(own)
        assert not self.extra.weight.requires_grad
        loss = self.loss(batch)
        own.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(own, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        own.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]  # one of them
        self.untoggle_optimizer(own)
        self.log("train_loss", loss)
        self.log_dict({"one": 1.0})
        self.print("at work")
        assert self.fabric is not None
        assert self.logger is None
        assert self.loggers == []
        assert self.all_gather(loss.detach()).numel() == 1
        assert self.dtype is torch.float32
        assert self.device.type == "cpu"
        self.seen.add((self.current_epoch, self.global_step, self.global_rank, self.local_rank))
        assert self.trainer.is_global_zero

    def on_test_start(self) -> None:
        self.freeze()
        self.unfreeze()
        self.eval()


def test_what_a_module_may_use_while_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = ByHand()
    made = fit(tmp_path, task, Points(1), max_rounds=2, local_epochs=2)
    # Gradients (w − 2) are clipped to 1: with ½ and ¼, w goes 0 → ½ → ¾, and with the next round's to 1¼ and 1¼ + ¼·¾.
    assert float(weights(made)["network.weight"][0, 0]) == pytest.approx(1.25 + 0.25 * 0.75, rel=1e-5)
    assert task.seen == {(0, 1, 0, 0), (0, 2, 0, 0), (1, 1, 0, 0), (1, 2, 0, 0)}
    assert capsys.readouterr().out.count("at work") == 4
    assert made.metrics["train/one"] == 1.0
    assert made.metrics["train/loss"] > 0
