"""Mutated messages of every kind end as their sender's failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.federation.fuzz import fuzz


def test_fifty_mutated_messages_end_as_failures() -> None:
    assert fuzz(seed=1, cases=50).startswith("seed 1: 25 answers and 25 orders, ")


@pytest.mark.long
def test_five_hundred_mutated_messages_end_as_failures_in_bounded_time_and_memory() -> None:
    """In a process of its own, whose memory is looked at."""
    words = [sys.executable, "-m", "tests.federation.fuzz", "--cases", "500", "--seed", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("seed 2: 250 answers and 250 orders, ")
