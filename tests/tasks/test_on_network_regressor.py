"""`lit_fed.tasks.Regressor`: values by hand, under Lightning's own trainer, in a federation, from the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_fed import Regressor
from lit_fed.command.cli import main
from lit_fed.data import Arrays, Diabetes, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from tests.support import ROOT, fit, rows

CONFIGS = ROOT / "configs"


def linear(weight: list[list[float]]) -> Regressor:
    """f(x) = Wx, which learns at a rate of ¼."""
    values = torch.tensor(weight)
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight.data.copy_(values)
    return Regressor(layer, lambda p: torch.optim.SGD(p, lr=0.25), num_outputs=len(weight))


def plain(tmp_path: Path, **settings: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **settings,
    )  # fmt: skip


def loader(x: Tensor, y: Tensor, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


# 2x is 0, 2, 4, 6 where 1, 1, 5, 5 is asked for: every error is ±1; around their mean 3 the targets have 4 · 2² = 16.
X, Y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([1.0, 1.0, 5.0, 5.0])
BY_HAND = {"loss": 1.0, "mae": 1.0, "r2": 1 - 4 / 16}


@pytest.mark.parametrize("batch_size", [4, 3, 2, 1])
@pytest.mark.parametrize("stage", ["val", "test"])
def test_losses_and_metrics_by_hand_however_the_batches_are_cut(tmp_path: Path, batch_size: int, stage: str) -> None:
    run = plain(tmp_path)
    for _ in range(2):  # nothing is left of a pass for the next
        evaluate = run.validate if stage == "val" else run.test
        [found] = evaluate(linear([[2.0]]), loader(X, Y, batch_size), verbose=False)
        assert found == {f"{stage}/{name}": pytest.approx(value) for name, value in BY_HAND.items()}


def test_several_outputs_are_averaged(tmp_path: Path) -> None:
    # The second output is −x = 0, −1, −2, −3 where 0, 1, 2, 3 is asked for: errors 0, 2, 4, 6, squares 56; around 1.5
    # the targets have 5. Mean square (4 + 56) / 8, mean error (4 + 12) / 8, R² the mean of ¾ and 1 − 56/5.
    y = torch.stack([Y, torch.arange(4.0)], dim=1)
    [found] = plain(tmp_path).test(linear([[2.0], [-1.0]]), loader(X, y, 3), verbose=False)
    assert found == {
        "test/loss": pytest.approx(7.5),
        "test/mae": pytest.approx(2.0),
        "test/r2": pytest.approx((0.75 + 1 - 56 / 5) / 2),
    }


def test_one_sample_has_no_share_of_a_variance(tmp_path: Path) -> None:
    run, module = plain(tmp_path), linear([[2.0]])
    [found] = run.test(module, loader(X[:1], Y[:1], 1), verbose=False)
    assert found == {"test/loss": 1.0, "test/mae": 1.0}
    [found] = run.test(module, loader(X, Y, 4), verbose=False)  # the one sample is forgotten
    assert found["test/r2"] == pytest.approx(0.75)


def test_a_step_by_hand(tmp_path: Path) -> None:
    # Gradient of the mean square: mean of 2(2x − y)x = ½(0·−1 + 1·1 + 2·−1 + 3·1) = 1; 2 − ¼.
    module, run = linear([[2.0]]), plain(tmp_path, max_epochs=1)
    run.fit(module, loader(X, Y, 4))
    assert next(iter(module.parameters())).item() == 1.75
    assert run.callback_metrics["train/loss"] == 1.0


def test_predictions_and_the_head() -> None:
    module = linear([[2.0]])
    assert module.predict_step((X, Y), 0)["prediction"].tolist() == module.predict_step(X, 0)["prediction"].tolist()
    assert module(X).flatten().tolist() == [0.0, 2.0, 4.0, 6.0]
    deep = Regressor("mlp", num_outputs=3, input_shape=(10,), network_args={"hidden": [4]})
    assert isinstance(deep.head, nn.Linear)
    assert deep.head.out_features == 3
    assert deep(torch.zeros(5, 10)).shape == (5, 3)


def test_it_learns_under_lightnings_own_trainer(tmp_path: Path) -> None:
    lightning.seed_everything(0)
    data = Diabetes(num_clients=1, batch_size=16)
    run = plain(tmp_path, max_epochs=20)
    module = Regressor("mlp", lambda p: torch.optim.SGD(p, lr=0.02), input_shape=(10,), network_args={"hidden": [16]})
    run.fit(module, data)
    assert run.test(module, data, verbose=False)[0]["test/r2"] > 0.4  # least squares explains 0.45


# ---------------------------------------------------------------------- in a federation


class Lines(TensorDataModule):
    """Client 0 trains and is tested on the four samples above, client 1 is tested on one, client 2 on two."""

    input_shape = (1,)

    def __init__(self) -> None:
        super().__init__(num_clients=3, partition=Natural(), batch_size=3, test_batch_size=3)

    def load_arrays(self) -> Arrays:
        x, y = X.numpy(), Y.numpy()
        own = np.array([0, 0, 0, 0, 1, 2, 2])
        x, y = np.concatenate([x, x[:1], x[:2]]), np.concatenate([y, y[:1], y[1:3]])
        return Arrays(x, y, x, y, own, own, "lines")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_no_client_is_measured_by_anothers_samples(tmp_path: Path, order: list[int]) -> None:
    module = linear([[2.0]])
    module.optimizer = lambda p: torch.optim.SGD(p, lr=0.0)  # it stays 2x, so all is known
    made = fit(tmp_path, module, Lines(), max_rounds=2)
    session = made.run.federation.session
    broadcast = made.run.federation.broadcast(2)
    # Client 2: 0, 2 for 1, 5: squares 1 + 9, around 3 the targets have 8.
    expected = {0: BY_HAND, 1: {"loss": 1.0, "mae": 1.0}, 2: {"loss": 5.0, "mae": 2.0, "r2": 1 - 10 / 8}}
    with session.at_work():
        for client_id in order:
            client = session.enter(client_id, broadcast, "test")
            found = session.evaluate(client, made.run.federation.data.test_loader(client_id), "test")
            assert found == {name: pytest.approx(value) for name, value in expected[client_id].items()}
    tested = [row for row in rows(made.log_dir / "clients.csv") if row["stage"] != "train"]
    assert {(row["client_id"], row["metric"]): float(row["value"]) for row in tested} == {
        (str(client_id), name): pytest.approx(value)
        for client_id, values in expected.items()
        for name, value in values.items()
    }
    assert made.metrics["clients/r2_mean"] == pytest.approx((0.75 - 0.25) / 2)  # the client with one sample has none
    # All seven: squares 4 + 1 + 10; targets 1, 1, 5, 5, 1, 1, 5 around 19/7 have 79 − 361/7.
    assert made.metrics["global/r2"] == pytest.approx(1 - 15 / (79 - 361 / 7))


def test_the_run_from_the_command_line_learns_and_keeps_its_best_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", "-c", str(CONFIGS / "runs" / "diabetes.yaml"), "--trainer.enable_progress_bar", "false"])
    run = tmp_path / "lightning_logs" / "version_0"
    metrics = rows(run / "metrics.csv")
    assert float(metrics[-1]["global/r2"]) > 0.4  # least squares on all data explains 0.45
    assert {name.partition("/")[2] for name in metrics[0] if name.startswith("global/")} == {"loss", "mae", "r2"}
    best = min(range(len(metrics)), key=lambda idx: float(metrics[idx]["global/loss"]))
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert content["round_idx"] == best + 1  # the round that comes next
    options = ["--output", "out.csv", "--ckpt_path", str(run / "checkpoints" / "best.ckpt")]
    main(["predict", "-c", str(CONFIGS / "runs" / "diabetes.yaml"), *options])
    with open("out.csv", newline="") as file:
        predicted = list(csv.DictReader(file))
    assert len(predicted) == 88
    assert float(predicted[0]["prediction"]) != 0


def test_the_quickstart_becomes_a_regression_by_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(CONFIGS / name) for name in ("quickstart.yaml", "data/diabetes.yaml", "network/mlp_16.yaml")]
    words = [word for file in files for word in ("-c", file)]
    quick = ["--trainer.max_rounds", "1", "--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
    main(["fit", *words, *quick, "--model", "Regressor"])
    metrics = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert {"global/r2", "global/mae", "train/loss"} <= metrics[0].keys()


def test_targets_of_another_shape_are_refused_by_what_to_set() -> None:
    """A column of 0 and 1 is classes: the data ask for two outputs, and a sample has one target."""
    model = Regressor("mlp", num_outputs=2, in_channels=1, input_shape=(1, 2))
    with pytest.raises(ConfigError, match="Regressor predicts 2 numbers a sample, and targets have 1; where whole"):
        model.training_step((torch.zeros(3, 1, 2), torch.tensor([0, 1, 0])), 0)
