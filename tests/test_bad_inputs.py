"""Bad inputs drawn over all options and files, each of which must end in one line with the right exit status."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.bad_inputs.draw import draw_cases
from tests.bad_inputs.judge import Case, judge
from tests.bad_inputs.options import edge_values, settings
from tests.bad_inputs.values import ENORMOUS
from tests.support import ROOT


@pytest.mark.long
def test_drawn_cases_end_as_they_must(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bad_inputs", "--seed", "7", "--cases", "77"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout
    assert "77 cases of seed 7" in done.stdout


def test_cases_follow_from_their_seed(tmp_path: Path) -> None:
    found = [[case.name for _, case in islice(draw_cases(random.Random(3), tmp_path, "value"), 20)] for _ in range(2)]
    assert found[0] == found[1]
    assert (
        len(set(found[0])) > 10
    )  # a drawing may name one value of one option twice: which options there are, extras say


@pytest.mark.parametrize("option", ["--data.init_args.max_test_samples", "--data.init_args.skew.init_args.sigma"])
def test_values_that_mean_something_are_not_drawn(option: str) -> None:
    """A cap above what there is takes all; a variance of 0 is no noise."""
    cases = islice(edge_values(random.Random(1)), 2 * len(settings()))
    drawn = {value for case in cases for key, _, value in [case.name.partition("=")] if key == option}
    assert drawn  # its other edges are
    assert not drawn & {"0" if option.endswith("sigma") else ENORMOUS}


def test_what_ends_otherwise_is_told(tmp_path: Path) -> None:
    """The judge is no mock: it runs commands, and sees more than one line, a folder left behind and a wrong status."""
    works = judge(Case("help", ["fit", "--help"]), tmp_path / "help")
    assert works.faults == ["exit status 0"]
    refused = judge(Case("no command", ["fitt"]), tmp_path / "none")
    assert (refused.status, refused.faults) == (2, [])
    assert refused.line.startswith("lit-fed: error: ")
