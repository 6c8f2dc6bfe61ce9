"""LightningModules as somebody writes them who has never heard of federated learning; nothing of lit_fed is imported.

They learn the 8×8 digits of scikit-learn, from batches (x, y) with x of shape (B, 1, 8, 8), and `RegressionNet` ten
measurements of diabetes patients, with batches (x, y) of shapes (B, 10) and (B,).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Accuracy, F1Score, MeanAbsoluteError, MetricCollection


class RegressionNet(LightningModule):
    """A network, a squared error, Adam."""

    def __init__(self, hidden: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(10, hidden), nn.Tanh())
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        predicted: Tensor = self.out(self.body(x))
        return predicted.squeeze(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log_dict({"val_mse": F.mse_loss(self(x), y), "val_mae": (self(x) - y).abs().mean()})

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]  # a module's call

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


class Net(LightningModule):
    """A classifier with all that Lightning's own examples have: batch norm, metric objects, a schedule, hooks."""

    def __init__(self, hidden: int = 24, lr: float = 0.05, interval: str = "epoch") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, 10)
        self.train_acc = Accuracy("multiclass", num_classes=10)
        self.val_acc = Accuracy("multiclass", num_classes=10)
        self.test_metrics = MetricCollection(
            {
                "acc": Accuracy("multiclass", num_classes=10),
                "f1": F1Score("multiclass", num_classes=10, average="macro"),
            },
            prefix="test/",
        )
        self.epochs_seen = {"train": 0, "val": 0, "test": 0}
        self.opened = 0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits

    def on_train_epoch_start(self) -> None:
        self.opened += 1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs_seen["train"] += 1
        self.log("train/opened", float(self.opened > 0))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val/loss", F.cross_entropy(logits, y), batch_size=len(y))

    def on_validation_epoch_end(self) -> None:
        self.epochs_seen["val"] += 1
        self.log("val/acc", self.val_acc)

    def on_test_epoch_start(self) -> None:
        self.epochs_seen["test"] += 1

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.test_metrics.update(logits, y)
        self.log("test/loss", F.cross_entropy(logits, y))
        self.log_dict(self.test_metrics)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch[0])
        return {"prediction": logits.argmax(1), "probability": logits.softmax(1)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        entry = {"scheduler": scheduler, "interval": self.hparams["interval"], "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": entry}


class DictNet(Net):
    """Takes batches ``{"image": x, "label": y}``, returns a dict."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Tensor]:
        return {"image": batch[0], "label": batch[1]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self(batch["image"])
        return {"loss": F.cross_entropy(logits, batch["label"]), "probability": logits.detach().softmax(1)}

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("train/confidence", outputs["probability"].amax(1).mean(), batch_size=len(batch["label"]))
        self.log("train/surprise", outputs["loss"], batch_size=len(batch["label"]))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().validation_step((batch["image"], batch["label"]), batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().test_step((batch["image"], batch["label"]), batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        return super().predict_step((batch["image"], batch["label"]), batch_idx)


class Terse(LightningModule):
    """As short as a module can be: its steps take the batch only, and there is no test_step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("error", (self(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Curious(Terse):
    """Asks its trainer for everything: the epoch, the step, the logger, the data, how long it will take."""

    def setup(self, stage: str) -> None:
        self.num_clients = self.trainer.datamodule.num_clients  # type: ignore[attr-defined]  # the data set's own

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().training_step(batch)
        progress = self.current_epoch / self.trainer.max_epochs  # type: ignore[operator]  # it is set
        if self.global_step == 0 and self.trainer.is_global_zero:
            self.print(f"epoch {self.current_epoch} of {self.trainer.max_epochs}")
            self.logger.experiment.add_scalar("stranger/progress", progress, self.current_epoch)  # type: ignore[union-attr]
        self.log("progress", progress)
        self.log("steps", float(self.global_step), reduce_fx="max")
        self.log("seen", float(len(batch[0])), reduce_fx=torch.sum)
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # of Lightning's trainer, set by its fit
        assert self.trainer.training
        assert self.trainer.world_size == 1
        assert self.num_clients == data.num_clients
        return (1 - 0.5 * progress) * loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Meddler(Terse):
    """Does by its own hooks what the loop would do: backward, clipping, steps, schedules, the transfer of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        return batch[0] - 0.5, batch[1]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.calls.append("clip")
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.5 / (1 + self.trainer.global_step)
        self.calls.append("step")
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append("zero")
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append("schedule")
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


class LatentGAN(LightningModule):
    """A GAN by hand on the digits' 64 pixels: two optimizers, a schedule each, toggled, stepped in turn."""

    def __init__(self, noise: int = 8) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise = noise
        self.generator = nn.Sequential(nn.Linear(noise, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z: Tensor) -> Tensor:
        picture: Tensor = self.generator(z)
        return picture

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        both: Any = self.optimizers()
        forge, judge = both
        real_is, fake_is = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)

        self.toggle_optimizer(judge)
        fake = self(torch.randn(len(real), self.noise, device=real.device)).detach()
        doubt = F.binary_cross_entropy_with_logits(self.judge(real), real_is) + F.binary_cross_entropy_with_logits(
            self.judge(fake), fake_is
        )
        judge.zero_grad()
        self.manual_backward(doubt)
        self.clip_gradients(judge, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        judge.step()
        self.untoggle_optimizer(judge)

        self.toggle_optimizer(forge)
        fooled = F.binary_cross_entropy_with_logits(
            self.judge(self(torch.randn(len(real), self.noise, device=real.device))), real_is
        )
        forge.zero_grad()
        self.manual_backward(fooled)
        forge.step()
        self.untoggle_optimizer(forge)
        self.log_dict({"train/judge": doubt, "train/forge": fooled})

    def on_train_epoch_end(self) -> None:
        both: Any = self.lr_schedulers()
        for scheduler in both:
            scheduler.step()
        self.log("train/lr", both[0].get_last_lr()[0])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        fakes = self(torch.randn(len(batch[0]), self.noise, device=batch[0].device))
        self.log("test/distance", (fakes.mean(0) - batch[0].flatten(1).mean(0)).norm())

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.judge)]
        return made, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in made]


class Inner(LightningModule):
    """A LightningModule within another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1))
        return logits / (1 + self.trainer.current_epoch)


class Nested(Terse):
    """Holds a LightningModule that asks for the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Inner()  # type: ignore[assignment]  # a module as well


class Fixed(Terse):
    """Fine-tunes: its features are somebody else's and do not train, its masks are buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(64, 32)
        self.features.requires_grad_(False)
        self.net = nn.Sequential(nn.ReLU(), nn.Linear(32, 10))
        self.mae = MeanAbsoluteError()
        self.register_buffer("batches", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(self.features(x.flatten(1)))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.batches.add_(1)  # type: ignore[operator]  # a tensor
        self.log("batches", self.batches, reduce_fx="max")  # type: ignore[arg-type]  # a tensor
        return super().training_step(batch)
