"""A run ends by the clock, after a round, and stays ended."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lit_fed.callbacks import Callback
from lit_fed.callbacks.timer import Timer
from lit_fed.errors import ConfigError
from tests.support import assert_same, fit, trainer, weights


class Slow(Callback):
    def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
        time.sleep(0.3)


def test_the_run_ends_after_the_round_in_which_its_time_is_over(tmp_path: Path) -> None:
    limit = timedelta(seconds=0.2)
    made = fit(tmp_path / "timed", max_rounds=9, max_time=limit, callbacks=[Slow()])
    assert made.run.next_round == 1  # a round takes longer than the time
    again = fit(tmp_path / "timed", max_rounds=9, max_time=limit, ckpt_path="last")
    assert again.run.next_round == 1, "the time before a resume counts"
    longer = fit(tmp_path / "timed", max_rounds=3, max_time="00:01:00:00", ckpt_path="last")
    assert_same(weights(longer), weights(fit(tmp_path / "whole", max_rounds=3)))


def test_lightnings_form_of_a_time() -> None:
    assert Timer("01:02:03:04").limit_s == 86400 + 2 * 3600 + 3 * 60 + 4
    for wrong in ("90", "1:2:3", "a:b:c:d"):
        with pytest.raises(ConfigError, match=r"trainer\.max_time is .*; it must be days, hours, minutes and seconds"):
            trainer(Path(), max_time=wrong)
