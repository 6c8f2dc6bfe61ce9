"""`lit_fed.tasks.Regressor`: values by hand, under Lightning's own trainer, in a federation, from the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_fed import Regressor, load_network
from lit_fed.command.cli import main
from lit_fed.data import Arrays, Diabetes, Natural, Table, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.handover.export import export_network
from tests.data.population.test_figures import statistics_of
from tests.federation.support import deploy, simulate, small
from tests.support import ROOT, assert_same, fit, rows, weights

CONFIGS = ROOT / "configs"


def linear(weight: list[list[float]], **kwargs: Any) -> Regressor:
    """f(x) = Wx, which learns at a rate of ¼."""
    values = torch.tensor(weight)
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight.data.copy_(values)
    return Regressor(layer, lambda p: torch.optim.SGD(p, lr=0.25), num_outputs=len(weight), **kwargs)


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


SCALE = [(3.0, 2.0)]  # of Y, whose errors from 3 are ±2


def test_with_a_scale_the_network_learns_standardised_targets(tmp_path: Path) -> None:
    """½x is 0, ½, 1, 1½ where (y − 3) / 2 is −1, −1, 1, 1: errors 1, 1½, 0, ½; in own units 2, 3, 0, 1."""
    module = linear([[0.5]], target_scale=SCALE)
    for size in (4, 3, 1):
        [found] = plain(tmp_path).test(module, loader(X, Y, size), verbose=False)
        assert found == {
            "test/loss": pytest.approx((1 + 2.25 + 0.25) / 4),
            "test/mae": pytest.approx((2 + 3 + 0 + 1) / 4),
            "test/r2": pytest.approx(1 - (4 + 9 + 0 + 1) / 16),
        }
    assert module(X).flatten().tolist() == [3.0, 4.0, 5.0, 6.0]  # 3 + 2 · ½x
    assert module.predict_step((X, Y), 0)["prediction"].flatten().tolist() == [3.0, 4.0, 5.0, 6.0]
    # Mean of 2(½x − t)x over the samples: ½(0 · 1 + 1 · 1½ + 2 · 0 + 3 · ½) = 1½; ½ − ¼ · 1½.
    run = plain(tmp_path, max_epochs=1)
    run.fit(module, loader(X, Y, 4))
    assert next(iter(module.parameters())).item() == 0.125
    assert list(module.state_dict()) == ["network.weight"]  # the scale does not travel


def test_each_target_has_its_scale(tmp_path: Path) -> None:
    y = torch.stack([Y, 100 * torch.arange(4.0)], dim=1)
    module = linear([[0.0], [0.0]], target_scale=[(3.0, 2.0), (150.0, 50.0)])
    [found] = plain(tmp_path).test(module, loader(X, y, 3), verbose=False)
    # Standardised: ±1, and −3, −1, 1, 3; in own units 2, and 150, 50, 50, 150.
    assert found["test/loss"] == pytest.approx((4 * 1 + 9 + 1 + 1 + 9) / 8)
    assert found["test/mae"] == pytest.approx((4 * 2 + 400) / 8)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ([(0.0, 1.0), (0.0, 1.0)], r"model\.target_scale has 2 entries for 1 targets; give one each"),
        ([(0.0, 0.0)], r"model\.target_scale\[0\]\[1\] is 0\.0; it must be above 0"),
        ([(float("nan"), 1.0)], r"model\.target_scale\[0\]\[0\] is nan; it must be a finite number"),
        ([1.0], r"Regressor\.target_scale\[0\] is 1\.0; it must be"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused_in_a_line(scale: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        linear([[1.0]], target_scale=scale)


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


# ---------------------------------------------------------------------- days and euros


def write_stays(folder: Path) -> Path:
    """Days until readmission, 120 ± 50, and euros, by age and stay; three hospitals."""
    drawn = np.random.default_rng(2)
    age, stay = drawn.integers(20, 90, 120), drawn.integers(1, 30, 120)
    days = 200 - age - 2 * stay + drawn.normal(0, 5, 120)
    lines = [
        f"{'abc'[i % 3]},{age[i]},{stay[i]},{days[i]:.1f},{900 * stay[i] + 10 * age[i]}" for i in range(120)
    ]  # fmt: skip
    path = folder / "stays.csv"
    path.write_text("\n".join(["hospital,age,stay,days,euros", *lines]))
    return path


def stays(path: Path, **kwargs: Any) -> Table:
    given = {"target": ["days", "euros"], "kind": "numbers", "features": ["age", "stay"], "client": "hospital"}
    return Table(str(path), **(given | kwargs))  # type: ignore[arg-type]


def learner(scale: Any, **kwargs: Any) -> Regressor:
    torch.manual_seed(0)
    given: dict[str, Any] = {"network_args": {"hidden": [16]}, "num_outputs": 2, "input_shape": (2,)}
    return Regressor("mlp", lambda p: torch.optim.SGD(p, lr=0.1), target_scale=scale, **(given | kwargs))


def test_from_the_federations_statistics_days_and_euros_train_at_the_quickstarts_rate(tmp_path: Path) -> None:
    """The command line takes the scale from the file, `export` and `predict` give days and euros, resume goes on."""
    path, out = write_stays(tmp_path), tmp_path / "out"
    config = tmp_path / "run.yaml"
    config.write_text(
        f"trainer: {{accelerator: cpu, max_rounds: 6, num_threads: 1, default_root_dir: {out}, logger: false,\n"
        f"  enable_progress_bar: false}}\n"
        f"data: {{class_path: Table, init_args: {{path: {path}, target: [days, euros], kind: numbers,\n"
        f"  features: [age, stay], client: hospital, batch_size: 16}}}}\n"
        "model: {class_path: Regressor, init_args: {network_args: {hidden: [16]},\n"
        "  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}}}\n"
        "algorithm: {class_path: FedAvg}\n"
    )
    figures = str(tmp_path / "statistics.json")
    main(["statistics", "-c", str(config), "--output", figures])
    words = ["-c", str(config), "--data.normalize", figures]
    main(["fit", *words])
    run = out / "lightning_logs" / "version_0"
    data = stays(path)
    data.setup()
    y = np.asarray(data.columns.y)  # of the training rows
    told = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["target_scale"]
    assert np.asarray(told) == pytest.approx(np.stack([y.mean(axis=0), y.std(axis=0)], axis=1), rel=1e-9)
    metrics = rows(run / "metrics.csv")[-1]
    assert float(metrics["global/r2"]) > 0.8

    last = run / "checkpoints" / "last.ckpt"
    main(["predict", *words, "--ckpt_path", str(last), "--output", str(tmp_path / "p.npz")])
    with np.load(tmp_path / "p.npz") as file:
        predicted = file["prediction"]
    tested = data.columns.test
    assert tested is not None
    assert np.abs(predicted - tested.y).mean() == pytest.approx(float(metrics["global/mae"]), rel=1e-5)
    deployed, stored = load_network(last), torch.from_numpy(tested.x)
    assert deployed(stored).detach().numpy() == pytest.approx(predicted, rel=1e-5)
    export_network(last, tmp_path / "export", onnx=False)
    exported = torch.export.load(str(tmp_path / "export" / "model.pt2")).module()
    assert exported(stored).detach().numpy() == pytest.approx(predicted, rel=1e-5)
    assert json.loads((tmp_path / "export" / "model.json").read_text())["target_scale"] == told

    main(["fit", *words, "--trainer.max_rounds", "3"])
    second = out / "lightning_logs" / "version_1"
    main(["fit", *words, "--ckpt_path", str(second)])
    again = rows(second / "metrics.csv")[-1]
    for name, value in metrics.items():
        if not name.startswith(("time", "comm")):
            assert again[name] == value


@pytest.mark.parametrize("executor", ["vectorized", "auto"])
def test_groups_learn_standardised_targets_as_one_after_the_other(tmp_path: Path, executor: Any) -> None:
    path, scale = write_stays(tmp_path), [(110.0, 30.0), (14000.0, 8000.0)]
    one, group = (
        fit(tmp_path / name, learner(scale), stays(path, batch_size=7), executor=name)
        for name in ("sequential", executor)
    )
    for name in ("global/loss", "global/mae", "global/r2", "clients/mae_mean", "clients/r2_mean", "train/loss"):
        assert group.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5)


def test_over_nodes_a_given_scale_is_the_simulations(tmp_path: Path) -> None:
    path, scale = write_stays(tmp_path), [(110.0, 30.0), (14000.0, 8000.0)]
    given: Any = {"mean": [55.0, 15.0], "std": [20.0, 9.0]}
    make = small(lambda: learner(scale), lambda: stays(path, **given))
    made, alone = deploy(make, tmp_path / "nodes", [[0], [1, 2]]), simulate(make, tmp_path / "one")
    assert_same(weights(made), weights(alone))
    assert made.metrics["clients/mae_mean"] == alone.metrics["clients/mae_mean"] > 1


def test_a_data_modules_scale_is_that_of_its_file(tmp_path: Path) -> None:
    path = write_stays(tmp_path)
    assert stays(path).target_scale is None
    file = statistics_of(stays(path), tmp_path / "s.json")
    both = stays(path, normalize=file).target_scale
    assert both is not None
    assert stays(path, normalize=file, target="euros").target_scale == both[1:]
    learner(both)
    classes = statistics_of(stays(path, target="stay", features=["age"], kind="classes"), tmp_path / "c.json")
    assert stays(path, target="stay", features=["age"], kind="classes", normalize=classes).target_scale is None
    only = stays(path, target="euros", normalize=statistics_of(stays(path, target="days"), tmp_path / "d.json"))
    with pytest.raises(ConfigError, match="has no column 'euros', but days; take statistics of these data"):
        _ = only.target_scale
