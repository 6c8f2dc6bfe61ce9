"""Ten nodes that stand serve the runs of a queue, one after the other, and start what their sites approve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from lit_fed.command.cli import main
from tests.federation.serving_support import free_address
from tests.support import ROOT, assert_same, run_cli, saved_weights, start_cli

NODES = 10
ROUNDS = {"a": 2, "b": 3, "refused": 2, "c": 2, "stopped": 10_000, "d": 2}  # by the name of a run, in order
SITES = """
# Approves configurations at a terminal of its own, and stands; a process for each node, forked after the imports.
import json, os, pty, sys
from lit_fed.command import federated_cli
from lit_fed.command.cli import main
from lit_fed.command.roots import import_named
import lit_fed.federation.commands.node
import_named()
address, *approved = json.loads(sys.argv[1])
for place, names in enumerate(approved):
    if os.fork() == 0:
        own = ["--standing", ".", "--server", address, "--client", str(place), "--state_dir", f"node_{place}"]
        above, below = pty.openpty()
        sys.stdin = open(below)
        sys.stdout = sys.stderr = open(f"node_{place}.log", "w", buffering=1)
        for name in names:
            os.write(above, b"y\\n")
            main(["node", "-c", f"{name}.yaml", *own, "--approve"])
        main(["node", *own])
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def config(rounds: int, seed: int) -> str:
    """Ten clients of handwritten digits; another seed trains other weights."""
    partition = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0}}
    data = {"num_clients": NODES, "seed": 1, "batch_size": 20, "partition": partition}
    quiet = {"accelerator": "cpu", "devices": 1, "num_threads": 1, "enable_progress_bar": False}
    return yaml.safe_dump(
        {
            "trainer": {**quiet, "max_rounds": rounds, "seed": seed},
            "model": {"class_path": "Classifier", "init_args": {"network": "logistic"}},
            "data": {"class_path": "Digits", "init_args": data},
            "algorithm": "FedAvg",
        }
    )


def until(done: Callable[[], object], seconds: float, tell: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, tell()
        time.sleep(0.3)


def standing(logs: list[Path]) -> int:
    """How many nodes have approved all that they approve, and wait."""
    return sum("INFO waiting for runs of" in log.read_text() for log in logs if log.exists())


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, tuple[str, str]]]:
    """What ``lit-fed runs`` prints: the word and the reason for each run's name."""

    def runs() -> dict[str, tuple[str, str]]:
        capsys.readouterr()
        main(["runs", "--queue", "queue"])
        rows = [line.split("  ", 2) for line in capsys.readouterr().out.splitlines()]
        return {name.partition("-")[2]: (state.partition(" ")[0], state) for name, _, state in rows}

    return runs


@pytest.mark.long
def test_ten_standing_nodes_serve_six_runs_of_which_one_is_refused_and_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: Callable[[], dict[str, tuple[str, str]]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, (name, rounds) in enumerate(ROUNDS.items()):
        (tmp_path / f"{name}.yaml").write_text(config(rounds, seed))
    every = [*ROUNDS]
    approved = [[name for name in every if name != "refused" or place] for place in range(NODES)]
    address = free_address()
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SITES, json.dumps([address, *approved])]
    logs = [tmp_path / f"node_{place}.log" for place in range(NODES)]
    with subprocess.Popen(words, env=env, start_new_session=True) as sites:
        try:
            until(lambda: standing(logs) == NODES, 400, lambda: "\n".join(log.read_text() for log in logs))
            for name in ROUNDS:
                main(["submit", f"{name}.yaml", "--queue", "queue"])
            server = start_cli(
                "federate", "--queue", "queue", "--server", address, "--gathering.wait_s", "25", cwd=tmp_path
            )
            try:
                metrics = "queue/0005-stopped/lightning_logs/*/metrics.csv"
                until(lambda: [*tmp_path.glob(metrics)], 600, lambda: repr(listed()))
                assert listed()["stopped"][0] == "running"
                main(["stop", "0005-stopped", "--queue", "queue"])
                until(lambda: listed()["d"][0] in ("finished", "failed"), 200, lambda: repr(listed()))
            finally:
                server.send_signal(signal.SIGTERM)
                out, err = server.communicate(timeout=60)
        finally:
            os.killpg(sites.pid, signal.SIGTERM)
    states = listed()
    expected = dict.fromkeys(ROUNDS, "finished") | {"refused": "failed", "stopped": "stopped"}
    assert {name: word for name, (word, _) in states.items()} == expected, (states, out, err)
    digest = sha256((tmp_path / "refused.yaml").read_bytes()).hexdigest()
    assert f"refused: the node has not approved configuration {digest[:16]}; its log says why" in states["refused"][1]
    assert "client 0 " in states["refused"][1]
    for name in ("a", "b", "c", "d"):
        done = run_cli("fit", "-c", f"{name}.yaml", "--trainer.default_root_dir", f"alone_{name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (run,) = tmp_path.glob(f"queue/*-{name}/lightning_logs/version_*")
        assert_same(saved_weights(run), saved_weights(tmp_path / f"alone_{name}/lightning_logs/version_0"))
