"""A server and three nodes, as processes over sockets, end in the simulation's weights and leave nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT

PRIVATE = ["--config", *(str(ROOT / "configs" / name) for name in ("quickstart.yaml", "privacy/client_level.yaml"))]


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--tls"], PRIVATE], ids=["plain", "tls", "private"])
def test_a_federation_is_the_simulation_and_nothing_is_left_behind(options: list[str]) -> None:
    if options is PRIVATE:
        pytest.importorskip("dp_accounting")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "federation.py"), "--rounds", "2", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"federation \d+ s from nothing running", done.stdout)
