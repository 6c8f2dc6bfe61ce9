"""What Lightning offers and a federation cannot do is refused in one line that says what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.errors import ClientFailure, ConfigError
from tests.strangers import LatentGAN
from tests.support import LeastSquares, fit


class OnPlateau(LeastSquares):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


class Iterates(LeastSquares):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]  # as Lightning allows
        raise AssertionError


class SecondOrder(LeastSquares):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Lazy(LeastSquares):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.LazyLinear(1)


class Bare(LeastSquares):
    def configure_optimizers(self) -> Any:
        return None


class Foreign(LeastSquares):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)], [object()]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (OnPlateau(), r"ReduceLROnPlateau watches a metric \(monitor\) and is not a function of the round"),
        (Iterates(), r"model Iterates has training_step\(dataloader_iter\); a client needs training_step\(batch, …\)"),
        (SecondOrder(), r"model SecondOrder has the optimizer LBFGS, which asks for the loss several times a step"),
        (Lazy(), r"model Lazy: 'network.weight' has no shape yet"),
        (Bare(), r"model.configure_optimizers must return an optimizer, .*; it returned None"),
        (Foreign(), r"model: object is not a scheduler of torch.optim.lr_scheduler; step it in lr_scheduler_step"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LightningModule) else "",
)
def test_what_a_federation_cannot_do_is_refused_before_any_training(
    tmp_path: Path, module: LightningModule, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        fit(tmp_path, module)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_settings_that_modules_by_hand_would_ignore_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(ConfigError, match=rf"model LatentGAN optimises by hand, so trainer.{key} has no effect"):
        fit(tmp_path, LatentGAN(), **settings)


class Forgetful(LeastSquares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"predictions": self(batch[0])}


class Numeric(LeastSquares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 1.0


class Thawing(LeastSquares):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 1)
        self.other.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.other.requires_grad_(True)


class Reader(LeastSquares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.fit_loop


class Stopper(LeastSquares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = True


class Reducing(LeastSquares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, reduce_fx=torch.median)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Forgetful(), "training_step returned a dict of predictions; it must return a tensor"),
        (Numeric(), "training_step returned float; it must return a tensor"),
        (Thawing(), "a hook of the model makes 'other.weight' trainable, which was frozen at the start"),
        (Reader(), "a client of a federation has no self.trainer.fit_loop; use current_epoch"),
        (Stopper(), "a client cannot stop the run by self.trainer.should_stop; use callback EarlyStopping"),
        (Reducing(), "it must be mean, sum, min or max"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LightningModule) else "",
)
def test_what_only_shows_at_work_ends_in_one_line(tmp_path: Path, module: LightningModule, message: str) -> None:
    with pytest.raises(ClientFailure, match=f"client 0 failed in round 0: .*{message}") as error:
        fit(tmp_path, module)
    assert "\n" not in str(error.value)
