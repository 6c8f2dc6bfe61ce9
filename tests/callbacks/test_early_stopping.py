"""Early stopping at the round worked out by hand, and not again after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torchmetrics import MeanSquaredError

from lit_fed.callbacks import Callback, Checkpoint, EarlyStopping, RoundRecord
from lit_fed.callbacks.early_stopping import improves
from lit_fed.errors import ConfigError
from lit_fed.participation import AvailabilityParticipation
from tests.engine.loop.test_checkpoint import BEST_LR, MEAN_LOSS
from tests.support import LeastSquares, Points, Wanderer, Wandering, assert_same, fit, rows, weights

# The mean loss of the two clients falls in rounds 0 and 1 and rises in rounds 2, 3, …, see test_checkpoint.py.
assert MEAN_LOSS[0] > MEAN_LOSS[1] < MEAN_LOSS[2] < MEAN_LOSS[3] < MEAN_LOSS[4] < MEAN_LOSS[5]


def run(folder: Path, patience: int, max_rounds: int = 10, **kwargs: Any) -> Any:
    stopping = EarlyStopping(
        kwargs.pop("monitor", "clients/loss_mean"),
        kwargs.pop("mode", "auto"),
        patience=patience,
        min_delta=kwargs.pop("min_delta", 0.0),
    )
    callbacks = [stopping, kwargs.pop("checkpoint", Checkpoint())]
    return fit(folder, LeastSquares(lr=BEST_LR), max_rounds=max_rounds, callbacks=callbacks, **kwargs)


@pytest.mark.parametrize(("patience", "rounds"), [(1, 3), (2, 4), (4, 6)])
def test_stops_at_the_round_by_hand(tmp_path: Path, patience: int, rounds: int) -> None:
    # Round 1 is the best; round 1 + patience is the last one without an improvement that is waited for.
    made = run(tmp_path, patience)
    assert made.run.next_round == rounds
    table = rows(made.log_dir / "metrics.csv")
    assert [float(row["clients/loss_mean"]) for row in table] == pytest.approx(MEAN_LOSS[:rounds], rel=1e-4)


def test_mode_max_counts_what_falls(tmp_path: Path) -> None:
    # 4.16, 4.11 (worse), 4.15 (better than 4.11, not than 4.16): stops after round 2.
    assert run(tmp_path, 2, mode="max").run.next_round == 3


def test_min_delta(tmp_path: Path) -> None:
    # From round 0 to 1 the loss falls by 0.047: too little for 0.05.
    assert 0.04 < MEAN_LOSS[0] - MEAN_LOSS[1] < 0.05
    assert run(tmp_path / "a", 1, min_delta=0.05).run.next_round == 2
    assert run(tmp_path / "b", 1, min_delta=0.04).run.next_round == 3


def test_patience_counts_evaluations(tmp_path: Path) -> None:
    # Evaluated after rounds 1, 3 and 5: round 1 is the best, 3 and 5 are worse.
    assert run(tmp_path, 2, evaluate_every=2).run.next_round == 6


@pytest.mark.parametrize("every", [1, 100])
def test_a_stopped_run_stays_stopped(tmp_path: Path, every: int) -> None:
    # The round that stops a run is checkpointed, whether or not one was due.
    first = run(tmp_path, 2, checkpoint=Checkpoint(monitor=None, every_n_rounds=every))
    resumed = run(tmp_path, 2, max_rounds=20, ckpt_path="last")
    assert (resumed.run.start_round, resumed.run.next_round) == (4, 4)
    assert_same(weights(resumed), weights(first))
    assert len(rows(resumed.log_dir / "metrics.csv")) == 4


def test_resumed_in_the_middle_stops_where_the_whole_run_does(tmp_path: Path) -> None:
    run(tmp_path, 2, max_rounds=3)  # one evaluation without an improvement behind it
    resumed = run(tmp_path, 2, ckpt_path="last")
    assert (resumed.run.start_round, resumed.run.next_round) == (3, 4)


def test_unknown_metric(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"EarlyStopping\.monitor is 'global/f1', and no metric .* did you mean global/loss\?"
    ):
        run(tmp_path, 2, monitor="global/f1")


@pytest.mark.parametrize(("monitor", "every", "ended"), [("global/f1", 3, []), ("a/b", 3, [0, 1, 2]), ("a/b", 0, [0])])
def test_a_metric_that_no_protocol_has_ends_the_run_before_it_and_another_one_when_it_is_due(
    tmp_path: Path, monitor: str, every: int, ended: list[int]
) -> None:
    rounds = Rounds()
    with pytest.raises(ConfigError, match=rf"EarlyStopping\.monitor is '{monitor}', and no metric of this run is"):
        fit(tmp_path, max_rounds=10, evaluate_every=every, callbacks=[rounds, EarlyStopping(monitor, patience=2)])
    assert rounds.ended == ended


@pytest.mark.parametrize(
    ("monitor", "told"),
    [
        ("client/loss_mean", "did you mean clients/loss_mean"),  # no prefix of a protocol, and one letter beside it
        ("clients/los_worst", "did you mean clients/loss_worst"),
        ("loss", "there are global/loss, clients/loss_mean"),  # as the model logs it
        ("test/loss", "there are global/loss, clients/loss_mean"),
        ("val/loss", "did you mean global/loss"),
        ("val/clients/loss_mean", "and there are no validation data; set data.init_args.val_fraction above 0"),
    ],
)
def test_a_monitor_of_another_name_is_refused_before_the_runs_folder(tmp_path: Path, monitor: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fit(tmp_path, callbacks=[EarlyStopping(monitor)])
    assert told in str(refused.value)
    assert not list(tmp_path.rglob("version_*"))


def test_a_method_without_a_global_model_has_no_monitor_of_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 'global/loss', and no metric .* there are clients/loss_mean"):
        fit(tmp_path, Wanderer(), Points(sizes=(2, 3)), Wandering(), callbacks=[EarlyStopping("global/loss")])


class Rounds(Callback):
    """Notes which rounds ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def on_round_end(self, run: Any, record: RoundRecord) -> None:
        self.ended.append(record.round_idx)


def test_a_training_metric_may_miss_a_round_in_which_nobody_trains(tmp_path: Path) -> None:
    def participation() -> AvailabilityParticipation:
        return AvailabilityParticipation(count=2, availability=0.3)

    def nobody(seed: int, round_idx: int) -> bool:
        sampler = participation()
        sampler.setup(2, lambda client_id: 1, seed)
        return not sampler.plan(round_idx)

    seed = next(seed for seed in range(100) if nobody(seed, 0) and not nobody(seed, 1) and nobody(seed, 2))
    stopping = EarlyStopping("train/loss", patience=5)
    made = fit(tmp_path, max_rounds=3, seed=seed, participation=participation(), callbacks=[stopping])
    assert made.run.next_round == 3
    assert (stopping.best_round, stopping.waited) == (1, 0)


def test_auto_needs_something_that_is_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EarlyStopping\.monitor is 'auto', and no evaluation of this run"):
        fit(tmp_path, evaluate_every=0, callbacks=[EarlyStopping()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, r"EarlyStopping\.patience is 0; it must be at least 1"),
        ({"min_delta": -0.1}, r"EarlyStopping\.min_delta is -0\.1; it must be at least 0"),
        ({"min_delta": math.nan}, r"EarlyStopping\.min_delta is nan; it must be at least 0"),
        ({"mode": "least"}, r"EarlyStopping\.mode is 'least'; it must be 'auto', 'max' or 'min'"),
    ],
)
def test_settings_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**options)


# ---------------------------------------------------------------------- which way is better


def test_an_improving_run_is_not_ended(tmp_path: Path) -> None:
    # With learning rate 1/2 the loss falls in every round, see test_fedavg.py.
    made = fit(tmp_path, max_rounds=6, callbacks=[EarlyStopping(monitor="global/loss", patience=3)])
    table = [float(row["global/loss"]) for row in rows(made.log_dir / "metrics.csv")]
    assert table == sorted(table, reverse=True)
    assert len(table) == 6


class Scored(LeastSquares):
    """Logs its loss under a name that says nothing."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/score", self.loss(batch))


class Declared(Scored):
    metrics: ClassVar = {"score": "min"}


class Object(LeastSquares):
    """Logs an object of torchmetrics that says that smaller is better."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__(lr)
        self.score = MeanSquaredError()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.score(self(x).squeeze(1), y.float())
        self.log("test/score", self.score)


@pytest.mark.parametrize(("task", "rounds"), [(Scored, 3), (Declared, 4), (Object, 4)])
def test_the_task_says_which_way_is_better(tmp_path: Path, task: Any, rounds: int) -> None:
    # A name that says nothing is better when larger: 4.16, 4.11 (worse), 4.15 (worse than 4.16) ends after round 2.
    # Where smaller is better, round 1 is the best, and 2 and 3 are waited for.
    stopping = EarlyStopping("clients/score_mean", patience=2)
    made = fit(tmp_path, task(lr=BEST_LR), max_rounds=10, callbacks=[stopping])
    assert made.run.next_round == rounds


def test_auto_watches_what_the_task_calls_most_important(tmp_path: Path) -> None:
    class Two(Declared):
        metrics: ClassVar = {"score": "min", "size": "max"}

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/size", 1.0)
            super().test_step(batch, batch_idx)

    stopping = EarlyStopping(patience=2)
    made = fit(tmp_path, Two(lr=BEST_LR), max_rounds=10, callbacks=[stopping])
    table = [float(row["global/score"]) for row in rows(made.log_dir / "metrics.csv")]
    assert stopping.best == min(table)
    assert stopping.waited == 2


# ---------------------------------------------------------------------- what it says


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "stopped early" in line]


def test_it_says_why_and_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, 2)
    best = f"its best was {MEAN_LOSS[1]:.4g}"[:-1]
    (line,) = said(capsys)
    assert line.startswith(f"stopped early after round 3: clients/loss_mean has not fallen in 2 evaluations; {best}")
    assert line.endswith(" in round 1")
    run(tmp_path / "delta", 1, min_delta=0.05)
    assert "has not fallen by more than 0.05 in 1 evaluation; " in said(capsys)[0]
    run(tmp_path, 2, ckpt_path="last")
    (line,) = said(capsys)
    assert line == (
        "the run had stopped early after 2 evaluations without an improvement; raise EarlyStopping.patience to continue"
    )
    assert run(tmp_path, 3, ckpt_path="last").run.next_round == 5


def test_it_says_nothing_where_the_run_ends_anyhow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, 2, max_rounds=4).run.next_round == 4
    assert said(capsys) == []


def test_a_metric_that_is_never_a_number_stops_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(LeastSquares):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", torch.tensor(math.nan))

    made = fit(tmp_path, Nothing(), max_rounds=10, callbacks=[EarlyStopping(patience=3)])
    assert made.run.next_round == 3
    (line,) = said(capsys)
    assert line == "stopped early after round 2: global/loss has not fallen in 3 evaluations; it was never a number"


def test_a_monitor_with_an_unseen_metric_in_between_is_waited_for(tmp_path: Path) -> None:
    class Sometimes(LeastSquares):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def on_test_epoch_end(self) -> None:
            self.calls += 1  # the check of the names before the run leaves it as it was
            if self.calls == 1:
                self.log("test/late", 1.0)

    # Seen once, in the first evaluation of the global model; its later absence is no reason to end the run.
    made = fit(tmp_path, Sometimes(), max_rounds=3, callbacks=[EarlyStopping("global/late", patience=1)])
    assert made.run.next_round == 3


def test_improves() -> None:
    nan = float("nan")
    assert improves(1.0, None, "max")
    assert not improves(nan, None, "max")
    assert not improves(nan, 1.0, "min")
    assert not improves(1.0, 1.0, "max")
    assert not improves(1.5, 1.0, "max", 0.5)
    assert improves(0.4, 1.0, "min", 0.5)
