"""A server and three nodes, as processes over sockets, end in the simulation's weights and leave nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT

QUICKSTART, PRIVACY, SUMMED = (
    str(ROOT / "configs" / name)
    for name in ("quickstart.yaml", "privacy/client_level.yaml", "privacy/secure_sum_over_nodes.yaml")
)
PRIVATE = ["--config", QUICKSTART, PRIVACY]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [[], ["--tls"], PRIVATE, ["--config", QUICKSTART, SUMMED], ["--tls", *PRIVATE, SUMMED]],
    ids=["plain", "tls", "private", "summed", "tls, private and summed"],
)
def test_a_federation_is_the_simulation_and_nothing_is_left_behind(options: list[str]) -> None:
    if PRIVACY in options:
        pytest.importorskip("dp_accounting")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "federation.py"), "--rounds", "2", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"federation \d+ s from nothing running", done.stdout)
