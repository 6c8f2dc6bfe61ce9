"""`lit_fed.tasks.Classifier`: values by hand, under Lightning's own trainer, from the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_fed import Classifier
from lit_fed.command.cli import main
from lit_fed.data import Digits
from lit_fed.errors import ConfigError
from tests.support import ROOT, fit, rows

CONFIGS = ROOT / "configs"


def scores(lr: float = 1.0, **kwargs: Any) -> Classifier:
    """f(x) = (x, 0) for one number x, so that the probability of class 0 is σ(x)."""
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.data.copy_(torch.tensor([[1.0], [0.0]]))
    return Classifier(layer, lambda p: torch.optim.SGD(p, lr=lr), **({"num_classes": 2} | kwargs))


# ln 3 and −ln 3: probabilities ¾ and ¼ of class 0; and one of 0, with ½.
X, Y = torch.tensor([[math.log(3)], [-math.log(3)], [-math.log(3)]]), torch.tensor([0, 1, 0])
LOSS = -(2 * math.log(0.75) + math.log(0.25)) / 3


def plain(tmp_path: Path, **settings: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("batch_size", [3, 2])
def test_loss_and_accuracy_by_hand(tmp_path: Path, stage: str, batch_size: int) -> None:
    run = plain(tmp_path)
    evaluate = run.validate if stage == "val" else run.test
    [found] = evaluate(scores(), DataLoader(TensorDataset(X, Y), batch_size=batch_size), verbose=False)
    assert found == {f"{stage}/loss": pytest.approx(LOSS), f"{stage}/acc": pytest.approx(2 / 3)}


def test_a_step_by_hand(tmp_path: Path) -> None:
    # The gradient in class 0's score is p − 1[y = 0]: −¼, ¼, −¾; times x: (−¼ − ¼ + ¾)·ln 3 / 3 = ln 3 / 12.
    module, run = scores(lr=1.0), plain(tmp_path, max_epochs=1)
    run.fit(module, DataLoader(TensorDataset(X, Y), batch_size=3))
    weight: Any = module.network.weight
    assert weight.flatten().tolist() == pytest.approx([1 - math.log(3) / 12, math.log(3) / 12])
    assert float(run.callback_metrics["train/loss"]) == pytest.approx(LOSS)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            torch.zeros(3, 3, dtype=torch.long),
            r"one class a prediction, and a sample's targets have shape \(3,\)",
        ),
        (
            torch.zeros(3, 1, dtype=torch.long),
            r"one class a prediction, and a sample's targets have shape \(1,\)",
        ),
        (torch.zeros(3), "targets are floating-point numbers; use Regressor"),
        (torch.zeros(3, 1), "targets are floating-point numbers; use Regressor"),
        (torch.zeros(3, 3), "targets are floating-point numbers; use Regressor"),
    ],
)
def test_targets_that_are_no_classes_are_refused_in_a_line(y: Tensor, message: str) -> None:
    module = scores()
    for step in (module.training_step, module.test_step):
        with pytest.raises(ConfigError, match=message):
            step((X, y), 0)


def test_probabilities_and_a_class_for_each_pixel_are_targets(tmp_path: Path) -> None:
    """Cross-entropy with targets (q, 1 − q): −q ln p − (1 − q) ln (1 − p); the larger probability is the class."""
    q = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    data = DataLoader(TensorDataset(X, q), batch_size=3)
    [found] = plain(tmp_path).test(scores(), data, verbose=False)
    own = -(0.9 * math.log(0.75) + 0.1 * math.log(0.25) + 1.4 * math.log(0.75) + 0.6 * math.log(0.25)) / 3
    assert found == {"test/loss": pytest.approx(own), "test/acc": 1.0}
    pixels = Classifier(nn.Conv2d(1, 2, 1), num_classes=2)
    assert pixels.training_step((torch.zeros(3, 1, 4, 4), torch.zeros(3, 4, 4, dtype=torch.long)), 0) > 0


def test_weights_of_classes_by_hand_and_as_torch_weighs(tmp_path: Path) -> None:
    """Weights 1 and 3: (ln 4/3 + 3 ln 4/3 + ln 4) / (1 + 3 + 1); the loss of a test weighs all alike."""
    module = scores(class_weights=[1.0, 3.0])
    loss = module.training_step((X, Y), 0)
    assert float(loss) == pytest.approx((4 * math.log(4 / 3) + math.log(4)) / 5)
    assert torch.equal(loss, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))(module(X), Y))
    [found] = plain(tmp_path).test(module, DataLoader(TensorDataset(X, Y), batch_size=3), verbose=False)
    assert found["test/loss"] == pytest.approx(LOSS)
    assert "weights_in_loss" not in module.state_dict()  # it does not travel
    assert torch.equal(scores().training_step((X, Y), 0), scores(class_weights=[2.0, 2.0]).training_step((X, Y), 0))


def test_labels_by_hand_and_as_torch_weighs_them(tmp_path: Path) -> None:
    """f(x) = (x, 0): probabilities ¾ or ¼ of the first label, ½ of the second, which is off below a score of 0."""
    y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    module = scores(num_classes=None, labels=["flu", "gout"], class_weights=[2.0, 1.0])
    first, second = [math.log(4 / 3), math.log(4 / 3), math.log(4)], 3 * math.log(2)
    loss = module.training_step((X, y), 0)
    assert float(loss) == pytest.approx((2 * first[0] + first[1] + 2 * first[2] + second) / 6)
    assert torch.equal(loss, nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 1.0]))(module(X), y))
    data = DataLoader(TensorDataset(X, y), batch_size=2)
    [found] = plain(tmp_path).test(module, data, verbose=False)
    assert found == {
        "test/loss": pytest.approx((sum(first) + second) / 6),
        "test/acc": pytest.approx(3 / 6),  # flu, no flu; no gout
        "test/acc_flu": pytest.approx(2 / 3),
        "test/acc_gout": pytest.approx(1 / 3),
    }
    told = module.predict_step(X, 0)
    assert told["prediction"].tolist() == [[1, 0], [0, 0], [0, 0]]
    assert told["probability"].flatten().tolist() == pytest.approx([0.75, 0.5, 0.25, 0.5, 0.25, 0.5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_weights": [1.0]}, r"model\.class_weights has 1 weights for 2 outputs; give one each"),
        ({"class_weights": [1.0, 0.0]}, r"model\.class_weights\[1\] is 0\.0; it must be above 0"),
        ({"class_weights": [1.0, math.inf]}, r"model\.class_weights\[1\] is inf; it must be above 0"),
        ({"class_weights": "even"}, r"Classifier\.class_weights is 'even'; it must be "),
        ({"metrics": ["auc"]}, r"Classifier\.metrics\[0\] is 'auc'; it must be 'auroc', 'balanced_accuracy', 'f1' or"),
        (
            {"labels": ["a", "b"]},
            r"model\.num_classes and 'balanced' class_weights are not for model\.labels; leave them",
        ),
        ({"labels": ["a", "a"], "num_classes": None}, r"model\.labels is \['a', 'a'\]; it must be different names"),
        ({"labels": ["a/b"], "num_classes": None}, r"model\.labels is \['a/b'\]; it must be different names without"),
        ({"labels": [], "num_classes": None}, r"model\.labels is \[\]; it must be different names"),
        (
            {"labels": ["a", "b"], "num_classes": None, "class_weights": "balanced"},
            r"model\.num_classes and 'balanced' class_weights are not for model\.labels; leave them out",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_a_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scores(**settings)


@pytest.mark.parametrize("y", [torch.zeros(3, 2, dtype=torch.long), torch.zeros(3), torch.zeros(3, 3)])
def test_targets_that_are_no_labels_are_refused_in_a_line(y: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"model\.labels has 2 labels, and a sample's targets are torch\."):
        scores(num_classes=None, labels=["a", "b"]).training_step((X, y), 0)


def test_balanced_weights_need_data_that_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'balanced', and the data do not count classes; give a list"):
        plain(tmp_path, max_epochs=1).fit(scores(class_weights="balanced"), DataLoader(TensorDataset(X, Y)))


def test_predictions_the_head_and_the_labels() -> None:
    module = scores()
    found = module.predict_step((X, Y), 0)
    assert found["prediction"].tolist() == module.predict_step(X, 0)["prediction"].tolist() == [0, 1, 1]
    assert found["probability"].flatten().tolist() == pytest.approx([0.75, 0.25, 0.25, 0.75, 0.25, 0.75])
    assert module.targets((X, Y)) is Y
    deep = Classifier("mlp", num_classes=7, input_shape=(1, 8, 8), network_args={"hidden": [4]})
    assert isinstance(deep.head, nn.Linear)
    assert deep.head.out_features == 7
    assert deep(torch.zeros(5, 1, 8, 8)).shape == (5, 7)


def test_a_schedule_comes_with_the_optimizer() -> None:
    module = Classifier("mlp", lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1), input_shape=(1, 8, 8))
    made = module.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.SGD)
    assert made["lr_scheduler"].optimizer is made["optimizer"]


def test_what_does_not_train_is_not_given_to_the_optimizer() -> None:
    module = Classifier("mlp", input_shape=(1, 8, 8), network_args={"hidden": [4]})
    module.head.requires_grad_(False)
    trained = {id(parameter) for group in module.configure_optimizers().param_groups for parameter in group["params"]}
    assert trained == {id(p) for p in module.parameters()} - {id(p) for p in module.head.parameters()}


def test_a_federation_of_one_measures_what_lightnings_own_trainer_measures(tmp_path: Path) -> None:
    lightning.seed_everything(0)
    module = Classifier("mlp", input_shape=(1, 8, 8), network_args={"hidden": [8]})
    data = Digits(num_clients=1, max_train_samples=300)
    made = fit(tmp_path, module, data, max_rounds=3)
    [found] = plain(tmp_path).test(module, data, verbose=False)
    for name in ("loss", "acc"):
        assert made.metrics[f"global/{name}"] == pytest.approx(found[f"test/{name}"], rel=1e-6)
        assert made.metrics[f"clients/{name}_mean"] == pytest.approx(found[f"test/{name}"], rel=1e-6)


def test_the_best_round_of_a_run_from_the_command_line_is_the_most_accurate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--trainer.max_rounds", "4", "--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
    small = [
        "--data.max_train_samples",
        "600",
        "--data.num_clients",
        "6",
        "--trainer.local_epochs",
        "1",
        "--model.network",
        "mlp",
    ]
    main(["fit", "-c", str(CONFIGS / "quickstart.yaml"), *quick, *small, "--model.optimizer.lr", "0.5"])
    run = tmp_path / "lightning_logs" / "version_0"
    accuracies = [float(row["global/acc"]) for row in rows(run / "metrics.csv")]
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert content["round_idx"] == accuracies.index(max(accuracies)) + 1  # the round that comes next
    assert "num_classes: 10" in (run / "config.yaml").read_text()  # it was null, and the data have ten
