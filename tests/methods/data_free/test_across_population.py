"""500 clients of three widths, all of them in every round, fit into 1.5 GB."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.methods.data_free.run_population import NUM_CLIENTS
from tests.support import ROOT, client_states, rows


@pytest.mark.long
def test_500_clients_of_three_widths_fit_into_a_gigabyte_and_a_half(tmp_path: Path) -> None:
    # Networks of 13,706, 6,058 and 3,098 parameters in turn; what clients keep is on disk.
    command = [sys.executable, "-m", "tests.methods.data_free.run_population", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak = float(done.stdout.split("peak ")[1])
    assert peak < 1.5e9
    run = tmp_path / "lightning_logs" / "version_0"
    assert {name for name, _ in client_states(run)} == {str(client_id) for client_id in range(NUM_CLIENTS)}
    first, last = rows(run / "metrics.csv")
    assert (first["server/first_participations"], last["server/first_participations"]) == ("500", "0")
