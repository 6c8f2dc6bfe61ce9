"""Everything that Lightning offers a module is answered in a federation, refused by name, or plain.

The lists of hooks and properties are Lightning's own: one that a new version adds belongs to no group here, and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lit_fed.engine.lightning.compatibility import NO_HOOKS
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.strangers import Terse
from tests.support import LeastSquares, Points, fit, trainer, weights

HOOKS = {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind) if not name.startswith("_")}
PUBLIC = {name for kind in (LightningModule, HyperparametersMixin) for name in vars(kind) if not name.startswith("_")}
DEVICE = {name for kind in LightningModule.__mro__[1:-2] for name in vars(kind) if not name.startswith("_")}

LOADERS = {f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")}
"""Where there is a data module, Lightning itself asks that and not the module."""

STEPS = {
    "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "backward",
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping",
}  # fmt: skip
"""What a module may override beside the hooks, and a federation calls."""

ANSWERED = {
    "trainer", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers", "log", "log_dict",
    "print", "all_gather", "optimizers", "lr_schedulers", "clip_gradients", "manual_backward", "toggle_optimizer",
    "untoggle_optimizer", "toggled_optimizer", "automatic_optimization",
}  # fmt: skip
"""What a module asks for while it works; `Inquisitive` and `ByHand` use them all."""

PLAIN = {
    "forward": "the module's own",
    "freeze": "sets requires_grad and the mode, which are respected",
    "unfreeze": "sets requires_grad and the mode, which are respected",
    "example_input_array": "for exports and summaries",
    "to_onnx": "an export",
    "to_torchscript": "an export",
    "to_tensorrt": "an export",
    "load_from_checkpoint": "makes a module, before there is a federation",
    "CHECKPOINT_HYPER_PARAMS_KEY": "names within Lightning's checkpoints",
    "CHECKPOINT_HYPER_PARAMS_NAME": "names within Lightning's checkpoints",
    "CHECKPOINT_HYPER_PARAMS_TYPE": "names within Lightning's checkpoints",
    "strict_loading": "for Lightning's checkpoints; ours name every tensor",
    "device_mesh": "None, as under every strategy that keeps a model whole",
    "fabric": "the Fabric that runs it",
    "on_gpu": "from the device",
    "hparams": "attributes of the module",
    "hparams_initial": "attributes of the module",
    "save_hyperparameters": "runs when the module is made",
    "remove_ignored_hparams": "within save_hyperparameters",
}
"""What works on the module alone, and why."""


def test_every_hook_and_property_of_lightning_belongs_to_one_group() -> None:
    called = HOOKS - NO_HOOKS.keys() - LOADERS
    groups = [called, set(NO_HOOKS), LOADERS, STEPS, ANSWERED, set(PLAIN)]
    assert sum(map(len, groups)) == len(set().union(*groups)), "a name is in two groups"
    assert (HOOKS | PUBLIC) - set().union(*groups) == set(), (
        "Lightning has something that a federation does not know of"
    )
    assert set().union(*groups) - HOOKS - PUBLIC == set(), "Lightning has it no more"
    assert {name for name in PUBLIC | HOOKS if name.startswith("configure_")} <= called | STEPS | set(NO_HOOKS)


def test_what_else_a_module_inherits_is_about_devices_and_types() -> None:
    assert {"cpu", "cuda", "device", "double", "dtype", "float", "half", "to", "type"} == DEVICE - HOOKS - PUBLIC


# ---------------------------------------------------------------------- hooks that are called


class Base(LeastSquares):
    """Has all four steps and a schedule that steps with every batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]  # a module's call

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _recording(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(name)
        return getattr(super(Recorder, self), name)(*args, **kwargs)

    return hook


Recorder: Any = type(
    "Recorder", (Base,), {name: _recording(name) for name in (HOOKS - NO_HOOKS.keys() - LOADERS) | STEPS}
)


def make_recorder() -> Any:
    module = Recorder()
    module.seen = []
    return module


def test_every_other_hook_is_called_and_changes_nothing(tmp_path: Path) -> None:
    plain = fit(tmp_path, Base(), Points(val_fraction=0.5, sizes=(4, 4)), max_rounds=2)
    module, data = make_recorder(), Points(val_fraction=0.5, sizes=(4, 4))
    made = trainer(tmp_path, max_rounds=2)
    parts = (module, data, FedAvg())
    made.fit(*parts)
    assert weights(made)["network.weight"].equal(weights(plain)["network.weight"])
    made.validate(*parts)
    made.test(*parts)
    made.predict(*parts, output=str(tmp_path / "predictions.csv"))
    assert (HOOKS - NO_HOOKS.keys() - LOADERS) | STEPS == set(module.seen)


def test_hooks_come_in_lightnings_order(tmp_path: Path) -> None:
    module = make_recorder()
    fit(tmp_path, module, Points(1), max_rounds=1, evaluate_every=0)
    seen = [name for name in module.seen if name != "configure_optimizers"]
    assert seen == [
        "prepare_data", "setup", "configure_model", "on_fit_start",
        "on_train_start", "on_train_epoch_start",
        "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
        "on_train_batch_start", "optimizer_step", "training_step", "on_before_zero_grad", "optimizer_zero_grad",
        "on_before_backward", "backward", "on_after_backward",
        "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step",
        "on_train_batch_end", "on_train_epoch_end", "on_train_end",
        "on_fit_end", "teardown",
    ]  # fmt: skip


def test_evaluation_hooks_come_in_lightnings_order(tmp_path: Path) -> None:
    module, made = make_recorder(), trainer(tmp_path, max_rounds=1, protocols=[])
    parts = (module, Points(1), FedAvg())
    made.fit(*parts)
    module.seen.clear()
    made.predict(*parts, output=str(tmp_path / "predictions.csv"))
    assert module.seen == [
        "setup", "on_predict_model_eval", "on_predict_start", "on_predict_epoch_start",
        "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
        "on_predict_batch_start", "predict_step", "on_predict_batch_end",
        "on_predict_epoch_end", "on_predict_end", "teardown",
    ]  # fmt: skip


def test_a_module_is_told_what_it_is_set_up_for(tmp_path: Path) -> None:
    told = []

    class Told(Base):
        def setup(self, stage: str) -> None:
            told.append(("setup", stage, self.trainer.datamodule.num_clients))  # type: ignore[attr-defined]

        def teardown(self, stage: str) -> None:
            told.append(("teardown", stage, self.trainer.datamodule.num_clients))  # type: ignore[attr-defined]

    parts, made = (Told(), Points(3), FedAvg()), trainer(tmp_path, max_rounds=1)
    made.fit(*parts)
    made.test(*parts)
    assert told == [(hook, stage, 3) for stage in ("fit", "test") for hook in ("setup", "teardown")]
    trainer(tmp_path, max_rounds=1).test(*parts, ckpt_path="last")
    assert told[4:] == told[2:4]


def test_parameters_may_be_made_in_setup_once(tmp_path: Path) -> None:
    class Late(Base):
        def setup(self, stage: str) -> None:
            self.network = nn.Linear(2, 1, bias=False)

    parts, made = (Late(), Points(), FedAvg()), trainer(tmp_path, max_rounds=1)
    made.fit(*parts)
    assert list(weights(made)) == ["network.weight"]
    with pytest.raises(ConfigError, match=r"model Late replaces its parameters in setup\('test'\)"):
        made.test(*parts)


@pytest.mark.parametrize("mode", [False, True])
def test_a_module_may_choose_its_mode_of_evaluation(tmp_path: Path, mode: bool) -> None:
    """Dropout at 0.5 while testing, as for Monte-Carlo estimates: half of the predictions are doubled, half are 0."""
    seen = []

    class MonteCarlo(Terse):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(2, 10), nn.Dropout())

        def on_test_model_eval(self) -> None:
            super().on_test_model_eval()
            self.net[2].train(mode)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((self.training, self.net[2].training, bool((self(batch[0]) == 0).any())))

    made = fit(tmp_path, MonteCarlo(), Points(sizes=(40, 40)), max_rounds=1)
    assert set(seen) == {(False, mode, mode)}
    assert all(module.training for module in made.run.federation.loops["model"].model.task.modules())


# ---------------------------------------------------------------------- hooks that are not


@pytest.mark.parametrize("hook", sorted(NO_HOOKS))
def test_a_hook_that_is_never_called_is_refused_by_name(tmp_path: Path, hook: str) -> None:
    module = type("Unheard", (LeastSquares,), {hook: lambda self, *args: None})()
    with pytest.raises(ConfigError, match=rf"^model Unheard has the hook {hook}, which a federation does not call; \w"):
        fit(tmp_path, module)
    assert not (tmp_path / "lightning_logs").exists()


def test_a_modules_own_loaders_are_not_asked_as_in_lightning_with_a_data_module(tmp_path: Path) -> None:
    def asked(self: Any) -> Any:
        raise AssertionError("asked for its loader")

    module = type("WithData", (LeastSquares,), dict.fromkeys(LOADERS, asked))()
    assert weights(fit(tmp_path, module, max_rounds=1))["network.weight"].tolist() == [[0.25, 1.5]]


# ---------------------------------------------------------------------- what a module asks for


class Inquisitive(LeastSquares):
    """Uses in its steps what Lightning has for them, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, list[Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.automatic_optimization
        assert self.lr_schedulers() is None
        now = {
            "current_epoch": self.current_epoch,
            "global_step": self.global_step,
            "global_rank": self.global_rank,
            "local_rank": self.local_rank,
            "logger": type(self.logger).__name__,
            "loggers": len(self.loggers),
            "trainer": (self.trainer.max_epochs, self.trainer.num_training_batches, self.trainer.world_size),
            "all_gather": self.all_gather({"x": 2.0, "n": torch.tensor([1, 2])}),
            "optimizers": type(self.optimizers()).__name__,
            "device": (self.device, self.dtype),
        }
        for name, value in now.items():
            self.told.setdefault(name, []).append(value)
        self.print("asked", batch_idx)
        loss = self.loss(batch)
        self.log("train/one", 1.0)
        self.log_dict({"train/two": 2.0, "train/loss": loss})
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.told.setdefault("clip", []).append((gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def test_a_module_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, data = Inquisitive(), Points(1, sizes=(10, 0))
    data.batch_size = 4
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    made = fit(tmp_path, module, data, max_rounds=2, local_epochs=2, logger=logger, gradient_clip_val=0.5)
    told = module.told
    assert told["current_epoch"] == [0] * 6 + [1] * 6  # ten samples in batches of 4 are 3, two epochs, two rounds
    assert told["global_step"] == [*range(6)] * 2
    assert set(told["global_rank"]) == set(told["local_rank"]) == {0}
    assert set(told["logger"]) == {"TensorBoardLogger"}
    assert set(told["loggers"]) == {1}
    assert set(told["trainer"]) == {(2, 3, 1)}
    gathered = told["all_gather"][0]
    assert gathered["x"].tolist() == 2.0
    assert gathered["n"].tolist() == [1, 2]
    assert set(told["optimizers"]) == {"SGD"}
    assert set(told["device"]) == {(torch.device("cpu"), torch.float32)}
    assert set(told["clip"]) == {(0.5, "norm")}
    # Every gradient (w − 2) is clipped to −½, so a step of ½ adds ¼ until w = 1.5, and half of what is left after it.
    expected = 0.0
    for _ in range(12):
        expected += 0.5 * min(0.5, 2.0 - expected)
    assert weights(made)["network.weight"].tolist() == [[expected, 0.0]]
    assert capsys.readouterr().out.count("asked") == 12
    metrics = made.metrics
    assert metrics["train/one"] == 1.0
    assert metrics["train/two"] == 2.0


class ByHand(LeastSquares):
    """Optimises by hand, with all that Lightning has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = nn.Linear(1, 1, bias=False)
        self.told: list[str] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.told.append("before_backward")

    def on_after_backward(self) -> None:
        self.told.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.told.append("before_step")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        both: Any = self.optimizers()
        one, two = both
        self.toggle_optimizer(one)
        assert not self.second.weight.requires_grad
        loss = self.loss(batch)
        one.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        one.step()
        self.untoggle_optimizer(one)
        with self.toggled_optimizer(two):
            two.zero_grad()
            self.manual_backward(self.second.weight.square().sum() / 2)
            two.step()
        schedules: Any = self.lr_schedulers()
        for schedule in schedules:
            schedule.step()
        self.log("train/rate", one.param_groups[0]["lr"])
        return {"loss": loss, "more": 3.0}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("train/more", outputs["more"])

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.network, self.second)]
        return made, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in made]


def test_a_module_that_optimises_by_hand_is_answered(tmp_path: Path) -> None:
    module, data = ByHand(), Points(1, sizes=(2, 0))
    nn.init.ones_(module.second.weight)
    data.batch_size = 1
    made = fit(tmp_path, module, data, max_rounds=1)
    # Two steps, at rates ½ and ¼: the gradient of the first weight is clipped from −2 to −½, so 0 → ¼ → ⅜; that of the
    # second is the weight itself, 1 → ½ → ⅜.
    assert {name: tensor.flatten().tolist() for name, tensor in weights(made).items()} == {
        "network.weight": [0.375, 0.0],
        "second.weight": [0.375],
    }
    assert module.told == ["before_backward", "after_backward", "before_step"] * 4
    assert made.metrics["train/more"] == 3.0
    assert made.metrics["train/rate"] == pytest.approx((0.25 + 0.125) / 2)
