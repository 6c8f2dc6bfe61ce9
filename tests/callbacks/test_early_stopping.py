"""Early stopping at the round worked out by hand, and not again after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fed.callbacks import Checkpoint, EarlyStopping
from lit_fed.callbacks.early_stopping import improves
from lit_fed.errors import ConfigError
from tests.engine.test_checkpoint import BEST_LR, MEAN_LOSS
from tests.support import LeastSquares, assert_same, fit, rows, weights

# The mean loss of the two clients falls in rounds 0 and 1 and rises in rounds 2, 3, …, see test_checkpoint.py.
assert MEAN_LOSS[0] > MEAN_LOSS[1] < MEAN_LOSS[2] < MEAN_LOSS[3] < MEAN_LOSS[4] < MEAN_LOSS[5]


def run(folder: Path, patience: int, max_rounds: int = 10, **kwargs: Any) -> Any:
    stopping = EarlyStopping(
        kwargs.pop("monitor", "clients/loss_mean"),
        kwargs.pop("mode", "min"),
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
    assert run(tmp_path, 2, mode="max").next_round == 3


def test_min_delta(tmp_path: Path) -> None:
    # From round 0 to 1 the loss falls by 0.047: too little for 0.05.
    assert 0.04 < MEAN_LOSS[0] - MEAN_LOSS[1] < 0.05
    assert run(tmp_path / "a", 1, min_delta=0.05).next_round == 2
    assert run(tmp_path / "b", 1, min_delta=0.04).next_round == 3


def test_patience_counts_evaluations(tmp_path: Path) -> None:
    # Evaluated after rounds 1, 3 and 5: round 1 is the best, 3 and 5 are worse.
    assert run(tmp_path, 2, evaluate_every=2).next_round == 6


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
    with pytest.raises(ConfigError, match=r"EarlyStopping\.monitor 'global/f1' is not a metric of this run; there are"):
        run(tmp_path, 2, monitor="global/f1")


def test_patience_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"EarlyStopping\.patience is 0; it must be at least 1"):
        EarlyStopping(patience=0)


def test_improves() -> None:
    nan = float("nan")
    assert improves(1.0, None, "max")
    assert not improves(nan, None, "max")
    assert not improves(nan, 1.0, "min")
    assert not improves(1.0, 1.0, "max")
    assert not improves(1.5, 1.0, "max", 0.5)
    assert improves(0.4, 1.0, "min", 0.5)
