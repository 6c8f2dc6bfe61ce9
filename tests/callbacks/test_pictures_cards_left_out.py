"""The picture of who was left out beside who attacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_fed.callbacks.pictures import _read
from lit_fed.robust import Median, MultiKrum, Scaling
from tests.robust.support import moved
from tests.support import events_of

TARGETS = (2.0, 4.0, 6.0, 8.0, 50.0)
HEAD = "round,client_id,stage,metric,value\n"


def test_a_run_under_attack_leaves_the_picture_in_its_folder_and_in_tensorboard(tmp_path: Path) -> None:
    attack = Scaling(100.0, clients=[4])
    _, made = moved(tmp_path, TARGETS, aggregation=MultiKrum(1), attack=attack, logger=True)
    assert (made.log_dir / "left_out.png").read_bytes().startswith(b"\x89PNG")
    shown = EventAccumulator(events_of(made.log_dir)).Reload().Tags()["images"]
    assert "pictures/left_out" in shown
    shares, attackers, weighted = _read(made.log_dir / "clients.csv", 1, 5)
    # Multi-Krum keeps four of five at 1/4 each, which is more than the fifth that the mean would give them.
    assert (shares.tolist(), attackers.tolist(), weighted) == ([[1, 1, 1, 1, 0]], [False] * 4 + [True], True)


def test_the_picture_is_drawn_again_after_a_resume(tmp_path: Path) -> None:
    attack = Scaling(100.0, clients=[4])
    moved(tmp_path, TARGETS, aggregation=MultiKrum(1), attack=attack, logger=True)
    last = next(tmp_path.rglob("last.ckpt"))
    _, made = moved(
        tmp_path, TARGETS, aggregation=MultiKrum(1), attack=attack, logger=True, max_rounds=3, ckpt_path=last
    )
    shares, _, _ = _read(made.log_dir / "clients.csv", 3, 5)
    assert shares.tolist() == [[1, 1, 1, 1, 0]] * 3


@pytest.mark.parametrize(
    "wrappers", [{}, {"aggregation": Median()}, {"aggregation": MultiKrum(1), "enable_pictures": False}]
)
def test_a_run_with_nothing_to_show_or_without_pictures_has_none(wrappers: dict[str, Any], tmp_path: Path) -> None:
    _, made = moved(tmp_path, TARGETS, logger=True, **wrappers)
    assert not (made.log_dir / "left_out.png").exists()


def test_a_round_that_was_skipped_counts_nobody(tmp_path: Path) -> None:
    lines = ["0,0,train,loss,1", "0,1,train,loss,1", "0,0,train,aggregation/weight,0.5", "0,1,test,acc,1"]
    lines += ["0,2,train,aggregation/weight,0.5", "1,1,train,loss,1", "1,1,train,attack/attacker,1"]
    (tmp_path / "clients.csv").write_text(HEAD + "".join(f"{line}\n" for line in lines))
    shares, attackers, weighted = _read(tmp_path / "clients.csv", 2, 3)
    # Client 1 trained in round 0, and its update did not arrive; in round 1 the rule gave no weight to anybody.
    assert np.array_equal(shares, [[1, np.nan, 1], [np.nan, 0, np.nan]], equal_nan=True)
    assert (attackers.tolist(), weighted) == ([False, True, False], True)
