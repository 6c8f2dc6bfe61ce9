"""Checkpoints: what they hold, which are kept, how they are found, and resumed from."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fed.callbacks import Callback, Checkpoint, EarlyStopping
from lit_fed.engine.loop.checkpoint import find_checkpoint, read_checkpoint, run_folder
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg
from lit_fed.participation import UniformParticipation
from tests.engine.storage.test_store import files
from tests.support import LeastSquares, Threes, Wanderer, Wandering, assert_same, client_states, fit, rows, weights

# With learning rate 2.675 the distances of w to (2, 4) shrink by a = 1 − 2.675/4 and flip by b = 1 − 3·2.675/4 a round:
# the mean loss of the two clients, ¼(4a²ʳ + 16b²ʳ) after r rounds, falls in the first two rounds and then rises.
BEST_LR = 2.675
MEAN_LOSS = [(4 * (1 - BEST_LR / 4) ** (2 * r) + 16 * (1 - 3 * BEST_LR / 4) ** (2 * r)) / 4 for r in range(1, 7)]
assert min(MEAN_LOSS) == MEAN_LOSS[1]


def judged(**kwargs: Any) -> Checkpoint:
    return Checkpoint(monitor="clients/loss_mean", **kwargs)


def checkpoints(made: Any) -> Path:
    folder: Path = made.log_dir / "checkpoints"
    return folder


def without_times(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows without what a clock said."""
    table = [{name: value for name, value in row.items() if "time" not in name} for row in rows(path)]
    return [row for row in table if row.get("metric") != "time_s"]


def stateful(folder: Path, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    kwargs = {"max_rounds": 4, "participation": UniformParticipation(count=2)} | kwargs
    return fit(folder, Wanderer(lr=0.05), Threes(4), Wandering(), **kwargs)


# ---------------------------------------------------------------------- contents


def kinds(content: Any) -> set[type]:
    if isinstance(content, dict):
        return set().union(*(kinds(key) | kinds(value) for key, value in content.items()), {dict})
    if isinstance(content, list | tuple):
        return set().union(*map(kinds, content), {type(content)})
    return {type(content)}


def test_tensors_and_primitives_only(tmp_path: Path) -> None:
    callbacks = [EarlyStopping("clients/loss_mean", "min"), Checkpoint(keep_last=1)]
    made = stateful(tmp_path, callbacks=callbacks)
    for path in checkpoints(made).rglob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        assert kinds(content) <= {dict, list, tuple, str, int, float, bool, type(None), Tensor}, path
    content = read_checkpoint(checkpoints(made) / "last.ckpt")
    assert (content["round_idx"], content["seed"]) == (4, 0)
    assert_same(content["state_dict"], weights(made))


def test_lightning_reads_a_checkpoint(tmp_path: Path) -> None:
    class Net(LeastSquares):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.more = torch.nn.Parameter(torch.zeros(width))

    made = fit(tmp_path, Net(3), max_rounds=1)
    path = checkpoints(made) / "last.ckpt"
    assert_same(dict(Net.load_from_checkpoint(path).state_dict()), weights(made))
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    x, y = torch.eye(2), torch.tensor([2.0, 4.0])
    plain.test(Net(3), DataLoader([(x, y)], batch_size=None), ckpt_path=str(path))  # type: ignore[arg-type]
    w = weights(made)["network.weight"][0]
    assert plain.callback_metrics["test/loss"] == 0.5 * (w - y).square().mean()


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = checkpoints(fit(tmp_path, max_rounds=1)) / "last.ckpt"
    whole, content = path.read_bytes(), repr(read_checkpoint(path))
    weight = read_checkpoint(path)["state_dict"]["network.weight"].numpy().tobytes()
    held = [at for at in range(len(whole)) if whole.startswith(weight, at)]
    assert held
    for place in (*held, *range(0, len(whole), 101)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        try:
            assert repr(read_checkpoint(path)) == content, place  # a date, or padding
            assert place not in held
        except CheckpointError:
            continue


def test_numpy_numbers_of_a_callback_are_saved_as_pythons(tmp_path: Path) -> None:
    class Counting(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": np.int64(3), "mean": [np.float64(0.5)], "yes": np.bool_(True)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {"count": 3, "mean": [0.5], "yes": True}
            self.loaded = True

    fit(tmp_path, callbacks=[Counting()], max_rounds=1)
    counting = Counting()
    fit(tmp_path, callbacks=[counting], max_rounds=2, ckpt_path="last")
    assert counting.loaded


def test_what_could_not_be_loaded_again_is_not_written(tmp_path: Path) -> None:
    class Foreign(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"where": [Path("x")]}

    message = r"callbacks\.Foreign\.where\.0 is a \w*Path; keep tensors and primitives only"
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, callbacks=[Foreign()])
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_round_that_cannot_be_saved_leaves_the_last_one(tmp_path: Path) -> None:
    class Odd(FedAvg):
        def step(self, server: Any, aggregate: Any, cohort: Any) -> dict[str, float]:
            server["seen"] = {"rounds": [range(cohort.round_idx)]} if cohort.round_idx else {"rounds": []}
            return super().step(server, aggregate, cohort)

        def setup(self, models: Any, population: Any) -> Any:
            return {**super().setup(models, population), "seen": {"rounds": []}}

    message = r"the server's state\.seen\.rounds\.0 is a range; keep tensors and primitives only"
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, algorithm=Odd(), max_rounds=3)
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    assert files(folder) == {"last.ckpt", "best.ckpt"}  # and no half-written one
    assert read_checkpoint(folder / "last.ckpt")["round_idx"] == 1


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_killed_at_any_moment_of_saving_there_is_a_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    made = fit(tmp_path, max_rounds=1)
    path = checkpoints(made) / "last.ckpt"
    before = read_checkpoint(path)["state_dict"]

    def killed(*args: Any, **kwargs: Any) -> None:
        if moment == "write":
            Path(args[1] if isinstance(args[1], str | Path) else args[1].name).write_bytes(b"PK\x03\x04 half a che")
        os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        target = {"write": (torch, "save"), "fsync": (os, "fsync"), "replace": (Path, "replace")}[moment]
        setattr(*target, killed)
        made.run.federation.server["model"]["network.weight"].zero_()
        made.save_checkpoint(path)

    child = multiprocessing.get_context("fork").Process(target=save)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert_same(read_checkpoint(path)["state_dict"], before)
    resumed = fit(tmp_path, max_rounds=2, ckpt_path="last")
    assert_same(weights(resumed), weights(fit(tmp_path / "whole", max_rounds=2)))
    assert files(checkpoints(resumed)) == {"last.ckpt", "best.ckpt"}


# ---------------------------------------------------------------------- which are kept


def test_best_is_the_best_round_by_hand(tmp_path: Path) -> None:
    made = fit(tmp_path, LeastSquares(lr=BEST_LR), max_rounds=4, callbacks=[judged()])
    assert made.metrics["clients/loss_mean"] == pytest.approx(MEAN_LOSS[3], rel=1e-5)
    assert files(checkpoints(made)) == {"last.ckpt", "best.ckpt"}
    best = read_checkpoint(checkpoints(made) / "best.ckpt")
    assert best["round_idx"] == 2
    assert best["metrics"]["clients/loss_mean"] == pytest.approx(MEAN_LOSS[1], rel=1e-5)
    expected = [2 * (1 - (1 - BEST_LR / 4) ** 2), 4 * (1 - (1 - 3 * BEST_LR / 4) ** 2)]
    assert best["state_dict"]["network.weight"].tolist()[0] == pytest.approx(expected, rel=1e-5)


def test_mode_max_and_no_monitor(tmp_path: Path) -> None:
    # The largest mean loss is the first of the first four; the auto monitor is global/loss here, where no accuracy is.
    made = fit(tmp_path, LeastSquares(lr=BEST_LR), max_rounds=2, callbacks=[judged(mode="max")])
    assert read_checkpoint(checkpoints(made) / "best.ckpt")["round_idx"] == 1
    made = fit(tmp_path, max_rounds=3)
    assert read_checkpoint(checkpoints(made) / "best.ckpt")["round_idx"] == 3
    made = fit(tmp_path, callbacks=[Checkpoint(monitor=None)])
    assert files(checkpoints(made)) == {"last.ckpt"}


def test_monitor_of_every_round_without_evaluation(tmp_path: Path) -> None:
    # train/loss is the loss before a round: it falls from round to round with learning rate ½.
    made = fit(tmp_path, max_rounds=3, evaluate_every=0, callbacks=[Checkpoint(monitor="train/loss")])
    assert read_checkpoint(checkpoints(made) / "best.ckpt")["round_idx"] == 3


def test_unknown_monitor(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Checkpoint\.monitor is 'global/f1', and no metric .* did you mean global/loss\?"
    ):
        fit(tmp_path, callbacks=[Checkpoint(monitor="global/f1")])


def test_keep_last(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=5, callbacks=[Checkpoint(monitor=None, keep_last=2)])
    assert files(checkpoints(made)) == {"last.ckpt", "round=3.ckpt", "round=4.ckpt"}
    for name, round_idx in (("last", 5), ("round=3", 4), ("round=4", 5)):
        assert read_checkpoint(checkpoints(made) / f"{name}.ckpt")["round_idx"] == round_idx
    fit(tmp_path, max_rounds=7, callbacks=[Checkpoint(monitor=None, keep_last=2)], ckpt_path="last")
    assert files(checkpoints(made)) == {"last.ckpt", "round=5.ckpt", "round=6.ckpt"}


def test_keep_every(tmp_path: Path) -> None:
    """After every third round, whatever else is written; beside the newest two."""
    made = fit(tmp_path, max_rounds=7, callbacks=[Checkpoint(monitor=None, keep_every=3, every_n_rounds=5)])
    assert files(checkpoints(made)) == {"last.ckpt", "round=2.ckpt", "round=5.ckpt"}
    assert read_checkpoint(checkpoints(made) / "round=2.ckpt")["round_idx"] == 3
    both = [Checkpoint(monitor=None, keep_every=3, keep_last=2)]
    fit(tmp_path, max_rounds=9, callbacks=both, ckpt_path="last")
    assert files(checkpoints(made)) == {"last.ckpt", "round=2.ckpt", "round=5.ckpt", "round=7.ckpt", "round=8.ckpt"}


def test_every_n_rounds_and_the_last(tmp_path: Path) -> None:
    written = []

    class Noting(Callback):
        def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
            last = checkpoints(run) / "last.ckpt"
            written.append(read_checkpoint(last)["round_idx"] if last.is_file() else None)

    made = fit(tmp_path, max_rounds=5, callbacks=[Noting(), Checkpoint(monitor=None, every_n_rounds=2)])
    assert written == [0, 0, 2, 2, 4]
    assert read_checkpoint(checkpoints(made) / "last.ckpt")["round_idx"] == 5


@pytest.mark.parametrize("settings", [{"keep_last": -1}, {"every_n_rounds": 0}, {"keep_every": 0}])
def test_settings_are_checked(settings: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"Checkpoint\.(keep_last is -1|(every_n_rounds|keep_every) is 0); it must be at"
    ):
        Checkpoint(**settings)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- finding


def test_find(tmp_path: Path) -> None:
    assert find_checkpoint("last", tmp_path) is None
    for run, names in (
        ("version_2", ["last", "best"]),
        ("version_10", ["last"]),
        ("version_11", []),
        ("other", ["last"]),
    ):
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        for name in names:
            (tmp_path / run / "checkpoints" / f"{name}.ckpt").touch()
    newest = tmp_path / "version_10" / "checkpoints" / "last.ckpt"
    assert find_checkpoint("last", tmp_path) == newest  # by number, not by text, and only where there is one
    assert find_checkpoint("best", tmp_path) == tmp_path / "version_2" / "checkpoints" / "best.ckpt"
    assert find_checkpoint(tmp_path / "version_10", tmp_path) == newest
    assert find_checkpoint(str(newest), tmp_path) == newest
    assert run_folder(newest) == (tmp_path / "version_10").resolve()
    assert run_folder(tmp_path / "loose.ckpt") is None


def test_last_without_any_run_starts_from_round_0(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1, ckpt_path="last")
    assert (made.run.start_round, made.run.next_round) == (0, 1)


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize("name", ["last", "folder", "file"])
def test_resumed_in_place_equals_uninterrupted(tmp_path: Path, name: str) -> None:
    whole = stateful(tmp_path / "whole")
    half = stateful(tmp_path, max_rounds=2)
    path = {"last": "last", "folder": half.log_dir, "file": checkpoints(half) / "last.ckpt"}[name]
    resumed = stateful(tmp_path, ckpt_path=str(path))
    assert resumed.log_dir == half.log_dir
    assert_same(weights(resumed), weights(whole))
    for table in ("metrics.csv", "clients.csv"):
        assert without_times(resumed.log_dir / table) == without_times(whole.log_dir / table)


def test_resumed_from_best_starts_a_new_folder_and_equals_uninterrupted(tmp_path: Path) -> None:
    def run(folder: Path, **kwargs: Any) -> Any:
        # the first round has the largest loss, so best.ckpt is far behind last.ckpt
        return stateful(folder, callbacks=[Checkpoint(monitor="train/task", mode="max")], **kwargs)

    whole = run(tmp_path / "whole", max_rounds=5)
    first = run(tmp_path, max_rounds=4)
    best_round = read_checkpoint(checkpoints(first) / "best.ckpt")["round_idx"]
    assert best_round < 4
    before = {path: path.read_bytes() for path in first.log_dir.rglob("*") if path.is_file()}
    resumed = run(tmp_path, max_rounds=5, ckpt_path="best")
    assert resumed.log_dir != first.log_dir
    assert resumed.run.start_round == best_round
    assert_same(weights(resumed), weights(whole))
    for table in ("metrics.csv", "clients.csv"):
        assert without_times(resumed.log_dir / table) == without_times(whole.log_dir / table)
    assert {path: path.read_bytes() for path in before} == before  # the old run is as it was
    # the new folder stands on its own: it has the best round too, and the client states of both
    assert files(checkpoints(resumed)) == {"last.ckpt", "best.ckpt", "clients"}
    one, two = (read_checkpoint(checkpoints(made) / "best.ckpt") for made in (resumed, whole))
    assert one["round_idx"] == two["round_idx"] == best_round
    assert_same(one["state_dict"], two["state_dict"])
    assert client_states(resumed.log_dir).keys() == client_states(whole.log_dir).keys()


def test_two_callbacks_of_a_kind_keep_their_own_state(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [EarlyStopping("global/loss", "min", 50), EarlyStopping("global/loss", "max", 50)]

    fit(tmp_path, max_rounds=2, callbacks=callbacks())
    resumed = callbacks()
    fit(tmp_path, max_rounds=2, callbacks=resumed, ckpt_path="last")
    # w after two rounds is (0.46875, 2.4375), see test_fedavg.py; the loss fell, so the largest is the first round's.
    smallest = (0.5 * (2 - 0.46875) ** 2 + 3 * 0.5 * (4 - 2.4375) ** 2) / 4
    assert [(c.best, c.waited) for c in resumed if isinstance(c, EarlyStopping)] == [(smallest, 0), (2.7265625, 1)]
