"""What names best.ckpt, and that it is said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lit_fed.callbacks import Checkpoint
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.errors import ConfigError
from tests.engine.loop.test_checkpoint import BEST_LR, checkpoints
from tests.engine.storage.test_store import files
from tests.support import LeastSquares, fit


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "best.ckpt" in line]


class Declared(LeastSquares):
    metrics: ClassVar = {"loss": "max"}


def best_round(made: Any) -> int:
    found: int = read_checkpoint(checkpoints(made) / "best.ckpt")["round_idx"] - 1
    return found


def test_an_undeclared_metric_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, max_rounds=3)
    (line,) = said(capsys)
    assert line == (
        "best.ckpt has the smallest global/loss; to choose another, set monitor and mode of callback "
        "Checkpoint, or a mapping `metrics` in the model"
    )
    fit(tmp_path, max_rounds=4, ckpt_path="last")
    assert said(capsys) == []


def test_a_guessed_direction_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, callbacks=[Checkpoint(monitor="clients/loss_mean")])
    assert said(capsys)[0].startswith("best.ckpt has the smallest clients/loss_mean; ")


def test_what_the_task_or_the_user_said_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = fit(tmp_path, Declared(lr=0.5), max_rounds=3)
    assert best_round(made) == 0  # the loss falls, and larger is better here
    fit(tmp_path, callbacks=[Checkpoint(monitor="clients/loss_mean", mode="min")])
    fit(tmp_path, callbacks=[Checkpoint(monitor=None)])
    assert said(capsys) == []


def test_without_a_best_round_it_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(LeastSquares):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", torch.tensor(math.nan))

    made = fit(tmp_path, evaluate_every=0)
    assert said(capsys) == [
        "there is no best.ckpt: no metric of the global model or of clients was evaluated; name another in "
        "Checkpoint.monitor"
    ]
    assert files(checkpoints(made)) == {"last.ckpt"}
    fit(tmp_path, Nothing())
    assert said(capsys)[-1] == "there is no best.ckpt: global/loss was never a number"


def test_a_training_metric_names_it_without_evaluation(tmp_path: Path) -> None:
    made = fit(tmp_path, LeastSquares(lr=BEST_LR), evaluate_every=0, callbacks=[Checkpoint(monitor="train/loss")])
    assert "best.ckpt" in files(checkpoints(made))
    with pytest.raises(
        ConfigError, match=r"Checkpoint\.monitor is 'train/los', and no metric .* did you mean train/loss"
    ):
        fit(tmp_path, evaluate_every=0, callbacks=[Checkpoint(monitor="train/los")])


def test_mode_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"Checkpoint\.mode is 'least'; it must be 'auto', 'max' or 'min'"):
        Checkpoint(mode="least")  # type: ignore[arg-type]


def test_the_last_rounds_are_kept_from_the_first_on(tmp_path: Path) -> None:
    for rounds, due in ((2, {0, 1}), (3, {0, 1, 2}), (5, {2, 3, 4})):
        kept = Checkpoint(monitor=None, keep_last=3)
        made = fit(tmp_path / str(rounds), max_rounds=rounds, callbacks=[kept])
        assert files(checkpoints(made)) == {"last.ckpt"} | {f"round={round_idx}.ckpt" for round_idx in due}


def test_other_files_in_the_folder_are_the_users(tmp_path: Path) -> None:
    first = fit(tmp_path, max_rounds=2, callbacks=[Checkpoint(monitor=None, keep_last=1)])
    for name in ("round=final.ckpt", "copy of last.ckpt", "theirs.ckpt"):
        (checkpoints(first) / name).write_text("not ours")
    made = fit(tmp_path, max_rounds=3, callbacks=[Checkpoint(monitor=None, keep_last=1)], ckpt_path="last")
    ours = {"last.ckpt", "round=2.ckpt"}
    assert files(checkpoints(made)) == ours | {"round=final.ckpt", "copy of last.ckpt", "theirs.ckpt"}


def test_the_closing_table_takes_the_direction_that_is_set_beside_a_monitor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bound(LeastSquares):
        """Logs a value that falls, under a name of which larger values are better by default."""

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/bound", self.loss(batch))

    best = Checkpoint(monitor="global/bound", mode="min")
    made = fit(tmp_path, Bound(lr=0.05), max_rounds=3, callbacks=[best], enable_progress_bar=True)
    assert best.best_round == best_round(made) > 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "│ global/bound" in line)
    assert row.split("│")[-2].strip() == str(best.best_round)
