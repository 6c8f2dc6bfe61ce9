"""What the pages of a node show to the operator of its site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from lit_fed.federation.node.status import NodeStatus
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.security import Security
from lit_fed.methods import FedAvg
from lit_fed.privacy import ClientLevel
from tests.federation.serving_support import Echo, free_address, served, until, working
from tests.federation.support import nodes_of, small


def status_of(folder: Path, **kwargs: Any) -> tuple[list[dict[str, Any]], str]:
    """The facts of a node of both clients before and after a run of two rounds, and its metrics."""
    make = small(max_rounds=2, **kwargs)
    (node,) = nodes_of(make, folder, [[0, 1]])
    made, *parts = make(folder)
    address, told = free_address(), []
    echo = Echo(node.handle)
    with served(None, address) as grid, node.at_work(), working(echo, address, Security()) as line:
        status = NodeStatus(node, line)
        until(status.is_ready)
        told.append(status.facts())
        federate(grid, made, *parts)
        told.append(status.facts())
    assert echo.said[0].startswith("connected to the server")
    return told, generate_latest(status.registry).decode()


def test_a_nodes_pages_show_its_run(tmp_path: Path) -> None:
    """Two clients in two rounds, and the messages around them."""
    (before, after), text = status_of(tmp_path)
    assert before == {
        "connected": True, "done": False, "method": "FedAvg", "run": "", "last_message": "nothing yet", "bytes": 0,
    }  # fmt: skip
    assert (after["connected"], after["done"]) == (True, True)
    assert re.fullmatch("[0-9a-f]{16}", after["run"])
    assert after["last_message"].startswith("the run ended after round 2")
    assert after["bytes"] > 0
    label = f'{{method="FedAvg",run="{after["run"]}"}}'
    assert f"lit_fed_done{label} 1.0" in text
    assert f"lit_fed_bytes_total{label}" in text
    counts = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("lit_fed_work_seconds_count")]
    assert sum(counts) >= 2 * 2 + 2  # work of two clients in two rounds, a greeting, and the end


def test_a_private_nodes_pages_do_not_tell_whether_it_takes_part(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = ClientLevel(noise_multiplier=1.0, clip_norm=1.0, delta=1e-3, key_file=str(tmp_path / "noise.key"))
    own = {"algorithm": lambda: FedAvg(weighting="uniform"), "on_client_failure": "skip"}
    (before, after), text = status_of(tmp_path, privacy=privacy, **own)
    assert before == {"connected": True, "done": False, "method": "FedAvg"}
    assert after == {"connected": True, "done": True, "method": "FedAvg"}
    assert "bytes" not in text
    assert "seconds_count" not in text
