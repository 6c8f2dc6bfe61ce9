"""A part of a client's batches in each pass, and a trial of a whole run."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_fed.callbacks import Checkpoint, EarlyStopping
from lit_fed.command.cli import main
from lit_fed.data import Arrays, Natural, TensorDataModule, Wrapped
from lit_fed.errors import ConfigError
from lit_fed.federation.messages.settings import agreed
from lit_fed.methods import FedAvg
from lit_fed.privacy import SampleLevel
from lit_fed.protocols import GlobalTest
from lit_fed.seeding import torch_generator
from tests.command.support import command
from tests.federation.support import deploy, simulate, small
from tests.support import LeastSquares, assert_same, fit, rows, trainer, weights

STEPS = 5  # batches of two in a client's ten samples


class Tens(TensorDataModule):
    """Clients with ten samples (1, k), y = k mod 3, in batches of two."""

    num_classes, input_shape = 3, (2,)

    def __init__(self, num_clients: int = 1, batch_size: int = 2, **kwargs: Any) -> None:
        super().__init__(num_clients=num_clients, partition=Natural(), batch_size=batch_size, **kwargs)

    def load_arrays(self) -> Arrays:
        k = np.arange(10 * self.num_clients)
        x = np.stack([np.ones(len(k)), k / len(k)], axis=1).astype(np.float32)
        return Arrays(x, k % 3, x, k % 3, k // 10, k // 10, "tens")


class Counting(LeastSquares):
    """Records the batches of every client and pass."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.taken: list[int] = []
        self.told: list[tuple[int, int]] = []

    def on_train_epoch_start(self) -> None:
        self.taken.append(0)
        self.told.append((int(self.trainer.num_training_batches), int(self.trainer.estimated_stepping_batches)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.taken[-1] += 1


def by_hand(data: Tens, limit: int, rounds: int, passes: int) -> list[float]:
    """Gradient descent on the first batches of every pass: ∇ ½ mean (w·x − y)² = mean (w·x − y) x."""
    k = torch.arange(10)
    x, y = torch.stack([torch.ones(10), k / 10], dim=1), k % 3
    w = torch.zeros(2)
    for round_idx in range(rounds):
        generator = torch_generator(0, "train", round_idx, 0, "data")
        for _ in range(passes):
            order = torch.randperm(10, generator=generator)
            for batch in torch.split(order, data.batch_size)[:limit]:
                w = w - 0.1 * ((x[batch] @ w - y[batch]).unsqueeze(1) * x[batch]).mean(0)
    return [float(one) for one in w]


@pytest.mark.parametrize("limit", [2, 0.4, 0.5])  # 5 · 0.5 = 2.5 is rounded down, as int() does in Lightning
def test_a_client_trains_on_the_first_batches_of_each_pass(tmp_path: Path, limit: Any) -> None:
    task = Counting()
    made = fit(tmp_path, task, Tens(), limit_train_batches=limit, local_epochs=2)
    assert task.taken == [2, 2, 2, 2]  # two rounds of two passes
    assert weights(made)["network.weight"][0].tolist() == pytest.approx(by_hand(Tens(), 2, 2, 2), rel=1e-6)
    assert by_hand(Tens(), 2, 2, 2) != pytest.approx(by_hand(Tens(), STEPS, 2, 2), rel=0.01)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 0.3, 0.5, 0.99, 1.0])
def test_the_limit_means_what_it_means_in_lightning(tmp_path: Path, limit: Any) -> None:
    ours, plain = Counting(), Counting()
    fit(tmp_path, ours, Tens(), limit_train_batches=limit, max_rounds=1)
    x = torch.zeros(10, 2)
    alone = Trainer(
        max_epochs=1, limit_train_batches=limit, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, devices=1,
    )  # fmt: skip
    alone.fit(plain, DataLoader(TensorDataset(x, torch.zeros(10)), batch_size=2))
    assert ours.taken == plain.taken
    assert ours.told == plain.told  # a schedule by steps sees the same length


def test_a_share_leaves_every_client_a_batch(tmp_path: Path) -> None:
    # Lightning refuses a share below a batch; here clients are of many sizes. ⌊5 · 0.1⌋ = 0.
    task = Counting()
    fit(tmp_path, task, Tens(2), limit_train_batches=0.1, max_rounds=1)
    assert task.taken == [1, 1]


def test_steps_are_counted_over_passes_of_the_limit(tmp_path: Path) -> None:
    task = Counting()
    fit(tmp_path, task, Tens(), limit_train_batches=2, local_steps=5, max_rounds=1)
    assert task.taken == [2, 2, 1]


def test_accumulated_gradients_step_at_the_last_batch_of_the_limit(tmp_path: Path) -> None:
    # Three batches, two of them to a step: ⌈3/2⌉ = 2 steps.
    task = Counting()
    fit(tmp_path, task, Tens(), limit_train_batches=3, accumulate_grad_batches=2, max_rounds=1)
    assert task.told == [(3, 2)]


@pytest.mark.parametrize("limit", [2, 0.7])
@pytest.mark.parametrize("batch_size", [2, 3])
def test_groups_take_the_same_batches(tmp_path: Path, limit: Any, batch_size: int) -> None:
    settings: dict[str, Any] = {"limit_train_batches": limit, "local_epochs": 2}
    one = fit(tmp_path / "one", LeastSquares(0.1), Tens(4, batch_size), **settings)
    group = fit(tmp_path / "group", LeastSquares(0.1), Tens(4, batch_size), executor="vectorized", **settings)
    whole = fit(tmp_path / "whole", LeastSquares(0.1), Tens(4, batch_size), local_epochs=2)
    torch.testing.assert_close(weights(one), weights(group), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(weights(one)["network.weight"], weights(whole)["network.weight"], rtol=0.01)


def test_nodes_keep_to_the_limit(tmp_path: Path) -> None:
    make = small(lambda: LeastSquares(0.1), lambda: Tens(3), max_rounds=2, limit_train_batches=2)
    apart, together = deploy(make, tmp_path / "apart", [[0, 2], [1]]), simulate(make, tmp_path / "together")
    assert_same(weights(apart), weights(together))
    whole = fit(tmp_path / "whole", LeastSquares(0.1), Tens(3))
    assert not torch.allclose(weights(apart)["network.weight"], weights(whole)["network.weight"], rtol=0.01)
    assert set(agreed("trainer: {limit_train_batches: 2}").values()) != set(agreed("trainer: {}").values())


def test_a_resumed_run_keeps_to_the_limit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"limit_train_batches": 2}
    whole = fit(tmp_path / "whole", LeastSquares(0.1), Tens(2), max_rounds=3, **settings)
    fit(tmp_path / "cut", LeastSquares(0.1), Tens(2), max_rounds=1, **settings)
    resumed = fit(tmp_path / "cut", LeastSquares(0.1), Tens(2), max_rounds=3, ckpt_path="last", **settings)
    assert_same(weights(whole), weights(resumed))


def test_the_limit_holds_for_a_users_own_loaders(tmp_path: Path) -> None:
    x, y = torch.eye(2).repeat(5, 1), torch.tensor([2.0, 4.0]).repeat(5)

    class Own(LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)

        test_dataloader = train_dataloader

    task, settings = Counting(), {"limit_train_batches": 2, "max_rounds": 1, "local_epochs": 2}
    one = fit(tmp_path / "one", task, Wrapped(Own(), num_clients=1), **settings)
    group = fit(tmp_path / "group", LeastSquares(0.1), Wrapped(Own(), num_clients=1), executor="vectorized", **settings)
    assert task.taken == [2, 2]
    torch.testing.assert_close(weights(one), weights(group), rtol=1e-6, atol=1e-7)
    assert weights(one)["network.weight"].abs().min() > 0


def test_a_private_client_accounts_for_the_steps_of_the_limit(tmp_path: Path) -> None:
    task = Counting()
    privacy = SampleLevel(clip_norm=1.0, noise_multiplier=1.0)
    made = fit(
        tmp_path, LeastSquares(0.1), Tens(2), FedAvg(weighting="uniform"), privacy=privacy, limit_train_batches=2,
        local_epochs=3, max_rounds=1,
    )  # fmt: skip
    assert task.taken == []
    assert privacy._steps.tolist() == [6, 6]  # three passes of two batches
    assert made.metrics["privacy/epsilon"] > 0


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (0, "trainer.limit_train_batches is 0; it must be above 0, or None for all batches"),
        (-1, "trainer.limit_train_batches is -1; it must be above 0, or None for all batches"),
        (1.5, "is 1.5; it must be above 0 and at most 1, or a number of batches, such as 2"),
        (float("nan"), "it must be above 0 and at most 1"),
        (True, "trainer.limit_train_batches is True; it must be a whole number"),
    ],
)
def test_an_impossible_limit_is_refused(tmp_path: Path, limit: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        trainer(tmp_path, limit_train_batches=limit)


@pytest.mark.parametrize(("given", "count"), [(True, 1), (2, 2), (np.int64(3), 3)])
def test_a_trial_run_is_short_and_leaves_nothing(
    tmp_path: Path, capsys: Any, monkeypatch: Any, given: Any, count: int
) -> None:
    monkeypatch.chdir(tmp_path)
    task, seen = Counting(), []

    class Seen(GlobalTest):
        def run(self, federation: Any, broadcast: Any, subset: Any) -> Any:
            seen.append(subset)
            return super().run(federation, broadcast, subset)

    callbacks = [Checkpoint(monitor="global/loss"), EarlyStopping(monitor="global/loss", patience=1)]
    made = fit(
        tmp_path, task, Tens(2), fast_dev_run=given, max_rounds=50, local_epochs=7, logger=True, protocols=[Seen()],
        callbacks=callbacks, enable_progress_bar=True,
    )  # fmt: skip
    assert task.taken == [count] * 2 * count  # two clients in each round
    assert seen == ["test"]
    out = capsys.readouterr().out
    rounds = "1 round" if count == 1 else f"{count} rounds"
    line = (
        f"trainer.fast_dev_run: {rounds}, at most {count} of each client's batches, one evaluation, no logger and no "
        "checkpoint; nothing is kept"
    )
    assert out.splitlines().count(line) == 1
    assert "logs  " not in out
    assert made.metrics["global/loss"] > 0
    assert made.test(task, made._parts[1], made._parts[2])["global/loss"] == made.metrics["global/loss"]
    assert list(tmp_path.iterdir()) == []
    folder = made.log_dir
    assert folder.is_dir()  # while the trainer lives
    del made
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("given", [False, 0])
def test_no_trial_is_a_usual_run(tmp_path: Path, given: Any) -> None:
    made = fit(tmp_path, fast_dev_run=given)
    assert len(rows(made.log_dir / "metrics.csv")) == 2


def test_a_trial_of_fewer_than_no_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.fast_dev_run is -1; it must be at least 0"):
        trainer(tmp_path, fast_dev_run=-1)


def test_a_trial_from_the_command_line_leaves_nothing(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    main(command("fit", "--trainer.fast_dev_run", "true"))
    assert "trainer.fast_dev_run: 1 round, at most 1 of each client's batches" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_limit_stays_in_the_runs_configuration(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    main(command("fit", "--trainer.max_rounds", "1", "--trainer.limit_train_batches", "1"))
    assert "limit_train_batches: 1\n" in Path("lightning_logs/version_0/config.yaml").read_text()
