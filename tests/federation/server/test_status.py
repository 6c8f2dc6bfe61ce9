"""What an operator reads of a federation at work: facts, metrics, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lit_fed.callbacks import Callback
from lit_fed.federation.keys.node_keys import NodeKeys
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.server.status import Status
from lit_fed.federation.transport.serving import RpcGrid
from lit_fed.federation.transport.status_port import StatusPort, StatusSource, serving_status
from lit_fed.methods import FedAvg
from lit_fed.privacy import ClientLevel
from tests.federation.serving_support import Echo, free_address, of_node, served, until, working
from tests.federation.status_support import read
from tests.federation.support import nodes_of, small
from tests.support import ROOT, start_cli

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=document.title=1>\"'&"


@contextmanager
def page_of(grid: RpcGrid) -> Iterator[tuple[Status, str]]:
    address, status = free_address(), Status(grid)
    with serving_status(StatusPort(int(address.rpartition(":")[2])), status):
        yield status, address


class Reading(Callback):
    """Reads the pages after each round, as another process would."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.facts: list[dict[str, Any]] = []
        self.metrics: list[str] = []
        self.ready: list[str] = []

    def on_round_end(self, run: Any, record: Any) -> None:
        self.facts.append(json.loads(read(self.address, "/status.json")))
        self.metrics.append(read(self.address, "/metrics"))
        self.ready.append(read(self.address, "/readyz"))


def run_of(keys: Path, folder: Path, homes: dict[str, list[int]], lines: str, **kwargs: Any) -> Reading:
    """A run over TLS whose pages are read after each round.

    Args:
        keys: The folder of certificates.
        folder: The run's.
        homes: The clients by the name of a certificate.
        lines: The content of ``--node_keys``.
        kwargs: Settings of the trainer.
    """
    make, alone = small(max_rounds=2, **kwargs), threading.Lock()
    (keys / "own_keys.yaml").write_text(lines)
    nodes = nodes_of(make, folder, list(homes.values()))

    def handle(node: Any, blob: bytes) -> bytes:
        with alone:
            return bytes(node.handle(blob))

    made, *parts = make(folder)
    address, bound = free_address(), NodeKeys(keys / "own_keys.yaml")
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid = stack.enter_context(served(keys, address, node_keys=bound))
        status, at = stack.enter_context(page_of(grid))
        reading = Reading(at)
        made.callbacks += [status, reading]
        assert gathering(json.loads(read(at, "/status.json")))
        with pytest.raises(urllib.error.HTTPError, match="503"):
            read(at, "/readyz")
        for name, node in zip(homes, nodes, strict=True):
            echo = Echo(lambda blob, node=node: handle(node, blob))  # type: ignore[misc]
            stack.enter_context(working(echo, address, of_node(keys, name)))
        federate(grid, made, *parts, patience=Patience(round_s=60), gathering=Gathering(60), node_clients=bound)
    return reading


def gathering(facts: dict[str, Any]) -> bool:
    """Whether these are the facts before a run has nodes."""
    del facts["now"]
    return facts == {"rounds": 0, "max_rounds": None, "nodes": 0}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a text that Prometheus's own parser has read."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_pages_show_a_run_as_it_goes_on(keys: Path, tmp_path: Path) -> None:
    """Two nodes of two clients, and a third key whose node is absent; two clients answer in each of two rounds."""
    lines = "node_0.crt: [0]\nnode_1.crt: [1]\nstranger.crt: [7]\n"
    reading = run_of(keys, tmp_path, {"node_0": [0], "node_1": [1]}, lines)
    first, last = reading.facts
    assert (first["rounds"], last["rounds"]) == (1, 2)
    assert {key: last[key] for key in ("max_rounds", "nodes", "failures", "method", "run", "epsilon")} == {
        "max_rounds": 2, "nodes": 2, "failures": 0, "method": "FedAvg", "run": "version_0", "epsilon": None,
    }  # fmt: skip
    assert last["bytes"] > first["bytes"] > 0
    assert [at for at, _ in last["curve"]] == [0, 1]
    assert last["metric"].startswith("clients/") or last["metric"].startswith("global/")
    sites = {site["name"]: site for site in last["sites"]}
    assert {name: site["state"] for name, site in sites.items()} == {
        "node_0, client 0": "connected", "node_1, client 1": "connected", "stranger, client 7": "absent",
    }  # fmt: skip
    assert 0 <= last["now"] - sites["node_0, client 0"]["answered"] < 60
    assert sites["stranger, client 7"]["answered"] is None
    assert reading.ready == ["ready\n"] * 2

    found, run = samples(reading.metrics[1]), (("method", "FedAvg"), ("run", "version_0"))
    assert found["lit_fed_rounds_total", run] == 2
    assert found["lit_fed_max_rounds", run] == 2
    assert found["lit_fed_nodes", run] == 2
    assert found["lit_fed_failures_total", run] == 0
    assert found["lit_fed_bytes_total", run] > 0
    assert found["lit_fed_round_seconds_count", run] == 2
    assert found["lit_fed_round_seconds_bucket", (("le", "+Inf"), *run)] == 2
    assert 0 < found["lit_fed_round_seconds_sum", run] < 120
    last_answers = {
        dict(labels)["node"]: value > 0
        for (name, labels), value in found.items()
        if name == "lit_fed_last_answer_timestamp_seconds"
    }
    assert last_answers == {"node_0, client 0": True, "node_1, client 1": True, "stranger, client 7": False}


def test_a_private_run_shows_nobody_who_takes_part_no_count_of_them_and_no_time(keys: Path, tmp_path: Path) -> None:
    """Rounds, the number of connected nodes and the budget alone; a round's time tells how many clients worked."""
    pytest.importorskip("dp_accounting")
    privacy = ClientLevel(noise_multiplier=1.0, clip_norm=1.0, delta=1e-3, key_file=str(tmp_path / "noise.key"))
    lines = "node_0.crt: [0]\nnode_1.crt: [1]\n"
    own: dict[str, Any] = {"privacy": privacy, "algorithm": lambda: FedAvg(weighting="uniform")}
    own["on_client_failure"] = "skip"
    reading = run_of(keys, tmp_path, {"node_0": [0], "node_1": [1]}, lines, **own)
    for facts, text in zip(reading.facts, reading.metrics, strict=True):
        assert facts.keys() == {"rounds", "max_rounds", "nodes", "now", "run", "method", "epsilon", "metric", "curve"}
        assert facts["metric"] is None or facts["metric"].startswith("global")
        assert facts["epsilon"] > 0
        assert "client" not in text
        assert {name for name, _ in samples(text)} == {
            "lit_fed_rounds_total", "lit_fed_max_rounds", "lit_fed_nodes", "lit_fed_epsilon",
        }  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_the_page_in_a_browser_shows_hostile_names_as_text(keys: Path, tmp_path: Path) -> None:
    """Names come from the server's file of keys; markup in them stays text in the table, the map and its titles."""
    hostile = keys / f"{HOSTILE.replace('/', '')}.crt"
    shutil.copy(keys / "stranger.crt", hostile)
    lines = f"node_0.crt: [0]\nnode_1.crt: [1]\n{json.dumps(hostile.name)}: [7]\n"
    reading = run_of(keys, tmp_path, {"node_0": [0], "node_1": [1]}, lines)

    class Facts(StatusSource):
        page = Status.page

        def facts(self) -> dict[str, Any]:
            return reading.facts[0]

        def is_ready(self) -> bool:
            return True

    at = free_address()
    with serving_status(StatusPort(int(at.rpartition(":")[2])), Facts("round_seconds")):
        words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        words += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        words += ["--virtual-time-budget=4000", "--dump-dom", f"http://{at}/"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    dom = done.stdout
    assert "running, as of" in dom, done.stderr[-2000:]
    assert "<title>1/2 version_0</title>" in dom  # no handler of a name has changed it
    assert "<img" not in dom
    shown = HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"<td>{shown}, client 7</td>" in dom
    assert f"<title>{shown}, client 7 absent</title>" in dom
    assert '<polyline points="' in dom
    assert re.search(r"<b>1 of 2</b>", dom)


@pytest.mark.long
def test_the_server_command_serves_the_pages_from_the_gathering_on(tmp_path: Path) -> None:
    server, at = free_address(), free_address()
    words = ("federate", "-c", ROOT / "configs/quickstart.yaml", "--server", server, "--status_port", at.split(":")[1])
    process = start_cli(*words, cwd=tmp_path)

    def answer() -> str | None:
        try:
            return read(at, "/status.json")
        except urllib.error.URLError:
            return None

    try:
        assert gathering(json.loads(until(answer, 120.0)))
        assert read(at, "/healthz") == "alive\n"
    finally:
        process.terminate()
        process.communicate(timeout=60)
